// GEMM with weights in blocks of 256: K-quants, IQ4_XS, TQ.
#include "gemm.cuh"

KERNEL(vg_gemm_q2_k, VgGemmParams, 256) { gemm<VG_Q2_K>(p); }
KERNEL(vg_gemm_q3_k, VgGemmParams, 256) { gemm<VG_Q3_K>(p); }
KERNEL(vg_gemm_q4_k, VgGemmParams, 256) { gemm<VG_Q4_K>(p); }
KERNEL(vg_gemm_q5_k, VgGemmParams, 256) { gemm<VG_Q5_K>(p); }
KERNEL(vg_gemm_q6_k, VgGemmParams, 256) { gemm<VG_Q6_K>(p); }
KERNEL(vg_gemm_iq4_xs, VgGemmParams, 256) { gemm<VG_IQ4_XS>(p); }
KERNEL(vg_gemm_tq1_0, VgGemmParams, 256) { gemm<VG_TQ1_0>(p); }
KERNEL(vg_gemm_tq2_0, VgGemmParams, 256) { gemm<VG_TQ2_0>(p); }
