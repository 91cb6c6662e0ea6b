// Quantisation of activations to q8 for the matrix-vector kernels.
#include "quantize_q8.cuh"

KERNEL_AHEAD(vg_quantize_q8, VgQuantizeQ8Params, 128) { quantize(p, this_block()); }
