// Products of few columns with weights that are floats.
#include "mmv.cuh"

KERNEL(vg_mmv_f16, VgMmvParams, 128) { vector_product<VG_F16, 1>(p); }
KERNEL(vg_mmv_f16_cols8, VgMmvParams, 128) { vector_product<VG_F16, MOST_COLUMNS>(p); }
KERNEL(vg_mmv_bf16, VgMmvParams, 128) { vector_product<VG_BF16, 1>(p); }
KERNEL(vg_mmv_bf16_cols8, VgMmvParams, 128) { vector_product<VG_BF16, MOST_COLUMNS>(p); }
KERNEL(vg_mmv_f32, VgMmvParams, 128) { vector_product<VG_F32, 1>(p); }
KERNEL(vg_mmv_f32_cols8, VgMmvParams, 128, 5) { vector_product<VG_F32, MOST_COLUMNS>(p); }
