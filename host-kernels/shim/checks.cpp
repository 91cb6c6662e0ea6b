// Kernels that do what a GPU does not forgive, each in one place: the shim's tests look whether they are caught.
#include "../cuda/kernels/sm90.cuh"

struct CheckParams {
    u64 from;   // 16 KiB of halves
    u64 to;     // a float for each thread
    u64 mistake;
};

namespace {

enum Mistake {
    NONE,
    NO_WAIT_FOR_COPY,
    NO_WAIT_FOR_PRODUCT,
    COPY_OVER_FACTORS,
    NO_FENCE,
    FACTORS_CHANGED,
    NOT_BEGUN,
    NOBODY_ARRIVES,
};

} // namespace

// Multiplies 64 rows of ones by 64 columns that were copied, or written, to shared memory.
KERNEL(shim_check_group, CheckParams, 128) {
    DYNAMIC_SHARED(u8, memory);
    u32 lead = shared_address(memory) % MATRIX_UNIT;
    u8* matrix = memory + (lead ? MATRIX_UNIT - lead : 0);
    u64* barrier = reinterpret_cast<u64*>(matrix + 8 * MATRIX_UNIT);
    auto is = [&](Mistake mistake) { return p.mistake == mistake; };
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barriers_are_ready();
    }
    __syncthreads();
    const u8* from = reinterpret_cast<const u8*>(p.from);
    if (is(NO_FENCE)) {
        for (u32 i = threadIdx.x; i < 8 * MATRIX_UNIT; i += GROUP) {
            matrix[i] = from[i];
        }
        __syncthreads();
    } else {
        if (threadIdx.x == 0 && !is(NOBODY_ARRIVES)) {
            barrier_expect(barrier, 8 * MATRIX_UNIT);
            for (int i = 0; i < 8; i++) {
                copy_bulk(matrix + i * MATRIX_UNIT, from + i * MATRIX_UNIT, MATRIX_UNIT, barrier);
            }
        }
        if (!is(NO_WAIT_FOR_COPY)) {
            barrier_wait(barrier, 0);
        }
    }
    float sums[32];
    u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    if (!is(NOT_BEGUN)) {
        group_begin();
    }
    for (int k = 0; k < 4; k++) {
        group_multiply<64, false>(sums, ones, matrix_at(shared_address(matrix)) + 2 * k, k > 0);
    }
    group_commit();
    if (is(FACTORS_CHANGED)) {
        ones[0] = 0;
    }
    if (is(COPY_OVER_FACTORS) && threadIdx.x == 127) {
        barrier_expect(barrier, MATRIX_UNIT);
        copy_bulk(matrix, from, MATRIX_UNIT, barrier);
    }
    if (!is(NO_WAIT_FOR_PRODUCT)) {
        group_wait<0>();
    }
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) {
        sum += sums[i];
    }
    reinterpret_cast<float*>(p.to)[threadIdx.x] = sum;
    if (is(NO_WAIT_FOR_PRODUCT)) {
        group_wait<0>();
    }
    if (is(NO_WAIT_FOR_COPY)) {
        barrier_wait(barrier, 0);
    }
}
