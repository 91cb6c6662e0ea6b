// ROPE and ROPE_BACK, alone and fused with SET_ROWS: see `rope.cuh`.
#include "rope.cuh"

KERNEL(vg_rope, VgRopeParams, 256) { rope(p, this_block()); }
KERNEL(vg_rope_rows, VgRopeRowsParams, 256) { rope_rows(p, this_block()); }
