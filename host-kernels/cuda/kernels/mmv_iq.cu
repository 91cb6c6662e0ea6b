// Matrix-vector products with weights in IQ formats (codebooks).
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_iq2_xxs, VgMmvParams, 128, 6) { mmv<VG_IQ2_XXS, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq2_xxs_cols8, VgMmvParams, 128, 4) { mmv<VG_IQ2_XXS, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq2_xs, VgMmvParams, 128, 6) { mmv<VG_IQ2_XS, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq2_xs_cols8, VgMmvParams, 128, 5) { mmv<VG_IQ2_XS, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq2_s, VgMmvParams, 128, 6) { mmv<VG_IQ2_S, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq2_s_cols8, VgMmvParams, 128, 5) { mmv<VG_IQ2_S, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq3_xxs, VgMmvParams, 128, 6) { mmv<VG_IQ3_XXS, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq3_xxs_cols8, VgMmvParams, 128, 5) { mmv<VG_IQ3_XXS, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq3_s, VgMmvParams, 128, 6) { mmv<VG_IQ3_S, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq3_s_cols8, VgMmvParams, 128, 5) { mmv<VG_IQ3_S, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq1_s, VgMmvParams, 128, 6) { mmv<VG_IQ1_S, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq1_s_cols8, VgMmvParams, 128, 5) { mmv<VG_IQ1_S, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_iq1_m, VgMmvParams, 128, 6) { mmv<VG_IQ1_M, 1>(p); }
KERNEL_AHEAD(vg_mmv_iq1_m_cols8, VgMmvParams, 128, 4) { mmv<VG_IQ1_M, MAX_COLUMNS>(p); }
