// DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, LIGHTNING_INDEXER: operators of DeepSeek models.
#include "formats.cuh"

namespace {

// Residual streams (hyper-connections).
constexpr int STREAMS = 4;

// Warps of a block of the indexer, one KV position each.
constexpr int WARPS = 4;

DEVICE float float_at(const View& v, i64 i0, i64 i1, i64 i2, i64 i3) {
    return *reinterpret_cast<const float*>(address(v, Index{{i0, i1, i2, i3}}));
}

} // namespace

// Softmax of each row, then Sinkhorn-Knopp normalisation of columns and rows; a thread for each
// token.
KERNEL(vg_hc_comb, VgHcCombParams, 128) {
    float scale = float_at(p.scale, 2, 0, 0, 0);
    for (i64 t = thread_index(); t < p.dst.ne[2]; t += thread_count()) {
        float comb[STREAMS][STREAMS];
        UNROLL
        for (int i = 0; i < STREAMS; i++) {
            float largest = -INFINITY_F, sum = 0.0f;
            UNROLL
            for (int j = 0; j < STREAMS; j++) {
                int k = 2 * STREAMS + i * STREAMS + j;
                comb[i][j] = float_at(p.mixes, k, t, 0, 0) * scale + float_at(p.base, k, 0, 0, 0);
                largest = fmaxf(largest, comb[i][j]);
            }
            UNROLL
            for (int j = 0; j < STREAMS; j++) {
                comb[i][j] = expf(comb[i][j] - largest);
                sum += comb[i][j];
            }
            UNROLL
            for (int j = 0; j < STREAMS; j++) {
                comb[i][j] = comb[i][j] / sum + p.eps;
            }
        }
        for (u32 iteration = 0; iteration < p.iterations; iteration++) {
            UNROLL
            for (int i = 0; i < STREAMS; i++) {
                float sum = p.eps;
                UNROLL
                for (int j = 0; j < STREAMS; j++) {
                    sum += comb[i][j];
                }
                UNROLL
                for (int j = 0; j < STREAMS; j++) {
                    comb[i][j] = iteration > 0 ? comb[i][j] / sum : comb[i][j];
                }
            }
            UNROLL
            for (int j = 0; j < STREAMS; j++) {
                float sum = p.eps;
                UNROLL
                for (int i = 0; i < STREAMS; i++) {
                    sum += comb[i][j];
                }
                UNROLL
                for (int i = 0; i < STREAMS; i++) {
                    comb[i][j] /= sum;
                }
            }
        }
        UNROLL
        for (int i = 0; i < STREAMS; i++) {
            UNROLL
            for (int j = 0; j < STREAMS; j++) {
                *reinterpret_cast<float*>(address(p.dst, Index{{j, i, t, 0}})) = comb[i][j];
            }
        }
    }
}

KERNEL(vg_hc_pre, VgHcPreParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        i64 i = to.i[0], t = to.i[1];
        float sum = 0.0f;
        for (i64 h = 0; h < p.x.ne[1]; h++) {
            float w = p.gated ? 1.0f / (1.0f + expf(-float_at(p.w, i, h, t, 0)))
                              : float_at(p.w, h, t, 0, 0);
            sum += float_at(p.x, i, h, t, 0) * w;
        }
        *reinterpret_cast<float*>(address(p.dst, to)) = sum * p.scale;
    }
}

KERNEL(vg_hc_post, VgHcPostParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        i64 i = to.i[0], d = to.i[1], t = to.i[2];
        float sum = float_at(p.x, i, t, 0, 0) * float_at(p.post, d, t, 0, 0);
        if (p.comb.data) {
            for (i64 s = 0; s < p.dst.ne[1]; s++) {
                sum += float_at(p.residual, i, s, t, 0) * float_at(p.comb, d, s, t, 0);
            }
        } else {
            sum += float_at(p.residual, i, d, t, 0); // identity
        }
        *reinterpret_cast<float*>(address(p.dst, to)) = sum;
    }
}

// A warp for each KV position of each stream, dequantised once for all tokens; lanes share the
// heads.
KERNEL(vg_indexer, VgIndexerParams, WARPS* WARP) {
    DYNAMIC_SHARED(float, shared);
    const VgCodebooks* grids = codebooks(p.codebooks);
    i64 n = p.q.ne[0], heads = p.q.ne[1], tokens = p.q.ne[2], streams = p.q.ne[3], keys = p.k.ne[2];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float* key = shared + warp * n;
    i64 first = static_cast<i64>(blockIdx.x) * WARPS + warp;
    for (i64 unit = first; unit < keys * streams; unit += static_cast<i64>(gridDim.x) * WARPS) {
        i64 k = unit % keys, s = unit / keys;
        const u8* row = address(p.k, Index{{0, 0, k, s}});
        __syncwarp();
        for (i64 i = lane; i < n; i += WARP) {
            key[i] = dequantize_element(p.k.type, grids, row, p.k.nb[0], i);
        }
        __syncwarp();
        for (i64 t = 0; t < tokens; t++) {
            float sum = 0.0f;
            for (i64 h = lane; h < heads; h += WARP) {
                const float* q = reinterpret_cast<const float*>(address(p.q, Index{{0, h, t, s}}));
                float score = 0.0f;
                for (i64 i = 0; i < n; i++) {
                    score += q[i] * key[i];
                }
                sum += fmaxf(score, 0.0f) * float_at(p.w, h, t, 0, s);
            }
            sum = warp_reduce<Sum>(sum);
            if (lane == 0) {
                sum += load(p.mask.type, address(p.mask, Index{{k, t, 0, s % p.mask.ne[3]}}));
                *reinterpret_cast<float*>(address(p.dst, Index{{k, t, 0, s}})) = sum;
            }
        }
    }
}
