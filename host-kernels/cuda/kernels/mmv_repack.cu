// Matrix-vector products with repacked weights.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_mxfp4_repacked, VgMmvParams, 128, 6) { mmv<VG_MXFP4 | VG_REPACKED, 1>(p); }
KERNEL_AHEAD(vg_mmv_mxfp4_repacked_cols8, VgMmvParams, 128) {
    mmv<VG_MXFP4 | VG_REPACKED, MAX_COLUMNS>(p);
}
KERNEL_AHEAD(vg_mmv_iq4_nl_repacked, VgMmvParams, 128, 6) { mmv<VG_IQ4_NL | VG_REPACKED, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq4_nl_repacked_cols8, VgMmvParams, 128) {
    mmv<VG_IQ4_NL | VG_REPACKED, MAX_COLUMNS>(p);
}
KERNEL_AHEAD(vg_mmv_q4_0_repacked, VgMmvParams, 128, 6) { mmv<VG_Q4_0 | VG_REPACKED, 1>(p); }
KERNEL_AHEAD(vg_mmv_q4_0_repacked_cols8, VgMmvParams, 128) {
    mmv<VG_Q4_0 | VG_REPACKED, MAX_COLUMNS>(p);
}
KERNEL_AHEAD(vg_mmv_q8_0_repacked, VgMmvParams, 128, 6) { mmv<VG_Q8_0 | VG_REPACKED, 1>(p); }
KERNEL_AHEAD(vg_mmv_q8_0_repacked_cols8, VgMmvParams, 128) {
    mmv<VG_Q8_0 | VG_REPACKED, MAX_COLUMNS>(p);
}
KERNEL_AHEAD(vg_mmv_q6_k_repacked, VgMmvParams, 128, 6) { mmv<VG_Q6_K | VG_REPACKED, 1>(p); }
KERNEL_AHEAD(vg_mmv_q6_k_repacked_cols8, VgMmvParams, 128) {
    mmv<VG_Q6_K | VG_REPACKED, MAX_COLUMNS>(p);
}
