// Classification of attention mask tiles: fully masked, partly masked, not masked.
#include "fattn.cuh"

// A block for each tile of rows (x) of each mask (y), a warp for each tile of KV positions.
KERNEL(vg_fattn_mask_tiles, VgFattnMaskTilesParams, 128) {
    int tiles = (p.keys + static_cast<int>(p.columns) - 1) / static_cast<int>(p.columns);
    const u8* mask =
        address(p.mask, Index{{0, 0, blockIdx.y % p.mask.ne[2], blockIdx.y / p.mask.ne[2]}});
    u8* states = reinterpret_cast<u8*>(p.mask_tiles) +
                 (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x) * tiles;
    int first = static_cast<int>(blockIdx.x * p.rows / p.gqa_ratio);
    int last = static_cast<int>(((blockIdx.x + 1) * p.rows - 1) / p.gqa_ratio);
    last = last < p.tokens ? last : p.tokens - 1;
    for (int tile = threadIdx.x / WARP; tile < tiles; tile += blockDim.x / WARP) {
        int key = tile * static_cast<int>(p.columns), end = key + static_cast<int>(p.columns);
        int state =
            mask_tile_state(mask, p.mask.nb[1], first, last, key, end < p.keys ? end : p.keys);
        if (threadIdx.x % WARP == 0) {
            states[tile] = static_cast<u8>(state);
        }
    }
}
