// Products of many columns with weights in blocks of 256 of two and three bits, and of values that are looked up, on
// Hopper GPUs.
#include "gemm_hopper.cuh"

KERNEL(vg_hopper_gemm_q2_k_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q2_K, 256>(p); }
KERNEL(vg_hopper_gemm_q2_k_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q2_K, 128>(p); }
KERNEL(vg_hopper_gemm_q3_k_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q3_K, 256>(p); }
KERNEL(vg_hopper_gemm_q3_k_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q3_K, 128>(p); }
KERNEL(vg_hopper_gemm_iq4_xs_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_XS, 256>(p); }
KERNEL(vg_hopper_gemm_iq4_xs_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_XS, 128>(p); }
