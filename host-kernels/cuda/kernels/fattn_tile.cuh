// The tile of FLASH_ATTN_EXT that a block of the tensor core kernels computes: its shape, its place
// in the operands, and which tiles of the mask matter. fattn.cuh describes the algorithm.
#pragma once
#include "dequantize.cuh"
#include "quantize_q8.cuh"

namespace {

constexpr int FATTN_WARPS = 4, FATTN_THREADS = FATTN_WARPS * WARP;

// The type of K and V in memory and as an operand.
enum KvKind { KV_F16, KV_BF16, KV_QUANT, KV_SPLIT_BF16 };

// What the mask does with a tile of KV positions.
enum MaskState { MASKED, PARTIAL, UNMASKED };

// KV tiles whose mask state a block determines itself; further tiles count as PARTIAL.
constexpr int MAX_MASK_TILES = 1024;

constexpr float LOG2_E = 1.44269504f;

// Shared memory of a block beside the tiles.
struct FattnShared {
    u8 states[MAX_MASK_TILES];
    u32 last;
};

// State of a KV tile for the tokens `first` to `last`. A warp calls it.
DEVICE int mask_tile_state(const u8* mask, i64 row_bytes, int first, int last, int key, int end) {
    u32 found = 0; // 1: not all are -inf; 2: not all are 0
    for (int token = first; token <= last; token++) {
        for (int k = key + static_cast<int>(threadIdx.x % WARP); k < end; k += WARP) {
            u32 bits = *reinterpret_cast<const u16*>(mask + token * row_bytes + 2 * k);
            found |= (bits != 0xfc00u ? 1 : 0) | (bits & 0x7fffu ? 2 : 0);
        }
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        found |= __shfl_xor_sync(0xffffffffu, found, step);
    }
    return !(found & 1) ? MASKED : found & 2 ? PARTIAL : UNMASKED;
}

// Mask values of an even KV position and of the next one, if there is one.
DEVICE void load_mask2(const u8* mask, int key, int n_keys, float* bias) {
    const u8* at = mask + 2 * key;
    u32 both = key + 1 < n_keys ? *aligned<u32>(at) : *aligned<u16>(at);
    bias[0] = to_float(f16{static_cast<u16>(both)});
    bias[1] = to_float(f16{static_cast<u16>(both >> 16)});
}

// Factor that rescales sums relative to maximum `from` to maximum `to` >= from. Without a maximum
// (-inf) sums are 0 or NaN, and stay so.
DEVICE float rescale(float from, float to) {
    return from == -INFINITY_F ? 0.0f : fast_exp2((from - to) * LOG2_E);
}

// The shape of a tile: rows by KV positions, distributed over ROW_WARPS x KEY_WARPS warps with 16
// rows each; remaining warps split the columns of V. K and V are head sizes, padded with zeros.
template <int HEAD_K, int HEAD_V, int WARPS_OF_ROWS, int WARPS_OF_KEYS, int TILE_KEYS, int KV_KIND>
struct FattnShape {
    static constexpr int K = HEAD_K, V = HEAD_V, ROW_WARPS = WARPS_OF_ROWS,
                         KEY_WARPS = WARPS_OF_KEYS, KEYS = TILE_KEYS, KIND = KV_KIND;
};

// A tile of this shape.
template <class T> struct FlashAttention {
    static constexpr int K = T::K, V = T::V, ROW_WARPS = T::ROW_WARPS, KEY_WARPS = T::KEY_WARPS,
                         KEYS = T::KEYS, KIND = T::KIND;
    static constexpr bool BF16 = KIND == KV_BF16 || KIND == KV_SPLIT_BF16;
    static constexpr int TERMS = KIND == KV_SPLIT_BF16 ? 2 : 1; // bf16 terms of a tile
    static constexpr int ROWS = 16 * ROW_WARPS,
                         COLUMN_WARPS = FATTN_WARPS / (ROW_WARPS * KEY_WARPS);
    static constexpr int WARP_KEYS = KEYS / KEY_WARPS, COLUMNS = V / COLUMN_WARPS;
    // Row strides in 16-bit elements, padded against bank conflicts.
    static constexpr int K_STRIDE = K + 8, V_STRIDE = V + 8;
    static_assert(WARP_KEYS % 16 == 0 && COLUMNS % 16 == 0 && K % 16 == 0, "mma tiles are 16 wide");

    // Accumulators of a thread: of rows lane / 4 and lane / 4 + 8 of the warp's 16.
    struct Accumulators {
        float of[COLUMNS / 8][4];
        float row_max[2], total[2];
    };

    const VgFattnParams& p;
    const BlockIndex& b;
    FattnShared& own;
    u16 *q_tile, *k_tile, *v_tile;
    u8 *raw_keys, *raw_values;
    const u8 *keys, *values;
    int lane, row_warp, key_warp, column_warp;
    int n_keys, n_rows, first_row, head, sequence;

    DEVICE FlashAttention(const VgFattnParams& params, const BlockIndex& blocks, u16* shared,
                          FattnShared& own)
        : p(params), b(blocks), own(own) {
        q_tile = shared;
        k_tile = q_tile + TERMS * ROWS * K_STRIDE;
        v_tile = KIND == KV_SPLIT_BF16 ? k_tile : k_tile + KEYS * K_STRIDE;
        raw_keys = reinterpret_cast<u8*>(v_tile + KEYS * V_STRIDE);
        raw_values = raw_keys + KEYS * static_cast<int>(p.quant_stride);
        int warp = threadIdx.x / WARP;
        lane = threadIdx.x % WARP;
        row_warp = warp % ROW_WARPS;
        key_warp = warp / ROW_WARPS % KEY_WARPS;
        column_warp = warp / (ROW_WARPS * KEY_WARPS);
        n_keys = static_cast<int>(p.k.ne[1]);
        n_rows = static_cast<int>(p.q.ne[1]) * static_cast<int>(p.gqa_ratio);
        // Reverse order: the last tiles of a causal mask have most work.
        first_row = static_cast<int>(b.nx - 1 - b.x) * ROWS;
        head = static_cast<int>(b.y * p.gqa_ratio);
        sequence = static_cast<int>(b.z / p.splits);
        auto shared_by = [&](const View& v) {
            return address(v, Index{{0, 0, shared_index(head, p.q.ne[2], v.ne[2]),
                                     shared_index(sequence, p.q.ne[3], v.ne[3])}});
        };
        keys = shared_by(p.k);
        values = shared_by(p.v);
    }

    // One token needs no division. Many tokens have no registers left for the branch.
    DEVICE int token_of(int row) const {
        return ROW_WARPS == 1 && p.q.ne[1] == 1
                   ? 0
                   : (row < n_rows ? row : n_rows - 1) / static_cast<int>(p.gqa_ratio);
    }

    DEVICE int head_of(int row) const {
        int ratio = static_cast<int>(p.gqa_ratio);
        return head + (ROW_WARPS == 1 && row < ratio ? row : row % ratio);
    }

    // The mask of the tile's heads, and its index among all masks.
    DEVICE const u8* mask() const {
        // For many tokens the branches of `repeated` cost registers and save no time.
        i64 i2 = ROW_WARPS == 1 ? repeated(head, p.mask.ne[2]) : head % p.mask.ne[2];
        i64 i3 = ROW_WARPS == 1 ? repeated(sequence, p.mask.ne[3]) : sequence % p.mask.ne[3];
        return address(p.mask, Index{{0, 0, i2, i3}});
    }

    DEVICE i64 index_of_mask() const {
        return repeated(sequence, p.mask.ne[3]) * p.mask.ne[2] + repeated(head, p.mask.ne[2]);
    }

    // Row `key` of a KV tile in memory; beyond the end the last row.
    DEVICE const u8* row_at(const View& v, const u8* base, int tile, int key) const {
        int at = tile * KEYS + key;
        return base + (at < n_keys ? at : n_keys - 1) * v.nb[1];
    }

    // Loading (fattn_load.cuh).
    DEVICE void fetch(const View& v, const u8* base, int tile, u16* to, int stride, u8* raw) const;
    DEVICE void dequantize_tile(const View& v, const u8* base, int tile, u16* to, int stride,
                                const u8* raw) const;
    template <int WIDTH>
    DEVICE void split_bf16_tile(const View& v, const u8* base, int tile, u16* to, int stride) const;
    DEVICE void load_queries() const;

    // Computing (fattn.cuh).
    DEVICE void compute_qk(float (*scores)[4]) const;
    DEVICE u32 apply_mask(float (*scores)[4], int tile, int state, const u8* const* masks,
                          const float* slopes) const;
    DEVICE void soft_max(float (*scores)[4], Accumulators& sums) const;
    DEVICE void compute_pv(const float (*weights)[4], u32 visible, Accumulators& sums) const;

    // The result of a row.
    DEVICE float* result(int row) const {
        return reinterpret_cast<float*>(
            address(p.dst, Index{{0, head_of(row), token_of(row), sequence}}));
    }

    // Scratch for the partial result of a split: V columns of each row, then the maximum and sum of
    // each.
    static constexpr int PARTIAL_FLOATS = ROWS * (V + 2);
    DEVICE i64 tile_index() const { return (static_cast<i64>(sequence) * b.ny + b.y) * b.nx + b.x; }
    DEVICE float* partial(int split) const {
        return reinterpret_cast<float*>(p.partials) +
               (tile_index() * p.splits + split) * PARTIAL_FLOATS;
    }

    // Bytes of shared memory for Q, K and V.
    static constexpr int TILE_BYTES =
        2 * (TERMS * ROWS * K_STRIDE +
             (KIND == KV_SPLIT_BF16 ? 2 * KEYS * (K_STRIDE > V_STRIDE ? K_STRIDE : V_STRIDE)
                                    : KEYS * (K_STRIDE + V_STRIDE)));

    // Merging and storing (fattn_merge.cuh).
    DEVICE float normalizer(int row, float row_max, float total) const;
    DEVICE void quantize_result(int row, int column, float x) const;
    DEVICE void store_result(int row, int column, const Float4& x) const;
    DEVICE void merge_splits() const;
    DEVICE void finish_few_rows(const Accumulators& sums, int split) const;
    DEVICE void finish_many_rows(const Accumulators& sums, int split) const;

    DEVICE void run();
};

} // namespace
