// Products of few columns with weights whose quants and scales lie in planes of their own.
#include "vector.cuh"

KERNEL(vg_vector_mxfp4_planes, VgVectorParams, 128) { vector_product<VG_MXFP4 | VG_PLANES, 1>(p); }
KERNEL(vg_vectors_mxfp4_planes, VgVectorParams, 128) { vector_product<VG_MXFP4 | VG_PLANES, MOST_COLUMNS>(p); }
