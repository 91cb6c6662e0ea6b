// FLASH_ATTN_EXT on tensor cores: merges the accumulators of warps and of splits, and stores the
// result. fattn.cuh describes the algorithm.
#pragma once
#include "fattn_tile.cuh"

namespace {

// Normalisation factor of a row with this maximum and sum, including the attention sink.
template <class T>
DEVICE float FlashAttention<T>::normalizer(int row, float row_max, float total) const {
    float factor = 1.0f;
    if (p.sinks.data) {
        float sink = reinterpret_cast<const float*>(p.sinks.data)[head_of(row)];
        float larger = fmaxf(row_max, sink);
        factor = rescale(row_max, larger);
        total = total * factor + fast_exp2((sink - larger) * LOG2_E);
    }
    return total == 0.0f ? 0.0f : factor / total; // a fully masked row is 0
}

// Quantises 32 columns of a row, one for each lane.
template <class T>
DEVICE void FlashAttention<T>::quantize_result(int row, int column, float x) const {
    i64 token = static_cast<i64>(sequence) * p.q.ne[1] + token_of(row), width = p.v.ne[0];
    u32 block = static_cast<u32>(head_of(row) * width + column) / 32;
    quantize_q8_block(p.quants, p.scales, token, q8_tiles(p.q.ne[2] * width), block, x);
}

// Stores four columns of a row for each lane, and quantises them. The whole warp calls it. The
// host ensures that heads are multiples of 32 if the result is quantised.
template <class T>
DEVICE void FlashAttention<T>::store_result(int row, int column, const Float4& x) const {
    int width = static_cast<int>(p.v.ne[0]);
    float* to = result(row);
    UNROLL
    for (int j = 0; j < 4; j++) {
        if (column + j < width) {
            to[column + j] = x.of[j];
        }
    }
    if (p.quants) {
        i64 token = static_cast<i64>(sequence) * p.q.ne[1] + token_of(row);
        u32 vec = static_cast<u32>(head_of(row) * width + column) / 4;
        bool valid = column < width;
        quantize_q8_vec(p.quants, p.scales, token, q8_tiles(p.q.ne[2] * width), vec,
                        valid ? x : Float4{}, valid);
    }
}

// Merges the partial results of all splits: a warp for each row, a lane for four columns at a
// time, and first a lane for the factor of each split.
template <class T>
DEVICE void FlashAttention<T>::merge_splits() const {
    int splits = static_cast<int>(p.splits);
    const float* parts = partial(0);
    for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
         row += FATTN_WARPS) {
        const float *row_maxes = parts + ROWS * V + row, *totals = row_maxes + ROWS;
        float row_max = -INFINITY_F;
        for (int s = lane; s < splits; s += WARP) {
            row_max = fmaxf(row_max, row_maxes[s * PARTIAL_FLOATS]);
        }
        row_max = warp_reduce<Max>(row_max);
        constexpr int VECS = (V / 4 + WARP - 1) / WARP;
        float sums[VECS][4] = {}, total = 0.0f;
        for (int first = 0; first < splits; first += WARP) {
            int count = splits - first < WARP ? splits - first : WARP;
            float factor = 0.0f;
            if (lane < count) {
                i64 at = static_cast<i64>(first + lane) * PARTIAL_FLOATS;
                factor = rescale(row_maxes[at], row_max);
                total += totals[at] * factor;
            }
            UNROLL_TIMES(8)
            for (int s = 0; s < count; s++) {
                float by = __shfl_sync(0xffffffffu, factor, s);
                const float* from =
                    parts + static_cast<i64>(first + s) * PARTIAL_FLOATS + row * V;
                UNROLL
                for (int v = 0; v < VECS; v++) {
                    int column = (v * WARP + lane) * 4;
                    if (V % (4 * WARP) == 0 || column < V) {
                        int4 four = *reinterpret_cast<const int4*>(from + column);
                        sums[v][0] += __int_as_float(four.x) * by;
                        sums[v][1] += __int_as_float(four.y) * by;
                        sums[v][2] += __int_as_float(four.z) * by;
                        sums[v][3] += __int_as_float(four.w) * by;
                    }
                }
            }
        }
        float factor = normalizer(first_row + row, row_max, warp_reduce<Sum>(total));
        UNROLL
        for (int v = 0; v < VECS; v++) {
            store_result(first_row + row, (v * WARP + lane) * 4,
                         {{sums[v][0] * factor, sums[v][1] * factor, sums[v][2] * factor,
                           sums[v][3] * factor}});
        }
    }
}

// Merges the accumulators of all warps through shared memory and stores the result, or the
// partial result of the split, for tiles of 16 rows, of which few exist: a warp for each row.
template <class T>
DEVICE void FlashAttention<T>::finish_few_rows(const Accumulators& sums, int split) const {
    static_assert(ROW_WARPS > 1 || KEY_WARPS * ROWS * (V + 2) * 4 <= TILE_BYTES,
                  "the accumulators fit where Q, K and V were");
    int splits = static_cast<int>(p.splits);
    float* parts = reinterpret_cast<float*>(q_tile);
    float *row_maxes = parts + KEY_WARPS * ROWS * V, *totals = row_maxes + KEY_WARPS * ROWS;
    __syncthreads(); // K and V have been read
    UNROLL
    for (int h = 0; h < 2; h++) {
        int row = lane / 4 + 8 * h;
        if (first_row + row < n_rows) {
            float* to = parts + (key_warp * ROWS + row) * V + column_warp * COLUMNS +
                        lane % 4 * 2;
            UNROLL
            for (int n = 0; n < COLUMNS / 8; n++) {
                *reinterpret_cast<float2*>(to + 8 * n) =
                    float2{sums.of[n][2 * h], sums.of[n][2 * h + 1]};
            }
            if (column_warp == 0 && lane % 4 == 0) {
                row_maxes[key_warp * ROWS + row] = sums.row_max[h];
                totals[key_warp * ROWS + row] = sums.total[h];
            }
        }
    }
    __syncthreads();
    UNROLL_TIMES(1)
    for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
         row += FATTN_WARPS) {
        float row_max = -INFINITY_F, total = 0.0f, by[KEY_WARPS];
        UNROLL
        for (int k = 0; k < KEY_WARPS; k++) {
            row_max = fmaxf(row_max, row_maxes[k * ROWS + row]);
        }
        UNROLL
        for (int k = 0; k < KEY_WARPS; k++) {
            by[k] = rescale(row_maxes[k * ROWS + row], row_max);
            total += totals[k * ROWS + row] * by[k];
        }
        float factor = splits == 1 ? normalizer(first_row + row, row_max, total) : 1.0f;
        float* mine = partial(split);
        UNROLL_TIMES(1)
        for (int first = 0; first < V; first += 4 * WARP) {
            int column = first + 4 * lane;
            Float4 sum = {};
            if (V % (4 * WARP) == 0 || column < V) {
                UNROLL
                for (int k = 0; k < KEY_WARPS; k++) {
                    Float4 more = load_float4(reinterpret_cast<const u8*>(
                        parts + (k * ROWS + row) * V + column));
                    UNROLL
                    for (int j = 0; j < 4; j++) {
                        sum.of[j] += more.of[j] * by[k];
                    }
                }
                UNROLL
                for (int j = 0; j < 4; j++) {
                    sum.of[j] *= factor;
                }
                if (splits > 1) {
                    store_float4(reinterpret_cast<u8*>(mine + row * V + column), sum);
                }
            }
            if (splits == 1) {
                store_result(first_row + row, column, sum);
            }
        }
        if (splits > 1 && lane == 0) {
            mine[ROWS * V + row] = row_max;
            mine[ROWS * V + ROWS + row] = total;
        }
    }
}

// Stores the result, or the partial result of the split, of a tile of many rows.
template <class T>
DEVICE void FlashAttention<T>::finish_many_rows(const Accumulators& sums, int split) const {
    static_assert(ROW_WARPS == 1 || KEY_WARPS == 1, "each warp has rows of its own");
    int width = static_cast<int>(p.v.ne[0]), splits = static_cast<int>(p.splits);
    float* mine = partial(split);
    UNROLL
    for (int h = 0; h < 2; h++) {
        int row = row_warp * 16 + lane / 4 + 8 * h;
        if (key_warp == 0 && first_row + row < n_rows) {
            float factor = 1.0f;
            float* to = mine + row * V;
            if (splits == 1) {
                factor = normalizer(first_row + row, sums.row_max[h], sums.total[h]);
                to = result(first_row + row);
            } else if (column_warp == 0 && lane % 4 == 0) {
                mine[ROWS * V + row] = sums.row_max[h];
                mine[ROWS * V + ROWS + row] = sums.total[h];
            }
            UNROLL
            for (int n = 0; n < COLUMNS / 8; n++) {
                int column = column_warp * COLUMNS + 8 * n + lane % 4 * 2;
                if (column < width) {
                    to[column] = sums.of[n][2 * h] * factor;
                    if (KIND != KV_SPLIT_BF16 || column + 1 < width) {
                        to[column + 1] = sums.of[n][2 * h + 1] * factor;
                    }
                }
            }
        }
    }
    if (splits == 1 && p.quants) {
        __syncthreads(); // all rows are stored
        for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
             row += FATTN_WARPS) {
            for (int column = lane; column < width; column += WARP) {
                quantize_result(first_row + row, column, result(first_row + row)[column]);
            }
        }
    }
}

} // namespace
