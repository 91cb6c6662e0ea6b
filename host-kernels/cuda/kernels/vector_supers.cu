// Products of few columns with weights in blocks of 256.
#include "vector.cuh"

KERNEL(vg_vector_q2_k, VgVectorParams, 128) { vector_product<VG_Q2_K, 1>(p); }
KERNEL(vg_vectors_q2_k, VgVectorParams, 128, 5) { vector_product<VG_Q2_K, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q3_k, VgVectorParams, 128) { vector_product<VG_Q3_K, 1>(p); }
KERNEL(vg_vectors_q3_k, VgVectorParams, 128) { vector_product<VG_Q3_K, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q4_k, VgVectorParams, 128) { vector_product<VG_Q4_K, 1>(p); }
KERNEL(vg_vectors_q4_k, VgVectorParams, 128) { vector_product<VG_Q4_K, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q5_k, VgVectorParams, 128) { vector_product<VG_Q5_K, 1>(p); }
KERNEL(vg_vectors_q5_k, VgVectorParams, 128) { vector_product<VG_Q5_K, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q6_k, VgVectorParams, 128) { vector_product<VG_Q6_K, 1>(p); }
KERNEL(vg_vectors_q6_k, VgVectorParams, 128) { vector_product<VG_Q6_K, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq4_xs, VgVectorParams, 128) { vector_product<VG_IQ4_XS, 1>(p); }
KERNEL(vg_vectors_iq4_xs, VgVectorParams, 128) { vector_product<VG_IQ4_XS, MOST_COLUMNS>(p); }
KERNEL(vg_vector_tq1_0, VgVectorParams, 128) { vector_product<VG_TQ1_0, 1>(p); }
KERNEL(vg_vectors_tq1_0, VgVectorParams, 128) { vector_product<VG_TQ1_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_tq2_0, VgVectorParams, 128) { vector_product<VG_TQ2_0, 1>(p); }
KERNEL(vg_vectors_tq2_0, VgVectorParams, 128) { vector_product<VG_TQ2_0, MOST_COLUMNS>(p); }
