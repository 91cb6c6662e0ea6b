// Fused graph nodes: see `fused.cuh`.
#include "fused.cuh"

KERNEL(vg_norm_fused, VgNormFusedParams, 256) { norm_fused(p, this_block()); }
KERNEL(vg_topk_moe, VgTopkMoeParams, 128) { topk_moe(p, this_block()); }
KERNEL(vg_weighted_sum, VgWeightedSumParams, 256) { weighted_sum(p, this_block()); }
