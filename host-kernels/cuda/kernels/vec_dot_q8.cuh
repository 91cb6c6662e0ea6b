// What a lane multiplies at a time of a row of quantised weights: 64 elements, in shared memory, and of activations those that
// belong to them (`q8_layout.cuh` says how they lie).
//
// A lane has 64 neighbours, as two blocks of 32, but of Q6_K: there it has 16 of each quarter of half a block, as their bits
// lie together. Of blocks of 32 in planes the second one is 16 further than the first, so that what lanes copy, and read, at a time
// lies together.
#pragma once
#include "dequantize.cuh"
#include "q8_layout.cuh"

namespace {

// How many blocks of 32 the second of a lane's is further.
DEVICE constexpr int second_of(int type) { return is_planes(type) && geometry(type).elements == 32 ? CHUNKS : 1; }

// Whether halves of 32 elements have scales of their own.
DEVICE constexpr bool has_halves(int type) {
    type = plain(type);
    return type == VG_Q2_K || type == VG_Q3_K || type == VG_Q6_K || type == VG_NVFP4 || type == VG_IQ2_XXS ||
           type == VG_IQ2_XS || type == VG_IQ2_S || type == VG_IQ1_S || type == VG_IQ1_M;
}

// Whether something is added to each element.
DEVICE constexpr bool has_offset(int type) {
    type = plain(type);
    return !(type == VG_Q8_0 || type == VG_IQ4_NL || type == VG_IQ4_XS || type == VG_MXFP4 || type == VG_NVFP4 ||
             type == VG_IQ2_XXS || type == VG_IQ2_XS || type == VG_IQ2_S || type == VG_IQ3_XXS || type == VG_IQ3_S);
}

// Whether bytes go beyond 127.
DEVICE constexpr bool has_large_bytes(int type) { return type == VG_Q4_K; }

DEVICE float2 two_floats(const u8* at) {
    u64 both = *aligned<u64>(at);
    return {__uint_as_float(static_cast<u32>(both)), __uint_as_float(static_cast<u32>(both >> 32))};
}

// What follows from which chunk a lane has: the same for all pieces. Places are counted from the beginning of a piece.
struct Chosen {
    int chunk;
    u32 head, quants; // of K-quants: where its block begins, and the first of its elements; of blocks of 32: the first block
    u32 scale;        // of planes: its first block's
    u32 which;        // of Q4_K and Q5_K: which bytes of the head, as `__byte_perm` takes it; or SECOND_OF_TWO
    u32 table[4];     // of IQ4_NL and MXFP4: what nibbles stand for
};

// Whether nibbles stand for entries of a table, in blocks of 32.
DEVICE constexpr bool has_table(int type) { return plain(type) == VG_IQ4_NL || plain(type) == VG_MXFP4; }

// Whether entries above and below 0 are multiplied apart: that is fewer instructions for one column.
DEVICE constexpr bool has_sides(int type, int columns) { return is_planes(type) && has_table(type) && columns == 1; }

template <int TYPE, int COLUMNS> DEVICE Chosen chosen_of(int chunk) {
    Chosen it = {chunk, 0, 0, 0, 0, {}};
    it.head = chunk / 4 * quant_bytes(TYPE), it.scale = chunk / 4 * scale_bytes(TYPE);
    if (second_of(TYPE) == CHUNKS) {
        it.head = chunk * quant_bytes(TYPE), it.scale = chunk * scale_bytes(TYPE);
    } else if (has_table(TYPE)) {
        it.head = 2 * chunk * geometry(TYPE).bytes;
    }
    if (has_table(TYPE)) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            it.table[i] = table_of<plain(TYPE) == VG_MXFP4>(i);
        }
        if (has_sides(TYPE, COLUMNS) && plain(TYPE) == VG_IQ4_NL) { // without their signs
            it.table[0] = 0x4153687fu, it.table[1] = 0x0a162331u;
        }
        it.which = SECOND_OF_TWO;
    } else if (TYPE == VG_Q4_K || TYPE == VG_Q5_K) {
        it.quants = it.head + (TYPE == VG_Q5_K ? 48 : 16) + chunk % 4 * 32;
        it.which = chunk % 2 ? 0x7632 : 0x5410;
    } else if (plain(TYPE) == VG_Q6_K) {
        it.quants = it.head + chunk / 2 % 2 * 64 + chunk % 2 * 16;
    }
    return it;
}

// The same, calculated once.
template <int TYPE, int COLUMNS> DEVICE Chosen kept_chosen(int chunk) {
    Chosen it = chosen_of<TYPE, COLUMNS>(chunk);
    it.scale = is_planes(TYPE) ? kept(it.scale) : 0;
    if (TYPE == VG_Q4_K || TYPE == VG_Q5_K || plain(TYPE) == VG_Q6_K) {
        it.head = kept(it.head), it.quants = kept(it.quants);
        it.which = plain(TYPE) == VG_Q6_K ? 0 : kept(it.which);
    } else if (has_table(TYPE) || is_planes(TYPE)) {
        it.head = kept(it.head);
    }
    if (has_table(TYPE)) {
        // Constants would be put in registers again for each use: so something is added that is 0, which the compiler does not
        // know. The other two are parts of instructions.
        u32 nothing = static_cast<u32>(chunk) / CHUNKS;
        it.table[0] = kept(it.table[0] + nothing), it.table[2] = kept(it.table[2] + nothing);
        it.which = kept(it.which + nothing);
    }
    return it;
}

// A lane's elements as they lie.
template <int TYPE> struct Chunk {
    const VgCodebooks* books;
    Begin piece;
    int chunk;
    u32 head, scale;

    // `piece` is where a piece of a row lies.
    DEVICE Chunk(const VgCodebooks* books, const Begin& piece, const Chosen& it)
        : books(books), piece(piece), chunk(it.chunk), head(it.head), scale(it.scale) {}

    DEVICE void unpack_block(int s, Unpacked& u) const {
        if (is_planes(TYPE)) {
            const u8* at = piece.scales + scale + s * CHUNKS * scale_bytes(TYPE);
            unpack<TYPE, true>(books, piece.quants + head + s * CHUNKS * quant_bytes(TYPE), 0, u, at);
            return;
        }
        constexpr int SUBS = geometry(TYPE).elements / 32;
        int block = 2 * chunk + s;
        unpack<TYPE, true>(books, piece.quants + block / SUBS * geometry(TYPE).bytes, block % SUBS, u);
    }
};

// The head of a block of Q4_K or Q5_K: of two neighbours of its eight, scales in the low bytes and minima in the high ones.
struct SixBits {
    float d, min;
    u32 bytes;

    DEVICE SixBits(const u8* piece, const Chosen& it) {
        int4 head = four_words(piece + it.head);
        d = to_float(f16{static_cast<u16>(head.x)});
        min = -to_float(f16{static_cast<u16>(static_cast<u32>(head.x) >> 16)});
        u32 third = static_cast<u32>(head.w), six = __byte_perm(head.y, head.z, it.which);
        u32 fours = __byte_perm(third, third >> 4, it.which) & 0x0f0f0f0fu;
        bytes = it.chunk % 4 < 2 ? six & 0x3f3f3f3fu : (six >> 2 & 0x30303030u) | fours;
    }
    DEVICE void scales(int s, float by, Unpacked& u) const {
        u32 scale = __byte_perm(bytes, 0, s ? 0x4441 : 0x4440), least = __byte_perm(bytes, 0, s ? 0x4443 : 0x4442);
        uniform(u, d * by * static_cast<float>(scale), min * static_cast<float>(least));
    }
};

template <> struct Chunk<VG_Q4_K> {
    SixBits scales;
    u32 q[8];

    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : scales(piece.quants, it) {
        words_at<8, 16, true>(piece.quants + it.quants, q);
    }
    // High nibbles stay where they are: sixteen times what they stand for.
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = q[k] & (s ? 0xf0f0f0f0u : 0x0f0f0f0fu);
        }
        scales.scales(s, s ? 0.0625f : 1.0f, u);
    }
};

template <> struct Chunk<VG_Q5_K> {
    SixBits scales;
    u32 q[8], fifths[8];

    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : scales(piece.quants, it) {
        words_at<8, 16, true>(piece.quants + it.quants, q);
        words_at<8, 16, true>(piece.quants + it.head + 16, fifths);
        UNROLL
        for (int k = 0; k < 8; k++) {
            fifths[k] >>= it.chunk % 4 * 2;
        }
    }
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = (q[k] >> 4 * s & 0x0f0f0f0fu) | (fifths[k] << (4 - s) & 0x10101010u);
        }
        scales.scales(s, 1.0f, u);
    }
};

// Blocks lie at multiples of two. "Blocks" here are two quarters of half a block, 16 elements of each.
template <int TYPE> struct Sixes {
    u32 low[2][4], high[4], six[2];
    float d;

    DEVICE Sixes(const Begin& piece, const Chosen& it) {
        constexpr int A = alignment_of(TYPE);
        const u8 *block = piece.quants + it.head, *quants = piece.quants + it.quants;
        int half = it.chunk / 2 % 2;
        words_at<4, A, true>(quants, low[0]);
        words_at<4, A, true>(quants + 32, low[1]);
        words_at<4, A, true>(quants + 128 - half * 32, high);
        if (is_planes(TYPE)) {
            u64 eight = *aligned<u64>(block + 192 + half * 8) >> it.chunk % 2 * 8;
            six[0] = static_cast<u32>(eight), six[1] = static_cast<u32>(eight >> 32);
        } else {
            words_around<2>(block + 192 + half * 8 + it.chunk % 2, six);
        }
        d = scale_of<TYPE>(block, piece.scales + it.scale);
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

template <> struct Chunk<VG_Q6_K> : Sixes<VG_Q6_K> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Sixes(piece, it) {}
};
template <> struct Chunk<VG_Q6_K | VG_REPACKED> : Sixes<VG_Q6_K | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Sixes(piece, it) {}
};

// Two blocks of 32 whose nibbles stand for entries of a table.
template <int TYPE> struct Entries {
    u32 q[2][4], table[4], which;
    float scale[2];

    DEVICE Entries(const Begin& piece, const Chosen& it) {
        UNROLL
        for (int s = 0; s < 2; s++) {
            const u8* at = piece.quants + it.head + s * second_of(TYPE) * quant_bytes(TYPE);
            words_at<4, alignment_of(TYPE), true>(quants_of<TYPE>(at), q[s]);
            scale[s] = scale_of<TYPE>(at, piece.scales + it.scale + s * second_of(TYPE) * scale_bytes(TYPE));
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            table[i] = it.table[i];
        }
        which = it.which;
    }
    DEVICE void unpack_block(int s, Unpacked& u) const {
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (is_planes(TYPE)) {
                look_up_eight(table, which, q[s][k], u.words + 2 * k);
            } else {
                look_up_both(table, which, q[s][k], u.words + k, u.words + k + 4);
            }
        }
        uniform(u, scale[s], 0.0f);
    }
};

template <> struct Chunk<VG_IQ4_NL> : Entries<VG_IQ4_NL> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Entries(piece, it) {}
};
template <> struct Chunk<VG_MXFP4> : Entries<VG_MXFP4> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Entries(piece, it) {}
};
template <> struct Chunk<VG_IQ4_NL | VG_REPACKED> : Entries<VG_IQ4_NL | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Entries(piece, it) {}
};
template <> struct Chunk<VG_MXFP4 | VG_REPACKED> : Entries<VG_MXFP4 | VG_REPACKED> {
    DEVICE Chunk(const VgCodebooks*, const Begin& piece, const Chosen& it) : Entries(piece, it) {}
};

// What belongs to a chunk of activations.
template <int TYPE> struct Activations {
    const u8 *quants, *scales; // of the chunk, or of its first block
    int chunk;

    // 16 of the elements: half `h` of block `s`.
    DEVICE int4 part(int s, int h) const {
        constexpr int QUARTER = ROUNDED_PIECE / 4;
        if constexpr (second_of(TYPE) == CHUNKS) {
            return four_words(quants + s * CHUNKS / 2 * 16 + h * QUARTER);
        }
        if constexpr (plain(TYPE) == VG_Q6_K) {
            return four_words(quants + chunk % 2 * (QUARTER - 16) + s * 16 + h * 2 * QUARTER);
        }
        return four_words(quants + (2 * s + h) * QUARTER);
    }

    // Of both blocks, and of halves if there are any: the factors, and the sums.
    DEVICE void factors(float (&factor)[2][2], float (&sum)[2][2]) const {
        constexpr u32 HALVES = ROUNDED_SCALES / 2;
        if constexpr (second_of(TYPE) == CHUNKS) {
            UNROLL
            for (int s = 0; s < 2; s++) {
                const u8* at = scales + s * CHUNKS / 2 * 16;
                factor[s][0] = factor[s][1] = *aligned<float>(at);
                sum[s][0] = sum[s][1] = has_offset(TYPE) ? *aligned<float>(at + 8) : 0.0f;
            }
        } else if constexpr (plain(TYPE) == VG_Q6_K) {
            UNROLL
            for (int s = 0; s < 2; s++) {
                float2 f = two_floats(scales - chunk % 2 * 16 + 16 * s);
                float2 g = two_floats(scales + HALVES - chunk % 2 * 8 + 16 * s);
                factor[s][0] = f.x, factor[s][1] = f.y, sum[s][0] = g.x, sum[s][1] = g.y;
            }
        } else if constexpr (has_offset(TYPE) && !has_halves(TYPE)) {
            int4 both = four_words(scales);
            factor[0][0] = factor[0][1] = __int_as_float(both.x), factor[1][0] = factor[1][1] = __int_as_float(both.y);
            sum[0][0] = sum[0][1] = __int_as_float(both.z), sum[1][0] = sum[1][1] = __int_as_float(both.w);
        } else {
            float2 f = two_floats(scales);
            int4 halves = {};
            if (has_offset(TYPE)) {
                halves = four_words(scales + HALVES);
            }
            factor[0][0] = factor[0][1] = f.x, factor[1][0] = factor[1][1] = f.y;
            sum[0][0] = __int_as_float(halves.x), sum[1][0] = __int_as_float(halves.y);
            sum[0][1] = __int_as_float(halves.z), sum[1][1] = __int_as_float(halves.w);
        }
    }
};

// Four products of bytes, of which the first may be unsigned ones.
template <bool UNSIGNED> DEVICE int dot_bytes(u32 a, int b, int sum) {
    if (!UNSIGNED) {
        return __dp4a(static_cast<int>(a), b, sum);
    }
#ifdef VGPU_SHIM
    return shim::dot_unsigned(a, b, sum);
#else
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
#endif
}

// The product of block `s` of entries with a column's, those at or above 0 and those below apart.
template <int TYPE>
DEVICE float multiply_sides(const Entries<TYPE>& it, const Activations<TYPE>& x, int s, const float (&factor)[2][2]) {
    constexpr bool FP4 = plain(TYPE) == VG_MXFP4; // numbers of FP4 have their sign in the highest bit, IQ4_NL's are in order
    const u32 *small = it.table, *large = it.table + (FP4 ? 0 : 2);
    int4 low = x.part(s, 0), high = x.part(s, 1);
    const int columns[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int above = 0, below = 0;
    UNROLL
    for (int k = 0; k < 8; k++) {
        u32 first = it.q[s][k / 2] >> k % 2 * 16, second = first ^ 0x88888888u;
        u32 more = choose_bytes_or_0(large[0], large[1], FP4 ? first : second);
        u32 less = choose_bytes_or_0(small[0], small[1], FP4 ? second : first);
        above = __dp4a(static_cast<int>(more), columns[k], above), below = __dp4a(static_cast<int>(less), columns[k], below);
    }
    return factor[s][1] * (it.scale[s] * static_cast<float>(above - below));
}

// The product of unpacked elements with a column's.
template <int TYPE>
DEVICE float multiply_block(const Unpacked& u, const Activations<TYPE>& x, int s, const float (&factor)[2][2],
                            const float (&sum)[2][2]) {
    constexpr bool UNSIGNED = has_large_bytes(TYPE);
    int4 low = x.part(s, 0), high = x.part(s, 1);
    int a = dot_bytes<UNSIGNED>(u.words[0], low.x, 0);
    a = dot_bytes<UNSIGNED>(u.words[1], low.y, a);
    a = dot_bytes<UNSIGNED>(u.words[2], low.z, a);
    a = dot_bytes<UNSIGNED>(u.words[3], low.w, a);
    int b = dot_bytes<UNSIGNED>(u.words[4], high.x, has_halves(TYPE) ? 0 : a);
    b = dot_bytes<UNSIGNED>(u.words[5], high.y, b);
    b = dot_bytes<UNSIGNED>(u.words[6], high.z, b);
    b = dot_bytes<UNSIGNED>(u.words[7], high.w, b);
    float all = factor[s][1] * (u.scale[1] * static_cast<float>(b));
    if (has_halves(TYPE)) {
        all += factor[s][0] * (u.scale[0] * static_cast<float>(a));
    }
    if (has_offset(TYPE)) {
        all += u.offset[0] * sum[s][0];
        if (has_halves(TYPE)) {
            all += u.offset[1] * sum[s][1];
        }
    }
    return all;
}

} // namespace
