// Matrix-vector products with weights in blocks of 256.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_q2_k, VgMmvParams, 128, 6) { mmv<VG_Q2_K, 1>(p); }
KERNEL_AHEAD(vg_mmv_q2_k_cols8, VgMmvParams, 128, 5) { mmv<VG_Q2_K, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q3_k, VgMmvParams, 128, 5) { mmv<VG_Q3_K, 1>(p); }
KERNEL_AHEAD(vg_mmv_q3_k_cols8, VgMmvParams, 128) { mmv<VG_Q3_K, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q4_k, VgMmvParams, 128, 6) { mmv<VG_Q4_K, 1>(p); }
KERNEL_AHEAD(vg_mmv_q4_k_cols8, VgMmvParams, 128, 4) { mmv<VG_Q4_K, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q5_k, VgMmvParams, 128, 6) { mmv<VG_Q5_K, 1>(p); }
KERNEL_AHEAD(vg_mmv_q5_k_cols8, VgMmvParams, 128) { mmv<VG_Q5_K, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q6_k, VgMmvParams, 128, 5) { mmv<VG_Q6_K, 1>(p); }
KERNEL_AHEAD(vg_mmv_q6_k_cols8, VgMmvParams, 128) { mmv<VG_Q6_K, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq4_xs, VgMmvParams, 128, 6) { mmv<VG_IQ4_XS, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq4_xs_cols8, VgMmvParams, 128, 4) { mmv<VG_IQ4_XS, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_tq1_0, VgMmvParams, 128, 6) { mmv<VG_TQ1_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_tq1_0_cols8, VgMmvParams, 128) { mmv<VG_TQ1_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_tq2_0, VgMmvParams, 128, 6) { mmv<VG_TQ2_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_tq2_0_cols8, VgMmvParams, 128) { mmv<VG_TQ2_0, MAX_COLUMNS>(p); }
