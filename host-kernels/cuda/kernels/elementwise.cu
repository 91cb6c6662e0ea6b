// Functions of single elements, and ADD_ID: see `map.cuh`.
#include "map.cuh"

KERNEL(vg_map, VgMapParams, 256) { map(p, this_block()); }

KERNEL(vg_add_id, VgAddIdParams, 256) { add_id(p, this_block()); }
