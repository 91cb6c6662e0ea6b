// FLASH_ATTN_EXT for sm_90a and prefill: f16 KV cache, wgmma, warp-specialised.
//
// A block has 128 rows, which are pairs of a token and a query head as in `fattn.cuh`. A producer
// warpgroup loads K and V; two consumer warpgroups multiply 64 rows each: Q * K^T from shared
// memory, P * V with P in registers. The softmax of one consumer overlaps the wgmma of the other:
// named barriers let them issue in turn, P * V of a tile together with Q * K^T of the next
// (ping-pong scheduling).
//
// The producer uses cp.async, which stores each 16 bytes at its swizzled position. KV rows may have
// any stride, and V rows that no query sees are zeroed.
#include "fattn.cuh"
#include "sm90.cuh"

namespace {

constexpr int QUERY_ROWS = 128, KV_STAGES = 2;

// Named barriers: one for the threads of each consumer, one for each consumer's turn, one for the
// producer.
constexpr int GROUP_BARRIER = 1, ORDER_BARRIER = 3, PRODUCER_BARRIER = 5;

template <int D, int KEYS> struct FattnSm90Shared {
    static constexpr int QUERIES = QUERY_ROWS * D * 2, TILE = KEYS * D * 2;
    // Panels of 64 elements of the head size.
    static constexpr int QUERY_PANEL = QUERY_ROWS * SWIZZLE_ROW, PANEL = KEYS * SWIZZLE_ROW;

    u8 *queries, *keys, *values, *visible;
    u64 *full_keys, *empty_keys, *full_values, *empty_values;

    DEVICE explicit FattnSm90Shared(u8* memory) {
        u32 lead = smem_address(memory) & (SWIZZLE_ATOM - 1);
        queries = memory + (lead ? SWIZZLE_ATOM - lead : 0);
        keys = queries + QUERIES;
        values = keys + KV_STAGES * TILE;
        full_keys = reinterpret_cast<u64*>(values + KV_STAGES * TILE);
        empty_keys = full_keys + KV_STAGES;
        full_values = empty_keys + KV_STAGES;
        empty_values = full_values + KV_STAGES;
        visible = reinterpret_cast<u8*>(empty_values + KV_STAGES);
    }
};

// Swizzled offset of the 16-byte vector `vec` of a row, in a matrix of panels.
DEVICE u32 swizzled_offset(int row, int vec, int panel) {
    return vec / 8 * panel + row * SWIZZLE_ROW + ((vec % 8 ^ row % 8) * 16);
}

template <int D, int KEYS> struct FattnSm90 {
    using Shared = FattnSm90Shared<D, KEYS>;
    const VgFattnParams& p;
    Shared shared;
    int n_keys, n_rows, first_row, head, sequence, tiles;
    const u8* states;

    DEVICE FattnSm90(const VgFattnParams& params, u8* memory) : p(params), shared(memory) {
        n_keys = static_cast<int>(p.k.ne[1]);
        n_rows = static_cast<int>(p.q.ne[1]) * static_cast<int>(p.gqa_ratio);
        // Reverse order: the last tiles of a causal mask have most work.
        int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
        first_row = tile * QUERY_ROWS;
        head = static_cast<int>(blockIdx.y * p.gqa_ratio);
        sequence = static_cast<int>(blockIdx.z);
        tiles = (n_keys + KEYS - 1) / KEYS;
        states = nullptr;
        if (p.mask.data) {
            i64 index = sequence % p.mask.ne[3] * p.mask.ne[2] + head % p.mask.ne[2];
            states = reinterpret_cast<const u8*>(p.mask_tiles) + (index * gridDim.x + tile) * tiles;
        }
    }

    DEVICE int token_of(int row) const {
        return (row < n_rows ? row : n_rows - 1) / static_cast<int>(p.gqa_ratio);
    }
    DEVICE int head_of(int row) const { return head + row % static_cast<int>(p.gqa_ratio); }
    DEVICE const u8* mask() const {
        return address(p.mask, Index{{0, 0, head % p.mask.ne[2], sequence % p.mask.ne[3]}});
    }
    DEVICE int state_of(int tile) const {
        return states ? static_cast<int>(states[tile]) : static_cast<int>(UNMASKED);
    }
    // The first tile from `tile` on that is not fully masked.
    DEVICE int next_visible_tile(int tile) const {
        while (tile < tiles && state_of(tile) == MASKED) {
            tile++;
        }
        return tile;
    }

    // ---- Producer.

    DEVICE const u8* rows_of(const View& v) const {
        return address(
            v, Index{{0, 0, head / (p.q.ne[2] / v.ne[2]), sequence / (p.q.ne[3] / v.ne[3])}});
    }

    // Starts to copy a tile. `checked`: rows that no query sees are zeroed.
    DEVICE void copy_tile(const View& v, const u8* rows, int tile, u8* to, bool checked) const {
        constexpr int VECS = D / 8;
        UNROLL_BY_4
        for (int i = threadIdx.x; i < KEYS * VECS; i += WARPGROUP) {
            int row = i / VECS, vec = i % VECS, key = tile * KEYS + row;
            int4* at = reinterpret_cast<int4*>(to + swizzled_offset(row, vec, Shared::PANEL));
            if (checked && !shared.visible[row]) {
                *at = int4{0, 0, 0, 0};
            } else {
                cp_async(at, rows + (key < n_keys ? key : n_keys - 1) * v.nb[1] + vec * 16);
            }
        }
        cp_async_commit();
    }

    // Determines which KV positions of a tile any row sees, a thread for each position.
    DEVICE void find_visible(int tile) const {
        named_barrier(PRODUCER_BARRIER, WARPGROUP); // the previous flags have been read
        int key = tile * KEYS + static_cast<int>(threadIdx.x);
        if (threadIdx.x < KEYS) {
            bool visible = false;
            if (key < n_keys) {
                visible = state_of(tile) == UNMASKED;
                int last = token_of(first_row + QUERY_ROWS - 1);
                for (int token = token_of(first_row); token <= last && !visible; token++) {
                    const u8* at = mask() + token * p.mask.nb[1] + 2 * key;
                    visible = *reinterpret_cast<const u16*>(at) != 0xfc00u;
                }
            }
            shared.visible[threadIdx.x] = visible ? 1 : 0;
        }
        named_barrier(PRODUCER_BARRIER, WARPGROUP);
    }

    DEVICE void load_kv() const {
        const u8 *keys = rows_of(p.k), *values = rows_of(p.v);
        PipelineState<KV_STAGES> ring;
        // Signals a copy while the next one is in flight.
        auto signal_full = [&](u64* barrier) {
            fence_proxy_async();
            mbarrier_arrive(barrier);
        };
        u64* in_flight = nullptr; // mbarrier of the V tile in flight
        for (int tile = next_visible_tile(0); tile < tiles; tile = next_visible_tile(tile + 1)) {
            mbarrier_wait(&shared.empty_keys[ring.stage], ring.phase ^ 1);
            copy_tile(p.k, keys, tile, shared.keys + ring.stage * Shared::TILE, false);
            if (in_flight) {
                cp_async_wait<1>();
                signal_full(in_flight);
            }
            bool checked = state_of(tile) != UNMASKED || (tile + 1) * KEYS > n_keys;
            if (checked) {
                find_visible(tile);
            }
            mbarrier_wait(&shared.empty_values[ring.stage], ring.phase ^ 1);
            copy_tile(p.v, values, tile, shared.values + ring.stage * Shared::TILE, checked);
            cp_async_wait<1>();
            signal_full(&shared.full_keys[ring.stage]);
            in_flight = &shared.full_values[ring.stage];
            ring.next();
        }
        cp_async_wait<0>();
        if (in_flight) {
            signal_full(in_flight);
        }
    }

    // ---- Consumers. A thread has rows 16 * warp + lane / 4 and + 8 of its warpgroup's 64.

    // Loads Q * scale of the warpgroup's rows; zeros in padding rows.
    DEVICE void load_queries(int group) const {
        for (int i = threadIdx.x % WARPGROUP; i < 64 * (D / 8); i += WARPGROUP) {
            int row = group * 64 + i / (D / 8), vec = i % (D / 8);
            u32 words[4] = {};
            if (first_row + row < n_rows) {
                i64 token = token_of(first_row + row), its_head = head_of(first_row + row);
                const float* q = reinterpret_cast<const float*>(
                    address(p.q, Index{{8 * vec, token, its_head, sequence}}));
                UNROLL
                for (int j = 0; j < 4; j++) {
                    words[j] = pack_half2<false>(q[2 * j] * p.scale, q[2 * j + 1] * p.scale);
                }
            }
            u8* to = shared.queries + swizzled_offset(row, vec, Shared::QUERY_PANEL);
            *reinterpret_cast<int4*>(to) =
                int4{static_cast<int>(words[0]), static_cast<int>(words[1]),
                     static_cast<int>(words[2]), static_cast<int>(words[3])};
        }
        fence_proxy_async();
        named_barrier(GROUP_BARRIER + group, WARPGROUP);
    }

    // Starts Q * K^T with a tile of K.
    DEVICE void issue_qk(float* scores, int group, u32 stage) const {
        u32 q = smem_address(shared.queries) + group * 64 * SWIZZLE_ROW;
        u32 k = smem_address(shared.keys) + stage * Shared::TILE;
        UNROLL
        for (int i = 0; i < D / 16; i++) {
            u64 left = smem_descriptor(q + i / 4 * Shared::QUERY_PANEL + i % 4 * 32);
            wgmma<KEYS, false>(scores, left,
                               smem_descriptor(k + i / 4 * Shared::PANEL + i % 4 * 32), i > 0);
        }
        wgmma_commit();
    }

    // Starts to add P * V.
    DEVICE void issue_pv(float* sums, const u32* weights, u32 stage) const {
        u32 v = smem_address(shared.values) + stage * Shared::TILE;
        UNROLL
        for (int i = 0; i < KEYS / 16; i++) {
            u64 right = smem_descriptor(v + i * 2 * SWIZZLE_ATOM, SWIZZLE_ATOM,
                                        D > 64 ? Shared::PANEL : 16);
            wgmma<D, false, true>(sums, weights + 4 * i, right, true);
        }
        wgmma_commit();
    }

    // Adds the mask to the scores.
    DEVICE void apply_mask(float* scores, int tile, int state, const u8* const* masks,
                           const float* slopes) const {
        int lane = threadIdx.x % WARP;
        UNROLL
        for (int j = 0; j < KEYS / 8; j++) {
            int key = tile * KEYS + 8 * j + lane % 4 * 2;
            UNROLL
            for (int h = 0; h < 2; h++) {
                float bias[2] = {0.0f, 0.0f};
                if (state == PARTIAL && key < n_keys) {
                    load_mask2(masks[h], key, n_keys, bias);
                }
                UNROLL
                for (int e = 0; e < 2; e++) {
                    bool hidden = key + e >= n_keys || bias[e] == -INFINITY_F;
                    float& score = scores[4 * j + 2 * h + e];
                    score = hidden ? -INFINITY_F : score + slopes[h] * bias[e];
                }
            }
        }
    }

    // Online softmax: converts scores to f16 weights in the A fragment layout and rescales the
    // accumulators.
    DEVICE void soft_max(float* scores, u32* weights, float* sums, float* row_maxes,
                         float* totals) const {
        UNROLL
        for (int h = 0; h < 2; h++) {
            float row_max = row_maxes[h];
            UNROLL
            for (int j = 0; j < KEYS / 8; j++) {
                row_max = fmaxf(row_max, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
            }
            row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
            row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
            float correction = rescale(row_maxes[h], row_max),
                  base = row_max == -INFINITY_F ? 0.0f : row_max * LOG2_E, total = 0.0f;
            row_maxes[h] = row_max;
            UNROLL
            for (int j = 0; j < KEYS / 8; j++) {
                float* two = scores + 4 * j + 2 * h;
                two[0] = fast_exp2(two[0] * LOG2_E - base),
                two[1] = fast_exp2(two[1] * LOG2_E - base);
                total += two[0] + two[1];
                weights[j / 2 * 4 + j % 2 * 2 + h] = pack_half2<false>(two[0], two[1]);
            }
            totals[h] = totals[h] * correction + total;
            UNROLL
            for (int n = 0; n < D / 8; n++) {
                sums[4 * n + 2 * h] *= correction, sums[4 * n + 2 * h + 1] *= correction;
            }
        }
    }

    DEVICE void run_consumer(int group) const {
        int lane = threadIdx.x % WARP,
            mine = first_row + group * 64 + static_cast<int>(threadIdx.x % WARPGROUP) / WARP * 16 +
                   lane / 4;
        load_queries(group);
        const u8* masks[2] = {nullptr, nullptr};
        float slopes[2], row_maxes[2] = {-INFINITY_F, -INFINITY_F}, totals[2] = {0.0f, 0.0f};
        UNROLL
        for (int h = 0; h < 2; h++) {
            slopes[h] =
                alibi_slope(p.max_bias, p.heads_log2, static_cast<u32>(head_of(mine + 8 * h)));
            if (p.mask.data) {
                masks[h] = mask() + token_of(mine + 8 * h) * p.mask.nb[1];
            }
        }
        float sums[D / 2], scores[KEYS / 2];
        UNROLL
        for (int i = 0; i < D / 2; i++) {
            sums[i] = 0.0f;
        }
        auto release = [&](u64* barrier) {
            if (lane == 0) {
                mbarrier_arrive(barrier);
            }
        };
        PipelineState<KV_STAGES> ring;
        int tile = next_visible_tile(0);
        if (group == 1 && tile < tiles) {
            named_barrier_arrive(ORDER_BARRIER, 2 * WARPGROUP); // the first consumer starts
        }
        if (tile < tiles) {
            mbarrier_wait(&shared.full_keys[0], 0);
            wgmma_fence();
            issue_qk(scores, group, 0);
            wgmma_wait<0>();
            accumulator_fence<KEYS / 2>(scores);
            release(&shared.empty_keys[0]);
        }
        while (tile < tiles) {
            int next = next_visible_tile(tile + 1);
            if (p.logit_softcap != 0.0f) {
                UNROLL
                for (int i = 0; i < KEYS / 2; i++) {
                    scores[i] = p.logit_softcap * tanhf(scores[i]);
                }
            }
            int state = state_of(tile);
            if (state != UNMASKED || (tile + 1) * KEYS > n_keys) {
                apply_mask(scores, tile, state, masks, slopes);
            }
            u32 weights[KEYS / 4];
            soft_max(scores, weights, sums, row_maxes, totals);
            u32 stage = ring.stage, phase = ring.phase;
            ring.next();
            mbarrier_wait(&shared.full_values[stage], phase);
            if (next < tiles) {
                mbarrier_wait(&shared.full_keys[ring.stage], ring.phase);
            }
            named_barrier(ORDER_BARRIER + group, 2 * WARPGROUP);
            wgmma_fence();
            issue_pv(sums, weights, stage);
            if (next < tiles) {
                wgmma_fence(); // other accumulator registers
                issue_qk(scores, group, ring.stage);
                named_barrier_arrive(ORDER_BARRIER + 1 - group, 2 * WARPGROUP);
                wgmma_wait<1>();
                release(&shared.empty_values[stage]);
                wgmma_wait<0>();
                accumulator_fence<KEYS / 2>(scores);
                release(&shared.empty_keys[ring.stage]);
            } else {
                if (group == 0) {
                    named_barrier_arrive(ORDER_BARRIER + 1, 2 * WARPGROUP);
                }
                wgmma_wait<0>();
                release(&shared.empty_values[stage]);
            }
            accumulator_fence<D / 2>(sums);
            tile = next;
        }

        UNROLL
        for (int h = 0; h < 2; h++) {
            int row = mine + 8 * h;
            float total = totals[h], factor = 1.0f;
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (row >= n_rows) {
                continue;
            }
            if (p.sinks.data) {
                float sink = reinterpret_cast<const float*>(p.sinks.data)[head_of(row)],
                      larger = fmaxf(row_maxes[h], sink);
                factor = rescale(row_maxes[h], larger);
                total = total * factor + fast_exp2((sink - larger) * LOG2_E);
            }
            factor = total == 0.0f ? 0.0f : factor / total; // a fully masked row is 0
            float* to = reinterpret_cast<float*>(
                address(p.dst, Index{{0, head_of(row), token_of(row), sequence}}));
            UNROLL
            for (int n = 0; n < D / 8; n++) {
                to[8 * n + lane % 4 * 2] = sums[4 * n + 2 * h] * factor;
                to[8 * n + lane % 4 * 2 + 1] = sums[4 * n + 2 * h + 1] * factor;
            }
        }
    }

    DEVICE void run() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < KV_STAGES; i++) {
                mbarrier_init(&shared.full_keys[i], WARPGROUP);
                mbarrier_init(&shared.full_values[i], WARPGROUP);
                mbarrier_init(&shared.empty_keys[i], 2 * WARPGROUP / WARP);
                mbarrier_init(&shared.empty_values[i], 2 * WARPGROUP / WARP);
            }
            mbarrier_init_fence();
        }
        __syncthreads();
        if (threadIdx.x < WARPGROUP) {
            setmaxnreg_dec<56>();
            load_kv();
        } else {
            setmaxnreg_inc<224>();
            run_consumer(static_cast<int>(threadIdx.x / WARPGROUP) - 1);
        }
    }
};

template <int D, int KEYS> DEVICE void fattn_sm90(const VgFattnParams& p) {
    DYNAMIC_SHARED(u8, memory);
    FattnSm90<D, KEYS>(p, memory).run();
}

} // namespace

KERNEL(vg_fattn_sm90_64, VgFattnParams, 384, 1) { fattn_sm90<64, 128>(p); }
KERNEL(vg_fattn_sm90_128, VgFattnParams, 384, 1) { fattn_sm90<128, 128>(p); }
KERNEL(vg_fattn_sm90_256, VgFattnParams, 384, 1) { fattn_sm90<256, 64>(p); }
