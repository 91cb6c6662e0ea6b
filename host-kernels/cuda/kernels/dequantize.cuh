// Weights as small integers: 32 elements of a block as eight words of four bytes, with scales.
//
//     element i = scale[i / 16] * byte i + offset[i / 16]
//
// That is what products with activations of 8 bits need, four elements to an instruction. Layouts are those of ggml;
// `formats.cuh` says the same element by element.
#pragma once
#include "formats.cuh"

struct Unpacked {
    int words[8];
    float scale[2], offset[2];
};

// Multiples of what blocks of a type lie at, if their rows are to be read in whole words.
DEVICE constexpr int alignment_of(int type) {
    return is_planes(type)                                                                          ? 16
           : type == VG_MXFP4                                                                       ? 1
           : type == VG_Q4_1 || type == VG_Q5_1 || type == VG_NVFP4 || type == VG_Q2_K || type == VG_Q4_K ||
                     type == VG_Q5_K
               ? 4
               : 2;
}

// The word at `at`, which is a multiple of what is given, or of 4.
template <int ALIGNMENT> DEVICE u32 word_at(const u8* at) {
    if (ALIGNMENT >= 4) {
        return *aligned<u32>(at);
    }
    if (ALIGNMENT == 2) {
        return *aligned<u16>(at) | static_cast<u32>(*aligned<u16>(at + 2)) << 16;
    }
    return at[0] | static_cast<u32>(at[1]) << 8 | static_cast<u32>(at[2]) << 16 | static_cast<u32>(at[3]) << 24;
}

DEVICE int4 four_words(const u8* at) { return *aligned<int4>(at); }

// Words one after the other, wherever they lie in shared memory: whole words around them are read, which is up to three bytes
// more on either side.
template <int COUNT> DEVICE void words_around(const u8* at, u32* words) {
    u32 beyond = static_cast<u32>(reinterpret_cast<u64>(at)) & 3;
    const u32* from = aligned<u32>(at - beyond);
    u32 word = from[0];
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        u32 next = from[i + 1];
        words[i] = __funnelshift_r(word, next, 8 * beyond);
        word = next;
    }
}

// The same, of which no more is read than they are unless they lie `AROUND` others.
template <int COUNT, int ALIGNMENT, bool AROUND> DEVICE void words_at(const u8* at, u32* words) {
    if (AROUND && ALIGNMENT < 4) {
        words_around<COUNT>(at, words);
    } else if (ALIGNMENT == 16) {
        UNROLL
        for (int i = 0; i < COUNT; i += 4) {
            int4 four = four_words(at + 4 * i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else {
        UNROLL
        for (int i = 0; i < COUNT; i++) {
            words[i] = word_at<ALIGNMENT>(at + 4 * i);
        }
    }
}

// Four bits as the lowest of four bytes.
DEVICE u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Four pairs of bits as four bytes.
DEVICE u32 spread_pairs(u32 x) { return (x & 3) | (x & 12) << 6 | (x & 48) << 12 | (x & 192) << 18; }

// Four of the sixteen that nibbles stand for: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113; or, of FP4, twice
// the numbers: 0 1 2 3, 4 6 8 12, and the same below 0.
template <bool FP4> DEVICE constexpr u32 table_of(int i) {
    return i == 0 ? (FP4 ? 0x03020100u : 0xbfad9881u) : i == 1 ? (FP4 ? 0x0c080604u : 0xf6eaddcfu)
         : i == 2 ? (FP4 ? 0xfdfeff00u : 0x26190d01u) : (FP4 ? 0xf4f8fafcu : 0x71594535u);
}

// The bytes of a table of 16 that four nibbles, each in a byte, stand for.
DEVICE u32 look_up(const u32* table, u32 nibbles) {
    u32 selector = (nibbles & 7) | (nibbles >> 4 & 0x70) | (nibbles >> 8 & 0x700) | (nibbles >> 12 & 0x7000);
    u32 low = __byte_perm(table[0], table[1], selector), high = __byte_perm(table[2], table[3], selector);
    u32 is_high = (nibbles >> 3 & 0x01010101u) * 255u;
    return (low & ~is_high) | (high & is_high);
}

// Of two words, bytes of the first by number; a bit more takes the second's.
constexpr u32 SECOND_OF_TWO = 0x32103210u;

// The same of eight nibbles in their order. `bytes` is SECOND_OF_TWO.
template <class T> DEVICE void look_up_eight(const u32* table, u32 bytes, u32 q, T* two) {
    u32 selector = q & 0x77777777u, which = (q >> 1 & 0x44444444u) | bytes;
    UNROLL
    for (int i = 0; i < 2; i++) {
        u32 small = choose_bytes(table[0], table[1], selector >> 16 * i);
        two[i] = choose_bytes(small, choose_bytes(table[2], table[3], selector >> 16 * i), which >> 16 * i);
    }
}

// The same: the low ones of four bytes, and the high ones.
DEVICE void look_up_both(const u32* table, u32 bytes, u32 q, int* low, int* high) {
    int two[2];
    look_up_eight(table, bytes, q, two);
    *low = __byte_perm(two[0], two[1], 0x6420), *high = __byte_perm(two[0], two[1], 0x7531);
}

// Where the quants of a block begin, and what its scale is, which lies at `scale` if there are planes.
template <int TYPE> DEVICE const u8* quants_of(const u8* b) {
    return b + (is_planes(TYPE) || TYPE == VG_Q6_K ? 0 : geometry(TYPE).bytes == 17 ? 1 : 2);
}
template <int TYPE> DEVICE float scale_of(const u8* b, const u8* scale) {
    const u8* at = is_planes(TYPE) ? scale : b + (TYPE == VG_Q6_K ? 208 : 0);
    return plain(TYPE) == VG_MXFP4 ? e8m0_half(at[0]) : half_at(at);
}

// Magnitudes plus 64, with signs: a bit for each of four bytes. No magnitude is 0.
DEVICE u32 with_signs(u32 magnitudes, u32 signs) {
    u32 ones = spread_bits(signs);
    return ((magnitudes - 0x40404040u) ^ ones * 255u) + ones;
}

// Eight signs, of which seven are given: the number of minus signs is even.
DEVICE u32 eight_signs(u32 seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

DEVICE void uniform(Unpacked& u, float scale, float offset) {
    u.scale[0] = u.scale[1] = scale;
    u.offset[0] = u.offset[1] = offset;
}

// The 32 elements `sub` of the block at `b`, whose scale lies at `scale` if there are planes; `AROUND`: a few bytes on either
// side may be read, too.
template <int TYPE, bool AROUND = false>
DEVICE void unpack(const VgCodebooks* books, const u8* b, int sub, Unpacked& u, const u8* scale = nullptr) {
    constexpr int OF = plain(TYPE), A = alignment_of(TYPE);
    constexpr u32 NIBBLES = 0x0f0f0f0fu;
    if constexpr (OF == VG_Q4_0 || OF == VG_Q4_1 || OF == VG_Q5_0 || OF == VG_Q5_1) {
        constexpr bool FIVE = OF == VG_Q5_0 || OF == VG_Q5_1, AFFINE = OF == VG_Q4_1 || OF == VG_Q5_1;
        const u8* qs = is_planes(TYPE) ? b : b + (AFFINE ? 4 : 2) + (FIVE ? 4 : 0);
        u32 fifth = FIVE ? word_at<A>(b + (AFFINE ? 4 : 2)) : 0, four[4];
        words_at<4, A, AROUND>(qs, four);
        UNROLL
        for (int k = 0; k < 4; k++) {
            u32 q = four[k];
            u.words[k] = (q & NIBBLES) | (FIVE ? spread_bits(fifth >> 4 * k) << 4 : 0);
            u.words[k + 4] = (q >> 4 & NIBBLES) | (FIVE ? spread_bits(fifth >> (16 + 4 * k)) << 4 : 0);
        }
        float d = scale_of<TYPE>(b, scale);
        uniform(u, d, AFFINE ? half_at(b + 2) : d * (FIVE ? -16.0f : -8.0f));
    } else if constexpr (OF == VG_Q8_0) {
        u32 eight[8];
        words_at<8, A, AROUND>(quants_of<TYPE>(b), eight);
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = eight[k];
        }
        uniform(u, scale_of<TYPE>(b, scale), 0.0f);
    } else if constexpr (OF == VG_IQ4_NL || OF == VG_IQ4_XS || OF == VG_MXFP4) {
        constexpr bool FP4 = OF == VG_MXFP4;
        const u32 table[4] = {table_of<FP4>(0), table_of<FP4>(1), table_of<FP4>(2), table_of<FP4>(3)};
        u32 four[4];
        words_at<4, A, AROUND>(OF == VG_IQ4_XS ? b + 8 + 16 * sub : quants_of<TYPE>(b), four);
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (is_planes(TYPE)) {
                look_up_eight(table, SECOND_OF_TWO, four[k], u.words + 2 * k);
            } else {
                look_up_both(table, SECOND_OF_TWO, four[k], u.words + k, u.words + k + 4);
            }
        }
        float d;
        if (OF == VG_IQ4_XS) {
            int six = (b[4 + sub / 2] >> (sub % 2 * 4) & 15) | (u16_at(b + 2) >> (2 * sub) & 3) << 4;
            d = half_at(b) * static_cast<float>(six - 32);
        } else {
            d = scale_of<TYPE>(b, scale);
        }
        uniform(u, d, 0.0f);
    } else if constexpr (OF == VG_NVFP4) {
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        UNROLL
        for (int h = 0; h < 2; h++) {
            int group = 2 * sub + h;
            UNROLL
            for (int k = 0; k < 2; k++) {
                u32 q = word_at<A>(b + 4 + 8 * group + 4 * k);
                look_up_both(table, SECOND_OF_TWO, q, u.words + 4 * h + k, u.words + 4 * h + 2 + k);
            }
            u.scale[h] = ue4m3_half(b[group]);
            u.offset[h] = 0.0f;
        }
    } else if constexpr (OF == VG_Q1_0) {
        u32 bits = word_at<A>(b + 2 + 4 * sub);
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = spread_bits(bits >> 4 * k);
        }
        float d = half_at(b);
        uniform(u, 2.0f * d, -d);
    } else if constexpr (OF == VG_Q2_0) {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = spread_pairs(b[2 + 8 * sub + k]);
        }
        float d = half_at(b);
        uniform(u, d, -d);
    } else if constexpr (OF == VG_Q2_K || OF == VG_TQ2_0 || OF == VG_Q3_K) {
        const u8* qs = b + (OF == VG_Q2_K ? 16 : OF == VG_Q3_K ? 32 : 0) + sub / 4 * 32;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = word_at<A>(qs + 4 * k) >> (sub % 4 * 2) & 0x03030303u;
            if (OF == VG_Q3_K) {
                u.words[k] |= (word_at<A>(b + 4 * k) >> sub & 0x01010101u) << 2;
            }
        }
        if (OF == VG_TQ2_0) {
            float d = half_at(b + 64);
            uniform(u, d, -d);
        }
        UNROLL
        for (int h = 0; h < 2 && OF != VG_TQ2_0; h++) {
            int j = 2 * sub + h;
            if (OF == VG_Q2_K) {
                u.scale[h] = half_at(b + 80) * static_cast<float>(b[j] & 15);
                u.offset[h] = -half_at(b + 82) * static_cast<float>(b[j] >> 4);
            } else {
                int six = (b[96 + j % 8] >> (j / 8 * 4) & 15) | (b[104 + j % 4] >> (j / 4 * 2) & 3) << 4;
                u.scale[h] = half_at(b + 108) * static_cast<float>(six - 32);
                u.offset[h] = -4.0f * u.scale[h];
            }
        }
    } else if constexpr (OF == VG_Q4_K || OF == VG_Q5_K) {
        const u8* qs = b + (OF == VG_Q5_K ? 48 : 16) + sub / 2 * 32;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = word_at<A>(qs + 4 * k) >> (sub % 2 * 4) & NIBBLES;
            if (OF == VG_Q5_K) {
                u.words[k] |= (word_at<A>(b + 16 + 4 * k) >> sub & 0x01010101u) << 4;
            }
        }
        float scale, min;
        six_bits(b + 4, sub, &scale, &min);
        uniform(u, half_at(b) * scale, -half_at(b + 2) * min);
    } else if constexpr (OF == VG_Q6_K) {
        int half = sub / 4, part = sub % 4;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u32 low = word_at<A>(b + half * 64 + part % 2 * 32 + 4 * k) >> (part / 2 * 4) & NIBBLES;
            u32 high = word_at<A>(b + 128 + half * 32 + 4 * k) >> (part * 2) & 0x03030303u;
            u.words[k] = low | high << 4;
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            u.scale[h] = scale_of<TYPE>(b, scale) * static_cast<float>(static_cast<signed char>(b[192 + 2 * sub + h]));
            u.offset[h] = -32.0f * u.scale[h];
        }
    } else if constexpr (OF == VG_TQ1_0) {
        // Five digits to the base 3 in a byte; the last four bytes hold four.
        UNROLL
        for (int k = 0; k < 8; k++) {
            bool last = sub == 7 && k >= 4;
            int digit = sub < 5 ? sub : last ? k - 4 : 2 * (sub - 5) + k / 4;
            u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
            u32 bytes = word_at<A>(b + (sub < 5 ? 4 * k : last ? 48 : 32 + 4 * k % 16)), word = 0;
            UNROLL
            for (int j = 0; j < 4; j++) {
                word |= (((bytes >> 8 * j & 255) * power & 255) * 3 >> 8) << 8 * j;
            }
            u.words[k] = word;
        }
        float d = half_at(b + 52);
        uniform(u, d, -d);
    } else if constexpr (OF == VG_IQ2_XXS || OF == VG_IQ2_XS || OF == VG_IQ2_S) {
        u32 packed = OF == VG_IQ2_XXS ? word_at<A>(b + 2 + 8 * sub + 4) : 0;
        UNROLL
        for (int g = 0; g < 4; g++) {
            int group = 4 * sub + g;
            u64 entry;
            u32 signs;
            if (OF == VG_IQ2_XXS) {
                entry = books->iq2_xxs[b[2 + 8 * sub + g]];
                signs = eight_signs(packed >> 7 * g);
            } else if (OF == VG_IQ2_XS) {
                u32 code = u16_at(b + 2 + 2 * group);
                entry = books->iq2_xs[code & 511];
                signs = eight_signs(code >> 9);
            } else {
                entry = books->iq2_s[b[2 + group] | (b[66 + sub] >> (2 * g) & 3) << 8];
                signs = b[34 + group];
            }
            u.words[2 * g] = with_signs(static_cast<u32>(entry), signs);
            u.words[2 * g + 1] = with_signs(static_cast<u32>(entry >> 32), signs >> 4);
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            u32 scale = OF == VG_IQ2_XXS ? packed >> 28 : b[(OF == VG_IQ2_XS ? 66 : 74) + sub] >> (4 * h) & 15;
            u.scale[h] = half_at(b) * 0.125f * static_cast<float>(2 * scale + 1);
            u.offset[h] = 0.0f;
        }
    } else if constexpr (OF == VG_IQ3_XXS || OF == VG_IQ3_S) {
        u32 packed = OF == VG_IQ3_XXS ? word_at<A>(b + 66 + 4 * sub) : 0;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u32 index = b[2 + 8 * sub + k], signs;
            u64 entry;
            if (OF == VG_IQ3_XXS) {
                entry = books->iq3_xxs[index];
                signs = eight_signs(packed >> (k / 2 * 7));
            } else {
                entry = books->iq3_s[index | (b[66 + sub] >> k & 1) << 8];
                signs = b[74 + 4 * sub + k / 2];
            }
            u.words[k] = with_signs(static_cast<u32>(entry), signs >> (k % 2 * 4));
        }
        u32 scale = OF == VG_IQ3_XXS ? packed >> 28 : b[106 + sub / 2] >> (sub % 2 * 4) & 15;
        float by = OF == VG_IQ3_XXS ? 0.25f : 1.0f;
        uniform(u, half_at(b) * by * static_cast<float>(2 * scale + 1), 0.0f);
    } else if constexpr (OF == VG_IQ1_S || OF == VG_IQ1_M) {
        u32 high = OF == VG_IQ1_S ? u16_at(b + 34 + 2 * sub) : 0;
        UNROLL
        for (int g = 0; g < 4; g++) {
            u32 index, up;
            if (OF == VG_IQ1_S) {
                index = b[2 + 4 * sub + g] | (high >> (3 * g) & 7) << 8;
                up = high >> 15 ? 0 : 0x02020202u;
            } else {
                u32 four = b[32 + 2 * sub + g / 2] >> (g % 2 * 4) & 15;
                index = b[4 * sub + g] | (four & 7) << 8;
                up = four >> 3 ? 0 : 0x02020202u;
            }
            u64 entry = books->iq1[index];
            u.words[2 * g] = static_cast<u32>(entry) + up;
            u.words[2 * g + 1] = static_cast<u32>(entry >> 32) + up;
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            float d;
            u32 scale;
            if (OF == VG_IQ1_S) {
                d = half_at(b);
                scale = high >> 12 & 7;
            } else {
                const u8* scales = b + 48;
                u32 bits = u16_at(scales) >> 12 | u16_at(scales + 2) >> 12 << 4 | u16_at(scales + 4) >> 12 << 8 |
                           u16_at(scales + 6) >> 12 << 12;
                d = to_float(f16{static_cast<u16>(bits)});
                scale = u16_at(scales + sub / 2 * 2) >> (sub % 2 * 6 + 3 * h) & 7;
            }
            u.scale[h] = d * 0.125f * static_cast<float>(2 * scale + 1);
            u.offset[h] = -16.0f * u.scale[h];
        }
    }
}
