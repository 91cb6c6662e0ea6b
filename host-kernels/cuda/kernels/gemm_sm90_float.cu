// sm_90a GEMM with weights in f16 and bf16.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_f16_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_F16, 256>(p); }
KERNEL(vg_gemm_sm90_f16_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_F16, 128>(p); }
KERNEL(vg_gemm_sm90_bf16_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_BF16, 256>(p); }
KERNEL(vg_gemm_sm90_bf16_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_BF16, 128>(p); }
