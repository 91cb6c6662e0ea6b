// Fused graph nodes: see `fused.cuh`.
#include "fused.cuh"

KERNEL_AHEAD(vg_norm_fused, VgNormFusedParams, 1024) {
    norm_fused(p, this_block());
}
KERNEL(vg_topk_moe, VgTopkMoeParams, 128, 4) { topk_moe(p, this_block()); }
KERNEL_AHEAD(vg_weighted_sum, VgWeightedSumParams, 256) { weighted_sum(p, this_block()); }
