// Block formats: dequantisation of single elements, and quantisation of the simple formats.
//
// Layouts are the `block_*` structs of ggml (ggml-common.h); `host-kernels/cpu/src/formats/`
// describes each field.
#pragma once
#include "device.cuh"

// Elements and bytes of a block (ggml: blck_size, type_size). Types without blocks have 1 element.
struct TypeTraits {
    int elements, bytes;
};

// Whether the type is repacked (quants and scales in separate arrays), and the ggml type itself.
// Negative ids are no types.
DEVICE constexpr bool is_repacked(int type) {
    return type > 0 && (type & VG_REPACKED) != 0;
}
DEVICE constexpr int base_type(int type) { return type & ~VG_REPACKED; }

DEVICE constexpr TypeTraits type_traits(u32 type) {
    switch (base_type(type)) {
    case VG_F32: return {1, 4};
    case VG_F16: return {1, 2};
    case VG_BF16: return {1, 2};
    case VG_I8: return {1, 1};
    case VG_I16: return {1, 2};
    case VG_I32: return {1, 4};
    case VG_I64: return {1, 8};
    case VG_F64: return {1, 8};
    case VG_Q4_0: return {32, 18};
    case VG_Q4_1: return {32, 20};
    case VG_Q5_0: return {32, 22};
    case VG_Q5_1: return {32, 24};
    case VG_Q8_0: return {32, 34};
    case VG_Q8_1: return {32, 36};
    case VG_IQ4_NL: return {32, 18};
    case VG_MXFP4: return {32, 17};
    case VG_NVFP4: return {64, 36};
    case VG_Q1_0: return {128, 18};
    case VG_Q2_0: return {64, 18};
    case VG_Q2_K: return {256, 84};
    case VG_Q3_K: return {256, 110};
    case VG_Q4_K: return {256, 144};
    case VG_Q5_K: return {256, 176};
    case VG_Q6_K: return {256, 210};
    case VG_Q8_K: return {256, 292};
    case VG_IQ2_XXS: return {256, 66};
    case VG_IQ2_XS: return {256, 74};
    case VG_IQ2_S: return {256, 82};
    case VG_IQ3_XXS: return {256, 98};
    case VG_IQ3_S: return {256, 110};
    case VG_IQ1_S: return {256, 50};
    case VG_IQ1_M: return {256, 56};
    case VG_IQ4_XS: return {256, 136};
    case VG_TQ1_0: return {256, 54};
    case VG_TQ2_0: return {256, 66};
    default: return {1, 1};
    }
}

// Bytes of a block in the scale array and in the quant array: 0 and the whole block if the type is
// not repacked.
DEVICE constexpr int scale_bytes(int type) {
    return !is_repacked(type) ? 0 : base_type(type) == VG_MXFP4 ? 1 : 2;
}
DEVICE constexpr int quant_bytes(int type) { return type_traits(type).bytes - scale_bytes(type); }

// Pointers to a row or a block of weights: its quants, and its scales if the type is repacked.
struct RowPtr {
    const u8 *quants, *scales;
};

// Bytes of a row in the quant and scale arrays of repacked weights. Both are 0 for other types,
// whose rows follow the strides of the view.
struct RowBytes {
    i64 quants, scales;
};
DEVICE RowBytes repacked_row_bytes(int type, i64 width) {
    i64 blocks = is_repacked(type) ? width / type_traits(type).elements : 0;
    return {blocks * quant_bytes(type), blocks * scale_bytes(type)};
}

// Row `row` of the matrix at `at`.
DEVICE RowPtr row_ptr(const u8* at, const View& w, i64 row, const RowBytes& bytes) {
    if (bytes.scales == 0) {
        return {at + row * w.nb[1], nullptr};
    }
    return {at + row * bytes.quants, at + w.ne[1] * bytes.quants + row * bytes.scales};
}
DEVICE RowPtr row_ptr_at(int type, const View& w, i64 row, i64 i2, i64 i3) {
    return row_ptr(address(w, Index{{0, 0, i2, i3}}), w, row, repacked_row_bytes(type, w.ne[0]));
}

// ggml's kvalues_iq4nl (IQ4_NL, IQ4_XS), and kvalues_mxfp4: twice the values of E2M1.
CONSTANT signed char IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
CONSTANT signed char FP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

DEVICE float load_f16(const u8* at) { return to_float(*aligned<f16>(at)); }
DEVICE u32 load_u16(const u8* at) { return *aligned<u16>(at); }
// Blocks are aligned to 2 bytes.
DEVICE u32 load_u32(const u8* at) {
    return load_u16(at) | load_u16(at + 2) << 16;
}

// 2^(e - 128): half the E8M0 scale of MXFP4, as FP4_VALUES are doubled. The bit pattern is the
// larger of two linear functions of e: numbers with e < 2 are subnormal and follow the second.
DEVICE float e8m0_half(u32 e) {
    int normal = static_cast<int>(e * 0x00800000u - 0x00800000u),
        subnormal = static_cast<int>(e * 0x00200000u + 0x00200000u);
    return __int_as_float(normal > subnormal ? normal : subnormal);
}

// Half the scale of NVFP4: unsigned E4M3. NaN is read as 0, as ggml does.
DEVICE float ue4m3_half(u32 bits) {
    if (bits == 0x7f) {
        return 0.0f;
    }
    u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 0) {
        return static_cast<float>(mantissa) * (0.5f / 512.0f);
    }
    return (1.0f + static_cast<float>(mantissa) / 8.0f) *
           __uint_as_float((exponent + 127 - 8) << 23);
}

// Element `i` of 32 4-bit quants: the first 16 are low nibbles.
DEVICE u32 nibble(const u8* qs, int i) {
    return qs[i % 16] >> (i / 16 * 4) & 15;
}

// 2-bit element `i` of Q2_K, Q3_K and TQ2_0: in each half of the block, element 32 * k + j is in
// bits 2 * k of byte j.
DEVICE int quant_2bit(const u8* qs, int i) {
    return qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

// 6-bit scale and minimum `j` of Q4_K and Q5_K, packed in 12 bytes (ggml: K_SCALE_SIZE).
DEVICE void scale_min_k4(const u8* packed, int j, float* scale, float* min) {
    if (j < 4) {
        *scale = static_cast<float>(packed[j] & 63);
        *min = static_cast<float>(packed[j + 4] & 63);
    } else {
        *scale = static_cast<float>((packed[j + 4] & 15) | packed[j - 4] >> 6 << 4);
        *min = static_cast<float>(packed[j + 4] >> 4 | packed[j] >> 6 << 4);
    }
}

// Byte `i` of a codebook entry, which is magnitude + 64, with its sign applied.
DEVICE float signed_magnitude(u64 entry, int i, u32 sign) {
    float magnitude = static_cast<float>(static_cast<int>(entry >> (8 * i) & 255) - 64);
    return sign ? -magnitude : magnitude;
}

// Sign `i` of eight. Seven are stored; the eighth makes the number of minus signs even.
DEVICE u32 iq_sign(u32 seven, int i) {
    seven &= 127;
    return i < 7 ? seven >> i & 1 : __popc(seven) & 1;
}

// Element `i` of the block at `b`, dequantised.
DEVICE float dequantize_block_element(u32 type, const VgCodebooks* grids, const u8* b, int i) {
    switch (type) {
    case VG_Q4_0: return load_f16(b) * static_cast<float>(static_cast<int>(nibble(b + 2, i)) - 8);
    case VG_Q4_1: return load_f16(b) * static_cast<float>(nibble(b + 4, i)) + load_f16(b + 2);
    case VG_Q5_0: {
        int q = static_cast<int>(nibble(b + 6, i) | (load_u32(b + 2) >> i & 1) << 4);
        return load_f16(b) * static_cast<float>(q - 16);
    }
    case VG_Q5_1: {
        u32 q = nibble(b + 8, i) | (load_u32(b + 4) >> i & 1) << 4;
        return load_f16(b) * static_cast<float>(q) + load_f16(b + 2);
    }
    case VG_Q8_0: return load_f16(b) * static_cast<float>(static_cast<signed char>(b[2 + i]));
    case VG_Q8_1: return load_f16(b) * static_cast<float>(static_cast<signed char>(b[4 + i]));
    case VG_IQ4_NL: return load_f16(b) * static_cast<float>(IQ4_VALUES[nibble(b + 2, i)]);
    case VG_MXFP4: return e8m0_half(b[0]) * static_cast<float>(FP4_VALUES[nibble(b + 1, i)]);
    case VG_NVFP4: {
        int sub = i / 16, j = i % 16;
        u32 q = b[4 + 8 * sub + j % 8] >> (j / 8 * 4) & 15;
        return ue4m3_half(b[sub]) * static_cast<float>(FP4_VALUES[q]);
    }
    case VG_Q1_0: return load_f16(b) * (b[2 + i / 8] >> (i % 8) & 1 ? 1.0f : -1.0f);
    case VG_Q2_0: return load_f16(b) * static_cast<float>((b[2 + i / 4] >> (i % 4 * 2) & 3) - 1);
    case VG_Q2_K: {
        u32 s = b[i / 16];
        float d = load_f16(b + 80) * static_cast<float>(s & 15),
              m = load_f16(b + 82) * static_cast<float>(s >> 4);
        return d * static_cast<float>(quant_2bit(b + 16, i)) - m;
    }
    case VG_Q3_K: {
        int j = i / 16;
        int scale = (b[96 + j % 8] >> (j / 8 * 4) & 15) | (b[104 + j % 4] >> (j / 4 * 2) & 3) << 4;
        int q = quant_2bit(b + 32, i) | (b[i % 32] >> (i / 32) & 1) << 2;
        return load_f16(b + 108) * static_cast<float>(scale - 32) * static_cast<float>(q - 4);
    }
    case VG_Q4_K: {
        float scale, min;
        scale_min_k4(b + 4, i / 32, &scale, &min);
        u32 q = b[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        return load_f16(b) * scale * static_cast<float>(q) - load_f16(b + 2) * min;
    }
    case VG_Q5_K: {
        float scale, min;
        scale_min_k4(b + 4, i / 32, &scale, &min);
        u32 q = b[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
        q |= (b[16 + i % 32] >> (i / 32) & 1) << 4;
        return load_f16(b) * scale * static_cast<float>(q) - load_f16(b + 2) * min;
    }
    case VG_Q6_K: {
        int part = i % 128 / 32, j = i % 32;
        int low = b[i / 128 * 64 + j + part % 2 * 32] >> (part / 2 * 4) & 15;
        int high = b[128 + i / 128 * 32 + j] >> (part * 2) & 3;
        float scale =
            load_f16(b + 208) * static_cast<float>(static_cast<signed char>(b[192 + i / 16]));
        return scale * static_cast<float>((low | high << 4) - 32);
    }
    case VG_Q8_K:
        return __uint_as_float(load_u32(b)) *
               static_cast<float>(static_cast<signed char>(b[4 + i]));
    case VG_IQ4_XS: {
        int j = i / 32;
        int scale = (b[4 + j / 2] >> (j % 2 * 4) & 15) | (load_u16(b + 2) >> (2 * j) & 3) << 4;
        float d = load_f16(b) * static_cast<float>(scale - 32);
        return d * static_cast<float>(IQ4_VALUES[nibble(b + 8 + 16 * j, i % 32)]);
    }
    case VG_TQ1_0: {
        // Five base-3 digits per byte; the last four bytes hold four.
        const int POWERS[5] = {1, 3, 9, 27, 81};
        int byte, digit;
        if (i < 160) {
            byte = i % 32, digit = i / 32;
        } else if (i < 240) {
            byte = 32 + (i - 160) % 16, digit = (i - 160) / 16;
        } else {
            byte = 48 + (i - 240) % 4, digit = (i - 240) / 4;
        }
        u32 rest = b[byte] * POWERS[digit] & 255;
        return load_f16(b + 52) * static_cast<float>(static_cast<int>(rest * 3 >> 8) - 1);
    }
    case VG_TQ2_0: return load_f16(b + 64) * static_cast<float>(quant_2bit(b, i) - 1);
    case VG_IQ2_XXS: {
        const u8* sub = b + 2 + i / 32 * 8;
        u32 signs = load_u32(sub + 4);
        int group = i % 32 / 8;
        float d = load_f16(b) * 0.125f * static_cast<float>(2 * (signs >> 28) + 1);
        return d * signed_magnitude(grids->iq2_xxs[sub[group]], i % 8,
                                    iq_sign(signs >> (7 * group), i % 8));
    }
    case VG_IQ2_XS: {
        u32 code = load_u16(b + 2 + i / 8 * 2);
        u32 scale = b[66 + i / 32] >> (i / 16 % 2 * 4) & 15;
        float d = load_f16(b) * 0.125f * static_cast<float>(2 * scale + 1);
        return d * signed_magnitude(grids->iq2_xs[code & 511], i % 8, iq_sign(code >> 9, i % 8));
    }
    case VG_IQ2_S: {
        int group = i / 8;
        u32 index = b[2 + group] | (b[66 + group / 4] >> (group % 4 * 2) & 3) << 8;
        u32 scale = b[74 + i / 32] >> (i / 16 % 2 * 4) & 15;
        float d = load_f16(b) * 0.125f * static_cast<float>(2 * scale + 1);
        return d * signed_magnitude(grids->iq2_s[index], i % 8, b[34 + group] >> (i % 8) & 1);
    }
    case VG_IQ3_XXS: {
        u32 signs = load_u32(b + 66 + i / 32 * 4);
        float d = load_f16(b) * 0.25f * static_cast<float>(2 * (signs >> 28) + 1);
        u32 sign = iq_sign(signs >> (i % 32 / 8 * 7), i % 8);
        return d * signed_magnitude(grids->iq3_xxs[b[2 + i / 4]], i % 4, sign);
    }
    case VG_IQ3_S: {
        u32 index = b[2 + i / 4] | (b[66 + i / 32] >> (i / 4 % 8) & 1) << 8;
        u32 scale = b[106 + i / 64] >> (i / 32 % 2 * 4) & 15;
        float d = load_f16(b) * static_cast<float>(2 * scale + 1);
        return d * signed_magnitude(grids->iq3_s[index], i % 4, b[74 + i / 8] >> (i % 8) & 1);
    }
    case VG_IQ1_S: {
        u32 qh = load_u16(b + 34 + i / 32 * 2);
        u32 index = b[2 + i / 8] | (qh >> (i % 32 / 8 * 3) & 7) << 8;
        float d = load_f16(b) * 0.125f * static_cast<float>(2 * (qh >> 12 & 7) + 1);
        // Codebook bytes are 8 * value + 15; the delta of IQ1 (IQ1S_DELTA) is 1/8 up or down.
        int q = static_cast<int>(grids->iq1[index] >> (i % 8 * 8) & 255) + (qh >> 15 ? 0 : 2);
        return d * static_cast<float>(q - 16);
    }
    case VG_IQ1_M: {
        const u8* scales = b + 48;
        u32 bits = load_u16(scales) >> 12 | load_u16(scales + 2) >> 12 << 4 |
                   load_u16(scales + 4) >> 12 << 8 | load_u16(scales + 6) >> 12 << 12;
        f16 half = {static_cast<u16>(bits)};
        u32 nibbles = b[32 + i / 16] >> (i / 8 % 2 * 4) & 15;
        u32 index = b[i / 8] | (nibbles & 7) << 8;
        u32 scale = load_u16(scales + i / 64 * 2) >> (i / 16 % 4 * 3) & 7;
        int q = static_cast<int>(grids->iq1[index] >> (i % 8 * 8) & 255) + (nibbles >> 3 ? 0 : 2);
        return to_float(half) * 0.125f * static_cast<float>(2 * scale + 1) *
               static_cast<float>(q - 16);
    }
    default: return NAN_F;
    }
}

// Element `i` of a row, dequantised. `step` is the stride of elements (of blocks for quantised
// types) in bytes.
DEVICE float dequantize_element(u32 type, const VgCodebooks* grids, const u8* row, i64 step,
                                i64 i) {
    if (type == VG_F32 || type == VG_F16 || type == VG_BF16 || type == VG_I32) {
        return load(type, row + i * step);
    }
    TypeTraits g = type_traits(type);
    i64 block = i / g.elements;
    return dequantize_block_element(type, grids, row + block * step,
                                    static_cast<int>(i - block * g.elements));
}

DEVICE const VgCodebooks* codebooks(u64 address) {
    return reinterpret_cast<const VgCodebooks*>(address);
}

// ---- Quantisation, rounded as ggml-cpu does.

DEVICE void store_f16(u8* at, float x) {
    *reinterpret_cast<f16*>(at) = to_f16(x);
}

DEVICE float signed_max(const float* x, int n) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) {
        if (fabsf(x[i]) > fabsf(largest)) {
            largest = x[i];
        }
    }
    return largest;
}

DEVICE float inverse_of(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

DEVICE u32 round_quant(float x, u32 max_value) {
    u32 q = static_cast<u8>(static_cast<signed char>(static_cast<int>(x)));
    return q < max_value ? q : max_value;
}

// Packs the low nibbles of 32 values into 16 bytes and returns their fifth bits (ggml: qh).
DEVICE u32 pack_nibbles(const u8* q, u8* qs) {
    u32 qh = 0;
    for (int j = 0; j < 16; j++) {
        qs[j] = static_cast<u8>((q[j] & 15) | (q[j + 16] & 15) << 4);
    }
    for (int j = 0; j < 32; j++) {
        qh |= static_cast<u32>(q[j] >> 4 & 1) << j;
    }
    return qh;
}

DEVICE void store_qh(u8* at, u32 bits) {
    reinterpret_cast<u16*>(at)[0] = static_cast<u16>(bits);
    reinterpret_cast<u16*>(at)[1] = static_cast<u16>(bits >> 16);
}

// Index of the IQ4 value nearest to x.
DEVICE u32 nearest_iq4_nl(float x) {
    if (!(x > static_cast<float>(IQ4_VALUES[0]))) {
        return 0;
    }
    if (x >= static_cast<float>(IQ4_VALUES[15])) {
        return 15;
    }
    int low = 0, high = 15; // value(low) <= x < value(high)
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (x < static_cast<float>(IQ4_VALUES[middle])) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return x - static_cast<float>(IQ4_VALUES[high - 1]) < static_cast<float>(IQ4_VALUES[high]) - x
               ? high - 1
               : high;
}

DEVICE void quantize_q8_0(const float* x, u8* b) {
    float largest = 0.0f;
    for (int i = 0; i < 32; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
    }
    float inverse = largest != 0.0f ? 127.0f / largest : 0.0f;
    store_f16(b, largest / 127.0f);
    for (int i = 0; i < 32; i++) {
        b[2 + i] = static_cast<u8>(static_cast<signed char>(rintf(x[i] * inverse)));
    }
}

DEVICE void quantize_symmetric(const float* x, u8* b, u32 type) {
    bool five = type == VG_Q5_0;
    float d = signed_max(x, 32) / (five ? -16.0f : -8.0f), inverse = inverse_of(d);
    u8 q[32];
    for (int i = 0; i < 32; i++) {
        float steps = mul_add_unfused(x[i], inverse, five ? 16.5f : 8.5f);
        q[i] = static_cast<u8>(round_quant(steps, five ? 31 : 15));
    }
    store_f16(b, d);
    u32 qh = pack_nibbles(q, b + (five ? 6 : 2));
    if (five) {
        store_qh(b + 2, qh);
    }
}

DEVICE void quantize_affine(const float* x, u8* b, u32 type) {
    bool five = type == VG_Q5_1;
    float min_value = 3.402823466e38f, max_value = -3.402823466e38f;
    for (int i = 0; i < 32; i++) {
        min_value = x[i] < min_value ? x[i] : min_value;
        max_value = x[i] > max_value ? x[i] : max_value;
    }
    float d = (max_value - min_value) / (five ? 31.0f : 15.0f), inverse = inverse_of(d);
    u8 q[32];
    for (int i = 0; i < 32; i++) {
        float steps = mul_add_unfused(x[i] - min_value, inverse, 0.5f);
        q[i] = static_cast<u8>(five ? static_cast<u32>(steps) & 31 : round_quant(steps, 15));
    }
    store_f16(b, d);
    store_f16(b + 2, min_value);
    u32 qh = pack_nibbles(q, b + (five ? 8 : 4));
    if (five) {
        store_qh(b + 4, qh);
    }
}

DEVICE void quantize_iq4_nl(const float* x, u8* b) {
    float largest = signed_max(x, 32);
    float d = 0.0f, inverse = 0.0f;
    if (fabsf(largest) >= 1e-15f) {
        inverse = 1.0f / (largest / static_cast<float>(IQ4_VALUES[0]));
        float sum_qx = 0.0f, sum_q2 = 0.0f;
        for (int i = 0; i < 32; i++) {
            float q = static_cast<float>(IQ4_VALUES[nearest_iq4_nl(inverse * x[i])]),
                  w = x[i] * x[i];
            sum_qx += w * q * x[i];
            sum_q2 += w * q * q;
        }
        d = sum_q2 > 0.0f ? sum_qx / sum_q2 : 0.0f;
    }
    u8 q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = fabsf(largest) >= 1e-15f ? static_cast<u8>(nearest_iq4_nl(inverse * x[i])) : 0;
    }
    store_f16(b, d);
    pack_nibbles(q, b + 2);
}

// Quantises 32 values to a block.
DEVICE void quantize_block(u32 type, const float* x, u8* b) {
    switch (type) {
    case VG_Q8_0: quantize_q8_0(x, b); break;
    case VG_Q4_0:
    case VG_Q5_0: quantize_symmetric(x, b, type); break;
    case VG_Q4_1:
    case VG_Q5_1: quantize_affine(x, b, type); break;
    case VG_IQ4_NL: quantize_iq4_nl(x, b); break;
    default: break;
    }
}
