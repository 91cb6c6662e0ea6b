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

// Stores eight numbers as two bf16 terms.
DEVICE void store_split_bf16(const float* x, u16* first, u16* rest) {
    u32 a[4], b[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        split_bf16(x[2 * i], x[2 * i + 1], a[i], b[i]);
    }
    auto four = [](const u32* words) {
        return int4{static_cast<int>(words[0]), static_cast<int>(words[1]),
                    static_cast<int>(words[2]), static_cast<int>(words[3])};
    };
    *reinterpret_cast<int4*>(first) = four(a);
    *reinterpret_cast<int4*>(rest) = four(b);
}

// Dequantises a block of 32 to two bf16 terms.
template <int TYPE> DEVICE void split_bf16_block(const u8* block, u16* first, u16* rest) {
    Unpacked w;
    unpack<TYPE>(nullptr, block, 0, w);
    UNROLL
    for (int i = 0; i < 4; i++) {
        float x[8];
        UNROLL
        for (int j = 0; j < 8; j++) {
            int q = static_cast<signed char>(w.words[2 * i + j / 4] >> (j % 4 * 8));
            x[j] = static_cast<float>(q) * w.scale[i / 2] + w.offset[i / 2];
        }
        store_split_bf16(x, first + 8 * i, rest + 8 * i);
    }
}

// Dequantises a block of 32 to f16.
template <int TYPE> DEVICE void unpack_block(const u8* block, int4* to) {
    Unpacked w;
    unpack<TYPE>(nullptr, block, 0, w);
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 words[4];
        UNROLL
        for (int j = 0; j < 4; j++) {
            int q = w.words[2 * i + j / 2] >> (j % 2 * 16);
            float low = static_cast<float>(static_cast<signed char>(q));
            float high = static_cast<float>(static_cast<signed char>(q >> 8));
            float scale = w.scale[i / 2], offset = w.offset[i / 2];
            words[j] = pack_half2<false>(low * scale + offset, high * scale + offset);
        }
        to[i] = int4{static_cast<int>(words[0]), static_cast<int>(words[1]),
                     static_cast<int>(words[2]), static_cast<int>(words[3])};
    }
}

// Factor that rescales sums relative to maximum `from` to maximum `to` >= from. Without a maximum
// (-inf) sums are 0 or NaN, and stay so.
DEVICE float rescale(float from, float to) {
    return from == -INFINITY_F ? 0.0f : fast_exp2((from - to) * LOG2_E);
}

// A tile of rows by tiles of KV positions, distributed over ROW_WARPS x KEY_WARPS warps with 16
// rows each; remaining warps split the columns of V. K and V are head sizes, padded with zeros.
template <int K, int V, int ROW_WARPS, int KEY_WARPS, int KEYS, int KIND> struct FlashAttention {
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

    // Starts to copy a tile of K or V to `to`, or its quantised bytes to `raw`.
    DEVICE void fetch(const View& v, const u8* base, int tile, u16* to, int stride, u8* raw) const {
        if constexpr (KIND == KV_QUANT) {
            int bytes = static_cast<int>(v.ne[0] / type_traits(v.type).elements) *
                        type_traits(v.type).bytes;
            int vecs = (bytes + 15 + 15) / 16; // upper bound for any alignment of the row
            for (int i = threadIdx.x; i < KEYS * vecs; i += FATTN_THREADS) {
                int key = i / vecs, vec = i - key * vecs;
                const u8* row = row_at(v, base, tile, key);
                int lead = static_cast<int>(reinterpret_cast<u64>(row) & 15);
                if (16 * vec < lead + bytes) {
                    cp_async(raw + key * static_cast<int>(p.quant_stride) + 16 * vec,
                             row - lead + 16 * vec);
                }
            }
        } else {
            // All but few models have heads as wide as the tiles, whose width is a constant. Each
            // thread then copies the same part of one row in `rows_at_once`.
            int wide = (stride - 8) / 8, rows_at_once = FATTN_THREADS / wide;
            if (ROW_WARPS == 1 && v.ne[0] == stride - 8 && FATTN_THREADS % wide == 0 &&
                KEYS % rows_at_once == 0) {
                int first = static_cast<int>(threadIdx.x) / wide;
                int vec = static_cast<int>(threadIdx.x) % wide;
                const u8* from = base + 16 * vec;
                to += 8 * vec;
                int last = n_keys - 1 - tile * KEYS;
                UNROLL
                for (int n = 0; n < KEYS / rows_at_once; n++) {
                    int key = first + n * rows_at_once;
                    int row = tile * KEYS + (key < last ? key : last);
                    cp_async(to + key * stride, from + row * v.nb[1]);
                }
            } else {
                int vecs = static_cast<int>(v.ne[0]) / 8;
                for (int i = threadIdx.x; i < KEYS * vecs; i += FATTN_THREADS) {
                    int key = i / vecs, vec = i - key * vecs;
                    cp_async(to + key * stride + 8 * vec, row_at(v, base, tile, key) + 16 * vec);
                }
            }
        }
        cp_async_commit();
    }

    // Dequantises the bytes in `raw` to f16.
    DEVICE void dequantize_tile(const View& v, const u8* base, int tile, u16* to, int stride,
                                const u8* raw) const {
        TypeTraits size = type_traits(v.type);
        int step = size.elements == 1 ? 8 : size.elements,
            blocks = static_cast<int>(v.ne[0]) / step;
        int bytes = size.bytes * step / size.elements;
        for (int i = threadIdx.x; i < KEYS * blocks; i += FATTN_THREADS) {
            int key = i / blocks, block = i - key * blocks;
            int lead = static_cast<int>(reinterpret_cast<u64>(row_at(v, base, tile, key)) & 15);
            const u8* from = raw + key * static_cast<int>(p.quant_stride) + lead + block * bytes;
            u16* at = to + key * stride + block * step;
            int4* four = reinterpret_cast<int4*>(at);
            switch (v.type) {
            case VG_Q4_0: unpack_block<VG_Q4_0>(from, four); break;
            case VG_Q4_1: unpack_block<VG_Q4_1>(from, four); break;
            case VG_Q5_0: unpack_block<VG_Q5_0>(from, four); break;
            case VG_Q5_1: unpack_block<VG_Q5_1>(from, four); break;
            case VG_Q8_0: unpack_block<VG_Q8_0>(from, four); break;
            case VG_IQ4_NL: unpack_block<VG_IQ4_NL>(from, four); break;
            default:
                for (int j = 0; j < 8; j++) {
                    at[j] = static_cast<u16>(load_u16(from + 2 * j));
                }
            }
        }
    }

    // Splits a tile of K or V into two bf16 terms, with zeros behind the head size up to WIDTH.
    template <int WIDTH> DEVICE void split_bf16_tile(const View& v, const u8* base, int tile,
                                                    u16* to, int stride) const {
        u16* rest = to + KEYS * stride;
        int width = static_cast<int>(v.ne[0]);
        bool floats = v.type == VG_F32 || v.type == VG_F16 || v.type == VG_BF16;
        auto lies_at = [&](int step, int multiple) {
            return v.nb[0] == step &&
                   (reinterpret_cast<u64>(base) | static_cast<u64>(v.nb[1])) % multiple == 0;
        };
        if (floats && lies_at(v.type == VG_F32 ? 4 : 2, 16)) {
            UNROLL_BY_4
            for (int i = threadIdx.x; i < KEYS * (WIDTH / 8); i += FATTN_THREADS) {
                int key = i / (WIDTH / 8), at = i % (WIDTH / 8) * 8, offset = key * stride + at;
                const u8* row = row_at(v, base, tile, key);
                float x[8] = {};
                if (at + 8 > width) {
                    UNROLL
                    for (int j = 0; j < 8; j++) {
                        x[j] = at + j < width ? load(v.type, row + (at + j) * v.nb[0]) : 0.0f;
                    }
                } else if (v.type == VG_F32) {
                    UNROLL
                    for (int h = 0; h < 2; h++) {
                        int4 four = *aligned<int4>(row + 4 * at + 16 * h);
                        x[4 * h] = __uint_as_float(four.x), x[4 * h + 1] = __uint_as_float(four.y);
                        x[4 * h + 2] = __uint_as_float(four.z),
                                  x[4 * h + 3] = __uint_as_float(four.w);
                    }
                } else {
                    int4 four = *aligned<int4>(row + 2 * at);
                    u32 words[4] = {static_cast<u32>(four.x), static_cast<u32>(four.y),
                                    static_cast<u32>(four.z), static_cast<u32>(four.w)};
                    UNROLL
                    for (int j = 0; j < 8; j++) {
                        u16 bits = static_cast<u16>(words[j / 2] >> (j % 2 * 16));
                        x[j] = v.type == VG_F16 ? to_float(f16{bits})
                                                : __uint_as_float(static_cast<u32>(bits) << 16);
                    }
                }
                store_split_bf16(x, to + offset, rest + offset);
            }
            return;
        }
        int bytes = type_traits(v.type).bytes;
        bool blocks =
            v.type == VG_Q4_0 || v.type == VG_Q5_0 || v.type == VG_Q8_0 || v.type == VG_IQ4_NL
                ? lies_at(bytes, 2)
                : (v.type == VG_Q4_1 || v.type == VG_Q5_1) && lies_at(bytes, 4);
        if (blocks) {
            for (int i = threadIdx.x; i < KEYS * (WIDTH / 32); i += FATTN_THREADS) {
                int key = i / (WIDTH / 32), block = i % (WIDTH / 32),
                    offset = key * stride + block * 32;
                const u8* from = row_at(v, base, tile, key) + block * bytes;
                if (block * 32 >= width) {
                    for (int j = 0; j < 32; j++) {
                        to[offset + j] = rest[offset + j] = 0;
                    }
                    continue;
                }
                switch (v.type) {
                case VG_Q4_0: split_bf16_block<VG_Q4_0>(from, to + offset, rest + offset); break;
                case VG_Q4_1: split_bf16_block<VG_Q4_1>(from, to + offset, rest + offset); break;
                case VG_Q5_0: split_bf16_block<VG_Q5_0>(from, to + offset, rest + offset); break;
                case VG_Q5_1: split_bf16_block<VG_Q5_1>(from, to + offset, rest + offset); break;
                case VG_Q8_0: split_bf16_block<VG_Q8_0>(from, to + offset, rest + offset); break;
                default: split_bf16_block<VG_IQ4_NL>(from, to + offset, rest + offset);
                }
            }
            return;
        }
        const VgCodebooks* grids = codebooks(p.codebooks);
        for (int i = threadIdx.x; i < KEYS * WIDTH; i += FATTN_THREADS) {
            int key = i / WIDTH, at = i % WIDTH, offset = key * stride + at;
            float x = at < width ? dequantize_element(v.type, grids, row_at(v, base, tile, key),
                                                      v.nb[0], at)
                                 : 0.0f;
            u32 first, its_rest;
            split_bf16(x, 0.0f, first, its_rest);
            to[offset] = static_cast<u16>(first);
            rest[offset] = static_cast<u16>(its_rest);
        }
    }

    // Loads Q * scale as f16 or bf16. Zeros fill the padding rows and the columns behind the head
    // size, there also in the tiles of K and V.
    DEVICE void load_queries() const {
        int width = static_cast<int>(p.k.ne[0]), value_width = static_cast<int>(p.v.ne[0]);
        int filled = n_rows - first_row < ROWS ? n_rows - first_row : ROWS;
        // Few threads have more than one iteration with few rows, and code that runs once is short:
        // instructions come from memory, too.
        UNROLL_TIMES(ROW_WARPS == 1 ? 1 : 2)
        for (int i = threadIdx.x; i < ROWS * (K / 4); i += FATTN_THREADS) {
            int row = i / (K / 4), column = i % (K / 4) * 4;
            float x[4] = {};
            if (row < filled && column < width) {
                i64 token = token_of(first_row + row), its_head = head_of(first_row + row);
                const float* q = reinterpret_cast<const float*>(
                    address(p.q, Index{{column, token, its_head, sequence}}));
                UNROLL
                for (int j = 0; j < 4; j++) {
                    // Other kinds have multiples of eight.
                    bool is_inside = KIND != KV_SPLIT_BF16 || column + j < width;
                    x[j] = is_inside ? q[j] * p.scale : 0.0f;
                }
            }
            u32* to = reinterpret_cast<u32*>(q_tile + row * K_STRIDE + column);
            UNROLL
            for (int j = 0; j < 2; j++) {
                if constexpr (KIND == KV_SPLIT_BF16) {
                    split_bf16(x[2 * j], x[2 * j + 1], to[j], to[j + ROWS * K_STRIDE / 2]);
                } else {
                    to[j] = pack_half2<BF16>(x[2 * j], x[2 * j + 1]);
                }
            }
        }
        if constexpr (KIND != KV_SPLIT_BF16) { // split_bf16_tile writes the zeros itself
            for (int i = threadIdx.x; i < KEYS * (K - width); i += FATTN_THREADS) {
                k_tile[i / (K - width) * K_STRIDE + width + i % (K - width)] = 0;
            }
            for (int i = threadIdx.x; i < KEYS * (V - value_width); i += FATTN_THREADS) {
                v_tile[i / (V - value_width) * V_STRIDE + value_width + i % (V - value_width)] = 0;
            }
        }
    }

    // Scores Q * K^T of the warp's rows and KV positions.
    DEVICE void compute_qk(float (*scores)[4]) const {
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
    DEVICE u32 apply_mask(float (*scores)[4], int tile, int state, const u8* const* masks,
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
    DEVICE void soft_max(float (*scores)[4], Accumulators& sums) const {
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
    DEVICE void compute_pv(const float (*weights)[4], u32 visible, Accumulators& sums) const {
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

    // Normalisation factor of a row with this maximum and sum, including the attention sink.
    DEVICE float normalizer(int row, float row_max, float total) const {
        float factor = 1.0f;
        if (p.sinks.data) {
            float sink = reinterpret_cast<const float*>(p.sinks.data)[head_of(row)];
            float larger = fmaxf(row_max, sink);
            factor = rescale(row_max, larger);
            total = total * factor + fast_exp2((sink - larger) * LOG2_E);
        }
        return total == 0.0f ? 0.0f : factor / total; // a fully masked row is 0
    }

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

    // Quantises 32 columns of a row, one for each lane.
    DEVICE void quantize_result(int row, int column, float x) const {
        i64 token = static_cast<i64>(sequence) * p.q.ne[1] + token_of(row), width = p.v.ne[0];
        u32 block = static_cast<u32>(head_of(row) * width + column) / 32;
        quantize_q8_block(p.quants, p.scales, token, q8_tiles(p.q.ne[2] * width), block, x);
    }

    // Stores four columns of a row for each lane, and quantises them. The whole warp calls it. The
    // host ensures that heads are multiples of 32 if the result is quantised.
    DEVICE void store_result(int row, int column, const Float4& x) const {
        int width = static_cast<int>(p.v.ne[0]);
        float* to = result(row);
        UNROLL
        for (int j = 0; j < 4; j++) {
            if (column + j < width) {
                to[column + j] = x.of[j];
            }
        }
        if (p.quants) {
            i64 token = static_cast<i64>(sequence) * p.q.ne[1] + token_of(row);
            u32 vec = static_cast<u32>(head_of(row) * width + column) / 4;
            bool valid = column < width;
            quantize_q8_vec(p.quants, p.scales, token, q8_tiles(p.q.ne[2] * width), vec,
                            valid ? x : Float4{}, valid);
        }
    }

    // Merges the partial results of all splits: a warp for each row, a lane for four columns at a
    // time, and first a lane for the factor of each split.
    DEVICE void merge_splits() const {
        int splits = static_cast<int>(p.splits);
        const float* parts = partial(0);
        for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
             row += FATTN_WARPS) {
            const float *row_maxes = parts + ROWS * V + row, *totals = row_maxes + ROWS;
            float row_max = -INFINITY_F;
            for (int s = lane; s < splits; s += WARP) {
                row_max = fmaxf(row_max, row_maxes[s * PARTIAL_FLOATS]);
            }
            row_max = warp_reduce<Max>(row_max);
            constexpr int VECS = (V / 4 + WARP - 1) / WARP;
            float sums[VECS][4] = {}, total = 0.0f;
            for (int first = 0; first < splits; first += WARP) {
                int count = splits - first < WARP ? splits - first : WARP;
                float factor = 0.0f;
                if (lane < count) {
                    i64 at = static_cast<i64>(first + lane) * PARTIAL_FLOATS;
                    factor = rescale(row_maxes[at], row_max);
                    total += totals[at] * factor;
                }
                UNROLL_TIMES(8)
                for (int s = 0; s < count; s++) {
                    float by = __shfl_sync(0xffffffffu, factor, s);
                    const float* from =
                        parts + static_cast<i64>(first + s) * PARTIAL_FLOATS + row * V;
                    UNROLL
                    for (int v = 0; v < VECS; v++) {
                        int column = (v * WARP + lane) * 4;
                        if (V % (4 * WARP) == 0 || column < V) {
                            int4 four = *reinterpret_cast<const int4*>(from + column);
                            sums[v][0] += __int_as_float(four.x) * by;
                            sums[v][1] += __int_as_float(four.y) * by;
                            sums[v][2] += __int_as_float(four.z) * by;
                            sums[v][3] += __int_as_float(four.w) * by;
                        }
                    }
                }
            }
            float factor = normalizer(first_row + row, row_max, warp_reduce<Sum>(total));
            UNROLL
            for (int v = 0; v < VECS; v++) {
                store_result(first_row + row, (v * WARP + lane) * 4,
                             {{sums[v][0] * factor, sums[v][1] * factor, sums[v][2] * factor,
                               sums[v][3] * factor}});
            }
        }
    }

    // Bytes of shared memory for Q, K and V.
    static constexpr int TILE_BYTES =
        2 * (TERMS * ROWS * K_STRIDE +
             (KIND == KV_SPLIT_BF16 ? 2 * KEYS * (K_STRIDE > V_STRIDE ? K_STRIDE : V_STRIDE)
                                    : KEYS * (K_STRIDE + V_STRIDE)));

    // Merges the accumulators of all warps through shared memory and stores the result, or the
    // partial result of the split, for tiles of 16 rows, of which few exist: a warp for each row.
    DEVICE void finish_few_rows(const Accumulators& sums, int split) const {
        static_assert(ROW_WARPS > 1 || KEY_WARPS * ROWS * (V + 2) * 4 <= TILE_BYTES,
                      "the accumulators fit where Q, K and V were");
        int splits = static_cast<int>(p.splits);
        float* parts = reinterpret_cast<float*>(q_tile);
        float *row_maxes = parts + KEY_WARPS * ROWS * V, *totals = row_maxes + KEY_WARPS * ROWS;
        __syncthreads(); // K and V have been read
        UNROLL
        for (int h = 0; h < 2; h++) {
            int row = lane / 4 + 8 * h;
            if (first_row + row < n_rows) {
                float* to = parts + (key_warp * ROWS + row) * V + column_warp * COLUMNS +
                            lane % 4 * 2;
                UNROLL
                for (int n = 0; n < COLUMNS / 8; n++) {
                    *reinterpret_cast<float2*>(to + 8 * n) =
                        float2{sums.of[n][2 * h], sums.of[n][2 * h + 1]};
                }
                if (column_warp == 0 && lane % 4 == 0) {
                    row_maxes[key_warp * ROWS + row] = sums.row_max[h];
                    totals[key_warp * ROWS + row] = sums.total[h];
                }
            }
        }
        __syncthreads();
        UNROLL_TIMES(1)
        for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
             row += FATTN_WARPS) {
            float row_max = -INFINITY_F, total = 0.0f, by[KEY_WARPS];
            UNROLL
            for (int k = 0; k < KEY_WARPS; k++) {
                row_max = fmaxf(row_max, row_maxes[k * ROWS + row]);
            }
            UNROLL
            for (int k = 0; k < KEY_WARPS; k++) {
                by[k] = rescale(row_maxes[k * ROWS + row], row_max);
                total += totals[k * ROWS + row] * by[k];
            }
            float factor = splits == 1 ? normalizer(first_row + row, row_max, total) : 1.0f;
            float* mine = partial(split);
            UNROLL_TIMES(1)
            for (int first = 0; first < V; first += 4 * WARP) {
                int column = first + 4 * lane;
                Float4 sum = {};
                if (V % (4 * WARP) == 0 || column < V) {
                    UNROLL
                    for (int k = 0; k < KEY_WARPS; k++) {
                        Float4 more = load_float4(reinterpret_cast<const u8*>(
                            parts + (k * ROWS + row) * V + column));
                        UNROLL
                        for (int j = 0; j < 4; j++) {
                            sum.of[j] += more.of[j] * by[k];
                        }
                    }
                    UNROLL
                    for (int j = 0; j < 4; j++) {
                        sum.of[j] *= factor;
                    }
                    if (splits > 1) {
                        store_float4(reinterpret_cast<u8*>(mine + row * V + column), sum);
                    }
                }
                if (splits == 1) {
                    store_result(first_row + row, column, sum);
                }
            }
            if (splits > 1 && lane == 0) {
                mine[ROWS * V + row] = row_max;
                mine[ROWS * V + ROWS + row] = total;
            }
        }
    }

    // Stores the result, or the partial result of the split, of a tile of many rows.
    DEVICE void finish_many_rows(const Accumulators& sums, int split) const {
        static_assert(ROW_WARPS == 1 || KEY_WARPS == 1, "each warp has rows of its own");
        int width = static_cast<int>(p.v.ne[0]), splits = static_cast<int>(p.splits);
        float* mine = partial(split);
        UNROLL
        for (int h = 0; h < 2; h++) {
            int row = row_warp * 16 + lane / 4 + 8 * h;
            if (key_warp == 0 && first_row + row < n_rows) {
                float factor = 1.0f;
                float* to = mine + row * V;
                if (splits == 1) {
                    factor = normalizer(first_row + row, sums.row_max[h], sums.total[h]);
                    to = result(first_row + row);
                } else if (column_warp == 0 && lane % 4 == 0) {
                    mine[ROWS * V + row] = sums.row_max[h];
                    mine[ROWS * V + ROWS + row] = sums.total[h];
                }
                UNROLL
                for (int n = 0; n < COLUMNS / 8; n++) {
                    int column = column_warp * COLUMNS + 8 * n + lane % 4 * 2;
                    if (column < width) {
                        to[column] = sums.of[n][2 * h] * factor;
                        if (KIND != KV_SPLIT_BF16 || column + 1 < width) {
                            to[column + 1] = sums.of[n][2 * h + 1] * factor;
                        }
                    }
                }
            }
        }
        if (splits == 1 && p.quants) {
            __syncthreads(); // all rows are stored
            for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows;
                 row += FATTN_WARPS) {
                for (int column = lane; column < width; column += WARP) {
                    quantize_result(first_row + row, column, result(first_row + row)[column]);
                }
            }
        }
    }

    // Waits for the launches before this one.
    DEVICE void run() {
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
};

template <int K, int V, int ROW_WARPS, int KEY_WARPS, int KEYS, int KIND>
DEVICE void fattn(const VgFattnParams& p) {
    DYNAMIC_SHARED(u16, shared);
    __shared__ FattnShared own;
    BlockIndex b = this_block();
    FlashAttention<K, V, ROW_WARPS, KEY_WARPS, KEYS, KIND>(p, b, shared, own).run();
}

} // namespace
