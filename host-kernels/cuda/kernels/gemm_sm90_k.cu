// sm_90a GEMM with weights in blocks of 256 of four to six bits.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_q4_k_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_K, 256>(p); }
KERNEL(vg_gemm_sm90_q4_k_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_K, 128>(p); }
KERNEL(vg_gemm_sm90_q5_k_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_K, 256>(p); }
KERNEL(vg_gemm_sm90_q5_k_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_K, 128>(p); }
KERNEL(vg_gemm_sm90_q6_k_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q6_K, 256>(p); }
KERNEL(vg_gemm_sm90_q6_k_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q6_K, 128>(p); }
