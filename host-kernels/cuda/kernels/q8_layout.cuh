// Layout of q8 activations, written by quantize_q8.cuh, fused.cuh and fattn.cuh and read by
// mmv.cuh.
//
// A row consists of blocks of 32 signed bytes, each with a scale and sums. A tile has 1024
// elements, 16 lanes of a warp multiply a tile, and a lane has a chunk of 64 neighbours. The data
// that the lanes load with one instruction is contiguous. With chunk c, quarter q of it, and block
// s = q / 2:
//
//     1024 bytes of quants: 16 elements at 256 q + 16 c
//     512 bytes of scales:  at 16 c the scales of both blocks, then scale * sum(quants) of both;
//                           at 256 + 16 c the sums of the first halves of both, then of the second
//
// The last tile of a row has its full size. Bytes behind the row are neither written nor read.
#pragma once
#include "device.cuh"

constexpr int Q8_TILE = 1024, Q8_TILE_SCALES = Q8_TILE / 2;
// Lanes that multiply a tile of a row, and elements of a lane.
constexpr int CHUNKS = 16, CHUNK = Q8_TILE / CHUNKS;

// Tiles of a row.
DEVICE u32 q8_tiles(i64 width) {
    return (static_cast<u32>(width) + Q8_TILE - 1) / Q8_TILE;
}

// Offset of the first half of a block of 32; the second half is CHUNK * 4 bytes behind it.
DEVICE i64 q8_quant_offset(i64 row, u32 tiles, u32 block) {
    return (row * tiles + block / 32) * Q8_TILE + block % 2 * (Q8_TILE / 2) + block % 32 / 2 * 16;
}

// Writes the scale of a block and the sums of its halves.
DEVICE void store_q8_scales(u64 scales, i64 row, u32 tiles, u32 block, float factor, float low,
                            float high) {
    i64 tile = (row * tiles + block / 32) * Q8_TILE_SCALES;
    float* to = reinterpret_cast<float*>(scales + tile + block % 32 / 2 * 16) + block % 2;
    to[0] = factor;
    to[2] = low + high;
    to[Q8_TILE_SCALES / 8] = low;
    to[Q8_TILE_SCALES / 8 + 2] = high;
}
