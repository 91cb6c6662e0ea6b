// FLASH_ATTN_EXT on tensor cores (mma.sync): a block has a tile of queries and iterates over the KV
// cache in tiles.
//
// Rows of a tile are pairs of a token and a query head, of all query heads that share a KV head
// (GQA), so that few tokens fill the 16 rows of an mma and K and V are loaded once for all those
// heads. Scores, the running maximum and sum of the softmax, and the weighted sums of V are f32 in
// registers. K and V are f16 or bf16 in shared memory: copied by cp.async, or (KV_QUANT) copied in
// a quantised type and dequantised from there. Anything else (KV_SPLIT_BF16) becomes two bf16 terms
// with a relative error of 2^-16: three products instead of one, and K and V of a tile share their
// memory in turn. Tiles that the mask hides completely are skipped.
//
// If the tiles of queries do not fill the device, several blocks share the KV positions of one tile
// (`splits`, flash-decoding). Each stores its partial result; the last block to finish merges them.
#pragma once
#include "fattn_load.cuh"
#include "fattn_merge.cuh"

namespace {

// Scores Q * K^T of the warp's rows and KV positions.
template <class T>
DEVICE void FlashAttention<T>::compute_qk(float (*scores)[4]) const {
    const u16* q = q_tile + (row_warp * 16 + lane % 16) * K_STRIDE + lane / 16 * 8;
    const u16* k = k_tile + (key_warp * WARP_KEYS + lane / 16 * 8 + lane % 8) * K_STRIDE +
                   lane / 8 % 2 * 8;
    UNROLL
    for (int i = 0; i < K; i += 16) {
        u32 a[TERMS][4];
        UNROLL
        for (int term = 0; term < TERMS; term++) {
            ldmatrix_x4<false>(a[term], q + term * ROWS * K_STRIDE + i);
        }
        UNROLL
        for (int j = 0; j < WARP_KEYS / 16; j++) {
            u32 b[4];
            ldmatrix_x4<false>(b, k + j * 16 * K_STRIDE + i);
            mma_m16n8k16<BF16>(scores[2 * j], a[0], b);
            mma_m16n8k16<BF16>(scores[2 * j + 1], a[0], b + 2);
            if constexpr (KIND == KV_SPLIT_BF16) {
                mma_m16n8k16<BF16>(scores[2 * j], a[1], b);
                mma_m16n8k16<BF16>(scores[2 * j + 1], a[1], b + 2);
                ldmatrix_x4<false>(b, k + (KEYS + j * 16) * K_STRIDE + i);
                mma_m16n8k16<BF16>(scores[2 * j], a[0], b);
                mma_m16n8k16<BF16>(scores[2 * j + 1], a[0], b + 2);
            }
        }
    }
}

// Adds the mask to the scores. Returns which KV positions of the lane any row of the warp sees:
// two bits for each eight positions.
template <class T>
DEVICE u32 FlashAttention<T>::apply_mask(float (*scores)[4], int tile, int state,
                                          const u8* const* masks,
                                          const float* slopes) const {
    u32 visible = 0;
    UNROLL
    for (int j = 0; j < WARP_KEYS / 8; j++) {
        int key = tile * KEYS + key_warp * WARP_KEYS + 8 * j + lane % 4 * 2;
        UNROLL
        for (int h = 0; h < 2; h++) {
            float bias[2] = {0.0f, 0.0f};
            if (state == PARTIAL && key < n_keys) {
                load_mask2(masks[h], key, n_keys, bias);
            }
            UNROLL
            for (int e = 0; e < 2; e++) {
                bool hidden = key + e >= n_keys || bias[e] == -INFINITY_F;
                float& score = scores[j][2 * h + e];
                score = hidden ? -INFINITY_F : score + slopes[h] * bias[e];
                visible |= (hidden ? 0u : 1u) << (2 * j + e);
            }
        }
    }
    UNROLL
    for (int step = 4; step < WARP; step *= 2) {
        visible |= __shfl_xor_sync(0xffffffffu, visible, step);
    }
    return visible;
}

// Online softmax: replaces scores by exp(score - max) and rescales the accumulators.
template <class T>
DEVICE void FlashAttention<T>::soft_max(float (*scores)[4], Accumulators& sums) const {
    UNROLL
    for (int h = 0; h < 2; h++) {
        float row_max = sums.row_max[h];
        UNROLL
        for (int j = 0; j < WARP_KEYS / 8; j++) {
            row_max = fmaxf(row_max, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
        float correction = rescale(sums.row_max[h], row_max),
              base = row_max == -INFINITY_F ? 0.0f : row_max * LOG2_E;
        sums.row_max[h] = row_max;
        sums.total[h] *= correction;
        UNROLL
        for (int j = 0; j < WARP_KEYS / 8; j++) {
            UNROLL
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                scores[j][e] = fast_exp2(scores[j][e] * LOG2_E - base);
                sums.total[h] += scores[j][e];
            }
        }
        UNROLL
        for (int n = 0; n < COLUMNS / 8; n++) {
            sums.of[n][2 * h] *= correction;
            sums.of[n][2 * h + 1] *= correction;
        }
    }
}

// Adds P * V. V rows that no query sees may hold garbage and count as 0.
template <class T>
DEVICE void FlashAttention<T>::compute_pv(const float (*weights)[4], u32 visible,
                                           Accumulators& sums) const {
    const u16* v = v_tile + (key_warp * WARP_KEYS + lane % 16) * V_STRIDE +
                   column_warp * COLUMNS + lane / 16 * 8;
    UNROLL
    for (int i = 0; i < WARP_KEYS / 16; i++) {
        const float *left = weights[2 * i], *right = weights[2 * i + 1];
        u32 a[4], rest[4];
        if constexpr (KIND == KV_SPLIT_BF16) {
            split_bf16(left[0], left[1], a[0], rest[0]),
                split_bf16(left[2], left[3], a[1], rest[1]);
            split_bf16(right[0], right[1], a[2], rest[2]),
                split_bf16(right[2], right[3], a[3], rest[3]);
        } else {
            a[0] = pack_half2<BF16>(left[0], left[1]),
            a[1] = pack_half2<BF16>(left[2], left[3]);
            a[2] = pack_half2<BF16>(right[0], right[1]),
            a[3] = pack_half2<BF16>(right[2], right[3]);
        }
        auto row_mask = [&](u32 bits) {
            return (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
        };
        u32 low = row_mask(visible >> 4 * i), high = row_mask(visible >> (4 * i + 2));
        UNROLL
        for (int n = 0; n < COLUMNS / 16; n++) {
            u32 b[4];
            ldmatrix_x4<true>(b, v + i * 16 * V_STRIDE + 16 * n);
            b[0] &= low, b[1] &= high, b[2] &= low, b[3] &= high;
            mma_m16n8k16<BF16>(sums.of[2 * n], a, b);
            mma_m16n8k16<BF16>(sums.of[2 * n + 1], a, b + 2);
            if constexpr (KIND == KV_SPLIT_BF16) {
                mma_m16n8k16<BF16>(sums.of[2 * n], rest, b);
                mma_m16n8k16<BF16>(sums.of[2 * n + 1], rest, b + 2);
                ldmatrix_x4<true>(b, v + (KEYS + i * 16) * V_STRIDE + 16 * n);
                b[0] &= low, b[1] &= high, b[2] &= low, b[3] &= high;
                mma_m16n8k16<BF16>(sums.of[2 * n], a, b);
                mma_m16n8k16<BF16>(sums.of[2 * n + 1], a, b + 2);
            }
        }
    }
}

// Waits for the launches before this one.
template <class T>
DEVICE void FlashAttention<T>::run() {
    int tiles = (n_keys + KEYS - 1) / KEYS, splits = static_cast<int>(p.splits);
    int each = (tiles + splits - 1) / splits, split = static_cast<int>(b.z % p.splits);
    int begin = split * each, end = begin + each < tiles ? begin + each : tiles;
    grid_dependency_wait();

    // State of each KV tile: from vg_fattn_mask_tiles, or determined here.
    const u8* tile_states = nullptr;
    if (p.mask.data && p.mask_tiles) {
        i64 index = index_of_mask() * b.nx + b.nx - 1 - b.x;
        tile_states = reinterpret_cast<const u8*>(p.mask_tiles) + index * tiles;
    }
    auto state_of = [&](int tile) -> int {
        if (!p.mask.data) {
            return UNMASKED;
        }
        if (tile_states) {
            return tile_states[tile];
        }
        return tile - begin < MAX_MASK_TILES ? static_cast<int>(own.states[tile - begin])
                                             : static_cast<int>(PARTIAL);
    };

    // Commits an empty group as well, as groups are counted.
    auto fetch_keys = [&](int tile) {
        if (tile < end) {
            fetch(p.k, keys, tile, k_tile, K_STRIDE, raw_keys);
        } else {
            cp_async_commit();
        }
    };
    auto fetch_values = [&](int tile) {
        if (tile < end) {
            fetch(p.v, values, tile, v_tile, V_STRIDE, raw_values);
        }
    };
    if (KIND != KV_SPLIT_BF16 && begin < end) {
        fetch_keys(begin);
        fetch_values(begin);
    }
    load_queries();
    if (p.mask.data && !tile_states) {
        int beyond = end - begin < MAX_MASK_TILES ? end : begin + MAX_MASK_TILES;
        int first = token_of(first_row), last_token = token_of(first_row + ROWS - 1);
        for (int tile = begin + static_cast<int>(threadIdx.x) / WARP; tile < beyond;
             tile += FATTN_WARPS) {
            int to = (tile + 1) * KEYS < n_keys ? (tile + 1) * KEYS : n_keys;
            int state =
                mask_tile_state(mask(), p.mask.nb[1], first, last_token, tile * KEYS, to);
            if (lane == 0) {
                own.states[tile - begin] = static_cast<u8>(state);
            }
        }
    }

    Accumulators sums = {};
    sums.row_max[0] = sums.row_max[1] = -INFINITY_F;
    for (int tile = begin, next; tile < end; tile = next) {
        cp_async_wait<1>();
        __syncthreads(); // K is loaded; split bf16: V has been read
        next = tile + 1;
        while (next < end && state_of(next) == MASKED) {
            next++;
        }
        if constexpr (KIND == KV_QUANT) {
            dequantize_tile(p.k, keys, tile, k_tile, K_STRIDE, raw_keys);
            __syncthreads();
            fetch_keys(next);
        }
        if constexpr (KIND == KV_SPLIT_BF16) {
            split_bf16_tile<K>(p.k, keys, tile, k_tile, K_STRIDE);
            __syncthreads();
        }
        float scores[WARP_KEYS / 8][4] = {};
        compute_qk(scores);
        if constexpr (KIND != KV_QUANT && KIND != KV_SPLIT_BF16) {
            __syncthreads(); // K has been read
            fetch_keys(next);
        }
        if (p.logit_softcap != 0.0f) {
            UNROLL
            for (int i = 0; i < WARP_KEYS / 2; i++) {
                scores[i / 4][i % 4] = p.logit_softcap * tanhf(scores[i / 4][i % 4]);
            }
        }
        int state = state_of(tile);
        u32 visible = 0xffffffffu;
        if (state != UNMASKED || (tile + 1) * KEYS > n_keys) {
            // Recomputed for each such tile, of which there are few, to save registers.
            const u8* masks[2] = {nullptr, nullptr};
            float slopes[2];
            UNROLL
            for (int h = 0; h < 2; h++) {
                int row = first_row + row_warp * 16 + lane / 4 + 8 * h;
                slopes[h] =
                    alibi_slope(p.max_bias, p.heads_log2, static_cast<u32>(head_of(row)));
                if (p.mask.data) {
                    masks[h] = mask() + token_of(row) * p.mask.nb[1];
                }
            }
            visible =
                apply_mask(scores, tile, state == UNMASKED ? UNMASKED : PARTIAL, masks, slopes);
        }
        soft_max(scores, sums);
        cp_async_wait<1>();
        __syncthreads(); // V is loaded; split bf16: K has been read
        if constexpr (KIND == KV_SPLIT_BF16) {
            split_bf16_tile<V>(p.v, values, tile, v_tile, V_STRIDE);
            __syncthreads();
        }
        if constexpr (KIND == KV_QUANT) {
            dequantize_tile(p.v, values, tile, v_tile, V_STRIDE, raw_values);
            __syncthreads();
            fetch_values(next);
        }
        compute_pv(scores, visible, sums);
        if constexpr (KIND != KV_QUANT && KIND != KV_SPLIT_BF16) {
            __syncthreads(); // V has been read
            fetch_values(next);
        }
    }
    UNROLL
    for (int h = 0; h < 2; h++) {
        sums.total[h] += __shfl_xor_sync(0xffffffffu, sums.total[h], 1);
        sums.total[h] += __shfl_xor_sync(0xffffffffu, sums.total[h], 2);
    }
    cp_async_wait<0>();
    if constexpr (ROW_WARPS == 1) {
        finish_few_rows(sums, split);
    } else {
        finish_many_rows(sums, split);
    }
    if (splits > 1) {
        // Makes the partial result visible before the counter is incremented.
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            u32* count = reinterpret_cast<u32*>(p.counters) + tile_index();
            own.last = atomicAdd(count, 1u) == p.splits - 1;
            if (own.last) {
                *count = 0; // for the next launch
            }
        }
        __syncthreads();
        if (own.last) {
            __threadfence();
            merge_splits();
        }
    }
}

template <int K, int V, int ROW_WARPS, int KEY_WARPS, int KEYS, int KIND>
DEVICE void fattn(const VgFattnParams& p) {
    DYNAMIC_SHARED(u16, shared);
    __shared__ FattnShared own;
    BlockIndex b = this_block();
    using Shape = FattnShape<K, V, ROW_WARPS, KEY_WARPS, KEYS, KIND>;
    FlashAttention<Shape>(p, b, shared, own).run();
}

} // namespace
