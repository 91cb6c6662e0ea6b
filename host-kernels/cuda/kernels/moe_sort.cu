// Sorts the slots of all tokens by MoE expert, so that a GEMM tile has the weights of one expert.
#include "device.cuh"

// Counting sort of the slots by expert, in one block.
KERNEL(vg_moe_sort, VgMoeSortParams, 512) {
    constexpr int MAX_EXPERTS = 512;
    __shared__ u32 counts[MAX_EXPERTS];
    __shared__ u64 sums[WARP];
    u32* starts = reinterpret_cast<u32*>(p.moe_order);
    u32 *tile_starts = starts + p.experts + 1, *order = tile_starts + p.experts + 1;
    u32 slots = static_cast<u32>(p.ids.ne[0]), total = slots * static_cast<u32>(p.ids.ne[1]);
    auto expert_of = [&](u32 i) -> i64 {
        return *reinterpret_cast<const int*>(address(p.ids, Index{{i % slots, i / slots, 0, 0}}));
    };
    for (u32 e = threadIdx.x; e < MAX_EXPERTS; e += blockDim.x) {
        counts[e] = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        i64 expert = expert_of(i);
        if (check_index(p.site, expert, p.experts)) {
            atomicAdd(&counts[expert], 1u);
        }
    }
    __syncthreads();
    // Exclusive prefix sums over experts: slots in the low half, tiles in the high half.
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 count = counts[threadIdx.x], whole = (count + p.align - 1) / p.align * p.align;
    u64 mine = whole | static_cast<u64>((count + p.columns - 1) / p.columns) << 32, sum = mine;
    for (u32 step = 1; step < WARP; step *= 2) {
        u64 other = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == WARP - 1) {
        sums[warp] = sum;
    }
    __syncthreads();
    for (u32 w = 0; w < warp; w++) {
        sum += sums[w];
    }
    u64 before = sum - mine;
    __syncthreads();
    if (threadIdx.x <= p.experts) {
        starts[threadIdx.x] = static_cast<u32>(before);
        tile_starts[threadIdx.x] = static_cast<u32>(before >> 32);
    }
    if (threadIdx.x == MAX_EXPERTS - 1 && p.experts == MAX_EXPERTS) {
        starts[MAX_EXPERTS] = static_cast<u32>(sum);
        tile_starts[MAX_EXPERTS] = static_cast<u32>(sum >> 32);
    }
    counts[threadIdx.x] = static_cast<u32>(before);
    for (u32 i = count; i < whole; i++) {
        order[static_cast<u32>(before) + i] = ~0u;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        i64 expert = expert_of(i);
        if (expert >= 0 && expert < p.experts) {
            order[atomicAdd(&counts[expert], 1u)] = i;
        }
    }
}
