// GEMM with weights in blocks of 16 to 128 elements.
#include "gemm.cuh"

KERNEL(vg_gemm_q4_0, VgGemmParams, 256) { gemm<VG_Q4_0>(p); }
KERNEL(vg_gemm_q4_1, VgGemmParams, 256) { gemm<VG_Q4_1>(p); }
KERNEL(vg_gemm_q5_0, VgGemmParams, 256) { gemm<VG_Q5_0>(p); }
KERNEL(vg_gemm_q5_1, VgGemmParams, 256) { gemm<VG_Q5_1>(p); }
KERNEL(vg_gemm_q8_0, VgGemmParams, 256) { gemm<VG_Q8_0>(p); }
KERNEL(vg_gemm_q1_0, VgGemmParams, 256) { gemm<VG_Q1_0>(p); }
KERNEL(vg_gemm_q2_0, VgGemmParams, 256) { gemm<VG_Q2_0>(p); }
KERNEL(vg_gemm_mxfp4, VgGemmParams, 256) { gemm<VG_MXFP4>(p); }
KERNEL(vg_gemm_nvfp4, VgGemmParams, 256) { gemm<VG_NVFP4>(p); }
KERNEL(vg_gemm_iq4_nl, VgGemmParams, 256) { gemm<VG_IQ4_NL>(p); }
