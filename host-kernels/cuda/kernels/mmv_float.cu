// Matrix-vector products with weights in f16, bf16 and f32.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_f16, VgMmvParams, 128) { mmv<VG_F16, 1>(p); }
KERNEL_AHEAD(vg_mmv_f16_cols8, VgMmvParams, 128, 5) { mmv<VG_F16, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_bf16, VgMmvParams, 128) { mmv<VG_BF16, 1>(p); }
KERNEL_AHEAD(vg_mmv_bf16_cols8, VgMmvParams, 128) { mmv<VG_BF16, MAX_COLUMNS>(p); }
KERNEL_AHEAD(vg_mmv_f32, VgMmvParams, 128) { mmv<VG_F32, 1>(p); }
KERNEL_AHEAD(vg_mmv_f32_cols8, VgMmvParams, 128, 5) { mmv<VG_F32, MAX_COLUMNS>(p); }
