// A kernel with one selectable mistake each; the shim's tests check that every mistake is caught.
#include "../cuda/kernels/sm90.cuh"

struct CheckParams {
    u64 from; // 8 KiB of f16
    u64 to;   // one float for each thread
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

// Multiplies 64 rows of ones by a 64-column matrix in shared memory.
KERNEL(shim_check_group, CheckParams, 128) {
    DYNAMIC_SHARED(u8, memory);
    u32 lead = smem_address(memory) % SWIZZLE_ATOM;
    u8* matrix = memory + (lead ? SWIZZLE_ATOM - lead : 0);
    u64* barrier = reinterpret_cast<u64*>(matrix + 8 * SWIZZLE_ATOM);
    auto is = [&](Mistake mistake) { return p.mistake == mistake; };
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    const u8* from = reinterpret_cast<const u8*>(p.from);
    if (is(NO_FENCE)) {
        for (u32 i = threadIdx.x; i < 8 * SWIZZLE_ATOM; i += WARPGROUP) {
            matrix[i] = from[i];
        }
        __syncthreads();
    } else {
        if (threadIdx.x == 0 && !is(NOBODY_ARRIVES)) {
            mbarrier_arrive_expect_tx(barrier, 8 * SWIZZLE_ATOM);
            for (int i = 0; i < 8; i++) {
                cp_async_bulk(matrix + i * SWIZZLE_ATOM, from + i * SWIZZLE_ATOM, SWIZZLE_ATOM,
                              barrier);
            }
        }
        if (!is(NO_WAIT_FOR_COPY)) {
            mbarrier_wait(barrier, 0);
        }
    }
    float sums[32];
    u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    if (!is(NOT_BEGUN)) {
        wgmma_fence();
    }
    for (int k = 0; k < 4; k++) {
        wgmma<64, false>(sums, ones, smem_descriptor(smem_address(matrix)) + 2 * k, k > 0);
    }
    wgmma_commit();
    if (is(FACTORS_CHANGED)) {
        ones[0] = 0;
    }
    if (is(COPY_OVER_FACTORS) && threadIdx.x == 127) {
        mbarrier_arrive_expect_tx(barrier, SWIZZLE_ATOM);
        cp_async_bulk(matrix, from, SWIZZLE_ATOM, barrier);
    }
    if (!is(NO_WAIT_FOR_PRODUCT)) {
        wgmma_wait<0>();
    }
    float sum = 0.0f;
    for (int i = 0; i < 32; i++) {
        sum += sums[i];
    }
    reinterpret_cast<float*>(p.to)[threadIdx.x] = sum;
    if (is(NO_WAIT_FOR_PRODUCT)) {
        wgmma_wait<0>();
    }
    if (is(NO_WAIT_FOR_COPY)) {
        mbarrier_wait(barrier, 0);
    }
}

namespace {

enum EarlyMistake {
    WAITS,
    READS_EARLY,
    COPIES_EARLY,
    WRITES_EARLY,
};

} // namespace

// Copies a float for each thread, which launches before this one have written. With WRITES_EARLY
// writes 7 instead.
KERNEL_AHEAD(shim_check_ahead, CheckParams, 64) {
    __shared__ __align__(16) float copied[64];
    const float* from = reinterpret_cast<const float*>(p.from);
    float* to = reinterpret_cast<float*>(p.to);
    auto is = [&](EarlyMistake mistake) { return p.mistake == mistake; };
    float x = 0.0f;
    if (is(READS_EARLY)) {
        x = from[threadIdx.x];
    }
    if (is(COPIES_EARLY) && threadIdx.x % 4 == 0) {
        cp_async(copied + threadIdx.x, from + threadIdx.x);
    }
    if (is(WRITES_EARLY)) {
        to[threadIdx.x] = 7.0f;
    }
    // Not all threads reach it at the same time.
    if (threadIdx.x % 3 == 0) {
        grid_dependency_wait();
    }
    __syncthreads();
    grid_dependency_wait();
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (!is(WRITES_EARLY)) {
        to[threadIdx.x] = is(READS_EARLY) ? x
                          : is(COPIES_EARLY) ? copied[threadIdx.x]
                                             : from[threadIdx.x];
    }
}
