// GEMM of f32 on CUDA cores in tiles of shared memory, for operands behind accessor functions.
#pragma once
#include "formats.cuh"

// Rows and columns of a tile of the result, and elements of a k step.
constexpr int TILE_ROWS = 64, TILE_COLS = 32, TILE_STEP = 32;
// Results of a thread; a block has 256 threads.
constexpr int THREAD_ROWS = 4, THREAD_COLS = 2;

// `load_a(r, k)` and `load_b(c, k)` load the operands; `store_c(r, c, sum)` stores a result.
template <class LoadA, class LoadB, class StoreC>
DEVICE void gemm_tile(i64 n_rows, i64 n_cols, i64 n_steps, LoadA load_a, LoadB load_b,
                      StoreC store_c) {
    __shared__ float a[TILE_STEP][TILE_ROWS + 1], b[TILE_STEP][TILE_COLS + 1];
    i64 first_row = static_cast<i64>(blockIdx.x) * TILE_ROWS,
        first_col = static_cast<i64>(blockIdx.y) * TILE_COLS;
    int row = threadIdx.x % (TILE_ROWS / THREAD_ROWS),
        col = threadIdx.x / (TILE_ROWS / THREAD_ROWS);
    float sums[THREAD_ROWS][THREAD_COLS] = {};
    for (i64 k0 = 0; k0 < n_steps; k0 += TILE_STEP) {
        for (int i = threadIdx.x; i < TILE_STEP * TILE_ROWS; i += blockDim.x) {
            int k = i % TILE_STEP, r = i / TILE_STEP;
            bool inside = k0 + k < n_steps && first_row + r < n_rows;
            a[k][r] = inside ? load_a(first_row + r, k0 + k) : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE_STEP * TILE_COLS; i += blockDim.x) {
            int k = i % TILE_STEP, c = i / TILE_STEP;
            bool inside = k0 + k < n_steps && first_col + c < n_cols;
            b[k][c] = inside ? load_b(first_col + c, k0 + k) : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < TILE_STEP; k++) {
            for (int i = 0; i < THREAD_ROWS; i++) {
                for (int j = 0; j < THREAD_COLS; j++) {
                    sums[i][j] += a[k][row + i * (TILE_ROWS / THREAD_ROWS)] *
                                  b[k][col + j * (TILE_COLS / THREAD_COLS)];
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < THREAD_ROWS; i++) {
        for (int j = 0; j < THREAD_COLS; j++) {
            i64 r = first_row + row + i * (TILE_ROWS / THREAD_ROWS),
                c = first_col + col + j * (TILE_COLS / THREAD_COLS);
            if (r < n_rows && c < n_cols) {
                store_c(r, c, sums[i][j]);
            }
        }
    }
}
