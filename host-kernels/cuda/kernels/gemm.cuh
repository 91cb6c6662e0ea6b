// Products of weights of any type with many columns of activations, on tensor cores: both are halves, sums are f32.
//
// Activations are made halves first (`vg_convert_f16`), each column times a power of two that lets its largest element be about
// 1, so that none is beyond what a half can hold. A block of threads has a tile of 128 rows by 128 columns, and goes
// along the sum 64 elements at a time: while it multiplies one step from shared memory, each thread unpacks 32 weights
// of the next in its registers, and the next activations are on their way to shared memory.
//
// Weights in f32, and weights of any type that lie in any way (`ANY`), are not rounded to halves. They and their activations
// (`vg_split_bf16`) become pairs of bfloat16: the second is what the first leaves, so that both together are off by 2^-16. Three
// products are added, all but that of the second ones. Steps are half as long.
#pragma once
#include "dequantize.cuh"

namespace {

constexpr int GEMM_ROWS = 128, GEMM_COLUMNS = 128, GEMM_STEP = 64, GEMM_THREADS = 256;

// A type of weights that is known when the kernel runs.
constexpr int ANY = -1;

// Whether weights are pairs of bfloat16.
DEVICE constexpr bool is_pairs(int type) { return type == VG_F32 || type == ANY; }

// What a warp has of a tile: 2 times 16 rows, 8 times 8 columns; 4 by 2 warps have all of it.
constexpr int WARP_ROWS = 2, WARP_COLUMNS = 8;

template <int TYPE> struct GemmTiles {
    static constexpr int PLANES = is_pairs(TYPE) ? 2 : 1, STEP = GEMM_STEP / PLANES;
    // Halves of a row in shared memory. What a warp reads of eight rows lies in different banks.
    static constexpr int STRIDE = STEP + 8;

    u16 weights[PLANES][GEMM_ROWS][STRIDE];
    u16 activations[2][PLANES][GEMM_COLUMNS][STRIDE];
};

// Elements from `k` on of a row of `n` weights, 16 of them, as bits of f32; zeros behind the end.
template <int TYPE> DEVICE void numbers_at(const VgCodebooks* books, const View& w, const u8* row, i64 k, u32* bits) {
    i64 n = w.ne[0];
    if constexpr (TYPE == VG_F32) { // rows end with whole 16 bytes
        UNROLL
        for (int i = 0; i < 4; i++) {
            int4 four = {0, 0, 0, 0};
            if (k + 4 * i < n) {
                four = *aligned<int4>(row + (k + 4 * i) * 4);
            }
            bits[4 * i] = four.x, bits[4 * i + 1] = four.y, bits[4 * i + 2] = four.z, bits[4 * i + 3] = four.w;
        }
    } else {
        UNROLL
        for (int i = 0; i < 16; i++) {
            bits[i] = k + i < n ? __float_as_uint(row_value(w.type, books, row, w.nb[0], k + i)) : 0;
        }
    }
}

// 32 weights of a row as halves, two to a word; `block` counts blocks of 32.
template <int TYPE> DEVICE void weights_at(const VgCodebooks* books, const Begin& begin, i64 block, u32* halves) {
    const u8* row = begin.quants;
    if constexpr (TYPE == VG_F16 || TYPE == VG_BF16) {
        const int4* from = reinterpret_cast<const int4*>(row + block * 64);
        UNROLL
        for (int i = 0; i < 4; i++) {
            int4 four = from[i];
            halves[4 * i] = four.x, halves[4 * i + 1] = four.y, halves[4 * i + 2] = four.z, halves[4 * i + 3] = four.w;
        }
    } else {
        constexpr int SUBS = geometry(TYPE).elements / 32;
        Unpacked w;
        i64 whole = block / SUBS;
        const u8* scale = is_planes(TYPE) ? begin.scales + whole * scale_bytes(TYPE) : nullptr;
        unpack<TYPE>(books, row + whole * quant_bytes(TYPE), static_cast<int>(block % SUBS), w, scale);
        UNROLL
        for (int k = 0; k < 8; k++) {
            auto value = [&](int i) {
                int q = static_cast<signed char>(w.words[k] >> 8 * i);
                return static_cast<float>(q) * w.scale[k / 4] + w.offset[k / 4];
            };
            halves[2 * k] = two_halves<false>(value(0), value(1));
            halves[2 * k + 1] = two_halves<false>(value(2), value(3));
        }
    }
}

// blockIdx.x and y count tiles of rows and columns, z batches. With groups, y counts the tiles of all experts.
template <int TYPE> DEVICE void gemm(const VgGemmParams& p) {
    using Tiles = GemmTiles<TYPE>;
    constexpr int STEP = Tiles::STEP, PLANES = Tiles::PLANES, STRIDE = Tiles::STRIDE;
    DYNAMIC_SHARED(Tiles, tiles);
    __shared__ u32 places[GEMM_COLUMNS]; // of the tile's columns: which vector of all
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int group = lane / 4, pair = lane % 4 * 2;
    i64 first_row = static_cast<i64>(blockIdx.x) * GEMM_ROWS;
    i64 rows = p.dst.ne[0], blocks = p.w.ne[0] / 32;
    i64 length = (p.w.ne[0] + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;

    i64 batch = blockIdx.z, i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2], w2, w3;
    u32 slots = static_cast<u32>(p.dst.ne[1]);
    int count; // of columns in this tile
    if (p.groups) {
        const u32* starts = reinterpret_cast<const u32*>(p.groups);
        u32 experts = static_cast<u32>(p.w.ne[2]), expert = 0, end = experts;
        const u32 *tile_starts = starts + experts + 1, *order = tile_starts + experts + 1;
        if (blockIdx.y >= tile_starts[experts]) {
            return;
        }
        while (end - expert > 1) { // the last whose tiles begin here or before
            u32 middle = (expert + end) / 2;
            (tile_starts[middle] <= blockIdx.y ? expert : end) = middle;
        }
        w2 = expert, w3 = 0;
        u32 first = starts[expert] + (blockIdx.y - tile_starts[expert]) * GEMM_COLUMNS, left = starts[expert + 1] - first;
        count = left < GEMM_COLUMNS ? static_cast<int>(left) : GEMM_COLUMNS;
        for (int i = threadIdx.x; i < count; i += GEMM_THREADS) {
            places[i] = order[first + i];
        }
    } else {
        w2 = i2 / (p.dst.ne[2] / p.w.ne[2]), w3 = i3 / (p.dst.ne[3] / p.w.ne[3]);
        i64 first = static_cast<i64>(blockIdx.y) * GEMM_COLUMNS, left = p.dst.ne[1] - first;
        count = left < GEMM_COLUMNS ? static_cast<int>(left) : GEMM_COLUMNS;
        for (int i = threadIdx.x; i < count; i += GEMM_THREADS) {
            places[i] = static_cast<u32>(batch * p.dst.ne[1] + first + i);
        }
    }
    __syncthreads();
    // The row of the activations for a place: experts may share those of a token.
    auto vector_of = [&](u32 place) -> i64 {
        return p.groups ? place / slots * p.slots + place % slots % static_cast<u32>(p.slots) : static_cast<i64>(place);
    };
    // The thread's row of weights, and which half of a step it unpacks. Beyond the last row and column the last is
    // read again; the results are not written.
    i64 mine = first_row + threadIdx.x / 2;
    Begin row = begin_of_row(TYPE, p.w, mine < rows ? mine : rows - 1, w2, w3);
    int half = threadIdx.x % 2;

    auto fetch = [&](int buffer, i64 step) {
        constexpr int PIECES = STEP / 8; // of a plane; planes of a vector follow each other
        for (int i = threadIdx.x; i < GEMM_COLUMNS * PLANES * PIECES; i += GEMM_THREADS) {
            int row = i / (PLANES * PIECES), plane = i / PIECES % PLANES, piece = i % PIECES;
            int column = row < count ? row : count - 1;
            const u16* from = reinterpret_cast<const u16*>(p.halves) + (vector_of(places[column]) * PLANES + plane) * length;
            copy_async(&tiles->activations[buffer][plane][row][piece * 8], from + step * STEP + piece * 8);
        }
        commit_async();
    };
    u32 next[16];
    auto unpack_next = [&](i64 step) {
        i64 block = step * 2 + half;
        if constexpr (PLANES == 2) {
            numbers_at<TYPE>(books, p.w, row.quants, block * (STEP / 2), next);
        } else if (block < blocks) {
            weights_at<TYPE>(books, row, block, next);
        } else {
            UNROLL
            for (int i = 0; i < 16; i++) {
                next[i] = 0;
            }
        }
    };
    auto put_next = [&]() {
        if constexpr (PLANES == 2) {
            u32 words[16];
            UNROLL
            for (int i = 0; i < 8; i++) {
                split(__uint_as_float(next[2 * i]), __uint_as_float(next[2 * i + 1]), words[i], words[8 + i]);
            }
            UNROLL
            for (int i = 0; i < 16; i++) {
                next[i] = words[i];
            }
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            int plane = i / (4 / PLANES), piece = i % (4 / PLANES);
            int4* to = reinterpret_cast<int4*>(&tiles->weights[plane][threadIdx.x / 2][half * (STEP / 2) + piece * 8]);
            *to = int4{static_cast<int>(next[4 * i]), static_cast<int>(next[4 * i + 1]),
                       static_cast<int>(next[4 * i + 2]), static_cast<int>(next[4 * i + 3])};
        }
    };

    float sums[WARP_ROWS][WARP_COLUMNS][4] = {};
    i64 steps = (p.w.ne[0] + STEP - 1) / STEP;
    fetch(0, 0);
    unpack_next(0);
    put_next();
    // Columns are dealt out eight at a time, so that both halves of the warps have their share of few.
    int row_of_warp = warp % 4 * WARP_ROWS * 16, column_of_warp = warp / 4 * 8;
    for (i64 step = 0; step < steps; step++) {
        int buffer = static_cast<int>(step % 2);
        wait_async<0>();
        __syncthreads(); // both tiles are there, and nobody reads the other buffer any more
        if (step + 1 < steps) {
            fetch(buffer ^ 1, step + 1);
            unpack_next(step + 1);
        }
        UNROLL
        for (int k = 0; k < STEP; k += 16) {
            auto word = [&](const u16* at) { return *reinterpret_cast<const u32*>(at); };
            u32 a[PLANES][WARP_ROWS][4], b[WARP_COLUMNS][PLANES][2];
            UNROLL
            for (int i = 0; i < PLANES * WARP_ROWS; i++) {
                int plane = i / WARP_ROWS, of = i % WARP_ROWS;
                const u16* upper = &tiles->weights[plane][row_of_warp + of * 16 + group][k + pair];
                const u16* lower = upper + 8 * STRIDE;
                u32* to = a[plane][of];
                to[0] = word(upper), to[1] = word(lower), to[2] = word(upper + 8), to[3] = word(lower + 8);
            }
            UNROLL
            for (int j = 0; j < WARP_COLUMNS; j++) {
                UNROLL
                for (int plane = 0; plane < PLANES && column_of_warp + j * 16 < count; plane++) {
                    const u16* at = &tiles->activations[buffer][plane][column_of_warp + j * 16 + group][k + pair];
                    b[j][plane][0] = word(at), b[j][plane][1] = word(at + 8);
                }
            }
            UNROLL
            for (int j = 0; j < WARP_COLUMNS; j++) {
                UNROLL
                for (int i = 0; i < WARP_ROWS && column_of_warp + j * 16 < count; i++) {
                    multiply_fragments<TYPE == VG_BF16 || PLANES == 2>(sums[i][j], a[0][i], b[j][0]);
                    if constexpr (PLANES == 2) {
                        multiply_fragments<true>(sums[i][j], a[0][i], b[j][1]);
                        multiply_fragments<true>(sums[i][j], a[1][i], b[j][0]);
                    }
                }
            }
        }
        __syncthreads(); // the weights may be written over
        if (step + 1 < steps) {
            put_next();
        }
    }

    const float* factors = reinterpret_cast<const float*>(p.factors); // pairs have none
    UNROLL
    for (int j = 0; j < WARP_COLUMNS; j++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
            int c = column_of_warp + j * 16 + pair + e;
            if (c >= count) {
                continue;
            }
            i64 place = places[c];
            float factor = PLANES == 2 ? 1.0f : factors[vector_of(places[c])];
            u8* to = p.groups ? address(p.dst, Index{{0, place % slots, place / slots, 0}})
                              : address(p.dst, Index{{0, place - batch * p.dst.ne[1], i2, i3}});
            UNROLL
            for (int i = 0; i < WARP_ROWS; i++) {
                UNROLL
                for (int h = 0; h < 2; h++) {
                    i64 r = first_row + row_of_warp + i * 16 + group + h * 8;
                    if (r < rows) {
                        *reinterpret_cast<float*>(to + r * p.dst.nb[0]) = sums[i][j][2 * h + e] * factor;
                    }
                }
            }
        }
    }
}

} // namespace
