// What a lane multiplies at a time of a row of quantised weights: 64 elements, in shared memory, and of activations those that
// belong to them (`scales.cuh` says how they lie).
//
// A lane has 64 neighbours, as two blocks of 32, but of Q6_K: there it has 16 of each quarter of half a block, as their bits
// lie together.
#pragma once
#include "quants.cuh"
#include "scales.cuh"

namespace {

// Whether halves of 32 elements have scales of their own.
DEVICE constexpr bool has_halves(int type) {
    return type == VG_Q2_K || type == VG_Q3_K || type == VG_Q6_K || type == VG_NVFP4 || type == VG_IQ2_XXS ||
           type == VG_IQ2_XS || type == VG_IQ2_S || type == VG_IQ1_S || type == VG_IQ1_M;
}

// Whether something is added to each element.
DEVICE constexpr bool has_offset(int type) {
    return !(type == VG_Q8_0 || type == VG_IQ4_NL || type == VG_IQ4_XS || type == VG_MXFP4 || type == VG_NVFP4 ||
             type == VG_IQ2_XXS || type == VG_IQ2_XS || type == VG_IQ2_S || type == VG_IQ3_XXS || type == VG_IQ3_S);
}

// Whether bytes go beyond 127.
DEVICE constexpr bool has_large_bytes(int type) { return type == VG_Q4_K; }

DEVICE int4 four_words(const u8* at) { return *aligned<int4>(at); }
DEVICE float2 two_floats(const u8* at) {
    u64 both = *aligned<u64>(at);
    return {__uint_as_float(static_cast<u32>(both)), __uint_as_float(static_cast<u32>(both >> 32))};
}

// What follows from which chunk a lane has: the same for all pieces. Places are counted from the beginning of a piece.
struct Chosen {
    int chunk;
    u32 head, quants; // of K-quants: where its block begins, and the first of its elements
    u32 which;        // of Q4_K and Q5_K: which bytes of the head, as `__byte_perm` takes it; or SECOND_OF_TWO
    u32 table[4];     // of IQ4_NL and MXFP4: what nibbles stand for
};

// Whether nibbles stand for entries of a table, in blocks of 32.
DEVICE constexpr bool has_table(int type) { return type == VG_IQ4_NL || type == VG_MXFP4; }

template <int TYPE> DEVICE Chosen chosen_of(int chunk) {
    Chosen it = {chunk, 0, 0, 0, {}};
    it.head = chunk / 4 * geometry(TYPE).bytes;
    if (has_table(TYPE)) {
        it.head = 2 * chunk * geometry(TYPE).bytes;
        UNROLL
        for (int i = 0; i < 4; i++) {
            it.table[i] = table_of<TYPE == VG_MXFP4>(i);
        }
        it.which = SECOND_OF_TWO;
    } else if (TYPE == VG_Q4_K || TYPE == VG_Q5_K) {
        it.quants = it.head + (TYPE == VG_Q5_K ? 48 : 16) + chunk % 4 * 32;
        it.which = chunk % 2 ? 0x7632 : 0x5410;
    } else if (TYPE == VG_Q6_K) {
        it.quants = it.head + chunk / 2 % 2 * 64 + chunk % 2 * 16;
    }
    return it;
}

// The same, calculated once.
template <int TYPE> DEVICE Chosen kept_chosen(int chunk) {
    Chosen it = chosen_of<TYPE>(chunk);
    if (TYPE == VG_Q4_K || TYPE == VG_Q5_K || TYPE == VG_Q6_K) {
        it.head = kept(it.head), it.quants = kept(it.quants);
        it.which = TYPE == VG_Q6_K ? 0 : kept(it.which);
    } else if (has_table(TYPE)) {
        it.head = kept(it.head);
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
    const u8* piece;
    int chunk;

    // `piece` is where a piece of a row lies.
    DEVICE Chunk(const VgCodebooks* books, const u8* piece, const Chosen& it)
        : books(books), piece(piece), chunk(it.chunk) {}

    DEVICE void unpack_block(int s, Unpacked& u) const {
        constexpr int SUBS = geometry(TYPE).elements / 32;
        int block = 2 * chunk + s;
        unpack<TYPE, true>(books, piece + block / SUBS * geometry(TYPE).bytes, block % SUBS, u);
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

    DEVICE Chunk(const VgCodebooks*, const u8* piece, const Chosen& it) : scales(piece, it) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            int4 four = four_words(piece + it.quants + 16 * i);
            q[4 * i] = four.x, q[4 * i + 1] = four.y, q[4 * i + 2] = four.z, q[4 * i + 3] = four.w;
        }
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

    DEVICE Chunk(const VgCodebooks*, const u8* piece, const Chosen& it) : scales(piece, it) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            int4 four = four_words(piece + it.quants + 16 * i), high = four_words(piece + it.head + 16 + 16 * i);
            q[4 * i] = four.x, q[4 * i + 1] = four.y, q[4 * i + 2] = four.z, q[4 * i + 3] = four.w;
            fifths[4 * i] = high.x, fifths[4 * i + 1] = high.y, fifths[4 * i + 2] = high.z, fifths[4 * i + 3] = high.w;
        }
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
template <> struct Chunk<VG_Q6_K> {
    u32 low[2][4], high[4], six[2];
    float d;

    DEVICE Chunk(const VgCodebooks*, const u8* piece, const Chosen& it) {
        const u8 *block = piece + it.head, *quants = piece + it.quants;
        int half = it.chunk / 2 % 2;
        words_around<4>(quants, low[0]);
        words_around<4>(quants + 32, low[1]);
        words_around<4>(quants + 128 - half * 32, high);
        words_around<2>(block + 192 + half * 8 + it.chunk % 2, six);
        d = half_at(block + 208);
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

// Two blocks of 32 whose nibbles stand for entries of a table.
template <int TYPE> struct Entries {
    static constexpr int HEAD = TYPE == VG_MXFP4 ? 1 : 2, BYTES = HEAD + 16;
    u32 q[2][4], table[4], which;
    float scale[2];

    DEVICE Entries(const u8* piece, const Chosen& it) {
        const u8* at = piece + it.head;
        UNROLL
        for (int s = 0; s < 2; s++) {
            words_around<4>(at + s * BYTES + HEAD, q[s]);
            scale[s] = TYPE == VG_MXFP4 ? e8m0_half(at[s * BYTES]) : half_at(at + s * BYTES);
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
            look_up_both(table, which, q[s][k], u.words + k, u.words + k + 4);
        }
        uniform(u, scale[s], 0.0f);
    }
};

template <> struct Chunk<VG_IQ4_NL> : Entries<VG_IQ4_NL> {
    DEVICE Chunk(const VgCodebooks*, const u8* piece, const Chosen& it) : Entries(piece, it) {}
};
template <> struct Chunk<VG_MXFP4> : Entries<VG_MXFP4> {
    DEVICE Chunk(const VgCodebooks*, const u8* piece, const Chosen& it) : Entries(piece, it) {}
};

// What belongs to a chunk of activations.
template <int TYPE> struct Activations {
    const u8 *quants, *scales; // of the chunk
    int chunk;

    // 16 of the elements: half `h` of block `s`.
    DEVICE int4 part(int s, int h) const {
        constexpr int QUARTER = ROUNDED_PIECE / 4;
        if constexpr (TYPE == VG_Q6_K) {
            return four_words(quants + chunk % 2 * (QUARTER - 16) + s * 16 + h * 2 * QUARTER);
        }
        return four_words(quants + (2 * s + h) * QUARTER);
    }

    // Of both blocks, and of halves if there are any: the factors, and the sums.
    DEVICE void factors(float (&factor)[2][2], float (&sum)[2][2]) const {
        constexpr u32 HALVES = ROUNDED_SCALES / 2;
        if constexpr (TYPE == VG_Q6_K) {
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
