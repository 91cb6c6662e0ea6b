// MUL_MAT, MUL_MAT_ID, OUT_PROD with operands of any type and layout.
#include "formats.cuh"

namespace {

// A tile of results: so many rows of weights by so many columns of activations, in steps along the products.
constexpr int TILE_ROWS = 64, TILE_COLS = 32, TILE_STEP = 32;
// Results of a thread, of 256.
constexpr int THREAD_ROWS = 4, THREAD_COLS = 2;

// Columns that `vg_mul_vec` multiplies a row with at a time.
constexpr int MOST_VECTORS = 8;

// The batch of the weights that belongs to batch (i2, i3) of the result.
DEVICE const u8* weights_of(const VgMulMatParams& p, i64 i2, i64 i3) {
    i64 w2 = i2 / (p.dst.ne[2] / p.w.ne[2]), w3 = i3 / (p.dst.ne[3] / p.w.ne[3]);
    return address(p.w, Index{{0, 0, w2, w3}});
}

// `left(r, k)` and `right(c, k)` give the factors; `put(r, c, sum)` takes the results.
template <class Left, class Right, class Put>
DEVICE void multiply_tile(i64 n_rows, i64 n_cols, i64 n_steps, Left left, Right right, Put put) {
    __shared__ float a[TILE_STEP][TILE_ROWS + 1], b[TILE_STEP][TILE_COLS + 1];
    i64 first_row = static_cast<i64>(blockIdx.x) * TILE_ROWS, first_col = static_cast<i64>(blockIdx.y) * TILE_COLS;
    int row = threadIdx.x % (TILE_ROWS / THREAD_ROWS), col = threadIdx.x / (TILE_ROWS / THREAD_ROWS);
    float sums[THREAD_ROWS][THREAD_COLS] = {};
    for (i64 start = 0; start < n_steps; start += TILE_STEP) {
        for (int i = threadIdx.x; i < TILE_STEP * TILE_ROWS; i += blockDim.x) {
            int k = i % TILE_STEP, r = i / TILE_STEP;
            bool inside = start + k < n_steps && first_row + r < n_rows;
            a[k][r] = inside ? left(first_row + r, start + k) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE_STEP * TILE_COLS; i += blockDim.x) {
            int k = i % TILE_STEP, c = i / TILE_STEP;
            bool inside = start + k < n_steps && first_col + c < n_cols;
            b[k][c] = inside ? right(first_col + c, start + k) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < TILE_STEP; k++) {
            for (int i = 0; i < THREAD_ROWS; i++) {
                for (int j = 0; j < THREAD_COLS; j++) {
                    sums[i][j] += a[k][row + i * (TILE_ROWS / THREAD_ROWS)] * b[k][col + j * (TILE_COLS / THREAD_COLS)];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < THREAD_ROWS; i++) {
        for (int j = 0; j < THREAD_COLS; j++) {
            i64 r = first_row + row + i * (TILE_ROWS / THREAD_ROWS), c = first_col + col + j * (TILE_COLS / THREAD_COLS);
            if (r < n_rows && c < n_cols) {
                put(r, c, sums[i][j]);
            }
        }
    }
}

DEVICE float* result(const View& dst, i64 i0, i64 i1, i64 i2, i64 i3) {
    return reinterpret_cast<float*>(address(dst, Index{{i0, i1, i2, i3}}));
}

// A block for each tile; blockIdx.z counts batches. `OUTER`: the terms of a sum are the rows of both operands, not their
// elements.
template <bool OUTER> DEVICE void multiply(const VgMulMatParams& p) {
    const VgCodebooks* books = codebooks(p.codebooks);
    auto value = [&](const View& v, const u8* matrix, i64 i, i64 k) {
        return row_value(v.type, books, matrix + (OUTER ? k : i) * v.nb[1], v.nb[0], OUTER ? i : k);
    };
    for (i64 batch = blockIdx.z; batch < p.dst.ne[2] * p.dst.ne[3]; batch += gridDim.z) {
        i64 i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2];
        const u8* w = weights_of(p, i2, i3);
        const u8* x = address(p.x, Index{{0, 0, i2, i3}});
        multiply_tile(
            p.dst.ne[0], p.dst.ne[1], p.w.ne[OUTER ? 1 : 0], [&](i64 r, i64 k) { return value(p.w, w, r, k); },
            [&](i64 c, i64 k) { return value(p.x, x, c, k); },
            [&](i64 r, i64 c, float sum) { *result(p.dst, r, c, i2, i3) = sum; });
    }
}

} // namespace

// Many columns.
KERNEL(vg_mul_mat, VgMulMatParams, 256) { multiply<false>(p); }

// Few columns: a warp for each row of weights, which is read once for up to eight of them. blockIdx.y counts
// groups of columns, blockIdx.z batches.
KERNEL(vg_mul_vec, VgMulMatParams, 128) {
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP;
    i64 r = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (r >= p.dst.ne[0]) {
        return;
    }
    i64 first = static_cast<i64>(blockIdx.y) * MOST_VECTORS;
    int cols = static_cast<int>(p.dst.ne[1] - first < MOST_VECTORS ? p.dst.ne[1] - first : MOST_VECTORS);
    for (i64 batch = blockIdx.z; batch < p.dst.ne[2] * p.dst.ne[3]; batch += gridDim.z) {
        i64 i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2];
        const u8* w = weights_of(p, i2, i3) + r * p.w.nb[1];
        const u8* x = address(p.x, Index{{0, first, i2, i3}});
        float sums[MOST_VECTORS] = {};
        for (i64 k = lane; k < p.w.ne[0]; k += WARP) {
            float weight = row_value(p.w.type, books, w, p.w.nb[0], k);
            UNROLL
            for (int c = 0; c < MOST_VECTORS; c++) {
                if (c < cols) {
                    sums[c] += weight * row_value(p.x.type, books, x + c * p.x.nb[1], p.x.nb[0], k);
                }
            }
        }
        UNROLL
        for (int c = 0; c < MOST_VECTORS; c++) {
            if (c < cols) {
                float sum = warp_reduce<Sum>(sums[c]);
                if (lane == 0) {
                    *result(p.dst, r, first + c, i2, i3) = sum;
                }
            }
        }
    }
}

// A warp for each row of an expert's weights; blockIdx.y and z count slots and tokens.
KERNEL(vg_mul_mat_id, VgMulMatParams, 128) {
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP;
    i64 r = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (r >= p.dst.ne[0]) {
        return;
    }
    for (i64 slot = blockIdx.y; slot < p.dst.ne[1]; slot += gridDim.y) {
        for (i64 token = blockIdx.z; token < p.dst.ne[2]; token += gridDim.z) {
            i64 expert = *reinterpret_cast<const int*>(address(p.ids, Index{{slot, token, 0, 0}}));
            if (!check_index(p.place, expert, p.w.ne[2])) {
                return;
            }
            const u8* w = address(p.w, Index{{0, r, expert, 0}});
            const u8* x = address(p.x, Index{{0, slot % p.x.ne[1], token, 0}});
            float sum = 0.0f;
            for (i64 k = lane; k < p.w.ne[0]; k += WARP) {
                sum += row_value(p.w.type, books, w, p.w.nb[0], k) * row_value(p.x.type, books, x, p.x.nb[0], k);
            }
            sum = warp_reduce<Sum>(sum);
            if (lane == 0) {
                *result(p.dst, r, slot, token, 0) = sum;
            }
        }
    }
}

KERNEL(vg_out_prod, VgMulMatParams, 256) { multiply<true>(p); }
