// sm_90a GEMM with repacked weights.
#include "gemm_sm90.cuh"

KERNEL(vg_gemm_sm90_mxfp4_repacked_256, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_MXFP4 | VG_REPACKED, 256>(p);
}
KERNEL(vg_gemm_sm90_mxfp4_repacked_128, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_MXFP4 | VG_REPACKED, 128>(p);
}
KERNEL(vg_gemm_sm90_iq4_nl_repacked_256, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_IQ4_NL | VG_REPACKED, 256>(p);
}
KERNEL(vg_gemm_sm90_iq4_nl_repacked_128, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_IQ4_NL | VG_REPACKED, 128>(p);
}
KERNEL(vg_gemm_sm90_q4_0_repacked_256, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q4_0 | VG_REPACKED, 256>(p);
}
KERNEL(vg_gemm_sm90_q4_0_repacked_128, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q4_0 | VG_REPACKED, 128>(p);
}
KERNEL(vg_gemm_sm90_q8_0_repacked_256, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q8_0 | VG_REPACKED, 256>(p);
}
KERNEL(vg_gemm_sm90_q8_0_repacked_128, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q8_0 | VG_REPACKED, 128>(p);
}
KERNEL(vg_gemm_sm90_q6_k_repacked_256, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q6_K | VG_REPACKED, 256>(p);
}
KERNEL(vg_gemm_sm90_q6_k_repacked_128, VgGemmSm90Params, 384, 1) {
    gemm_sm90<VG_Q6_K | VG_REPACKED, 128>(p);
}
