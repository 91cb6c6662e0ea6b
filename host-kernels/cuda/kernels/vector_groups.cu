// Products of few columns with weights in blocks of 32 to 128, and what rounds activations for all such products.
#include "rounding.cuh"
#include "vector.cuh"

KERNEL(vg_quantize, VgQuantizeParams, 128) { quantize(p, this_block()); }

KERNEL(vg_vector_q4_0, VgVectorParams, 128) { vector_product<VG_Q4_0, 1>(p); }
KERNEL(vg_vectors_q4_0, VgVectorParams, 128) { vector_product<VG_Q4_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q4_1, VgVectorParams, 128) { vector_product<VG_Q4_1, 1>(p); }
KERNEL(vg_vectors_q4_1, VgVectorParams, 128) { vector_product<VG_Q4_1, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q5_0, VgVectorParams, 128) { vector_product<VG_Q5_0, 1>(p); }
KERNEL(vg_vectors_q5_0, VgVectorParams, 128) { vector_product<VG_Q5_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q5_1, VgVectorParams, 128) { vector_product<VG_Q5_1, 1>(p); }
KERNEL(vg_vectors_q5_1, VgVectorParams, 128) { vector_product<VG_Q5_1, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q8_0, VgVectorParams, 128) { vector_product<VG_Q8_0, 1>(p); }
KERNEL(vg_vectors_q8_0, VgVectorParams, 128) { vector_product<VG_Q8_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q1_0, VgVectorParams, 128) { vector_product<VG_Q1_0, 1>(p); }
KERNEL(vg_vectors_q1_0, VgVectorParams, 128, 4) { vector_product<VG_Q1_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q2_0, VgVectorParams, 128) { vector_product<VG_Q2_0, 1>(p); }
KERNEL(vg_vectors_q2_0, VgVectorParams, 128) { vector_product<VG_Q2_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_mxfp4, VgVectorParams, 128) { vector_product<VG_MXFP4, 1>(p); }
KERNEL(vg_vectors_mxfp4, VgVectorParams, 128) { vector_product<VG_MXFP4, MOST_COLUMNS>(p); }
KERNEL(vg_vector_nvfp4, VgVectorParams, 128) { vector_product<VG_NVFP4, 1>(p); }
KERNEL(vg_vectors_nvfp4, VgVectorParams, 128) { vector_product<VG_NVFP4, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq4_nl, VgVectorParams, 128) { vector_product<VG_IQ4_NL, 1>(p); }
KERNEL(vg_vectors_iq4_nl, VgVectorParams, 128) { vector_product<VG_IQ4_NL, MOST_COLUMNS>(p); }
