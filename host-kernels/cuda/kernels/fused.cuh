// Fused graph nodes: RMS_NORM with the operations around it, MoE routing (softmax, top-k,
// normalisation), and the weighted sum of expert results.
#pragma once
#include "device.cuh"
#include "quantize_q8.cuh"

namespace {

// A block for each row. A thread has four elements at a time; eight lanes have a q8 block of 32.
// Waits for the launches before this one; constant factors are loaded before that.
DEVICE void norm_fused(const VgNormFusedParams& p, const BlockIndex& b) {
    int vecs = static_cast<int>(p.a.ne[0] / 4), lane = threadIdx.x % WARP;
    for (i64 r = b.x; r < rows(p.a); r += b.nx) {
        Index at = row_of(p.a, r);
        const u8* a = address(p.a, at);
        const u8* add = p.add.data ? repeated(p.add, at) : nullptr;
        const u8* w = p.w.data ? repeated(p.w, at) : nullptr;
        u8* sum = p.sum.data ? address(p.sum, at) : nullptr;
        u8* to = p.dst.data ? address(p.dst, at) : nullptr;
        auto value = [&](int i) {
            Float4 x = load_float4(a + 16 * i);
            if (add) {
                Float4 y = load_float4(add + 16 * i);
                UNROLL
                for (int j = 0; j < 4; j++) {
                    x.of[j] += y.of[j];
                }
            }
            return x;
        };
        // The first elements of the thread, and their factors.
        Float4 first = {}, first_by = {{1.0f, 1.0f, 1.0f, 1.0f}};
        bool has_factors = w && static_cast<int>(threadIdx.x) < vecs;
        if (has_factors && p.has_constant_factors) {
            first_by = load_float4(w + 16 * threadIdx.x);
        }
        grid_dependency_wait();
        if (has_factors && !p.has_constant_factors) {
            first_by = load_float4(w + 16 * threadIdx.x);
        }
        float squares = 0.0f;
        for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
            Float4 x = value(i);
            if (i == static_cast<int>(threadIdx.x)) {
                first = x;
            }
            if (sum) {
                store_float4(sum + 16 * i, x);
            }
            UNROLL
            for (int j = 0; j < 4; j++) {
                squares += x.of[j] * x.of[j];
            }
        }
        squares = block_reduce<Sum>(squares, 0.0f);
        float scale = 1.0f / sqrtf(squares / static_cast<float>(p.a.ne[0]) + p.eps);
        for (int i = threadIdx.x; i - lane < vecs; i += blockDim.x) {
            Float4 x = {};
            if (i < vecs) {
                // `sum` may alias `a`.
                x = i == static_cast<int>(threadIdx.x) ? first
                    : sum                              ? load_float4(sum + 16 * i)
                                                       : value(i);
                Float4 by = first_by;
                if (w && i != static_cast<int>(threadIdx.x)) {
                    by = load_float4(w + 16 * i);
                }
                UNROLL
                for (int j = 0; j < 4; j++) {
                    x.of[j] = x.of[j] * scale * by.of[j];
                }
                if (to) {
                    store_float4(to + 16 * i, x);
                }
            }
            if (p.quants) {
                quantize_q8_vec(p.quants, p.scales, r, q8_tiles(p.a.ne[0]), static_cast<u32>(i), x,
                                i < vecs);
            }
        }
        __syncthreads();
    }
}

// Experts of a lane at most; 512 experts.
constexpr int MAX_LANE_EXPERTS = 16;

// Monotonic integer key of a float, above 0. NaN has the lowest key.
DEVICE u32 rank(float x) {
    if (x != x) {
        return 1;
    }
    u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The choice of experts with at most LANE_EXPERTS for each lane.
template <int LANE_EXPERTS>
DEVICE void topk_moe_of(const VgTopkMoeParams& p, const BlockIndex& b) {
    int lane = threadIdx.x % WARP, experts = static_cast<int>(p.logits.ne[0]);
    const float* bias = reinterpret_cast<const float*>(p.bias);
    i64 first = static_cast<i64>(b.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 token = first; token < p.logits.ne[1];
         token += static_cast<i64>(b.nx) * (blockDim.x / WARP)) {
        const u8* row = address(p.logits, Index{{0, token, 0, 0}});
        float x[LANE_EXPERTS], max_logit = -INFINITY_F, sum = 0.0f;
        UNROLL
        for (int i = 0; i < LANE_EXPERTS; i++) {
            int expert = i * WARP + lane;
            x[i] = expert < experts ? *reinterpret_cast<const float*>(row + expert * p.logits.nb[0])
                                    : -INFINITY_F;
            max_logit = fmaxf(max_logit, x[i]);
        }
        if (p.op == VG_GATING_SOFT_MAX) {
            max_logit = warp_reduce<Max>(max_logit);
            UNROLL
            for (int i = 0; i < LANE_EXPERTS; i++) {
                x[i] = i * WARP + lane < experts ? expf(x[i] - max_logit) : 0.0f;
                sum += x[i];
            }
            sum = 1.0f / warp_reduce<Sum>(sum);
            UNROLL
            for (int i = 0; i < LANE_EXPERTS; i++) {
                x[i] *= sum;
            }
        } else if (p.op == VG_GATING_SIGMOID) {
            UNROLL
            for (int i = 0; i < LANE_EXPERTS; i++) {
                x[i] = 1.0f / (1.0f + expf(-x[i]));
            }
        }
        // Key, then the lowest index first; 0 for experts already selected.
        u64 ranks[LANE_EXPERTS];
        UNROLL
        for (int i = 0; i < LANE_EXPERTS; i++) {
            u32 expert = static_cast<u32>(i * WARP + lane);
            bool is_valid = expert < static_cast<u32>(experts);
            float score = x[i] + (bias && is_valid ? bias[expert] : 0.0f);
            ranks[i] = is_valid ? static_cast<u64>(rank(score)) << 32 | (0xffffffffu - expert) : 0;
        }
        // Lane u keeps the u-th selection.
        int chosen = 0;
        float weight = 0.0f;
        for (u32 u = 0; u < p.used; u++) {
            u64 best = 0;
            UNROLL
            for (int i = 0; i < LANE_EXPERTS; i++) {
                best = larger(best, ranks[i]);
            }
            UNROLL
            for (int step = WARP / 2; step > 0; step /= 2) {
                best = larger(best, __shfl_xor_sync(0xffffffffu, best, step));
            }
            int expert = static_cast<int>(0xffffffffu - static_cast<u32>(best));
            float its = 0.0f;
            UNROLL
            for (int i = 0; i < LANE_EXPERTS; i++) {
                if (ranks[i] == best) {
                    ranks[i] = 0;
                    its = x[i];
                }
            }
            its = __shfl_sync(0xffffffffu, its, expert % WARP);
            if (static_cast<u32>(lane) == u) {
                chosen = expert;
                weight = its;
            }
        }
        bool mine = static_cast<u32>(lane) < p.used;
        if (p.op == VG_GATING_LOGITS) {
            float top = warp_reduce<Max>(mine ? weight : -INFINITY_F);
            weight = mine ? expf(weight - top) : 0.0f;
            weight /= warp_reduce<Sum>(weight);
        }
        if (p.normalized) {
            float total = warp_reduce<Sum>(mine ? weight : 0.0f);
            weight /= total < p.min_sum ? p.min_sum : total;
        }
        if (mine) {
            *reinterpret_cast<int*>(address(p.ids, Index{{lane, token, 0, 0}})) = chosen;
            *reinterpret_cast<float*>(address(p.weights, Index{{0, lane, token, 0}})) =
                weight * p.scale;
        }
    }
}

// A warp for each token. Most models have at most 128 experts.
DEVICE void topk_moe(const VgTopkMoeParams& p, const BlockIndex& b) {
    if (p.logits.ne[0] <= 4 * WARP) {
        topk_moe_of<4>(p, b);
    } else {
        topk_moe_of<MAX_LANE_EXPERTS>(p, b);
    }
}

// Waits for the launches before this one.
DEVICE void weighted_sum(const VgWeightedSumParams& p, const BlockIndex& b) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(b); e < n; e += thread_count(b)) {
        Index at = index_of(p.dst, e);
        grid_dependency_wait();
        float sum = 0.0f;
        UNROLL_BY_4
        for (i64 u = 0; u < p.experts.ne[1]; u++) {
            Index from = {{at.i[0], u, at.i[1], 0}};
            float x = *reinterpret_cast<const float*>(address(p.experts, from));
            from.i[0] = 0;
            sum += x * *reinterpret_cast<const float*>(address(p.weights, from));
        }
        *reinterpret_cast<float*>(address(p.dst, at)) = sum;
    }
}

} // namespace
