// Dot products of a lane: 64 elements of a row of quantised weights in shared memory with the q8
// activations that belong to them (layout: `q8_layout.cuh`).
//
// A lane has 64 neighbours as two blocks of 32. For Q6_K it has 16 elements of each quarter of half
// a block, whose bits are stored together. For repacked blocks of 32 the second block is 16 blocks
// behind the first, so that lanes copy and read contiguous bytes.
#pragma once
#include "dequantize.cuh"
#include "q8_layout.cuh"

namespace {

// Distance in blocks between a lane's two blocks of 32.
DEVICE constexpr int second_block_offset(int type) {
    return is_repacked(type) && type_traits(type).elements == 32 ? CHUNKS : 1;
}

// Whether each 16 elements have a scale.
DEVICE constexpr bool has_half_scales(int type) {
    type = base_type(type);
    return type == VG_Q2_K || type == VG_Q3_K || type == VG_Q6_K || type == VG_NVFP4 ||
           type == VG_IQ2_XXS || type == VG_IQ2_XS || type == VG_IQ2_S || type == VG_IQ1_S ||
           type == VG_IQ1_M;
}

// Whether the format has an offset (minimum).
DEVICE constexpr bool has_offset(int type) {
    type = base_type(type);
    return !(type == VG_Q8_0 || type == VG_IQ4_NL || type == VG_IQ4_XS || type == VG_MXFP4 ||
             type == VG_NVFP4 || type == VG_IQ2_XXS || type == VG_IQ2_XS || type == VG_IQ2_S ||
             type == VG_IQ3_XXS || type == VG_IQ3_S);
}

// Whether unpacked bytes exceed 127.
DEVICE constexpr bool has_unsigned_quants(int type) {
    return type == VG_Q4_K;
}

DEVICE float2 load_float2(const u8* at) {
    u64 both = *aligned<u64>(at);
    return {__uint_as_float(static_cast<u32>(both)), __uint_as_float(static_cast<u32>(both >> 32))};
}

// Byte offsets relative to the tile, which depend on the lane's chunk only and are the same for all
// tiles.
struct LaneOffsets {
    int chunk;
    u32 head, quants; // K-quants: its block, and its first quants; blocks of 32: the first block
    u32 scale;        // repacked: scale of its first block
    u32 selector;     // Q4_K, Q5_K: prmt selector of scale bytes; else PRMT_PAIR_SELECT
    u32 table[4];     // IQ4_NL, MXFP4: value of each nibble
};

// Whether nibbles index a table of values, in blocks of 32.
DEVICE constexpr bool has_table(int type) {
    return base_type(type) == VG_IQ4_NL || base_type(type) == VG_MXFP4;
}

// Whether values above and below 0 are multiplied apart, which takes fewer instructions for one
// column.
DEVICE constexpr bool splits_signs(int type, int columns) {
    return is_repacked(type) && has_table(type) && columns == 1;
}

template <int TYPE, int COLUMNS> DEVICE LaneOffsets lane_offsets_of(int chunk) {
    LaneOffsets it = {chunk, 0, 0, 0, 0, {}};
    it.head = chunk / 4 * quant_bytes(TYPE), it.scale = chunk / 4 * scale_bytes(TYPE);
    if (second_block_offset(TYPE) == CHUNKS) {
        it.head = chunk * quant_bytes(TYPE), it.scale = chunk * scale_bytes(TYPE);
    } else if (has_table(TYPE)) {
        it.head = 2 * chunk * type_traits(TYPE).bytes;
    }
    if (has_table(TYPE)) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            it.table[i] = table_word<base_type(TYPE) == VG_MXFP4>(i);
        }
        if (splits_signs(TYPE, COLUMNS) && base_type(TYPE) == VG_IQ4_NL) { // magnitudes
            it.table[0] = 0x4153687fu, it.table[1] = 0x0a162331u;
        }
        it.selector = PRMT_PAIR_SELECT;
    } else if (TYPE == VG_Q4_K || TYPE == VG_Q5_K) {
        it.quants = it.head + (TYPE == VG_Q5_K ? 48 : 16) + chunk % 4 * 32;
        it.selector = chunk % 2 ? 0x7632 : 0x5410;
    } else if (base_type(TYPE) == VG_Q6_K) {
        it.quants = it.head + chunk / 2 % 2 * 64 + chunk % 2 * 16;
    }
    return it;
}

// The same, in registers that the compiler does not recompute.
template <int TYPE, int COLUMNS> DEVICE LaneOffsets opaque_lane_offsets(int chunk) {
    LaneOffsets it = lane_offsets_of<TYPE, COLUMNS>(chunk);
    it.scale = is_repacked(TYPE) ? opaque(it.scale) : 0;
    if (TYPE == VG_Q4_K || TYPE == VG_Q5_K || base_type(TYPE) == VG_Q6_K) {
        it.head = opaque(it.head), it.quants = opaque(it.quants);
        it.selector = base_type(TYPE) == VG_Q6_K ? 0 : opaque(it.selector);
    } else if (has_table(TYPE) || is_repacked(TYPE)) {
        it.head = opaque(it.head);
    }
    if (has_table(TYPE)) {
        // Adding a zero that the compiler does not know keeps it from reloading the constants at
        // each use. The other two words are immediate operands.
        u32 zero = static_cast<u32>(chunk) / CHUNKS;
        it.table[0] = opaque(it.table[0] + zero), it.table[2] = opaque(it.table[2] + zero);
        it.selector = opaque(it.selector + zero);
    }
    return it;
}

// A lane's elements in their memory format; specialisations keep them in registers.
template <int TYPE> struct Chunk {
    const VgCodebooks* grids;
    RowPtr tile;
    int chunk;
    u32 head, scale;

    // `tile` is the address of a tile of a row.
    DEVICE Chunk(const VgCodebooks* grids, const RowPtr& tile, const LaneOffsets& it)
        : grids(grids), tile(tile), chunk(it.chunk), head(it.head), scale(it.scale) {}

    DEVICE void unpack_block(int s, Unpacked& u) const {
        if (is_repacked(TYPE)) {
            const u8* at = tile.scales + scale + s * CHUNKS * scale_bytes(TYPE);
            unpack<TYPE, true>(grids, tile.quants + head + s * CHUNKS * quant_bytes(TYPE), 0, u,
                               at);
            return;
        }
        constexpr int SUBS = type_traits(TYPE).elements / 32;
        int block = 2 * chunk + s;
        unpack<TYPE, true>(grids, tile.quants + block / SUBS * type_traits(TYPE).bytes,
                           block % SUBS, u);
    }
};

// 6-bit scales and minima of two neighbouring sub-blocks of Q4_K or Q5_K: scales in the low bytes,
// minima in the high bytes.
struct ScaleMinK4 {
    float d, min;
    u32 bytes;

    DEVICE ScaleMinK4(const u8* tile, const LaneOffsets& it) {
        int4 head = load_int4(tile + it.head);
        d = to_float(f16{static_cast<u16>(head.x)});
        min = -to_float(f16{static_cast<u16>(static_cast<u32>(head.x) >> 16)});
        u32 third = static_cast<u32>(head.w), six = __byte_perm(head.y, head.z, it.selector);
        u32 fours = __byte_perm(third, third >> 4, it.selector) & 0x0f0f0f0fu;
        bytes = it.chunk % 4 < 2 ? six & 0x3f3f3f3fu : (six >> 2 & 0x30303030u) | fours;
    }
    DEVICE void scales(int s, float by, Unpacked& u) const {
        u32 scale = __byte_perm(bytes, 0, s ? 0x4441 : 0x4440),
            least = __byte_perm(bytes, 0, s ? 0x4443 : 0x4442);
        set_scales(u, d * by * static_cast<float>(scale), min * static_cast<float>(least));
    }
};

template <> struct Chunk<VG_Q4_K> {
    ScaleMinK4 scales;
    u32 q[8];

    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : scales(tile.quants, it) {
        load_words<8, 16, true>(tile.quants + it.quants, q);
    }
    // High nibbles are not shifted: they count sixteen times, which the scale compensates.
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = q[k] & (s ? 0xf0f0f0f0u : 0x0f0f0f0fu);
        }
        scales.scales(s, s ? 0.0625f : 1.0f, u);
    }
};

template <> struct Chunk<VG_Q5_K> {
    ScaleMinK4 scales;
    u32 q[8], qh[8];

    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : scales(tile.quants, it) {
        load_words<8, 16, true>(tile.quants + it.quants, q);
        load_words<8, 16, true>(tile.quants + it.head + 16, qh);
        UNROLL
        for (int k = 0; k < 8; k++) {
            qh[k] >>= it.chunk % 4 * 2;
        }
    }
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = (q[k] >> 4 * s & 0x0f0f0f0fu) | (qh[k] << (4 - s) & 0x10101010u);
        }
        scales.scales(s, 1.0f, u);
    }
};

// Q6_K: blocks are 2-byte aligned. A "block" here is two quarters of half a block, 16 elements
// each.
template <int TYPE> struct ChunkQ6K {
    u32 low[2][4], high[4], six[2];
    float d;

    DEVICE ChunkQ6K(const RowPtr& tile, const LaneOffsets& it) {
        constexpr int A = alignment_of(TYPE);
        const u8 *block = tile.quants + it.head, *quants = tile.quants + it.quants;
        int half = it.chunk / 2 % 2;
        load_words<4, A, true>(quants, low[0]);
        load_words<4, A, true>(quants + 32, low[1]);
        load_words<4, A, true>(quants + 128 - half * 32, high);
        if (is_repacked(TYPE)) {
            u64 eight = *aligned<u64>(block + 192 + half * 8) >> it.chunk % 2 * 8;
            six[0] = static_cast<u32>(eight), six[1] = static_cast<u32>(eight >> 32);
        } else {
            load_words_unaligned<2>(block + 192 + half * 8 + it.chunk % 2, six);
        }
        d = scale_of<TYPE>(block, tile.scales + it.scale);
    }
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u32 l = low[k / 4][k % 4], h = high[k % 4];
            if (s == 0) {
                u.words[k] = (l & 0x0f0f0f0fu) | (h << (k < 4 ? 4 : 2) & 0x30303030u);
            } else {
                u.words[k] = (l >> 4 & 0x0f0f0f0fu) | (h >> (k < 4 ? 0 : 2) & 0x30303030u);
            }
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            u.scale[h] = d * static_cast<float>(static_cast<signed char>(six[s] >> 16 * h));
            u.offset[h] = -32.0f * u.scale[h];
        }
    }
};

template <> struct Chunk<VG_Q6_K> : ChunkQ6K<VG_Q6_K> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : ChunkQ6K(tile, it) {}
};
template <> struct Chunk<VG_Q6_K | VG_REPACKED> : ChunkQ6K<VG_Q6_K | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : ChunkQ6K(tile, it) {}
};

// Two blocks of 32 whose nibbles index a table.
template <int TYPE> struct TableChunk {
    u32 q[2][4], table[4], selector;
    float scale[2];

    DEVICE TableChunk(const RowPtr& tile, const LaneOffsets& it) {
        UNROLL
        for (int s = 0; s < 2; s++) {
            const u8* at =
                tile.quants + it.head + s * second_block_offset(TYPE) * quant_bytes(TYPE);
            load_words<4, alignment_of(TYPE), true>(quants_of<TYPE>(at), q[s]);
            scale[s] = scale_of<TYPE>(at, tile.scales + it.scale +
                                              s * second_block_offset(TYPE) * scale_bytes(TYPE));
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            table[i] = it.table[i];
        }
        selector = it.selector;
    }
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (is_repacked(TYPE)) {
                lookup_8(table, selector, q[s][k], u.words + 2 * k);
            } else {
                lookup_lo_hi(table, selector, q[s][k], u.words + k, u.words + k + 4);
            }
        }
        set_scales(u, scale[s], 0.0f);
    }
};

template <> struct Chunk<VG_IQ4_NL> : TableChunk<VG_IQ4_NL> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : TableChunk(tile, it) {}
};
template <> struct Chunk<VG_MXFP4> : TableChunk<VG_MXFP4> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : TableChunk(tile, it) {}
};
template <> struct Chunk<VG_IQ4_NL | VG_REPACKED> : TableChunk<VG_IQ4_NL | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : TableChunk(tile, it) {}
};
template <> struct Chunk<VG_MXFP4 | VG_REPACKED> : TableChunk<VG_MXFP4 | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const RowPtr& tile, const LaneOffsets& it)
        : TableChunk(tile, it) {}
};

// The q8 activations of a chunk.
template <int TYPE> struct Activations {
    const u8 *quants, *scales; // address of the chunk, or of its first block
    int chunk;

    // 16 elements: half `h` of block `s`.
    DEVICE int4 part(int s, int h) const {
        constexpr int QUARTER = Q8_TILE / 4;
        if constexpr (second_block_offset(TYPE) == CHUNKS) {
            return load_int4(quants + s * CHUNKS / 2 * 16 + h * QUARTER);
        }
        if constexpr (base_type(TYPE) == VG_Q6_K) {
            return load_int4(quants + chunk % 2 * (QUARTER - 16) + s * 16 + h * 2 * QUARTER);
        }
        return load_int4(quants + (2 * s + h) * QUARTER);
    }

    // Scales of both blocks and sums, of halves if the format has half scales.
    DEVICE void factors(float (&factor)[2][2], float (&sum)[2][2]) const {
        constexpr u32 HALF_SUMS = Q8_TILE_SCALES / 2;
        if constexpr (second_block_offset(TYPE) == CHUNKS) {
            UNROLL
            for (int s = 0; s < 2; s++) {
                const u8* at = scales + s * CHUNKS / 2 * 16;
                factor[s][0] = factor[s][1] = *aligned<float>(at);
                sum[s][0] = sum[s][1] = has_offset(TYPE) ? *aligned<float>(at + 8) : 0.0f;
            }
        } else if constexpr (base_type(TYPE) == VG_Q6_K) {
            UNROLL
            for (int s = 0; s < 2; s++) {
                float2 f = load_float2(scales - chunk % 2 * 16 + 16 * s);
                float2 g = load_float2(scales + HALF_SUMS - chunk % 2 * 8 + 16 * s);
                factor[s][0] = f.x, factor[s][1] = f.y, sum[s][0] = g.x, sum[s][1] = g.y;
            }
        } else if constexpr (has_offset(TYPE) && !has_half_scales(TYPE)) {
            int4 both = load_int4(scales);
            factor[0][0] = factor[0][1] = __int_as_float(both.x),
            factor[1][0] = factor[1][1] = __int_as_float(both.y);
            sum[0][0] = sum[0][1] = __int_as_float(both.z),
            sum[1][0] = sum[1][1] = __int_as_float(both.w);
        } else {
            float2 f = load_float2(scales);
            int4 halves = {};
            if (has_offset(TYPE)) {
                halves = load_int4(scales + HALF_SUMS);
            }
            factor[0][0] = factor[0][1] = f.x, factor[1][0] = factor[1][1] = f.y;
            sum[0][0] = __int_as_float(halves.x), sum[1][0] = __int_as_float(halves.y);
            sum[0][1] = __int_as_float(halves.z), sum[1][1] = __int_as_float(halves.w);
        }
    }
};

// The q8 activations of a chunk, in registers.
template <int TYPE> struct LoadedActivations {
    int4 parts[2][2];
    float factor[2][2], sum[2][2];

    DEVICE void load(const Activations<TYPE>& x) {
        UNROLL
        for (int s = 0; s < 2; s++) {
            parts[s][0] = x.part(s, 0), parts[s][1] = x.part(s, 1);
        }
        x.factors(factor, sum);
    }
    DEVICE int4 part(int s, int h) const { return parts[s][h]; }
};

// dp4a; UNSIGNED: the first operand has unsigned bytes.
template <bool UNSIGNED> DEVICE int dp4a(u32 a, int b, int sum) {
    if (!UNSIGNED) {
        return __dp4a(static_cast<int>(a), b, sum);
    }
#ifdef VGPU_SHIM
    return shim::dp4a_u8_s8(a, b, sum);
#else
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
#endif
}

// Dot product of block `s` of table values with a column: values >= 0 and values < 0 apart.
template <int TYPE, class X> DEVICE float dot_split_signs(const TableChunk<TYPE>& it, const X& x,
                                                         int s,
                                                const float (&factor)[2][2]) {
    constexpr bool FP4 =
        base_type(TYPE) == VG_MXFP4; // FP4 has a sign bit; IQ4_NL values are sorted
    const u32 *small = it.table, *large = it.table + (FP4 ? 0 : 2);
    int4 low = x.part(s, 0), high = x.part(s, 1);
    const int columns[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int above = 0, below = 0;
    UNROLL
    for (int k = 0; k < 8; k++) {
        u32 first = it.q[s][k / 2] >> k % 2 * 16, second = first ^ 0x88888888u;
        u32 more = prmt_or_0(large[0], large[1], FP4 ? first : second);
        u32 less = prmt_or_0(small[0], small[1], FP4 ? second : first);
        above = __dp4a(static_cast<int>(more), columns[k], above),
        below = __dp4a(static_cast<int>(less), columns[k], below);
    }
    return factor[s][1] * (it.scale[s] * static_cast<float>(above - below));
}

// Dot product of an unpacked block with a column.
template <int TYPE, class X> DEVICE float dot_block(const Unpacked& u, const X& x, int s,
                                                    const float (&factor)[2][2], const float (&sum)[2][2]) {
    constexpr bool UNSIGNED = has_unsigned_quants(TYPE);
    int4 low = x.part(s, 0), high = x.part(s, 1);
    int a = dp4a<UNSIGNED>(u.words[0], low.x, 0);
    a = dp4a<UNSIGNED>(u.words[1], low.y, a);
    a = dp4a<UNSIGNED>(u.words[2], low.z, a);
    a = dp4a<UNSIGNED>(u.words[3], low.w, a);
    int b = dp4a<UNSIGNED>(u.words[4], high.x, has_half_scales(TYPE) ? 0 : a);
    b = dp4a<UNSIGNED>(u.words[5], high.y, b);
    b = dp4a<UNSIGNED>(u.words[6], high.z, b);
    b = dp4a<UNSIGNED>(u.words[7], high.w, b);
    float all = factor[s][1] * (u.scale[1] * static_cast<float>(b));
    if (has_half_scales(TYPE)) {
        all += factor[s][0] * (u.scale[0] * static_cast<float>(a));
    }
    if (has_offset(TYPE)) {
        all += u.offset[0] * sum[s][0];
        if (has_half_scales(TYPE)) {
            all += u.offset[1] * sum[s][1];
        }
    }
    return all;
}

} // namespace
