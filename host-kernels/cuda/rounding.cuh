// What rounds activations for products with quantised weights.
#pragma once
#include "scales.cuh"

namespace {

// Rounds a block of 32, of which each lane of a warp has an element: to integers from -127 to 127, with a factor.
DEVICE void round_block(u64 quants, u64 scales, i64 block, float x) {
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
    reinterpret_cast<signed char*>(quants)[block * 32 + lane] = static_cast<signed char>(static_cast<int>(q));
    if (lane == 0) {
        reinterpret_cast<Scales*>(scales)[block] = {factor, factor * sum, factor * high, 0.0f};
    }
}

// Activations in blocks of 32 as integers from -127 to 127, a warp for each block; columns in the order of `src`.
DEVICE void quantize(const VgQuantizeParams& p, const Blocks& b) {
    int lane = threadIdx.x % WARP;
    i64 blocks = p.src.ne[0] / 32, total = blocks * rows(p.src);
    i64 first = static_cast<i64>(b.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 block = first; block < total; block += static_cast<i64>(b.nx) * (blockDim.x / WARP)) {
        Index at = row_of(p.src, block / blocks);
        at.i[0] = block % blocks * 32 + lane;
        round_block(p.quants, p.scales, block, load(p.src.type, address(p.src, at)));
    }
}

} // namespace
