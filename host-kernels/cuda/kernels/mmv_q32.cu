// Matrix-vector products with weights in blocks of 16 to 128 elements.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_q4_0, VgMmvParams, 128, 6) { mmv<VG_Q4_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_q4_0_cols8, VgMmvParams, 128) { mmv<VG_Q4_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q4_1, VgMmvParams, 128, 6) { mmv<VG_Q4_1, 1>(p); }
KERNEL_AHEAD(vg_mmv_q4_1_cols8, VgMmvParams, 128) { mmv<VG_Q4_1, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q5_0, VgMmvParams, 128, 6) { mmv<VG_Q5_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_q5_0_cols8, VgMmvParams, 128) { mmv<VG_Q5_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q5_1, VgMmvParams, 128, 6) { mmv<VG_Q5_1, 1>(p); }
KERNEL_AHEAD(vg_mmv_q5_1_cols8, VgMmvParams, 128) { mmv<VG_Q5_1, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q8_0, VgMmvParams, 128, 6) { mmv<VG_Q8_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_q8_0_cols8, VgMmvParams, 128) { mmv<VG_Q8_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q1_0, VgMmvParams, 128, 6) { mmv<VG_Q1_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_q1_0_cols8, VgMmvParams, 128, 4) { mmv<VG_Q1_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_q2_0, VgMmvParams, 128, 6) { mmv<VG_Q2_0, 1>(p); }
KERNEL_AHEAD(vg_mmv_q2_0_cols8, VgMmvParams, 128) { mmv<VG_Q2_0, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_mxfp4, VgMmvParams, 128, 6) { mmv<VG_MXFP4, 1>(p); }
KERNEL_AHEAD(vg_mmv_mxfp4_cols8, VgMmvParams, 128) { mmv<VG_MXFP4, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_nvfp4, VgMmvParams, 128, 6) { mmv<VG_NVFP4, 1>(p); }
KERNEL_AHEAD(vg_mmv_nvfp4_cols8, VgMmvParams, 128) { mmv<VG_NVFP4, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq4_nl, VgMmvParams, 128, 6) { mmv<VG_IQ4_NL, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq4_nl_cols8, VgMmvParams, 128) { mmv<VG_IQ4_NL, MAX_COLUMNS>(p); }
