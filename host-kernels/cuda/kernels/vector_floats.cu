// Products of few columns with weights that are floats.
#include "vector.cuh"

KERNEL(vg_vector_f16, VgVectorParams, 128) { vector_product<VG_F16, 1>(p); }
KERNEL(vg_vectors_f16, VgVectorParams, 128) { vector_product<VG_F16, MOST_COLUMNS>(p); }
KERNEL(vg_vector_bf16, VgVectorParams, 128) { vector_product<VG_BF16, 1>(p); }
KERNEL(vg_vectors_bf16, VgVectorParams, 128) { vector_product<VG_BF16, MOST_COLUMNS>(p); }
KERNEL(vg_vector_f32, VgVectorParams, 128) { vector_product<VG_F32, 1>(p); }
KERNEL(vg_vectors_f32, VgVectorParams, 128, 5) { vector_product<VG_F32, MOST_COLUMNS>(p); }
