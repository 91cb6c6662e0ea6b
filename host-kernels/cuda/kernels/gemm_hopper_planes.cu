// Products of many columns with weights whose quants and scales lie in planes of their own, on Hopper GPUs.
#include "gemm_hopper.cuh"

KERNEL(vg_hopper_gemm_mxfp4_planes_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_MXFP4 | VG_PLANES, 256>(p); }
KERNEL(vg_hopper_gemm_mxfp4_planes_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_MXFP4 | VG_PLANES, 128>(p); }
KERNEL(vg_hopper_gemm_iq4_nl_planes_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_NL | VG_PLANES, 256>(p); }
KERNEL(vg_hopper_gemm_iq4_nl_planes_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_IQ4_NL | VG_PLANES, 128>(p); }
KERNEL(vg_hopper_gemm_q4_0_planes_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_0 | VG_PLANES, 256>(p); }
KERNEL(vg_hopper_gemm_q4_0_planes_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q4_0 | VG_PLANES, 128>(p); }
KERNEL(vg_hopper_gemm_q8_0_planes_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q8_0 | VG_PLANES, 256>(p); }
KERNEL(vg_hopper_gemm_q8_0_planes_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q8_0 | VG_PLANES, 128>(p); }
KERNEL(vg_hopper_gemm_q6_k_planes_256, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q6_K | VG_PLANES, 256>(p); }
KERNEL(vg_hopper_gemm_q6_k_planes_128, VgHopperGemmParams, 384, 1) { gemm_hopper<VG_Q6_K | VG_PLANES, 128>(p); }
