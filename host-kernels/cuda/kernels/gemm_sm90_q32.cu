// sm_90a GEMM with weights in blocks of 32.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_q4_0_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_0, 256>(p); }
KERNEL(vg_gemm_sm90_q4_0_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q4_0, 128>(p); }
KERNEL(vg_gemm_sm90_q8_0_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q8_0, 256>(p); }
KERNEL(vg_gemm_sm90_q8_0_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q8_0, 128>(p); }
KERNEL(vg_gemm_sm90_iq4_nl_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_IQ4_NL, 256>(p); }
KERNEL(vg_gemm_sm90_iq4_nl_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_IQ4_NL, 128>(p); }
KERNEL(vg_gemm_sm90_mxfp4_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_MXFP4, 256>(p); }
KERNEL(vg_gemm_sm90_mxfp4_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_MXFP4, 128>(p); }
