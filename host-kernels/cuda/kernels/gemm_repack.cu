// GEMM with repacked weights.
#include "gemm.cuh"

KERNEL(vg_gemm_mxfp4_repacked, VgGemmParams, 256) { gemm<VG_MXFP4 | VG_REPACKED>(p); }
KERNEL(vg_gemm_iq4_nl_repacked, VgGemmParams, 256) { gemm<VG_IQ4_NL | VG_REPACKED>(p); }
KERNEL(vg_gemm_q4_0_repacked, VgGemmParams, 256) { gemm<VG_Q4_0 | VG_REPACKED>(p); }
KERNEL(vg_gemm_q8_0_repacked, VgGemmParams, 256) { gemm<VG_Q8_0 | VG_REPACKED>(p); }
KERNEL(vg_gemm_q6_k_repacked, VgGemmParams, 256) { gemm<VG_Q6_K | VG_REPACKED>(p); }
