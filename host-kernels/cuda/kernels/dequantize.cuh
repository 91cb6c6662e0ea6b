// Weights as 8-bit integers: 32 elements of a block as eight words of four bytes, with scales.
//
//     element i = scale[i / 16] * byte i + offset[i / 16]
//
// The bytes are in the operand format of dp4a. Layouts are the `block_*` structs of ggml
// (ggml-common.h); `formats.cuh` has the same per element.
#pragma once
#include "formats.cuh"

struct Unpacked {
    int words[8];
    float scale[2], offset[2];
};

// Alignment in bytes of the blocks of a type, for loads of whole words.
DEVICE constexpr int alignment_of(int type) {
    return is_repacked(type)  ? 16
           : type == VG_MXFP4 ? 1
           : type == VG_Q4_1 || type == VG_Q5_1 || type == VG_NVFP4 || type == VG_Q2_K ||
                   type == VG_Q4_K || type == VG_Q5_K
               ? 4
               : 2;
}

// The word at `at`, which has this alignment.
template <int ALIGNMENT> DEVICE u32 load_word(const u8* at) {
    if (ALIGNMENT >= 4) {
        return *aligned<u32>(at);
    }
    if (ALIGNMENT == 2) {
        return *aligned<u16>(at) | static_cast<u32>(*aligned<u16>(at + 2)) << 16;
    }
    return at[0] | static_cast<u32>(at[1]) << 8 | static_cast<u32>(at[2]) << 16 |
           static_cast<u32>(at[3]) << 24;
}

DEVICE int4 load_int4(const u8* at) { return *aligned<int4>(at); }

// COUNT words at any address of shared memory. Reads the aligned words around them, up to three
// bytes beyond either end.
template <int COUNT> DEVICE void load_words_unaligned(const u8* at, u32* words) {
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

// COUNT words at `at`. Reads no byte beyond them unless UNALIGNED is set.
template <int COUNT, int ALIGNMENT, bool UNALIGNED>
DEVICE void load_words(const u8* at, u32* words) {
    if (UNALIGNED && ALIGNMENT < 4) {
        load_words_unaligned<COUNT>(at, words);
    } else if (ALIGNMENT == 16) {
        UNROLL
        for (int i = 0; i < COUNT; i += 4) {
            int4 four = load_int4(at + 4 * i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else {
        UNROLL
        for (int i = 0; i < COUNT; i++) {
            words[i] = load_word<ALIGNMENT>(at + 4 * i);
        }
    }
}

// Spreads four bits to the lowest bits of four bytes.
DEVICE u32 spread_bits(u32 bits) {
    return (bits & 15) * 0x00204081u & 0x01010101u;
}

// Spreads four 2-bit fields to four bytes.
DEVICE u32 spread_pairs(u32 x) {
    return (x & 3) | (x & 12) << 6 | (x & 48) << 12 | (x & 192) << 18;
}

// Word i of a table of 16 bytes: IQ4_NL values (-127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53
// 69 89 113), or with FP4 twice the E2M1 values (0 1 2 3, 4 6 8 12, and their negatives).
template <bool FP4> DEVICE constexpr u32 table_word(int i) {
    return i == 0   ? (FP4 ? 0x03020100u : 0xbfad9881u)
           : i == 1 ? (FP4 ? 0x0c080604u : 0xf6eaddcfu)
           : i == 2 ? (FP4 ? 0xfdfeff00u : 0x26190d01u)
                    : (FP4 ? 0xf4f8fafcu : 0x71594535u);
}

// Looks up four nibbles, one in each byte, in a table of 16 bytes.
DEVICE u32 lookup_4(const u32* table, u32 nibbles) {
    u32 selector =
        (nibbles & 7) | (nibbles >> 4 & 0x70) | (nibbles >> 8 & 0x700) | (nibbles >> 12 & 0x7000);
    u32 low = __byte_perm(table[0], table[1], selector),
        high = __byte_perm(table[2], table[3], selector);
    u32 is_high = (nibbles >> 3 & 0x01010101u) * 255u;
    return (low & ~is_high) | (high & is_high);
}

// A `prmt` selector of bytes 0 to 3 of the first word; adding 4 to a nibble selects the second
// word.
constexpr u32 PRMT_PAIR_SELECT = 0x32103210u;

// Looks up eight nibbles in order. `bytes` is PRMT_PAIR_SELECT.
template <class T> DEVICE void lookup_8(const u32* table, u32 bytes, u32 q, T* two) {
    u32 selector = q & 0x77777777u, which = (q >> 1 & 0x44444444u) | bytes;
    UNROLL
    for (int i = 0; i < 2; i++) {
        u32 small = prmt(table[0], table[1], selector >> 16 * i);
        two[i] = prmt(small, prmt(table[2], table[3], selector >> 16 * i), which >> 16 * i);
    }
}

// Looks up the low and the high nibbles of four bytes.
DEVICE void lookup_lo_hi(const u32* table, u32 bytes, u32 q, int* low, int* high) {
    int two[2];
    lookup_8(table, bytes, q, two);
    *low = __byte_perm(two[0], two[1], 0x6420), *high = __byte_perm(two[0], two[1], 0x7531);
}

// The quants of a block, and its scale, which is at `scale` for repacked types.
template <int TYPE> DEVICE const u8* quants_of(const u8* b) {
    return b + (is_repacked(TYPE) || TYPE == VG_Q6_K ? 0 : type_traits(TYPE).bytes == 17 ? 1 : 2);
}
template <int TYPE> DEVICE float scale_of(const u8* b, const u8* scale) {
    const u8* at = is_repacked(TYPE) ? scale : b + (TYPE == VG_Q6_K ? 208 : 0);
    return base_type(TYPE) == VG_MXFP4 ? e8m0_half(at[0]) : load_f16(at);
}

// Four magnitudes + 64 with their signs, one bit for each byte. No magnitude is 0.
DEVICE u32 apply_signs(u32 magnitudes, u32 signs) {
    u32 ones = spread_bits(signs);
    return ((magnitudes - 0x40404040u) ^ ones * 255u) + ones;
}

// Eight signs. Seven are stored; the eighth makes the number of minus signs even (ggml:
// ksigns_iq2xs).
DEVICE u32 iq_signs(u32 seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

DEVICE void set_scales(Unpacked& u, float scale, float offset) {
    u.scale[0] = u.scale[1] = scale;
    u.offset[0] = u.offset[1] = offset;
}

// Unpacks sub-block `sub` of 32 elements of the block at `b`. The scale is at `scale` for repacked
// types. UNALIGNED allows reads of a few bytes on either side.
template <int TYPE, bool UNALIGNED = false> DEVICE void
unpack(const VgCodebooks* grids, const u8* b, int sub, Unpacked& u, const u8* scale = nullptr) {
    constexpr int OF = base_type(TYPE), A = alignment_of(TYPE);
    constexpr u32 NIBBLES = 0x0f0f0f0fu;
    if constexpr (OF == VG_Q4_0 || OF == VG_Q4_1 || OF == VG_Q5_0 || OF == VG_Q5_1) {
        constexpr bool FIVE = OF == VG_Q5_0 || OF == VG_Q5_1,
                       AFFINE = OF == VG_Q4_1 || OF == VG_Q5_1;
        const u8* qs = is_repacked(TYPE) ? b : b + (AFFINE ? 4 : 2) + (FIVE ? 4 : 0);
        u32 qh = FIVE ? load_word<A>(b + (AFFINE ? 4 : 2)) : 0, four[4];
        load_words<4, A, UNALIGNED>(qs, four);
        UNROLL
        for (int k = 0; k < 4; k++) {
            u32 q = four[k];
            u.words[k] = (q & NIBBLES) | (FIVE ? spread_bits(qh >> 4 * k) << 4 : 0);
            u.words[k + 4] = (q >> 4 & NIBBLES) | (FIVE ? spread_bits(qh >> (16 + 4 * k)) << 4 : 0);
        }
        float d = scale_of<TYPE>(b, scale);
        set_scales(u, d, AFFINE ? load_f16(b + 2) : d * (FIVE ? -16.0f : -8.0f));
    } else if constexpr (OF == VG_Q8_0) {
        u32 eight[8];
        load_words<8, A, UNALIGNED>(quants_of<TYPE>(b), eight);
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = eight[k];
        }
        set_scales(u, scale_of<TYPE>(b, scale), 0.0f);
    } else if constexpr (OF == VG_IQ4_NL || OF == VG_IQ4_XS || OF == VG_MXFP4) {
        constexpr bool FP4 = OF == VG_MXFP4;
        const u32 table[4] = {table_word<FP4>(0), table_word<FP4>(1), table_word<FP4>(2),
                              table_word<FP4>(3)};
        u32 four[4];
        load_words<4, A, UNALIGNED>(OF == VG_IQ4_XS ? b + 8 + 16 * sub : quants_of<TYPE>(b), four);
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (is_repacked(TYPE)) {
                lookup_8(table, PRMT_PAIR_SELECT, four[k], u.words + 2 * k);
            } else {
                lookup_lo_hi(table, PRMT_PAIR_SELECT, four[k], u.words + k, u.words + k + 4);
            }
        }
        float d;
        if (OF == VG_IQ4_XS) {
            int six = (b[4 + sub / 2] >> (sub % 2 * 4) & 15) | (load_u16(b + 2) >> (2 * sub) & 3)
                                                                   << 4;
            d = load_f16(b) * static_cast<float>(six - 32);
        } else {
            d = scale_of<TYPE>(b, scale);
        }
        set_scales(u, d, 0.0f);
    } else if constexpr (OF == VG_NVFP4) {
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        UNROLL
        for (int h = 0; h < 2; h++) {
            int group = 2 * sub + h;
            UNROLL
            for (int k = 0; k < 2; k++) {
                u32 q = load_word<A>(b + 4 + 8 * group + 4 * k);
                lookup_lo_hi(table, PRMT_PAIR_SELECT, q, u.words + 4 * h + k,
                             u.words + 4 * h + 2 + k);
            }
            u.scale[h] = ue4m3_half(b[group]);
            u.offset[h] = 0.0f;
        }
    } else if constexpr (OF == VG_Q1_0) {
        u32 bits = load_word<A>(b + 2 + 4 * sub);
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = spread_bits(bits >> 4 * k);
        }
        float d = load_f16(b);
        set_scales(u, 2.0f * d, -d);
    } else if constexpr (OF == VG_Q2_0) {
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = spread_pairs(b[2 + 8 * sub + k]);
        }
        float d = load_f16(b);
        set_scales(u, d, -d);
    } else if constexpr (OF == VG_Q2_K || OF == VG_TQ2_0 || OF == VG_Q3_K) {
        const u8* qs = b + (OF == VG_Q2_K ? 16 : OF == VG_Q3_K ? 32 : 0) + sub / 4 * 32;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = load_word<A>(qs + 4 * k) >> (sub % 4 * 2) & 0x03030303u;
            if (OF == VG_Q3_K) {
                u.words[k] |= (load_word<A>(b + 4 * k) >> sub & 0x01010101u) << 2;
            }
        }
        if (OF == VG_TQ2_0) {
            float d = load_f16(b + 64);
            set_scales(u, d, -d);
        }
        UNROLL
        for (int h = 0; h < 2 && OF != VG_TQ2_0; h++) {
            int j = 2 * sub + h;
            if (OF == VG_Q2_K) {
                u.scale[h] = load_f16(b + 80) * static_cast<float>(b[j] & 15);
                u.offset[h] = -load_f16(b + 82) * static_cast<float>(b[j] >> 4);
            } else {
                int six = (b[96 + j % 8] >> (j / 8 * 4) & 15) | (b[104 + j % 4] >> (j / 4 * 2) & 3)
                                                                    << 4;
                u.scale[h] = load_f16(b + 108) * static_cast<float>(six - 32);
                u.offset[h] = -4.0f * u.scale[h];
            }
        }
    } else if constexpr (OF == VG_Q4_K || OF == VG_Q5_K) {
        const u8* qs = b + (OF == VG_Q5_K ? 48 : 16) + sub / 2 * 32;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u.words[k] = load_word<A>(qs + 4 * k) >> (sub % 2 * 4) & NIBBLES;
            if (OF == VG_Q5_K) {
                u.words[k] |= (load_word<A>(b + 16 + 4 * k) >> sub & 0x01010101u) << 4;
            }
        }
        float scale, min;
        scale_min_k4(b + 4, sub, &scale, &min);
        set_scales(u, load_f16(b) * scale, -load_f16(b + 2) * min);
    } else if constexpr (OF == VG_Q6_K) {
        int half = sub / 4, part = sub % 4;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u32 low =
                load_word<A>(b + half * 64 + part % 2 * 32 + 4 * k) >> (part / 2 * 4) & NIBBLES;
            u32 high = load_word<A>(b + 128 + half * 32 + 4 * k) >> (part * 2) & 0x03030303u;
            u.words[k] = low | high << 4;
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            u.scale[h] = scale_of<TYPE>(b, scale) *
                         static_cast<float>(static_cast<signed char>(b[192 + 2 * sub + h]));
            u.offset[h] = -32.0f * u.scale[h];
        }
    } else if constexpr (OF == VG_TQ1_0) {
        // Five base-3 digits per byte; the last four bytes hold four.
        UNROLL
        for (int k = 0; k < 8; k++) {
            bool last = sub == 7 && k >= 4;
            int digit = sub < 5 ? sub : last ? k - 4 : 2 * (sub - 5) + k / 4;
            u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
            u32 bytes = load_word<A>(b + (sub < 5 ? 4 * k : last ? 48 : 32 + 4 * k % 16)), word = 0;
            UNROLL
            for (int j = 0; j < 4; j++) {
                word |= (((bytes >> 8 * j & 255) * power & 255) * 3 >> 8) << 8 * j;
            }
            u.words[k] = word;
        }
        float d = load_f16(b + 52);
        set_scales(u, d, -d);
    } else if constexpr (OF == VG_IQ2_XXS || OF == VG_IQ2_XS || OF == VG_IQ2_S) {
        u32 packed = OF == VG_IQ2_XXS ? load_word<A>(b + 2 + 8 * sub + 4) : 0;
        UNROLL
        for (int g = 0; g < 4; g++) {
            int group = 4 * sub + g;
            u64 entry;
            u32 signs;
            if (OF == VG_IQ2_XXS) {
                entry = grids->iq2_xxs[b[2 + 8 * sub + g]];
                signs = iq_signs(packed >> 7 * g);
            } else if (OF == VG_IQ2_XS) {
                u32 code = load_u16(b + 2 + 2 * group);
                entry = grids->iq2_xs[code & 511];
                signs = iq_signs(code >> 9);
            } else {
                entry = grids->iq2_s[b[2 + group] | (b[66 + sub] >> (2 * g) & 3) << 8];
                signs = b[34 + group];
            }
            u.words[2 * g] = apply_signs(static_cast<u32>(entry), signs);
            u.words[2 * g + 1] = apply_signs(static_cast<u32>(entry >> 32), signs >> 4);
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            u32 scale = OF == VG_IQ2_XXS ? packed >> 28
                                         : b[(OF == VG_IQ2_XS ? 66 : 74) + sub] >> (4 * h) & 15;
            u.scale[h] = load_f16(b) * 0.125f * static_cast<float>(2 * scale + 1);
            u.offset[h] = 0.0f;
        }
    } else if constexpr (OF == VG_IQ3_XXS || OF == VG_IQ3_S) {
        u32 packed = OF == VG_IQ3_XXS ? load_word<A>(b + 66 + 4 * sub) : 0;
        UNROLL
        for (int k = 0; k < 8; k++) {
            u32 index = b[2 + 8 * sub + k], signs;
            u64 entry;
            if (OF == VG_IQ3_XXS) {
                entry = grids->iq3_xxs[index];
                signs = iq_signs(packed >> (k / 2 * 7));
            } else {
                entry = grids->iq3_s[index | (b[66 + sub] >> k & 1) << 8];
                signs = b[74 + 4 * sub + k / 2];
            }
            u.words[k] = apply_signs(static_cast<u32>(entry), signs >> (k % 2 * 4));
        }
        u32 scale = OF == VG_IQ3_XXS ? packed >> 28 : b[106 + sub / 2] >> (sub % 2 * 4) & 15;
        float by = OF == VG_IQ3_XXS ? 0.25f : 1.0f;
        set_scales(u, load_f16(b) * by * static_cast<float>(2 * scale + 1), 0.0f);
    } else if constexpr (OF == VG_IQ1_S || OF == VG_IQ1_M) {
        u32 high = OF == VG_IQ1_S ? load_u16(b + 34 + 2 * sub) : 0;
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
            u64 entry = grids->iq1[index];
            u.words[2 * g] = static_cast<u32>(entry) + up;
            u.words[2 * g + 1] = static_cast<u32>(entry >> 32) + up;
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            float d;
            u32 scale;
            if (OF == VG_IQ1_S) {
                d = load_f16(b);
                scale = high >> 12 & 7;
            } else {
                const u8* scales = b + 48;
                u32 bits = load_u16(scales) >> 12 | load_u16(scales + 2) >> 12 << 4 |
                           load_u16(scales + 4) >> 12 << 8 | load_u16(scales + 6) >> 12 << 12;
                d = to_float(f16{static_cast<u16>(bits)});
                scale = load_u16(scales + sub / 2 * 2) >> (sub % 2 * 6 + 3 * h) & 7;
            }
            u.scale[h] = d * 0.125f * static_cast<float>(2 * scale + 1);
            u.offset[h] = -16.0f * u.scale[h];
        }
    }
}
