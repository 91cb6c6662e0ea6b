// sm_90a GEMM with weights in blocks of 32 that have five bits or an offset.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_q4_1_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_1, 256>(p); }
KERNEL(vg_gemm_sm90_q4_1_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_1, 128>(p); }
KERNEL(vg_gemm_sm90_q5_0_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_0, 256>(p); }
KERNEL(vg_gemm_sm90_q5_0_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_0, 128>(p); }
KERNEL(vg_gemm_sm90_q5_1_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_1, 256>(p); }
KERNEL(vg_gemm_sm90_q5_1_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q5_1, 128>(p); }
