// sm_90a GEMM with weights in blocks of 256 of two and three bits, and IQ4_XS.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_q2_k_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q2_K, 256>(p); }
KERNEL(vg_gemm_sm90_q2_k_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q2_K, 128>(p); }
KERNEL(vg_gemm_sm90_q3_k_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q3_K, 256>(p); }
KERNEL(vg_gemm_sm90_q3_k_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_Q3_K, 128>(p); }
KERNEL(vg_gemm_sm90_iq4_xs_256, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_IQ4_XS, 256>(p); }
KERNEL(vg_gemm_sm90_iq4_xs_128, VgGemmSm90Params, 384, 1) { gemm_sm90<VG_IQ4_XS, 128>(p); }
