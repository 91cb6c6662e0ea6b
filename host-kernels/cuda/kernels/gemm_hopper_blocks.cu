// Products of many columns with weights in blocks, on Hopper GPUs.
#include "gemm_hopper.cuh"

KERNEL(vg_hopper_gemm_q4_0_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_0, 256>(p); }
KERNEL(vg_hopper_gemm_q4_0_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_0, 128>(p); }
KERNEL(vg_hopper_gemm_q8_0_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q8_0, 256>(p); }
KERNEL(vg_hopper_gemm_q8_0_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q8_0, 128>(p); }
KERNEL(vg_hopper_gemm_iq4_nl_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_NL, 256>(p); }
KERNEL(vg_hopper_gemm_iq4_nl_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_NL, 128>(p); }
KERNEL(vg_hopper_gemm_mxfp4_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_MXFP4, 256>(p); }
KERNEL(vg_hopper_gemm_mxfp4_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_MXFP4, 128>(p); }
