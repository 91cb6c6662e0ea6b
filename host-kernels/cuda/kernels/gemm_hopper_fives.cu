// Products of many columns with weights in blocks of 32 that have five bits or an offset, on Hopper GPUs.
#include "gemm_hopper.cuh"

KERNEL(vg_hopper_gemm_q4_1_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_1, 256>(p); }
KERNEL(vg_hopper_gemm_q4_1_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_1, 128>(p); }
KERNEL(vg_hopper_gemm_q5_0_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_0, 256>(p); }
KERNEL(vg_hopper_gemm_q5_0_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_0, 128>(p); }
KERNEL(vg_hopper_gemm_q5_1_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_1, 256>(p); }
KERNEL(vg_hopper_gemm_q5_1_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q5_1, 128>(p); }
