// Elementwise functions and ADD_ID: see `elementwise.cuh`.
#include "elementwise.cuh"

KERNEL(vg_elementwise, VgElementwiseParams, 256) { elementwise(p, this_block()); }

KERNEL(vg_add_id, VgAddIdParams, 256) { add_id(p, this_block()); }
