// FLASH_ATTN_EXT on tensor cores: loads a tile's queries, keys and values into shared memory and
// converts them to the type of the operands. fattn.cuh describes the algorithm.
#pragma once
#include "fattn_tile.cuh"

namespace {

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

// Starts to copy a tile of K or V to `to`, or its quantised bytes to `raw`.
template <class T>
DEVICE void FlashAttention<T>::fetch(const View& v, const u8* base, int tile, u16* to,
                                      int stride, u8* raw) const {
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
template <class T>
DEVICE void FlashAttention<T>::dequantize_tile(const View& v, const u8* base, int tile, u16* to,
                                                int stride, const u8* raw) const {
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
template <class T> template <int WIDTH>
DEVICE void FlashAttention<T>::split_bf16_tile(const View& v, const u8* base, int tile, u16* to,
                                                int stride) const {
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
template <class T>
DEVICE void FlashAttention<T>::load_queries() const {
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

} // namespace
