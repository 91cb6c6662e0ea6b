// GEMM on tensor cores (mma.sync) for weights of any type: f16 operands, f32 accumulators.
//
// `vg_convert_f16` first converts the activations to f16, with each row scaled by a power of two so
// that no element overflows. A block of threads has a tile of 128 rows by 128 columns and iterates
// over k in steps of 64. While a block multiplies one step from shared memory, each thread
// dequantises 32 weights of the next step in registers, and cp.async loads the next activations.
//
// Weights in f32, and weights of any type with unusual strides (ANY_TYPE), are not rounded to f16.
// Weights and activations (`vg_split_bf16`) become two bf16 terms each, with a relative error of
// 2^-16, and three of the four products of terms are added. The k step of such weights is half as
// long.
#pragma once
#include "dequantize.cuh"

namespace {

constexpr int GEMM_ROWS = 128, GEMM_COLUMNS = 128, GEMM_STEP = 64, GEMM_THREADS = 256;

// The type of the weights is known at run time only.
constexpr int ANY_TYPE = -1;

// Whether operands are split into two bf16 terms.
DEVICE constexpr bool is_split_bf16(int type) {
    return type == VG_F32 || type == ANY_TYPE;
}

// Fragments of a warp: 2 of 16 rows by 8 of 8 columns. 4 x 2 warps cover the tile.
constexpr int WARP_ROWS = 2, WARP_COLUMNS = 8;

template <int TYPE> struct GemmTiles {
    static constexpr int TERMS = is_split_bf16(TYPE) ? 2 : 1, STEP = GEMM_STEP / TERMS;
    // Row stride in shared memory, padded against bank conflicts.
    static constexpr int STRIDE = STEP + 8;

    u16 weights[TERMS][GEMM_ROWS][STRIDE];
    u16 activations[2][TERMS][GEMM_COLUMNS][STRIDE];
};

// Loads 16 weights of a row from element `k` on as f32 bits; zeros behind the end.
template <int TYPE> DEVICE void load_f32_weights(const VgCodebooks* grids, const View& w,
                                                const u8* row, i64 k, u32* bits) {
    i64 n = w.ne[0];
    if constexpr (TYPE == VG_F32) { // rows are multiples of 16 bytes
        UNROLL
        for (int i = 0; i < 4; i++) {
            int4 four = {0, 0, 0, 0};
            if (k + 4 * i < n) {
                four = *aligned<int4>(row + (k + 4 * i) * 4);
            }
            bits[4 * i] = four.x, bits[4 * i + 1] = four.y, bits[4 * i + 2] = four.z,
                     bits[4 * i + 3] = four.w;
        }
    } else {
        UNROLL
        for (int i = 0; i < 16; i++) {
            bits[i] = k + i < n
                          ? __float_as_uint(dequantize_element(w.type, grids, row, w.nb[0], k + i))
                          : 0;
        }
    }
}

// Dequantises 32 weights of a row to f16, two to a word; `block` counts blocks of 32.
template <int TYPE> DEVICE void load_f16_weights(const VgCodebooks* grids, const RowPtr& begin,
                                                i64 block, u32* halves) {
    const u8* row = begin.quants;
    if constexpr (TYPE == VG_F16 || TYPE == VG_BF16) {
        const int4* from = reinterpret_cast<const int4*>(row + block * 64);
        UNROLL
        for (int i = 0; i < 4; i++) {
            int4 four = from[i];
            halves[4 * i] = four.x, halves[4 * i + 1] = four.y, halves[4 * i + 2] = four.z,
                       halves[4 * i + 3] = four.w;
        }
    } else {
        constexpr int SUBS = type_traits(TYPE).elements / 32;
        Unpacked w;
        i64 whole = block / SUBS;
        const u8* scale = is_repacked(TYPE) ? begin.scales + whole * scale_bytes(TYPE) : nullptr;
        unpack<TYPE>(grids, row + whole * quant_bytes(TYPE), static_cast<int>(block % SUBS), w,
                     scale);
        UNROLL
        for (int k = 0; k < 8; k++) {
            auto value = [&](int i) {
                int q = static_cast<signed char>(w.words[k] >> 8 * i);
                return static_cast<float>(q) * w.scale[k / 4] + w.offset[k / 4];
            };
            halves[2 * k] = pack_half2<false>(value(0), value(1));
            halves[2 * k + 1] = pack_half2<false>(value(2), value(3));
        }
    }
}

// blockIdx.x and y count tiles of rows and columns, z batches. With moe_order, y counts the tiles
// of all experts.
template <int TYPE> DEVICE void gemm(const VgGemmParams& p) {
    using Tiles = GemmTiles<TYPE>;
    constexpr int STEP = Tiles::STEP, TERMS = Tiles::TERMS, STRIDE = Tiles::STRIDE;
    DYNAMIC_SHARED(Tiles, tiles);
    __shared__ u32 column_ids[GEMM_COLUMNS]; // index of each column of the tile
    const VgCodebooks* grids = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int group = lane / 4, pair = lane % 4 * 2;
    i64 first_row = static_cast<i64>(blockIdx.x) * GEMM_ROWS;
    i64 rows = p.dst.ne[0], blocks = p.w.ne[0] / 32;
    i64 length = (p.w.ne[0] + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;

    i64 batch = blockIdx.z, i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2], w2, w3;
    u32 slots = static_cast<u32>(p.dst.ne[1]);
    int count; // columns in this tile
    if (p.moe_order) {
        const u32* starts = reinterpret_cast<const u32*>(p.moe_order);
        u32 experts = static_cast<u32>(p.w.ne[2]), expert = 0, end = experts;
        const u32 *tile_starts = starts + experts + 1, *order = tile_starts + experts + 1;
        if (blockIdx.y >= tile_starts[experts]) {
            return;
        }
        while (end - expert > 1) { // the last expert whose tiles begin here or before
            u32 middle = (expert + end) / 2;
            (tile_starts[middle] <= blockIdx.y ? expert : end) = middle;
        }
        w2 = expert, w3 = 0;
        u32 first = starts[expert] + (blockIdx.y - tile_starts[expert]) * GEMM_COLUMNS,
            left = starts[expert + 1] - first;
        count = left < GEMM_COLUMNS ? static_cast<int>(left) : GEMM_COLUMNS;
        for (int i = threadIdx.x; i < count; i += GEMM_THREADS) {
            column_ids[i] = order[first + i];
        }
    } else {
        w2 = i2 / (p.dst.ne[2] / p.w.ne[2]), w3 = i3 / (p.dst.ne[3] / p.w.ne[3]);
        i64 first = static_cast<i64>(blockIdx.y) * GEMM_COLUMNS, left = p.dst.ne[1] - first;
        count = left < GEMM_COLUMNS ? static_cast<int>(left) : GEMM_COLUMNS;
        for (int i = threadIdx.x; i < count; i += GEMM_THREADS) {
            column_ids[i] = static_cast<u32>(batch * p.dst.ne[1] + first + i);
        }
    }
    __syncthreads();
    // The row of the activations for a column: slots of a token may share activations.
    auto activation_row = [&](u32 column_id) -> i64 {
        return p.moe_order ? column_id / slots * p.slots +
                                 column_id % slots % static_cast<u32>(p.slots)
                           : static_cast<i64>(column_id);
    };
    // The thread's row of weights and its half of a k step. Rows and columns beyond the last read
    // the last one; their results are not stored.
    i64 mine = first_row + threadIdx.x / 2;
    RowPtr row = row_ptr_at(TYPE, p.w, mine < rows ? mine : rows - 1, w2, w3);
    int half = threadIdx.x % 2;

    auto fetch = [&](int buffer, i64 step) {
        // 16-byte vectors of a term. The terms of a row of activations are contiguous.
        constexpr int VECS = STEP / 8;
        for (int i = threadIdx.x; i < GEMM_COLUMNS * TERMS * VECS; i += GEMM_THREADS) {
            int row = i / (TERMS * VECS), term = i / VECS % TERMS, vec = i % VECS;
            int column = row < count ? row : count - 1;
            const u16* from = reinterpret_cast<const u16*>(p.values) +
                              (activation_row(column_ids[column]) * TERMS + term) * length;
            cp_async(&tiles->activations[buffer][term][row][vec * 8], from + step * STEP + vec * 8);
        }
        cp_async_commit();
    };
    u32 next[16];
    auto dequantize_next = [&](i64 step) {
        i64 block = step * 2 + half;
        if constexpr (TERMS == 2) {
            load_f32_weights<TYPE>(grids, p.w, row.quants, block * (STEP / 2), next);
        } else if (block < blocks) {
            load_f16_weights<TYPE>(grids, row, block, next);
        } else {
            UNROLL
            for (int i = 0; i < 16; i++) {
                next[i] = 0;
            }
        }
    };
    auto store_next = [&]() {
        if constexpr (TERMS == 2) {
            u32 words[16];
            UNROLL
            for (int i = 0; i < 8; i++) {
                split_bf16(__uint_as_float(next[2 * i]), __uint_as_float(next[2 * i + 1]), words[i],
                           words[8 + i]);
            }
            UNROLL
            for (int i = 0; i < 16; i++) {
                next[i] = words[i];
            }
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            int term = i / (4 / TERMS), vec = i % (4 / TERMS);
            int4* to = reinterpret_cast<int4*>(
                &tiles->weights[term][threadIdx.x / 2][half * (STEP / 2) + vec * 8]);
            *to = int4{static_cast<int>(next[4 * i]), static_cast<int>(next[4 * i + 1]),
                       static_cast<int>(next[4 * i + 2]), static_cast<int>(next[4 * i + 3])};
        }
    };

    float sums[WARP_ROWS][WARP_COLUMNS][4] = {};
    i64 steps = (p.w.ne[0] + STEP - 1) / STEP;
    fetch(0, 0);
    dequantize_next(0);
    store_next();
    // Columns are interleaved by eights, so that both halves of the warps have work if there are
    // few.
    int row_of_warp = warp % 4 * WARP_ROWS * 16, column_of_warp = warp / 4 * 8;
    for (i64 step = 0; step < steps; step++) {
        int buffer = static_cast<int>(step % 2);
        cp_async_wait<0>();
        __syncthreads(); // both tiles are loaded; the other buffer is free
        if (step + 1 < steps) {
            fetch(buffer ^ 1, step + 1);
            dequantize_next(step + 1);
        }
        UNROLL
        for (int k = 0; k < STEP; k += 16) {
            auto word = [&](const u16* at) { return *reinterpret_cast<const u32*>(at); };
            u32 a[TERMS][WARP_ROWS][4], b[WARP_COLUMNS][TERMS][2];
            UNROLL
            for (int i = 0; i < TERMS * WARP_ROWS; i++) {
                int term = i / WARP_ROWS, of = i % WARP_ROWS;
                const u16* upper = &tiles->weights[term][row_of_warp + of * 16 + group][k + pair];
                const u16* lower = upper + 8 * STRIDE;
                u32* to = a[term][of];
                to[0] = word(upper), to[1] = word(lower), to[2] = word(upper + 8),
                to[3] = word(lower + 8);
            }
            UNROLL
            for (int j = 0; j < WARP_COLUMNS; j++) {
                UNROLL
                for (int term = 0; term < TERMS && column_of_warp + j * 16 < count; term++) {
                    const u16* at =
                        &tiles
                             ->activations[buffer][term][column_of_warp + j * 16 + group][k + pair];
                    b[j][term][0] = word(at), b[j][term][1] = word(at + 8);
                }
            }
            UNROLL
            for (int j = 0; j < WARP_COLUMNS; j++) {
                UNROLL
                for (int i = 0; i < WARP_ROWS && column_of_warp + j * 16 < count; i++) {
                    mma_m16n8k16<TYPE == VG_BF16 || TERMS == 2>(sums[i][j], a[0][i], b[j][0]);
                    if constexpr (TERMS == 2) {
                        mma_m16n8k16<true>(sums[i][j], a[0][i], b[j][1]);
                        mma_m16n8k16<true>(sums[i][j], a[1][i], b[j][0]);
                    }
                }
            }
        }
        __syncthreads(); // all warps have read the weights
        if (step + 1 < steps) {
            store_next();
        }
    }

    const float* factors = reinterpret_cast<const float*>(p.row_scales); // split bf16 has no scales
    UNROLL
    for (int j = 0; j < WARP_COLUMNS; j++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
            int c = column_of_warp + j * 16 + pair + e;
            if (c >= count) {
                continue;
            }
            i64 column_id = column_ids[c];
            float factor = TERMS == 2 ? 1.0f : factors[activation_row(column_ids[c])];
            u8* to = p.moe_order
                         ? address(p.dst, Index{{0, column_id % slots, column_id / slots, 0}})
                         : address(p.dst, Index{{0, column_id - batch * p.dst.ne[1], i2, i3}});
            UNROLL
            for (int i = 0; i < WARP_ROWS; i++) {
                UNROLL
                for (int h = 0; h < 2; h++) {
                    i64 r = first_row + row_of_warp + i * 16 + group + h * 8;
                    if (r < rows) {
                        *reinterpret_cast<float*>(to + r * p.dst.nb[0]) =
                            sums[i][j][2 * h + e] * factor;
                    }
                }
            }
        }
    }
}

} // namespace
