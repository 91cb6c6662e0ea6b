// sm_90a GEMM of few columns with repacked weights.
#include "gemm_sm90_few.cuh"

KERNEL_AHEAD(vg_gemm_sm90_mxfp4_repacked_16, VgGemmSm90FewParams, 128) {
    gemm_few<VG_MXFP4 | VG_REPACKED, 16>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_mxfp4_repacked_32, VgGemmSm90FewParams, 128) {
    gemm_few<VG_MXFP4 | VG_REPACKED, 32>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_mxfp4_repacked_64, VgGemmSm90FewParams, 128) {
    gemm_few<VG_MXFP4 | VG_REPACKED, 64>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_repacked_16, VgGemmSm90FewParams, 128) {
    gemm_few<VG_IQ4_NL | VG_REPACKED, 16>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_repacked_32, VgGemmSm90FewParams, 128) {
    gemm_few<VG_IQ4_NL | VG_REPACKED, 32>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_repacked_64, VgGemmSm90FewParams, 128) {
    gemm_few<VG_IQ4_NL | VG_REPACKED, 64>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q4_0_repacked_16, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q4_0 | VG_REPACKED, 16>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q4_0_repacked_32, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q4_0 | VG_REPACKED, 32>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q4_0_repacked_64, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q4_0 | VG_REPACKED, 64>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q8_0_repacked_16, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q8_0 | VG_REPACKED, 16>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q8_0_repacked_32, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q8_0 | VG_REPACKED, 32>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q8_0_repacked_64, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q8_0 | VG_REPACKED, 64>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q6_k_repacked_16, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q6_K | VG_REPACKED, 16>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q6_k_repacked_32, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q6_K | VG_REPACKED, 32>(p);
}
KERNEL_AHEAD(vg_gemm_sm90_q6_k_repacked_64, VgGemmSm90FewParams, 128) {
    gemm_few<VG_Q6_K | VG_REPACKED, 64>(p);
}
