// FLASH_ATTN_EXT on tensor cores: a block has a tile of queries and goes along the keys, a tile of them at a time.
//
// Rows of a tile are pairs of a token and a query head, of all heads that share a head of keys, so that few tokens fill
// the 16 rows of a product of fragments, and keys and values are read once for all those heads. Scores, the running
// maximum and sum of soft-max, and the weighted sums of values stay in registers; they are f32. Keys and values are
// halves (`BRAIN`: bfloat16) in shared memory: copied there as they are while the arithmetic goes on, or (`RAW`) copied
// as the bytes of a quantised type and unpacked from there. What halves cannot hold or lies in unusual ways (`PAIRS`), of any
// type, becomes pairs of bfloat16, which are off by 2^-16: three products instead of one, and keys and values of a tile have the
// same place one after the other. A tile that the mask hides altogether is not read.
//
// Where tiles of queries alone would not fill the device, several blocks share the keys of one (`splits`). Each leaves its
// sums in memory; the last to finish merges them.
#pragma once
#include "dequantize.cuh"
#include "quantize_q8.cuh"

namespace {

constexpr int ATTEND_WARPS = 4, ATTEND_THREADS = ATTEND_WARPS * WARP;

// What lies in memory, and what is multiplied: halves, bfloat16, halves from any of some types, or pairs of bfloat16 from
// anything.
enum Kind { HALVES, BRAIN_HALVES, RAW, PAIRS };

// What the mask does with a tile of keys.
enum State { HIDDEN, MIXED, SHOWN };

// Tiles of keys of a block whose states it finds out by itself; beyond those all count as mixed.
constexpr int MOST_STATES = 1024;

constexpr float LOG2_E = 1.44269504f;

// What a block has in shared memory beside tiles.
struct AttendOwn {
    u8 states[MOST_STATES];
    u32 last;
};

// What the mask does with a tile of keys: `first` to `last` are the tokens of the rows.
DEVICE int state_of_tile(const u8* mask, i64 row_bytes, int first, int last, int key, int end) {
    u32 found = 0; // 1: something is not hidden; 2: something is not 0
    for (int token = first; token <= last; token++) {
        for (int k = key + static_cast<int>(threadIdx.x % WARP); k < end; k += WARP) {
            u32 bits = *reinterpret_cast<const u16*>(mask + token * row_bytes + 2 * k);
            found |= (bits != 0xfc00u ? 1 : 0) | (bits & 0x7fffu ? 2 : 0);
        }
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        found |= __shfl_xor_sync(0xffffffffu, found, step);
    }
    return !(found & 1) ? HIDDEN : found & 2 ? MIXED : SHOWN;
}

// What a token's row of the mask has for a key, an even one, and for the next if there is one.
DEVICE void mask_of_two(const u8* mask, int key, int n_keys, float* bias) {
    const u8* at = mask + 2 * key;
    u32 both = key + 1 < n_keys ? *aligned<u32>(at) : *aligned<u16>(at);
    bias[0] = to_float(f16{static_cast<u16>(both)});
    bias[1] = to_float(f16{static_cast<u16>(both >> 16)});
}

// Eight numbers as pairs.
DEVICE void put_pairs(const float* x, u16* first, u16* rest) {
    u32 a[4], b[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        split(x[2 * i], x[2 * i + 1], a[i], b[i]);
    }
    auto four = [](const u32* words) {
        return int4{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                    static_cast<int>(words[3])};
    };
    *reinterpret_cast<int4*>(first) = four(a);
    *reinterpret_cast<int4*>(rest) = four(b);
}

// The 32 elements of a block as pairs.
template <int TYPE> DEVICE void split_block(const u8* block, u16* first, u16* rest) {
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
        put_pairs(x, first + 8 * i, rest + 8 * i);
    }
}

// The 32 elements of a block as halves.
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
            words[j] = two_halves<false>(low * scale + offset, high * scale + offset);
        }
        to[i] = int4{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                     static_cast<int>(words[3])};
    }
}

// The factor that brings sums that belong to the maximum `from` to the maximum `to`, which is not smaller. Sums with no
// maximum are 0, or not a number, which they stay.
DEVICE float rescale(float from, float to) { return from == -INFINITY_F ? 0.0f : fast_exp2((from - to) * LOG2_E); }

// A tile of rows by a tile of keys, shared out among `ROW_WARPS` times `KEY_WARPS` warps, each with 16 rows; what warps
// are left over share the columns of the values. `K` and `V` are the widths of heads, filled up with zeros.
template <int K, int V, int ROW_WARPS, int KEY_WARPS, int KEYS, int KIND> struct Attention {
    static constexpr bool BRAIN = KIND == BRAIN_HALVES || KIND == PAIRS;
    static constexpr int PLANES = KIND == PAIRS ? 2 : 1; // of tiles in shared memory
    static constexpr int ROWS = 16 * ROW_WARPS, COLUMN_WARPS = ATTEND_WARPS / (ROW_WARPS * KEY_WARPS);
    static constexpr int WARP_KEYS = KEYS / KEY_WARPS, COLUMNS = V / COLUMN_WARPS;
    // Halves from row to row: what a warp reads of eight rows lies in different banks.
    static constexpr int K_STRIDE = K + 8, V_STRIDE = V + 8;
    static_assert(WARP_KEYS % 16 == 0 && COLUMNS % 16 == 0 && K % 16 == 0, "products of fragments are 16 wide");

    // What a thread has of the sums of a warp's 16 rows: of rows lane / 4 and 8 further.
    struct Sums {
        float of[COLUMNS / 8][4];
        float most[2], total[2];
    };

    const VgFattnParams& p;
    const Blocks& b;
    AttendOwn& own;
    u16 *q_tile, *k_tile, *v_tile;
    u8 *raw_keys, *raw_values;
    const u8 *keys, *values;
    int lane, row_warp, key_warp, column_warp;
    int n_keys, n_rows, first_row, head, sequence;

    DEVICE Attention(const VgFattnParams& params, const Blocks& blocks, u16* shared, AttendOwn& own)
        : p(params), b(blocks), own(own) {
        q_tile = shared;
        k_tile = q_tile + PLANES * ROWS * K_STRIDE;
        v_tile = KIND == PAIRS ? k_tile : k_tile + KEYS * K_STRIDE;
        raw_keys = reinterpret_cast<u8*>(v_tile + KEYS * V_STRIDE);
        raw_values = raw_keys + KEYS * static_cast<int>(p.raw);
        int warp = threadIdx.x / WARP;
        lane = threadIdx.x % WARP;
        row_warp = warp % ROW_WARPS;
        key_warp = warp / ROW_WARPS % KEY_WARPS;
        column_warp = warp / (ROW_WARPS * KEY_WARPS);
        n_keys = static_cast<int>(p.k.ne[1]);
        n_rows = static_cast<int>(p.q.ne[1]) * static_cast<int>(p.group);
        // The last tile first: of causal masks it has most to do.
        first_row = static_cast<int>(b.nx - 1 - b.x) * ROWS;
        head = static_cast<int>(b.y * p.group);
        sequence = static_cast<int>(b.z / p.splits);
        auto shared_by = [&](const View& v) {
            return address(v, Index{{0, 0, head / (p.q.ne[2] / v.ne[2]), sequence / (p.q.ne[3] / v.ne[3])}});
        };
        keys = shared_by(p.k);
        values = shared_by(p.v);
    }

    DEVICE int token_of(int row) const { return (row < n_rows ? row : n_rows - 1) / static_cast<int>(p.group); }
    DEVICE int head_of(int row) const { return head + row % static_cast<int>(p.group); }

    // The mask of the heads, and which mask of all that is.
    DEVICE const u8* mask() const {
        i64 i2 = head % p.mask.ne[2], i3 = sequence % p.mask.ne[3];
        return address(p.mask, Index{{0, 0, i2, i3}});
    }
    DEVICE i64 index_of_mask() const { return sequence % p.mask.ne[3] * p.mask.ne[2] + head % p.mask.ne[2]; }

    // Row `key` of a tile in memory: beyond the last, the last again.
    DEVICE const u8* row_at(const View& v, const u8* base, int tile, int key) const {
        int at = tile * KEYS + key;
        return base + (at < n_keys ? at : n_keys - 1) * v.nb[1];
    }

    // Begins to copy a tile of keys or values to `to`, or its bytes to `raw`.
    DEVICE void fetch(const View& v, const u8* base, int tile, u16* to, int stride, u8* raw) const {
        if constexpr (KIND == RAW) {
            int bytes = static_cast<int>(v.ne[0] / geometry(v.type).elements) * geometry(v.type).bytes;
            int pieces = (bytes + 15 + 15) / 16; // at most, wherever the row begins
            for (int i = threadIdx.x; i < KEYS * pieces; i += ATTEND_THREADS) {
                int key = i / pieces, piece = i - key * pieces;
                const u8* row = row_at(v, base, tile, key);
                int lead = static_cast<int>(reinterpret_cast<u64>(row) & 15);
                if (16 * piece < lead + bytes) {
                    copy_async(raw + key * static_cast<int>(p.raw) + 16 * piece, row - lead + 16 * piece);
                }
            }
        } else {
            int pieces = static_cast<int>(v.ne[0]) / 8;
            for (int i = threadIdx.x; i < KEYS * pieces; i += ATTEND_THREADS) {
                int key = i / pieces, piece = i - key * pieces;
                copy_async(to + key * stride + 8 * piece, row_at(v, base, tile, key) + 16 * piece);
            }
        }
        commit_async();
    }

    // Makes halves of the bytes in `raw`.
    DEVICE void unpack_tile(const View& v, const u8* base, int tile, u16* to, int stride, const u8* raw) const {
        Geometry size = geometry(v.type);
        int step = size.elements == 1 ? 8 : size.elements, blocks = static_cast<int>(v.ne[0]) / step;
        int bytes = size.bytes * step / size.elements;
        for (int i = threadIdx.x; i < KEYS * blocks; i += ATTEND_THREADS) {
            int key = i / blocks, block = i - key * blocks;
            int lead = static_cast<int>(reinterpret_cast<u64>(row_at(v, base, tile, key)) & 15);
            const u8* from = raw + key * static_cast<int>(p.raw) + lead + block * bytes;
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
                    at[j] = static_cast<u16>(u16_at(from + 2 * j));
                }
            }
        }
    }

    // Makes pairs of a tile of keys or values, and zeros behind the width of heads, up to `WIDTH`.
    template <int WIDTH> DEVICE void split_tile(const View& v, const u8* base, int tile, u16* to, int stride) const {
        u16* rest = to + KEYS * stride;
        int width = static_cast<int>(v.ne[0]);
        bool floats = v.type == VG_F32 || v.type == VG_F16 || v.type == VG_BF16;
        auto lies_at = [&](int step, int multiple) {
            return v.nb[0] == step && (reinterpret_cast<u64>(base) | static_cast<u64>(v.nb[1])) % multiple == 0;
        };
        if (floats && lies_at(v.type == VG_F32 ? 4 : 2, 16)) {
            UNROLL_BY_4
            for (int i = threadIdx.x; i < KEYS * (WIDTH / 8); i += ATTEND_THREADS) {
                int key = i / (WIDTH / 8), at = i % (WIDTH / 8) * 8, place = key * stride + at;
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
                        x[4 * h + 2] = __uint_as_float(four.z), x[4 * h + 3] = __uint_as_float(four.w);
                    }
                } else {
                    int4 four = *aligned<int4>(row + 2 * at);
                    u32 words[4] = {static_cast<u32>(four.x), static_cast<u32>(four.y), static_cast<u32>(four.z),
                                    static_cast<u32>(four.w)};
                    UNROLL
                    for (int j = 0; j < 8; j++) {
                        u16 bits = static_cast<u16>(words[j / 2] >> (j % 2 * 16));
                        x[j] = v.type == VG_F16 ? to_float(f16{bits}) : __uint_as_float(static_cast<u32>(bits) << 16);
                    }
                }
                put_pairs(x, to + place, rest + place);
            }
            return;
        }
        int bytes = geometry(v.type).bytes;
        bool blocks = v.type == VG_Q4_0 || v.type == VG_Q5_0 || v.type == VG_Q8_0 || v.type == VG_IQ4_NL
                          ? lies_at(bytes, 2)
                          : (v.type == VG_Q4_1 || v.type == VG_Q5_1) && lies_at(bytes, 4);
        if (blocks) {
            for (int i = threadIdx.x; i < KEYS * (WIDTH / 32); i += ATTEND_THREADS) {
                int key = i / (WIDTH / 32), block = i % (WIDTH / 32), place = key * stride + block * 32;
                const u8* from = row_at(v, base, tile, key) + block * bytes;
                if (block * 32 >= width) {
                    for (int j = 0; j < 32; j++) {
                        to[place + j] = rest[place + j] = 0;
                    }
                    continue;
                }
                switch (v.type) {
                case VG_Q4_0: split_block<VG_Q4_0>(from, to + place, rest + place); break;
                case VG_Q4_1: split_block<VG_Q4_1>(from, to + place, rest + place); break;
                case VG_Q5_0: split_block<VG_Q5_0>(from, to + place, rest + place); break;
                case VG_Q5_1: split_block<VG_Q5_1>(from, to + place, rest + place); break;
                case VG_Q8_0: split_block<VG_Q8_0>(from, to + place, rest + place); break;
                default: split_block<VG_IQ4_NL>(from, to + place, rest + place);
                }
            }
            return;
        }
        const VgCodebooks* books = codebooks(p.codebooks);
        for (int i = threadIdx.x; i < KEYS * WIDTH; i += ATTEND_THREADS) {
            int key = i / WIDTH, at = i % WIDTH, place = key * stride + at;
            float x = at < width ? row_value(v.type, books, row_at(v, base, tile, key), v.nb[0], at) : 0.0f;
            u32 first, its_rest;
            split(x, 0.0f, first, its_rest);
            to[place] = static_cast<u16>(first);
            rest[place] = static_cast<u16>(its_rest);
        }
    }

    // The queries, times the scale, as halves; zeros in rows that are none and behind the width of heads, there also in
    // the tiles of keys and values.
    DEVICE void load_queries() const {
        int width = static_cast<int>(p.k.ne[0]), value_width = static_cast<int>(p.v.ne[0]);
        for (int i = threadIdx.x; i < ROWS * (K / 2); i += ATTEND_THREADS) {
            int row = i / (K / 2), column = i % (K / 2) * 2;
            float x = 0.0f, y = 0.0f;
            if (first_row + row < n_rows && column < width) {
                i64 token = token_of(first_row + row), its_head = head_of(first_row + row);
                const float* q = reinterpret_cast<const float*>(address(p.q, Index{{column, token, its_head, sequence}}));
                x = q[0] * p.scale;
                y = KIND == PAIRS && column + 1 == width ? 0.0f : q[1] * p.scale; // others have whole eights
            }
            u32* to = reinterpret_cast<u32*>(q_tile + row * K_STRIDE + column);
            if constexpr (KIND == PAIRS) {
                split(x, y, *to, to[ROWS * K_STRIDE / 2]);
            } else {
                *to = two_halves<BRAIN>(x, y);
            }
        }
        if constexpr (KIND != PAIRS) { // whose tiles bring zeros of their own
            for (int i = threadIdx.x; i < KEYS * (K - width); i += ATTEND_THREADS) {
                k_tile[i / (K - width) * K_STRIDE + width + i % (K - width)] = 0;
            }
            for (int i = threadIdx.x; i < KEYS * (V - value_width); i += ATTEND_THREADS) {
                v_tile[i / (V - value_width) * V_STRIDE + value_width + i % (V - value_width)] = 0;
            }
        }
    }

    // Scores of the warp's rows and keys.
    DEVICE void multiply_keys(float (*scores)[4]) const {
        const u16* q = q_tile + (row_warp * 16 + lane % 16) * K_STRIDE + lane / 16 * 8;
        const u16* k = k_tile + (key_warp * WARP_KEYS + lane / 16 * 8 + lane % 8) * K_STRIDE + lane / 8 % 2 * 8;
        UNROLL
        for (int i = 0; i < K; i += 16) {
            u32 a[PLANES][4];
            UNROLL
            for (int plane = 0; plane < PLANES; plane++) {
                load_matrices<false>(a[plane], q + plane * ROWS * K_STRIDE + i);
            }
            UNROLL
            for (int j = 0; j < WARP_KEYS / 16; j++) {
                u32 b[4];
                load_matrices<false>(b, k + j * 16 * K_STRIDE + i);
                multiply_fragments<BRAIN>(scores[2 * j], a[0], b);
                multiply_fragments<BRAIN>(scores[2 * j + 1], a[0], b + 2);
                if constexpr (KIND == PAIRS) {
                    multiply_fragments<BRAIN>(scores[2 * j], a[1], b);
                    multiply_fragments<BRAIN>(scores[2 * j + 1], a[1], b + 2);
                    load_matrices<false>(b, k + (KEYS + j * 16) * K_STRIDE + i);
                    multiply_fragments<BRAIN>(scores[2 * j], a[0], b);
                    multiply_fragments<BRAIN>(scores[2 * j + 1], a[0], b + 2);
                }
            }
        }
    }

    // Adds the mask to scores. Returns which keys any row of the warp sees, of those that the lane has: two bits for each
    // eight keys.
    DEVICE u32 hide(float (*scores)[4], int tile, int state, const u8* const* masks, const float* slopes) const {
        u32 seen = 0;
        UNROLL
        for (int j = 0; j < WARP_KEYS / 8; j++) {
            int key = tile * KEYS + key_warp * WARP_KEYS + 8 * j + lane % 4 * 2;
            UNROLL
            for (int h = 0; h < 2; h++) {
                float bias[2] = {0.0f, 0.0f};
                if (state == MIXED && key < n_keys) {
                    mask_of_two(masks[h], key, n_keys, bias);
                }
                UNROLL
                for (int e = 0; e < 2; e++) {
                    bool hidden = key + e >= n_keys || bias[e] == -INFINITY_F;
                    float& score = scores[j][2 * h + e];
                    score = hidden ? -INFINITY_F : score + slopes[h] * bias[e];
                    seen |= (hidden ? 0u : 1u) << (2 * j + e);
                }
            }
        }
        UNROLL
        for (int step = 4; step < WARP; step *= 2) {
            seen |= __shfl_xor_sync(0xffffffffu, seen, step);
        }
        return seen;
    }

    // Makes weights of scores, and brings the sums to the new maximum.
    DEVICE void soft_max(float (*scores)[4], Sums& sums) const {
        UNROLL
        for (int h = 0; h < 2; h++) {
            float most = sums.most[h];
            UNROLL
            for (int j = 0; j < WARP_KEYS / 8; j++) {
                most = fmaxf(most, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float shrink = rescale(sums.most[h], most), base = most == -INFINITY_F ? 0.0f : most * LOG2_E;
            sums.most[h] = most;
            sums.total[h] *= shrink;
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
                sums.of[n][2 * h] *= shrink;
                sums.of[n][2 * h + 1] *= shrink;
            }
        }
    }

    // Adds the weighted values. What no row sees may be anything, and counts as 0.
    DEVICE void multiply_values(const float (*weights)[4], u32 seen, Sums& sums) const {
        const u16* v = v_tile + (key_warp * WARP_KEYS + lane % 16) * V_STRIDE + column_warp * COLUMNS + lane / 16 * 8;
        UNROLL
        for (int i = 0; i < WARP_KEYS / 16; i++) {
            const float *left = weights[2 * i], *right = weights[2 * i + 1];
            u32 a[4], rest[4];
            if constexpr (KIND == PAIRS) {
                split(left[0], left[1], a[0], rest[0]), split(left[2], left[3], a[1], rest[1]);
                split(right[0], right[1], a[2], rest[2]), split(right[2], right[3], a[3], rest[3]);
            } else {
                a[0] = two_halves<BRAIN>(left[0], left[1]), a[1] = two_halves<BRAIN>(left[2], left[3]);
                a[2] = two_halves<BRAIN>(right[0], right[1]), a[3] = two_halves<BRAIN>(right[2], right[3]);
            }
            auto of_two = [&](u32 bits) { return (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u); };
            u32 low = of_two(seen >> 4 * i), high = of_two(seen >> (4 * i + 2));
            UNROLL
            for (int n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                load_matrices<true>(b, v + i * 16 * V_STRIDE + 16 * n);
                b[0] &= low, b[1] &= high, b[2] &= low, b[3] &= high;
                multiply_fragments<BRAIN>(sums.of[2 * n], a, b);
                multiply_fragments<BRAIN>(sums.of[2 * n + 1], a, b + 2);
                if constexpr (KIND == PAIRS) {
                    multiply_fragments<BRAIN>(sums.of[2 * n], rest, b);
                    multiply_fragments<BRAIN>(sums.of[2 * n + 1], rest, b + 2);
                    load_matrices<true>(b, v + (KEYS + i * 16) * V_STRIDE + 16 * n);
                    b[0] &= low, b[1] &= high, b[2] &= low, b[3] &= high;
                    multiply_fragments<BRAIN>(sums.of[2 * n], a, b);
                    multiply_fragments<BRAIN>(sums.of[2 * n + 1], a, b + 2);
                }
            }
        }
    }

    // Adds the sums of all warps with the same rows and columns into those of the first.
    DEVICE void merge_warps(Sums& sums, float* memory) const {
        constexpr int SLOT = (COLUMNS / 2 + 4) * WARP;
        UNROLL
        for (int width = KEY_WARPS / 2; width > 0; width /= 2) {
            float* slot = memory + ((key_warp % width * ROW_WARPS + row_warp) * COLUMN_WARPS + column_warp) * SLOT + lane;
            __syncthreads();
            if (key_warp >= width && key_warp < 2 * width) {
                UNROLL
                for (int i = 0; i < COLUMNS / 2; i++) {
                    slot[i * WARP] = sums.of[i / 4][i % 4];
                }
                UNROLL
                for (int h = 0; h < 2; h++) {
                    slot[(COLUMNS / 2 + h) * WARP] = sums.most[h];
                    slot[(COLUMNS / 2 + 2 + h) * WARP] = sums.total[h];
                }
            }
            __syncthreads();
            if (key_warp < width) {
                float mine[2], its[2];
                UNROLL
                for (int h = 0; h < 2; h++) {
                    float most = slot[(COLUMNS / 2 + h) * WARP], larger = fmaxf(most, sums.most[h]);
                    mine[h] = rescale(sums.most[h], larger), its[h] = rescale(most, larger);
                    sums.most[h] = larger;
                    sums.total[h] = sums.total[h] * mine[h] + slot[(COLUMNS / 2 + 2 + h) * WARP] * its[h];
                }
                UNROLL
                for (int i = 0; i < COLUMNS / 2; i++) {
                    int h = i % 4 / 2;
                    sums.of[i / 4][i % 4] = sums.of[i / 4][i % 4] * mine[h] + slot[i * WARP] * its[h];
                }
            }
        }
    }

    // What the sums of a row with this maximum and total are to be multiplied with.
    DEVICE float share(int row, float most, float total) const {
        float factor = 1.0f;
        if (p.sinks.data) {
            float sink = reinterpret_cast<const float*>(p.sinks.data)[head_of(row)];
            float larger = fmaxf(most, sink);
            factor = rescale(most, larger);
            total = total * factor + fast_exp2((sink - larger) * LOG2_E);
        }
        return total == 0.0f ? 0.0f : factor / total; // a row that sees nothing is 0
    }

    DEVICE float* result(int row) const {
        return reinterpret_cast<float*>(address(p.dst, Index{{0, head_of(row), token_of(row), sequence}}));
    }

    // Where the block leaves, or finds, sums of a split: V columns of each row, then maximum and total of each.
    static constexpr int PART = ROWS * (V + 2);
    DEVICE i64 item() const { return (static_cast<i64>(sequence) * b.ny + b.y) * b.nx + b.x; }
    DEVICE float* part(int split) const { return reinterpret_cast<float*>(p.parts) + (item() * p.splits + split) * PART; }

    // Leaves 32 columns of a row, of which each lane has one, rounded for products, too.
    DEVICE void round_result(int row, int column, float x) const {
        i64 token = static_cast<i64>(sequence) * p.q.ne[1] + token_of(row), width = p.v.ne[0];
        u32 block = static_cast<u32>(head_of(row) * width + column) / 32;
        round_block(p.quants, p.scales, token, rounded_pieces(p.q.ne[2] * width), block, x);
    }

    // Merges the parts of all splits: a warp for each row.
    DEVICE void merge_parts() const {
        int width = static_cast<int>(p.v.ne[0]), splits = static_cast<int>(p.splits);
        const float* parts = part(0);
        for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows; row += ATTEND_WARPS) {
            const float *mosts = parts + ROWS * V + row, *totals = mosts + ROWS;
            float most = -INFINITY_F, total = 0.0f;
            for (int s = lane; s < splits; s += WARP) {
                most = fmaxf(most, mosts[s * PART]);
            }
            most = warp_reduce<Largest>(most);
            for (int s = lane; s < splits; s += WARP) {
                total += totals[s * PART] * rescale(mosts[s * PART], most);
            }
            total = warp_reduce<Sum>(total);
            float factor = share(first_row + row, most, total);
            for (int column = lane; column < width; column += WARP) {
                float sum = 0.0f;
                UNROLL_BY_4
                for (int s = 0; s < splits; s++) {
                    sum += parts[s * PART + row * V + column] * rescale(mosts[s * PART], most);
                }
                sum *= factor;
                result(first_row + row)[column] = sum;
                if (p.quants) {
                    round_result(first_row + row, column, sum);
                }
            }
        }
    }

    DEVICE void run() {
        int tiles = (n_keys + KEYS - 1) / KEYS, splits = static_cast<int>(p.splits);
        int each = (tiles + splits - 1) / splits, split = static_cast<int>(b.z % p.splits);
        int begin = split * each, end = begin + each < tiles ? begin + each : tiles;

        // What the mask does with a tile: known beforehand, or found out now.
        const u8* known = nullptr;
        if (p.mask.data && p.states) {
            i64 index = index_of_mask() * b.nx + b.nx - 1 - b.x;
            known = reinterpret_cast<const u8*>(p.states) + index * tiles;
        }
        auto state_of = [&](int tile) -> int {
            if (!p.mask.data) {
                return SHOWN;
            }
            if (known) {
                return known[tile];
            }
            return tile - begin < MOST_STATES ? static_cast<int>(own.states[tile - begin]) : static_cast<int>(MIXED);
        };

        // Of nothing, too: groups are counted.
        auto fetch_keys = [&](int tile) {
            if (tile < end) {
                fetch(p.k, keys, tile, k_tile, K_STRIDE, raw_keys);
            } else {
                commit_async();
            }
        };
        auto fetch_values = [&](int tile) {
            if (tile < end) {
                fetch(p.v, values, tile, v_tile, V_STRIDE, raw_values);
            }
        };
        if (KIND != PAIRS && begin < end) {
            fetch_keys(begin);
            fetch_values(begin);
        }
        load_queries();
        if (p.mask.data && !known) {
            int beyond = end - begin < MOST_STATES ? end : begin + MOST_STATES;
            int first = token_of(first_row), last_token = token_of(first_row + ROWS - 1);
            for (int tile = begin + static_cast<int>(threadIdx.x) / WARP; tile < beyond; tile += ATTEND_WARPS) {
                int to = (tile + 1) * KEYS < n_keys ? (tile + 1) * KEYS : n_keys;
                int state = state_of_tile(mask(), p.mask.nb[1], first, last_token, tile * KEYS, to);
                if (lane == 0) {
                    own.states[tile - begin] = static_cast<u8>(state);
                }
            }
        }

        Sums sums = {};
        sums.most[0] = sums.most[1] = -INFINITY_F;
        for (int tile = begin, next; tile < end; tile = next) {
            wait_async<1>();
            __syncthreads(); // the keys are there; pairs: nobody reads the values any more
            next = tile + 1;
            while (next < end && state_of(next) == HIDDEN) {
                next++;
            }
            if constexpr (KIND == RAW) {
                unpack_tile(p.k, keys, tile, k_tile, K_STRIDE, raw_keys);
                __syncthreads();
                fetch_keys(next);
            }
            if constexpr (KIND == PAIRS) {
                split_tile<K>(p.k, keys, tile, k_tile, K_STRIDE);
                __syncthreads();
            }
            float scores[WARP_KEYS / 8][4] = {};
            multiply_keys(scores);
            if constexpr (KIND != RAW && KIND != PAIRS) {
                __syncthreads(); // the keys may be written over
                fetch_keys(next);
            }
            if (p.cap != 0.0f) {
                UNROLL
                for (int i = 0; i < WARP_KEYS / 2; i++) {
                    scores[i / 4][i % 4] = p.cap * tanhf(scores[i / 4][i % 4]);
                }
            }
            int state = state_of(tile);
            u32 seen = 0xffffffffu;
            if (state != SHOWN || (tile + 1) * KEYS > n_keys) {
                // Looked up for each such tile, of which there are few, and not kept beside the sums.
                const u8* masks[2] = {nullptr, nullptr};
                float slopes[2];
                UNROLL
                for (int h = 0; h < 2; h++) {
                    int row = first_row + row_warp * 16 + lane / 4 + 8 * h;
                    slopes[h] = alibi_slope(p.max_bias, p.heads_log2, static_cast<u32>(head_of(row)));
                    if (p.mask.data) {
                        masks[h] = mask() + token_of(row) * p.mask.nb[1];
                    }
                }
                seen = hide(scores, tile, state == SHOWN ? SHOWN : MIXED, masks, slopes);
            }
            soft_max(scores, sums);
            wait_async<1>();
            __syncthreads(); // the values are there; pairs: nobody reads the keys any more
            if constexpr (KIND == PAIRS) {
                split_tile<V>(p.v, values, tile, v_tile, V_STRIDE);
                __syncthreads();
            }
            if constexpr (KIND == RAW) {
                unpack_tile(p.v, values, tile, v_tile, V_STRIDE, raw_values);
                __syncthreads();
                fetch_values(next);
            }
            multiply_values(scores, seen, sums);
            if constexpr (KIND != RAW && KIND != PAIRS) {
                __syncthreads(); // the values may be written over
                fetch_values(next);
            }
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            sums.total[h] += __shfl_xor_sync(0xffffffffu, sums.total[h], 1);
            sums.total[h] += __shfl_xor_sync(0xffffffffu, sums.total[h], 2);
        }
        wait_async<0>();
        merge_warps(sums, reinterpret_cast<float*>(q_tile));

        int width = static_cast<int>(p.v.ne[0]);
        float* mine = part(split);
        UNROLL
        for (int h = 0; h < 2; h++) {
            int row = row_warp * 16 + lane / 4 + 8 * h;
            if (key_warp == 0 && first_row + row < n_rows) {
                float factor = 1.0f;
                float* to = mine + row * V;
                if (splits == 1) {
                    factor = share(first_row + row, sums.most[h], sums.total[h]);
                    to = result(first_row + row);
                } else if (column_warp == 0 && lane % 4 == 0) {
                    mine[ROWS * V + row] = sums.most[h];
                    mine[ROWS * V + ROWS + row] = sums.total[h];
                }
                UNROLL
                for (int n = 0; n < COLUMNS / 8; n++) {
                    int column = column_warp * COLUMNS + 8 * n + lane % 4 * 2;
                    if (column < width) {
                        to[column] = sums.of[n][2 * h] * factor;
                        if (KIND != PAIRS || column + 1 < width) {
                            to[column + 1] = sums.of[n][2 * h + 1] * factor;
                        }
                    }
                }
            }
        }
        if (splits == 1 && p.quants) {
            __syncthreads(); // the rows are written
            for (int row = threadIdx.x / WARP; row < ROWS && first_row + row < n_rows; row += ATTEND_WARPS) {
                for (int column = lane; column < width; column += WARP) {
                    round_result(first_row + row, column, result(first_row + row)[column]);
                }
            }
        }
        if (splits > 1) {
            // What a block has written is seen by whoever sees it counted.
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                u32* count = reinterpret_cast<u32*>(p.counters) + item();
                own.last = atomicAdd(count, 1u) == p.splits - 1;
                if (own.last) {
                    *count = 0; // for the next launch
                }
            }
            __syncthreads();
            if (own.last) {
                __threadfence();
                merge_parts();
            }
        }
    }
};

template <int K, int V, int ROW_WARPS, int KEY_WARPS, int KEYS, int KIND> DEVICE void attend(const VgFattnParams& p) {
    DYNAMIC_SHARED(u16, shared);
    __shared__ AttendOwn own;
    Blocks b = this_block();
    Attention<K, V, ROW_WARPS, KEY_WARPS, KEYS, KIND>(p, b, shared, own).run();
}

} // namespace
