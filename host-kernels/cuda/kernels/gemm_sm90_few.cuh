// GEMM for few columns on sm_90a: tiles of 16, 32 or 64 columns, bound by the bandwidth of the
// weights, with mma.sync.
//
// A block has 64 rows of weights and a share of K: there are fewer tiles of rows than SMs have room
// for. Each warp has 16 rows, dequantised as in `gemm_sm90.cuh`, with the same permutation of k and
// the same layout of activations. Weights are fetched before the launches before this one have
// ended, if no launch of the graph writes them. The last block of a tile adds the partial results
// in the order of the shares, so that the sum does not depend on the order of the blocks.
#pragma once
#include "gemm_sm90.cuh"

namespace {

constexpr int FEW_THREADS = 128, FEW_ROWS = 16 * FEW_THREADS / WARP;

template <int TYPE, int N> struct FewShared {
    static constexpr int CHUNK_STEPS = chunk_of(TYPE) / SM90_STEP;
    static constexpr int STEP_ACTIVATIONS = N * SWIZZLE_ROW;
    static constexpr int ACTIVATIONS = CHUNK_STEPS * STEP_ACTIVATIONS;
    // The last words are read behind the last row.
    static constexpr int STAGE = ACTIVATIONS + FEW_ROWS * chunk_stride(TYPE) + 16;
    // A step of 16 tokens of the 8B model took 8.2 ms on an H200, and 8.5 ms with two stages. Of 64
    // columns, two blocks with three stages do not fit an SM.
    static constexpr int STAGES = N > 32 ? 2 : 3;
};

template <int TYPE, int N> DEVICE void gemm_few(const VgGemmSm90FewParams& p) {
    using Shared = FewShared<TYPE, N>;
    constexpr int STAGES = Shared::STAGES, CHUNK_STEPS = Shared::CHUNK_STEPS;
    constexpr int BLOCKS = chunk_of(TYPE) / type_traits(TYPE).elements;
    DYNAMIC_SHARED(u8, memory);
    __shared__ u32 is_last;
    int thread = static_cast<int>(threadIdx.x), lane = thread % WARP;
    // The first row of the lane; the other one is eight rows behind it.
    int mine = thread / WARP * 16 + lane / 4, t = lane % 4;
    int batch = static_cast<int>(blockIdx.z), i2 = batch, i3 = 0;
    if (p.dst.ne[3] != 1) {
        i2 = batch % static_cast<int>(p.dst.ne[2]), i3 = batch / static_cast<int>(p.dst.ne[2]);
    }
    int w2 = static_cast<int>(shared_index(i2, p.dst.ne[2], p.w.ne[2]));
    int w3 = static_cast<int>(shared_index(i3, p.dst.ne[3], p.w.ne[3]));
    int first_row = static_cast<int>(blockIdx.x) * FEW_ROWS;
    i64 left = p.dst.ne[0] - first_row;
    int rows = left < FEW_ROWS ? static_cast<int>(left) : FEW_ROWS;
    int width = static_cast<int>(p.w.ne[0]) / type_traits(TYPE).elements; // in blocks
    int columns = static_cast<int>(p.dst.ne[1]), padded = static_cast<int>(p.padded);
    int steps = (static_cast<int>(p.w.ne[0]) + SM90_STEP - 1) / SM90_STEP;
    int chunks = (width + BLOCKS - 1) / BLOCKS, splits = static_cast<int>(p.splits);
    int each = (chunks + splits - 1) / splits, split = static_cast<int>(blockIdx.y);
    int begin = split * each, end = begin + each < chunks ? begin + each : chunks;
    RowPtr first = row_ptr_at(TYPE, p.w, first_row, w2, w3);

    auto stage_of = [&](int chunk) { return memory + (chunk - begin) % STAGES * Shared::STAGE; };
    auto fetch_weights = [&](int chunk) {
        if (chunk < end) {
            copy_chunk<TYPE, FEW_THREADS>(stage_of(chunk) + Shared::ACTIVATIONS, p.w, first, rows,
                                          chunk * BLOCKS, width, thread);
        }
    };
    // Only `padded` columns are copied. The other columns of the tile are undefined, and their
    // results are not stored.
    auto fetch_activations = [&](int chunk) {
        if (chunk >= end) {
            return;
        }
        u8* to = stage_of(chunk);
        const u8* from = reinterpret_cast<const u8*>(p.values) +
                         static_cast<i64>(batch) * padded * SWIZZLE_ROW;
        int units = padded * (SWIZZLE_ROW / 16);
        for (int s = 0; s < CHUNK_STEPS && chunk * CHUNK_STEPS + s < steps; s++) {
            const u8* step = from + (chunk * CHUNK_STEPS + s) * p.rows * SWIZZLE_ROW;
            for (int i = thread; i < units; i += FEW_THREADS) {
                cp_async(to + s * Shared::STEP_ACTIVATIONS + 16 * i, step + 16 * i);
            }
        }
    };

    if (!p.has_constant_weights) {
        grid_dependency_wait();
    }
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch_weights(begin + i);
        cp_async_commit();
    }
    grid_dependency_wait();
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch_activations(begin + i);
        cp_async_commit();
    }
    u32 leads[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        leads[r] = lead_of<TYPE>(p.w, first_row + mine + 8 * r, w2, w3);
    }
    float sums[N / 8][4] = {};
    for (int chunk = begin; chunk < end; chunk++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads(); // the chunk is loaded; the one before it has been read
        fetch_weights(chunk + STAGES - 1);
        fetch_activations(chunk + STAGES - 1);
        cp_async_commit();
        const u8* activations = stage_of(chunk);
        const u8* weights = activations + Shared::ACTIVATIONS + mine * chunk_stride(TYPE);
        for (int s = 0; s < CHUNK_STEPS && chunk * CHUNK_STEPS + s < steps; s++) {
            u32 a[16];
            dequantize_rows<TYPE>(weights, leads, chunk * CHUNK_STEPS + s,
                                  static_cast<int>(p.w.ne[0]) / 32, t, a);
            UNROLL
            for (int n = 0; n < N / 8; n++) {
                if (8 * n < columns) {
                    // Rows of 128 bytes, whose units of 16 are swizzled by the row.
                    const u8* row = activations + s * Shared::STEP_ACTIVATIONS +
                                    (8 * n + lane % 8) * SWIZZLE_ROW;
                    u32 b[8];
                    ldmatrix_x4<false>(b, row + 16 * (lane / 8 ^ lane % 8));
                    ldmatrix_x4<false>(b + 4, row + 16 * ((lane / 8 + 4) ^ lane % 8));
                    UNROLL
                    for (int k = 0; k < 4; k++) {
                        mma_m16n8k16<TYPE == VG_BF16>(sums[n], a + 4 * k, b + 2 * k);
                    }
                }
            }
        }
    }
    cp_async_wait<0>();

    if (splits > 1) {
        // Partial results are stored as the threads have them.
        i64 tile = static_cast<i64>(batch) * gridDim.x + blockIdx.x;
        auto partial = [&](int split, int n) {
            return reinterpret_cast<int4*>(p.partials) +
                   ((tile * splits + split) * (N / 8) + n) * FEW_THREADS + thread;
        };
        UNROLL
        for (int n = 0; n < N / 8; n++) {
            if (8 * n < columns) {
                *partial(split, n) =
                    int4{__float_as_int(sums[n][0]), __float_as_int(sums[n][1]),
                         __float_as_int(sums[n][2]), __float_as_int(sums[n][3])};
            }
        }
        __threadfence(); // before the counter is incremented
        __syncthreads();
        if (thread == 0) {
            u32* count = reinterpret_cast<u32*>(p.counters) + tile;
            is_last = atomicAdd(count, 1u) == p.splits - 1;
            if (is_last) {
                *count = 0; // for the next launch
            }
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();
        UNROLL
        for (int n = 0; n < N / 8; n++) {
            if (8 * n < columns) {
                float total[4] = {};
                UNROLL_BY_4
                for (int s = 0; s < splits; s++) {
                    int4 four = *partial(s, n);
                    total[0] += __int_as_float(four.x), total[1] += __int_as_float(four.y);
                    total[2] += __int_as_float(four.z), total[3] += __int_as_float(four.w);
                }
                UNROLL
                for (int i = 0; i < 4; i++) {
                    sums[n][i] = total[i];
                }
            }
        }
    }
    u8* to = address(p.dst, Index{{first_row + mine, 0, i2, i3}});
    const float* factors = reinterpret_cast<const float*>(p.row_scales) +
                           static_cast<i64>(batch) * padded;
    UNROLL
    for (int n = 0; n < N / 8; n++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
            int column = 8 * n + 2 * t + e;
            if (column < columns) {
                float* at = reinterpret_cast<float*>(to + column * p.dst.nb[1]);
                float factor = factors[column];
                if (mine < rows) {
                    at[0] = sums[n][e] * factor;
                }
                if (mine + 8 < rows) {
                    at[8] = sums[n][2 + e] * factor;
                }
            }
        }
    }
}

} // namespace
