// Products of few columns with weights that are entries of codebooks.
#include "vector.cuh"

KERNEL(vg_vector_iq2_xxs, VgVectorParams, 128) { vector_product<VG_IQ2_XXS, 1>(p); }
KERNEL(vg_vectors_iq2_xxs, VgVectorParams, 128, 4) { vector_product<VG_IQ2_XXS, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq2_xs, VgVectorParams, 128) { vector_product<VG_IQ2_XS, 1>(p); }
KERNEL(vg_vectors_iq2_xs, VgVectorParams, 128, 5) { vector_product<VG_IQ2_XS, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq2_s, VgVectorParams, 128) { vector_product<VG_IQ2_S, 1>(p); }
KERNEL(vg_vectors_iq2_s, VgVectorParams, 128, 5) { vector_product<VG_IQ2_S, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq3_xxs, VgVectorParams, 128) { vector_product<VG_IQ3_XXS, 1>(p); }
KERNEL(vg_vectors_iq3_xxs, VgVectorParams, 128, 5) { vector_product<VG_IQ3_XXS, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq3_s, VgVectorParams, 128) { vector_product<VG_IQ3_S, 1>(p); }
KERNEL(vg_vectors_iq3_s, VgVectorParams, 128, 5) { vector_product<VG_IQ3_S, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq1_s, VgVectorParams, 128) { vector_product<VG_IQ1_S, 1>(p); }
KERNEL(vg_vectors_iq1_s, VgVectorParams, 128, 5) { vector_product<VG_IQ1_S, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq1_m, VgVectorParams, 128) { vector_product<VG_IQ1_M, 1>(p); }
KERNEL(vg_vectors_iq1_m, VgVectorParams, 128) { vector_product<VG_IQ1_M, MOST_COLUMNS>(p); }
