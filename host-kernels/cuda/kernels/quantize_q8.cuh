// What rounds activations for products with quantised weights.
#pragma once
#include "q8_layout.cuh"

namespace {

// Rounds block `of_row` of a row of so many pieces, 32 elements of which each lane of a warp has one: to integers from -127 to
// 127, with a factor.
DEVICE void round_block(u64 quants, u64 scales, i64 row, u32 pieces, u32 of_row, float x) {
    int lane = threadIdx.x % WARP;
    float largest = warp_reduce<Largest>(fabsf(x));
    float q = largest > 0.0f ? rintf(x * (127.0f / largest)) : 0.0f;
    // NaN and infinities get into the factor.
    float factor = largest / 127.0f + (x - x), sum = q;
    factor = warp_reduce<LargestOrNan>(factor);
    for (int step = 8; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    float high = __shfl_sync(0xffffffffu, sum, 16);
    i64 place = place_of_quants(row, pieces, of_row) + lane / 16 * (ROUNDED_PIECE / 4) + lane % 16;
    reinterpret_cast<signed char*>(quants)[place] = static_cast<signed char>(static_cast<int>(q));
    if (lane == 0) {
        put_scales(scales, row, pieces, of_row, factor, factor * sum, factor * high);
    }
}

// Activations in blocks of 32 as integers from -127 to 127, a warp for each block; columns in the order of `src`.
DEVICE void quantize(const VgQuantizeQ8Params& p, const Blocks& b) {
    int lane = threadIdx.x % WARP;
    i64 blocks = p.src.ne[0] / 32, total = blocks * rows(p.src);
    u32 pieces = rounded_pieces(p.src.ne[0]);
    i64 first = static_cast<i64>(b.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 block = first; block < total; block += static_cast<i64>(b.nx) * (blockDim.x / WARP)) {
        Index at = row_of(p.src, block / blocks);
        at.i[0] = block % blocks * 32 + lane;
        i64 row = block / blocks;
        u32 of_row = static_cast<u32>(block - row * blocks);
        round_block(p.quants, p.scales, row, pieces, of_row, load(p.src.type, address(p.src, at)));
    }
}

} // namespace
