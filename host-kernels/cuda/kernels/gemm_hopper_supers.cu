// Products of many columns with weights in blocks of 256, on Hopper GPUs.
#include "gemm_hopper.cuh"

KERNEL(vg_hopper_gemm_q4_k_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_K, 256>(p); }
KERNEL(vg_hopper_gemm_q4_k_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_K, 128>(p); }
KERNEL(vg_hopper_gemm_q5_k_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_K, 256>(p); }
KERNEL(vg_hopper_gemm_q5_k_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_K, 128>(p); }
KERNEL(vg_hopper_gemm_q6_k_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q6_K, 256>(p); }
KERNEL(vg_hopper_gemm_q6_k_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q6_K, 128>(p); }
