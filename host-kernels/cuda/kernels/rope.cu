// ROPE and ROPE_BACK, alone and fused with SET_ROWS: see `rope.cuh`.
#include "rope.cuh"
#include "rows.cuh"

KERNEL_AHEAD(vg_rope, VgRopeParams, 256, 4) { rope(p, this_block()); }
KERNEL_AHEAD(vg_rope_rows, VgRopeRowsParams, 256, 4) { rope_rows(p, this_block()); }

// What attention of few tokens needs, in one launch: rotated queries, and rows of both caches. Each
// alone is shorter than the gap between two launches.
KERNEL_AHEAD(vg_rope_cache, VgRopeCacheParams, 256) {
    u32 x = blockIdx.x;
    if (x < p.query_blocks) {
        rope(p.query, BlockIndex{x, 0, 0, p.query_blocks, 1, 1});
        return;
    }
    x -= p.query_blocks;
    if (x < p.key_blocks) {
        rope_rows(p.key, BlockIndex{x, 0, 0, p.key_blocks, 1, 1});
        return;
    }
    set_rows<false>(p.value, BlockIndex{x - p.key_blocks, 0, 0, p.value_blocks, 1, 1});
}
