// GEMM with weights in f16, bf16 and f32.
#include "gemm.cuh"

KERNEL(vg_gemm_f16, VgGemmParams, 256) { gemm<VG_F16>(p); }
KERNEL(vg_gemm_bf16, VgGemmParams, 256) { gemm<VG_BF16>(p); }
KERNEL(vg_gemm_f32, VgGemmParams, 256) { gemm<VG_F32>(p); }
