// FLASH_ATTN_EXT for K and V of any type and layout, on CUDA cores: a block for each query of each
// head. The warps of a block split the KV positions; each warp has a running maximum, sum and
// weighted sum of V, which are merged in the end.
#include "formats.cuh"

namespace {

constexpr int WARPS = 4;

} // namespace

KERNEL(vg_fattn_simt, VgFattnSimtParams, WARPS* WARP) {
    // The query, then the weighted sum of each warp.
    DYNAMIC_SHARED(float, shared);
    __shared__ float largests[WARPS], totals[WARPS];
    const VgCodebooks* grids = codebooks(p.codebooks);
    i64 n = p.k.ne[0], width = p.v.ne[0], keys = p.k.ne[1];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float* query = shared;
    float* sums = shared + n + warp * width;
    i64 token = blockIdx.x, head = blockIdx.y;
    for (i64 sequence = blockIdx.z; sequence < p.q.ne[3]; sequence += gridDim.z) {
        const u8* q = address(p.q, Index{{0, token, head, sequence}});
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
            query[i] = load(p.q.type, q + i * p.q.nb[0]);
        }
        for (i64 i = lane; i < width; i += WARP) {
            sums[i] = 0.0f;
        }
        __syncthreads();
        auto shared_by = [&](const View& v) {
            return address(
                v, Index{{0, 0, head / (p.q.ne[2] / v.ne[2]), sequence / (p.q.ne[3] / v.ne[3])}});
        };
        const u8* k = shared_by(p.k);
        const u8* v = shared_by(p.v);
        const u8* mask = nullptr;
        if (p.mask.data) {
            mask = address(p.mask, Index{{0, token, head % p.mask.ne[2], sequence % p.mask.ne[3]}});
        }
        float slope = alibi_slope(p.max_bias, p.heads_log2, static_cast<u32>(head));
        float largest = -INFINITY_F, total = 0.0f;
        for (i64 key = warp; key < keys; key += WARPS) {
            float bias = mask ? load(p.mask.type, mask + key * p.mask.nb[0]) : 0.0f;
            if (bias == -INFINITY_F) {
                continue; // masked positions may hold garbage
            }
            const u8* row = k + key * p.k.nb[1];
            float score = 0.0f;
            for (i64 i = lane; i < n; i += WARP) {
                score += query[i] * dequantize_element(p.k.type, grids, row, p.k.nb[0], i);
            }
            score = warp_reduce<Sum>(score) * p.scale;
            if (p.logit_softcap != 0.0f) {
                score = p.logit_softcap * tanhf(score);
            }
            score += slope * bias;
            float share = 1.0f;
            if (score > largest) {
                float shrink = expf(largest - score);
                total *= shrink;
                for (i64 i = lane; i < width; i += WARP) {
                    sums[i] *= shrink;
                }
                largest = score;
            } else {
                share = expf(score - largest);
            }
            total += share;
            row = v + key * p.v.nb[1];
            for (i64 i = lane; i < width; i += WARP) {
                sums[i] += share * dequantize_element(p.v.type, grids, row, p.v.nb[0], i);
            }
        }
        if (lane == 0) {
            largests[warp] = largest;
            totals[warp] = total;
        }
        __syncthreads();
        float most = -INFINITY_F, sink = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            most = largests[w] > most ? largests[w] : most;
        }
        if (p.sinks.data) {
            sink = reinterpret_cast<const float*>(p.sinks.data)[head];
            most = sink > most ? sink : most;
        }
        float weight = p.sinks.data ? expf(sink - most) : 0.0f, factors[WARPS];
        for (int w = 0; w < WARPS; w++) {
            factors[w] = largests[w] == -INFINITY_F ? 0.0f : expf(largests[w] - most);
            weight += totals[w] * factors[w];
        }
        float inverse = weight == 0.0f ? 0.0f : 1.0f / weight; // a fully masked row is 0
        u8* to = address(p.dst, Index{{0, head, token, sequence}});
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                sum += shared[n + w * width + i] * factors[w];
            }
            *reinterpret_cast<float*>(to + i * p.dst.nb[0]) = sum * inverse;
        }
        __syncthreads();
    }
}
