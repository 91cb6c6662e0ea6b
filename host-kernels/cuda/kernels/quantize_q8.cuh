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

struct Float4 {
    float of[4];
};

DEVICE Float4 load_float4(const u8* at) {
    int4 words = *aligned<int4>(at);
    return {{__int_as_float(words.x), __int_as_float(words.y), __int_as_float(words.z),
             __int_as_float(words.w)}};
}

DEVICE void store_float4(u8* at, const Float4& x) {
    *reinterpret_cast<int4*>(at) = int4{__float_as_int(x.of[0]), __float_as_int(x.of[1]),
                                        __float_as_int(x.of[2]), __float_as_int(x.of[3])};
}

// Quantises elements 4 * vec to 4 * vec + 3 of a row, one such vector for each lane: eight lanes
// have a block of 32. The whole warp calls it; lanes that are not `valid` have zeros and store
// nothing.
DEVICE void quantize_q8_vec(u64 quants, u64 scales, i64 row, u32 tiles, u32 vec, const Float4& x,
                            bool valid) {
    float largest = 0.0f, poison = 0.0f, total = 0.0f;
    UNROLL
    for (int j = 0; j < 4; j++) {
        largest = fmaxf(largest, fabsf(x.of[j]));
        poison += x.of[j] - x.of[j]; // NaN for NaN and infinities
    }
    UNROLL
    for (int step = 4; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        poison += __shfl_xor_sync(0xffffffffu, poison, step);
    }
    float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    u32 word = 0;
    UNROLL
    for (int j = 0; j < 4; j++) {
        float q = rintf(x.of[j] * inverse);
        q = largest > 0.0f ? q : 0.0f; // all elements are 0 or NaN
        total += q;
        word |= (static_cast<u32>(static_cast<int>(q)) & 255u) << 8 * j;
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    float high = __shfl_xor_sync(0xffffffffu, total, 4);
    if (valid) {
        u32 block = vec / 8;
        i64 offset = q8_quant_offset(row, tiles, block) + vec % 8 / 4 * (Q8_TILE / 4) + vec % 4 * 4;
        *reinterpret_cast<u32*>(quants + offset) = word;
        if (vec % 8 == 0) {
            float factor = largest / 127.0f + poison;
            store_q8_scales(scales, row, tiles, block, factor, factor * total, factor * high);
        }
    }
}

// Quantises rows of `src` in blocks of 32, a warp for each block. Waits for the launches before
// this one.
DEVICE void quantize(const VgQuantizeQ8Params& p, const BlockIndex& b) {
    int lane = threadIdx.x % WARP;
    i64 blocks = static_cast<u64>(p.src.ne[0]) / 32, total = blocks * rows(p.src);
    u32 tiles = q8_tiles(p.src.ne[0]);
    i64 first = static_cast<i64>(b.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 block = first; block < total; block += static_cast<i64>(b.nx) * (blockDim.x / WARP)) {
        Division by = divide(block, blocks);
        Index at = row_of(p.src, by.whole);
        at.i[0] = by.rest * 32 + lane;
        const u8* from = address(p.src, at);
        grid_dependency_wait();
        quantize_q8_block(p.quants, p.scales, by.whole, tiles, static_cast<u32>(by.rest),
                          load(p.src.type, from));
    }
}

} // namespace
