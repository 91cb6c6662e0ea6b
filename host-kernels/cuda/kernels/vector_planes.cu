// Products of few columns with weights whose quants and scales lie in planes of their own.
#include "vector.cuh"

KERNEL(vg_vector_mxfp4_planes, VgVectorParams, 128) { vector_product<VG_MXFP4 | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_mxfp4_planes, VgVectorParams, 128) { vector_product<VG_MXFP4 | VG_PLANES, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq4_nl_planes, VgVectorParams, 128) { vector_product<VG_IQ4_NL | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_iq4_nl_planes, VgVectorParams, 128) { vector_product<VG_IQ4_NL | VG_PLANES, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q4_0_planes, VgVectorParams, 128) { vector_product<VG_Q4_0 | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_q4_0_planes, VgVectorParams, 128) { vector_product<VG_Q4_0 | VG_PLANES, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q8_0_planes, VgVectorParams, 128) { vector_product<VG_Q8_0 | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_q8_0_planes, VgVectorParams, 128) { vector_product<VG_Q8_0 | VG_PLANES, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q6_k_planes, VgVectorParams, 128) { vector_product<VG_Q6_K | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_q6_k_planes, VgVectorParams, 128) { vector_product<VG_Q6_K | VG_PLANES, MOST_COLUMNS>(p); }
