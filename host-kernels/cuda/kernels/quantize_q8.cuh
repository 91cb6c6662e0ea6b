// Quantisation of activations to q8 for products with quantised weights.
#pragma once
#include "q8_layout.cuh"

namespace {

// Quantises block `of_row` of a row to integers from -127 to 127 and a scale. Each lane of the warp
// has one element.
DEVICE void quantize_q8_block(u64 quants, u64 scales, i64 row, u32 tiles, u32 of_row, float x) {
    int lane = threadIdx.x % WARP;
    float largest = warp_reduce<Max>(fabsf(x));
    float q = largest > 0.0f ? rintf(x * (127.0f / largest)) : 0.0f;
    // x - x is NaN for NaN and infinities, which so reach the scale.
    float factor = largest / 127.0f + (x - x), sum = q;
    factor = warp_reduce<MaxOrNan>(factor);
    for (int step = 8; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    float high = __shfl_sync(0xffffffffu, sum, 16);
    i64 offset = q8_quant_offset(row, tiles, of_row) + lane / 16 * (Q8_TILE / 4) + lane % 16;
    reinterpret_cast<signed char*>(quants)[offset] = static_cast<signed char>(static_cast<int>(q));
    if (lane == 0) {
        store_q8_scales(scales, row, tiles, of_row, factor, factor * sum, factor * high);
    }
}

// Quantises rows of `src` in blocks of 32, a warp for each block.
DEVICE void quantize(const VgQuantizeQ8Params& p, const BlockIndex& b) {
    int lane = threadIdx.x % WARP;
    i64 blocks = p.src.ne[0] / 32, total = blocks * rows(p.src);
    u32 tiles = q8_tiles(p.src.ne[0]);
    i64 first = static_cast<i64>(b.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 block = first; block < total; block += static_cast<i64>(b.nx) * (blockDim.x / WARP)) {
        Index at = row_of(p.src, block / blocks);
        at.i[0] = block % blocks * 32 + lane;
        i64 row = block / blocks;
        u32 of_row = static_cast<u32>(block - row * blocks);
        quantize_q8_block(p.quants, p.scales, row, tiles, of_row,
                          load(p.src.type, address(p.src, at)));
    }
}

} // namespace
