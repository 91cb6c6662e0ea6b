// Fused graph nodes: see `fused.cuh`.
#include "fused.cuh"

KERNEL_AHEAD(vg_norm_fused, VgNormFusedParams, 1024) {
    prefetch_norm(p);
    grid_dependency_wait();
    norm_fused(p, this_block());
}
KERNEL(vg_topk_moe, VgTopkMoeParams, 128) { topk_moe(p, this_block()); }
KERNEL(vg_weighted_sum, VgWeightedSumParams, 256) { weighted_sum(p, this_block()); }
