// GEMM for sm_90a: warp-specialised, with wgmma, f16 or bf16 operands and f32 accumulators.
//
// One producer warpgroup: three warps copy weights in their memory format with cp.async, a thread
// of the fourth one copies activations, which `vg_convert_f16_sm90` stored so that the operand of a
// k step is one bulk copy. Two consumer warpgroups: each thread dequantises its weights from shared
// memory to the registers of the A operand, for the next k step while wgmma executes this one.
// `full` and `empty` mbarriers of two ring buffers synchronise producers and consumers.
//
// The k index is permuted within a step so that a thread's A fragment comes from eight neighbours
// of each block of 32, which it loads at once in every format. For thread t of four, element 8t + e
// of block h is element 32h + 16(e / 4) + 8(e % 2) + 2t + e % 4 / 2 of the product.
#pragma once
#include "sm90.cuh"
#include "dequantize.cuh"

namespace {

constexpr int SM90_ROWS = 128, SM90_STEP = 64, SM90_THREADS = 3 * WARPGROUP;

// Dynamic shared memory of a block: the maximum of sm_90.
constexpr int SM90_SHARED = 227 << 10;

DEVICE constexpr bool is_float(int type) { return type == VG_F16 || type == VG_BF16; }

// Elements of a row that are loaded at a time.
DEVICE constexpr int chunk_of(int type) {
    return is_float(type) ? 128 : 256;
}

// Whether rows (or rows of repacked quants) are 16-byte aligned; the host ensures it.
DEVICE constexpr bool is_aligned(int type) {
    return is_float(type) || type == VG_Q4_K || type == VG_Q5_K || is_repacked(type);
}

DEVICE constexpr int chunk_bytes(int type) {
    return chunk_of(type) / type_traits(type).elements * quant_bytes(type);
}
// Bytes of repacked scales, which are stored behind the quants of a row.
DEVICE constexpr int chunk_scales(int type) {
    return chunk_of(type) / type_traits(type).elements * scale_bytes(type);
}

// Row stride in shared memory, without bank conflicts between eight rows.
DEVICE constexpr int chunk_stride(int type) {
    return is_repacked(type)   ? (chunk_bytes(type) == 128   ? 176
                                  : chunk_bytes(type) == 256 ? 288
                                                             : 224)
           : is_float(type)    ? 320
           : !is_aligned(type) ? (chunk_bytes(type) + 15 + 15) / 16 * 16
           : type == VG_Q4_K   ? 160
                               : 224;
}

template <int TYPE, int N> struct GemmShared {
    static constexpr int WEIGHTS = SM90_ROWS * chunk_stride(TYPE), ACTIVATIONS = N * SWIZZLE_ROW;
    static constexpr int CHUNKS = WEIGHTS > 32 << 10 ? 2 : 3;
    // Reserve for alignment to SWIZZLE_ATOM, for mbarriers, and for words read behind the last row.
    static constexpr int CAPACITY = SM90_SHARED - SWIZZLE_ATOM - 512;
    static constexpr int MAX_STEPS = (CAPACITY - CHUNKS * WEIGHTS) / ACTIVATIONS,
                         STEPS = MAX_STEPS < 8 ? MAX_STEPS : 8;
    static_assert(STEPS >= 3, "one step is multiplied, one is still read, and one is in flight");

    u8 *activations, *weights;
    u64 *full_steps, *empty_steps, *full_chunks, *empty_chunks;

    DEVICE explicit GemmShared(u8* memory) {
        u32 lead = smem_address(memory) & (SWIZZLE_ATOM - 1);
        activations = memory + (lead ? SWIZZLE_ATOM - lead : 0);
        weights = activations + STEPS * ACTIVATIONS;
        full_steps = reinterpret_cast<u64*>(weights + CHUNKS * WEIGHTS + 16);
        empty_steps = full_steps + STEPS;
        full_chunks = empty_steps + STEPS;
        empty_chunks = full_chunks + CHUNKS;
    }
};

// A tile of the result: matrix and rows of the weights, rows of the activations.
struct GemmTile {
    int i2, i3, w2, w3;
    int first_row, first, column; // row of weights; row of activations in memory, and in the batch
    int count;                    // columns
};

// All tiles of the launch, fewer than 2^31 as the host ensures.
template <int N> struct TileScheduler {
    const VgGemmSm90Params& p;
    int row_tiles, column_tiles, count;

    DEVICE const u32* starts() const { return reinterpret_cast<const u32*>(p.moe_order); }
    DEVICE const u32* tile_starts() const { return starts() + p.w.ne[2] + 1; }
    DEVICE const u32* order() const { return tile_starts() + p.w.ne[2] + 1; }

    DEVICE explicit TileScheduler(const VgGemmSm90Params& params) : p(params) {
        row_tiles = static_cast<int>((p.dst.ne[0] + SM90_ROWS - 1) / SM90_ROWS);
        column_tiles =
            static_cast<int>(p.moe_order ? tile_starts()[p.w.ne[2]] : (p.dst.ne[1] + N - 1) / N);
        count = row_tiles * column_tiles *
                (p.moe_order ? 1 : static_cast<int>(p.dst.ne[2] * p.dst.ne[3]));
    }

    // Column tiles are fastest: concurrent tiles share weights in the L2 cache.
    DEVICE GemmTile at(int index) const {
        GemmTile tile;
        int column = index % column_tiles, rest = index / column_tiles, left;
        tile.first_row = rest % row_tiles * SM90_ROWS;
        int batch = rest / row_tiles, across = static_cast<int>(p.dst.ne[2]);
        tile.i2 = batch % across, tile.i3 = batch / across;
        tile.column = column * N;
        if (p.moe_order) {
            int expert = 0, end = static_cast<int>(p.w.ne[2]);
            while (end - expert > 1) { // the last expert whose tiles begin here or before
                int middle = (expert + end) / 2;
                (static_cast<int>(tile_starts()[middle]) <= column ? expert : end) = middle;
            }
            tile.w2 = expert, tile.w3 = 0;
            tile.first = static_cast<int>(starts()[expert]) +
                         (column - static_cast<int>(tile_starts()[expert])) * N;
            left = static_cast<int>(starts()[expert + 1]) - tile.first;
        } else {
            tile.w2 = tile.i2 / (across / static_cast<int>(p.w.ne[2]));
            tile.w3 = tile.i3 / static_cast<int>(p.dst.ne[3] / p.w.ne[3]);
            tile.first = batch * static_cast<int>(p.padded) + tile.column;
            left = static_cast<int>(p.dst.ne[1]) - tile.column;
        }
        tile.count = left < N ? left : N;
        return tile;
    }
};

// ---- Dequantisation of weights to registers.

// f16x2 arithmetic, each operation rounded once.
DEVICE u32 hadd2(u32 a, u32 b) {
#ifdef VGPU_SHIM
    return shim::hfma2(a, 0x3c003c00u, b);
#else
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#endif
}
DEVICE u32 hmul2(u32 a, u32 b) {
#ifdef VGPU_SHIM
    return shim::hfma2(a, b, 0x80008000u);
#else
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#endif
}
DEVICE u32 hfma2(u32 a, u32 b, u32 c) {
#ifdef VGPU_SHIM
    return shim::hfma2(a, b, c);
#else
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
    return a;
#endif
}

DEVICE u32 dup_half2(u32 half) { return half * 0x00010001u; }

// f16 1024 in both halves: OR-ing an integer below 1024 into it gives the f16 1024 + integer.
constexpr u32 PLUS_1024 = 0x64006400u;
// f16x2 constant that subtracts 1024 and `zero` (adds with opposite sign). All values are integers,
// so nothing is rounded.
DEVICE constexpr u32 minus_1024(u32 zero) {
    return (0xe400u + zero) * 0x00010001u;
}

// Eight bytes at any address. Reads up to three bytes behind them.
DEVICE void load_8_bytes(const u8* at, u32* words) {
    u32 shift = static_cast<u32>(reinterpret_cast<u64>(at) & 3) * 8;
    const u32* from = reinterpret_cast<const u32*>(at - shift / 8);
    u32 a = from[0], b = from[1], c = from[2];
    words[0] = __funnelshift_r(a, b, shift), words[1] = __funnelshift_r(b, c, shift);
}

// (x & mask) | bits in one lop3 instruction; the compiler makes two of constants.
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) {
#ifdef VGPU_SHIM
    return (x & mask) | bits;
#else
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
#endif
}

// Eight weights of eight bytes masked with `mask`: (byte - ZERO) * scale + offset. The output words
// have elements (0, 2), (1, 3), (4, 6), (5, 7).
template <u32 ZERO, bool OFFSET>
DEVICE void dequantize_8(const u32* words, u32 mask, u32 scale, u32 offset, u32* out) {
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 q = words[i / 2] >> (i % 2 * 8);
        q = hadd2(and_or(q, mask, PLUS_1024), minus_1024(ZERO));
        out[i] = OFFSET ? hfma2(q, scale, offset) : hmul2(q, scale);
    }
}

// Sixteen weights of the thread as f16x2: eight of each of the two blocks of 32 of step `step` of a
// chunk.
template <int TYPE> DEVICE void dequantize_16(const RowPtr& begin, int step, int t, u32* out) {
    const u8* row = begin.quants;
    // For blocks of 32: the block, its scale, and eight bytes of quants at a multiple of eight.
    auto block = [&](int h) { return row + (2 * step + h) * quant_bytes(TYPE); };
    auto scale_at = [&](int h) {
        return is_repacked(TYPE) ? begin.scales + (2 * step + h) * scale_bytes(TYPE) : block(h);
    };
    auto eight = [&](const u8* at, u32* words) {
        if (is_repacked(TYPE)) {
            words[0] = reinterpret_cast<const u32*>(at)[0],
            words[1] = reinterpret_cast<const u32*>(at)[1];
        } else {
            load_8_bytes(at, words);
        }
    };
    if constexpr (is_float(TYPE)) {
        UNROLL
        for (int h = 0; h < 2; h++) {
            int4 eight = *reinterpret_cast<const int4*>(row + step * 128 + h * 64 + t * 16);
            out[4 * h] = __byte_perm(eight.x, eight.y, 0x5410),
                    out[4 * h + 1] = __byte_perm(eight.x, eight.y, 0x7632);
            out[4 * h + 2] = __byte_perm(eight.z, eight.w, 0x5410),
                        out[4 * h + 3] = __byte_perm(eight.z, eight.w, 0x7632);
        }
    } else if constexpr (base_type(TYPE) == VG_MXFP4) {
        UNROLL
        for (int h = 0; h < 2; h++) {
            float power = __uint_as_float(static_cast<u32>(*scale_at(h)) << 23);
            u32 scale = pack_half2<false>(power, power);
            // Two FP4 values of each word of `from`, at bit `down` of its halves.
            u32 from[4];
            int down[4] = {0, is_repacked(TYPE) ? 4 : 8, is_repacked(TYPE) ? 8 : 0,
                           is_repacked(TYPE) ? 12 : 8};
            if constexpr (is_repacked(TYPE)) {
                u32 word = *reinterpret_cast<const u32*>(block(h) + 4 * t);
                from[0] = from[1] = from[2] = from[3] = __byte_perm(word, 0, 0x3120);
            } else {
                u32 words[2];
                load_8_bytes(block(h) + 1 + t % 2 * 8, words);
                from[0] = from[1] = words[0] >> t / 2 * 4,
                from[2] = from[3] = words[1] >> t / 2 * 4;
            }
            UNROLL
            for (int i = 0; i < 4; i++) {
                // With sign, exponent and mantissa in their f16 positions, the value is scaled by
                // 2^-14.
                u32 q = from[i],
                    to_exponent = down[i] < 9 ? q << (9 - down[i]) : q >> (down[i] - 9);
                q = and_or(to_exponent, 0x0e000e00u, q << (12 - down[i]) & 0x80008000u);
                out[4 * h + i] = hmul2(hmul2(q, 0x74007400u), scale);
            }
        }
    } else if constexpr (base_type(TYPE) == VG_IQ4_NL || TYPE == VG_IQ4_XS) {
        // The table of `unpack`, plus 128.
        const u32 table[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
        UNROLL
        for (int h = 0; h < 2; h++) {
            int sub = 2 * step + h;
            const u8 *b = TYPE == VG_IQ4_XS ? row : block(h), *qs = b + 2;
            u32 words[2],
                scale =
                    dup_half2(*reinterpret_cast<const u16*>(TYPE == VG_IQ4_XS ? b : scale_at(h)));
            if constexpr (TYPE == VG_IQ4_XS) {
                qs = b + 8 + 16 * sub;
                u32 high = *reinterpret_cast<const u16*>(b + 2);
                u32 six = (b[4 + sub / 2] >> (sub % 2 * 4) & 15) | (high >> (2 * sub) & 3) << 4;
                scale = hmul2(hadd2(dup_half2(six) | PLUS_1024, minus_1024(32)), scale);
            }
            if constexpr (is_repacked(TYPE)) {
                lookup_8(table, PRMT_PAIR_SELECT, *reinterpret_cast<const u32*>(b + 4 * t), words);
            } else {
                load_8_bytes(qs + t % 2 * 8, words);
                UNROLL
                for (int i = 0; i < 2; i++) {
                    words[i] = lookup_4(table, words[i] >> t / 2 * 4 & 0x0f0f0f0fu);
                }
            }
            dequantize_8<128, false>(words, 0x00ff00ffu, scale, 0, out + 4 * h);
        }
    } else if constexpr (base_type(TYPE) == VG_Q4_0 || TYPE == VG_Q4_1 || TYPE == VG_Q5_0 ||
                         TYPE == VG_Q5_1) {
        constexpr bool FIVE = TYPE == VG_Q5_0 || TYPE == VG_Q5_1,
                       AFFINE = TYPE == VG_Q4_1 || TYPE == VG_Q5_1;
        UNROLL
        for (int h = 0; h < 2; h++) {
            const u8 *b = block(h), *rest = is_repacked(TYPE) ? b : b + (AFFINE ? 4 : 2);
            u32 words[2], scale = dup_half2(*reinterpret_cast<const u16*>(scale_at(h)));
            u32 offset = AFFINE ? dup_half2(*reinterpret_cast<const u16*>(b + 2)) : 0;
            eight(rest + (FIVE ? 4 : 0) + t % 2 * 8, words);
            UNROLL
            for (int i = 0; i < 2; i++) {
                words[i] >>= t / 2 * 4;
                if (FIVE) {
                    words[i] = (words[i] & 0x0f0f0f0fu) | spread_bits(rest[t] >> 4 * i) << 4;
                }
            }
            constexpr u32 ZERO = base_type(TYPE) == VG_Q4_0 ? 8 : TYPE == VG_Q5_0 ? 16 : 0;
            dequantize_8<ZERO, AFFINE>(words, FIVE ? 0x00ff00ffu : 0x000f000fu, scale, offset,
                                       out + 4 * h);
        }
    } else if constexpr (base_type(TYPE) == VG_Q8_0) {
        UNROLL
        for (int h = 0; h < 2; h++) {
            u32 words[2], scale = dup_half2(*reinterpret_cast<const u16*>(scale_at(h)));
            eight(quants_of<TYPE>(block(h)) + t * 8, words);
            words[0] ^= 0x80808080u, words[1] ^= 0x80808080u;
            dequantize_8<128, false>(words, 0x00ff00ffu, scale, 0, out + 4 * h);
        }
    } else if constexpr (TYPE == VG_Q4_K || TYPE == VG_Q5_K) {
        constexpr bool FIVE = TYPE == VG_Q5_K;
        int4 head = *reinterpret_cast<const int4*>(
            row); // d and dmin, then 6-bit scales and minima (ggml: block_q4_K)
        u32 scales =
            step < 2 ? head.y & 0x3f3f3f3f : (head.w & 0x0f0f0f0f) | (head.y >> 2 & 0x30303030);
        u32 least = step < 2 ? head.z & 0x3f3f3f3f
                             : (head.w >> 4 & 0x0f0f0f0f) | (head.z >> 2 & 0x30303030);
        auto two = [&](u32 bytes) { // the two of this step as f16x2
            u32 q = __byte_perm(bytes >> (step % 2 * 16), 0, 0x4140);
            return hadd2(q | PLUS_1024, minus_1024(0));
        };
        u32 both = static_cast<u32>(head.x);
        scales = hmul2(two(scales), __byte_perm(both, 0, 0x1010));
        least = hmul2(two(least), __byte_perm(both, 0, 0x3232) ^ 0x80008000u);
        const u8* qs = row + (FIVE ? 48 : 16) + step * 32 + t * 8;
        u32 low[2] = {reinterpret_cast<const u32*>(qs)[0], reinterpret_cast<const u32*>(qs)[1]};
        UNROLL
        for (int h = 0; h < 2; h++) {
            u32 words[2] = {low[0] >> 4 * h, low[1] >> 4 * h},
                scale = __byte_perm(scales, 0, h ? 0x3232 : 0x1010);
            u32 offset = __byte_perm(least, 0, h ? 0x3232 : 0x1010), mask = 0x000f000fu;
            if constexpr (FIVE) {
                const u32* qh = reinterpret_cast<const u32*>(row + 16 + t * 8);
                UNROLL
                for (int i = 0; i < 2; i++) {
                    words[i] = (words[i] & 0x0f0f0f0fu) | (qh[i] >> (2 * step + h) & 0x01010101u)
                                                              << 4;
                }
                mask = 0x00ff00ffu;
            }
            dequantize_8<0, true>(words, mask, scale, offset, out + 4 * h);
        }
    } else if constexpr (TYPE == VG_Q2_K || TYPE == VG_Q3_K) {
        constexpr bool THREE = TYPE == VG_Q3_K;
        u32 two[2], third[2],
            factor = dup_half2(*reinterpret_cast<const u16*>(row + (THREE ? 108 : 80)));
        load_8_bytes(row + (THREE ? 32 : 16) + step / 2 * 32 + t * 8, two);
        if (THREE) {
            load_8_bytes(row + t * 8, third);
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            int sub = 2 * step + h, j = 2 * sub + t / 2;
            u32 words[2], scale, offset = 0;
            UNROLL
            for (int i = 0; i < 2; i++) {
                words[i] = two[i] >> (sub % 4 * 2) & 0x03030303u;
                if (THREE) {
                    words[i] |= (third[i] >> sub & 0x01010101u) << 2;
                }
            }
            if (THREE) {
                u32 six = (row[96 + j % 8] >> (j / 8 * 4) & 15) |
                          (row[104 + j % 4] >> (j / 4 * 2) & 3) << 4;
                scale = hmul2(hadd2(dup_half2(six) | PLUS_1024, minus_1024(32)), factor);
            } else {
                u32 both = row[j],
                    least = dup_half2(*reinterpret_cast<const u16*>(row + 82)) ^ 0x80008000u;
                scale = hmul2(hadd2(dup_half2(both & 15) | PLUS_1024, minus_1024(0)), factor);
                offset = hmul2(hadd2(dup_half2(both >> 4) | PLUS_1024, minus_1024(0)), least);
            }
            dequantize_8<THREE ? 4 : 0, !THREE>(words, 0x00ff00ffu, scale, offset, out + 4 * h);
        }
    } else if constexpr (base_type(TYPE) == VG_Q6_K) {
        int half = step / 2,
            upper = step % 2; // half of the block; high or low nibbles and 2-bit fields
        u32 high[2], factor = dup_half2(*reinterpret_cast<const u16*>(
                         is_repacked(TYPE) ? begin.scales : row + 208));
        eight(row + 128 + half * 32 + t * 8, high);
        UNROLL
        for (int h = 0; h < 2; h++) {
            u32 words[2];
            eight(row + half * 64 + h * 32 + t * 8, words);
            UNROLL
            for (int i = 0; i < 2; i++) {
                u32 two = high[i] >> (4 * upper + 2 * h) & 0x03030303u;
                words[i] = (words[i] >> 4 * upper & 0x0f0f0f0fu) | two << 4;
            }
            u32 scale = dup_half2(row[192 + 4 * step + 2 * h + t / 2] ^ 0x80u);
            scale = hmul2(hadd2(scale | PLUS_1024, minus_1024(128)), factor);
            dequantize_8<32, false>(words, 0x00ff00ffu, scale, 0, out + 4 * h);
        }
    }
}

// ---- Producers and consumers.

// Threads that copy weights: the producer warpgroup without the warp that copies activations.
constexpr int WEIGHT_THREADS = WARPGROUP - WARP;

// Units of 16 bytes that a row's chunk of quants and one of scales touch at most.
DEVICE constexpr int chunk_units(int type) {
    return (chunk_bytes(type) + (is_aligned(type) ? 0 : 15) + 15) / 16;
}
DEVICE constexpr int scale_units(int type) {
    return is_repacked(type) ? (chunk_scales(type) + 15 + 15) / 16 : 0;
}

// Tag of a count for generic lambdas.
template <int OF> struct Units {
    static constexpr int COUNT = OF;
};

// Copies a chunk of weights of `rows` rows from `first` on with cp.async, by THREADS threads of
// which this is number `thread`. The chunk begins at block `at` of rows of `width` blocks.
template <int TYPE, int THREADS>
DEVICE void copy_chunk(u8* to, const View& w, const RowPtr& first, int rows, int at, int width,
                       int thread) {
    constexpr int CHUNK = chunk_of(TYPE) / type_traits(TYPE).elements, STRIDE = chunk_stride(TYPE);
    int blocks = width - at < CHUNK ? width - at : CHUNK;
    // Copies the units of `bytes` bytes of each row. In the first row they begin at `from`.
    auto copy = [&](auto units, u8* to, const u8* from, auto pitch, int bytes, bool are_aligned) {
        constexpr int UNITS = decltype(units)::COUNT;
        UNROLL_TIMES(is_repacked(TYPE) ? 1 : 2)
        for (int i = thread; i < rows * UNITS; i += THREADS) {
            int row = i / UNITS, unit = i % UNITS;
            const u8* begin = from + static_cast<i64>(row) * pitch;
            int lead = are_aligned ? 0 : static_cast<int>(reinterpret_cast<u64>(begin) & 15);
            if (16 * unit < lead + bytes) {
                cp_async(to + row * STRIDE + 16 * unit, begin - lead + 16 * unit);
            }
        }
    };
    if constexpr (is_repacked(TYPE)) { // rows are adjacent
        copy(Units<chunk_units(TYPE)>{}, to, first.quants + at * quant_bytes(TYPE),
             width * quant_bytes(TYPE), blocks * quant_bytes(TYPE), true);
        copy(Units<scale_units(TYPE)>{}, to + chunk_bytes(TYPE),
             first.scales + at * scale_bytes(TYPE), width * scale_bytes(TYPE),
             blocks * scale_bytes(TYPE), false);
    } else {
        copy(Units<chunk_units(TYPE)>{}, to, first.quants + at * quant_bytes(TYPE), w.nb[1],
             blocks * quant_bytes(TYPE), is_aligned(TYPE));
    }
}

// The low address bits of the array of a row whose beginning in shared memory they determine.
template <int TYPE> DEVICE u32 lead_of(const View& w, int row, int w2, int w3) {
    RowPtr begin = row_ptr_at(TYPE, w, row, w2, w3);
    return static_cast<u32>(reinterpret_cast<u64>(is_repacked(TYPE) ? begin.scales : begin.quants));
}

// Dequantises step `step` of two rows to the A fragments of four k16 steps. `chunk` is the first
// row in shared memory; the second one is eight rows behind it. `leads` are those of the rows
// (`lead_of`), and `blocks` is the number of blocks of 32 of a row.
template <int TYPE>
DEVICE void dequantize_rows(const u8* chunk, const u32* leads, int step, int blocks, int t,
                            u32* a) {
    constexpr int CHUNK_STEPS = chunk_of(TYPE) / SM90_STEP;
    UNROLL
    for (int r = 0; r < 2; r++) {
        constexpr int BYTES = is_repacked(TYPE) ? chunk_scales(TYPE) : chunk_bytes(TYPE);
        u32 lead = (leads[r] + static_cast<u32>(step / CHUNK_STEPS * BYTES)) & 15;
        const u8* row = chunk + 8 * r * chunk_stride(TYPE);
        u32 words[8];
        dequantize_16<TYPE>({row + (is_aligned(TYPE) ? 0 : lead), row + chunk_bytes(TYPE) + lead},
                            step % CHUNK_STEPS, t, words);
        UNROLL
        for (int i = 0; i < 8; i++) {
            // The last k step may be partial: activations are 0 there, but garbage * 0 may be NaN.
            bool is_valid = type_traits(TYPE).elements == 256 || 2 * step + i / 4 < blocks;
            a[i / 2 * 4 + i % 2 * 2 + r] = is_valid ? words[i] : 0;
        }
    }
}

// Copies the weights of all chunks with cp.async, by WEIGHT_THREADS threads of which this is number
// `thread`. One bulk copy for each row would be slower: an SM begins one in about 60 cycles,
// however short it is.
template <int TYPE, int N>
DEVICE void load_weights(const VgGemmSm90Params& p, const GemmShared<TYPE, N>& shared, int thread) {
    constexpr TypeTraits SIZE = type_traits(TYPE);
    TileScheduler<N> tiles(p);
    PipelineState<GemmShared<TYPE, N>::CHUNKS> ring;
    int width = static_cast<int>(p.w.ne[0]) / SIZE.elements; // in blocks
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        GemmTile tile = tiles.at(index);
        i64 left = p.dst.ne[0] - tile.first_row;
        int rows = left < SM90_ROWS ? static_cast<int>(left) : SM90_ROWS;
        RowPtr first = row_ptr_at(TYPE, p.w, tile.first_row, tile.w2, tile.w3);
        for (int at = 0; at < width; at += chunk_of(TYPE) / SIZE.elements) {
            mbarrier_wait(&shared.empty_chunks[ring.stage], ring.phase ^ 1);
            u8* to = shared.weights + ring.stage * GemmShared<TYPE, N>::WEIGHTS;
            copy_chunk<TYPE, WEIGHT_THREADS>(to, p.w, first, rows, at, width, thread);
            mbarrier_arrive_copies(&shared.full_chunks[ring.stage]);
            ring.next();
        }
    }
}

// Executed by one thread.
template <int TYPE, int N> DEVICE void
load_activations(const VgGemmSm90Params& p, const GemmShared<TYPE, N>& shared, int steps) {
    TileScheduler<N> tiles(p);
    PipelineState<GemmShared<TYPE, N>::STEPS> ring;
    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        GemmTile tile = tiles.at(index);
        const u8* from =
            reinterpret_cast<const u8*>(p.values) + static_cast<i64>(tile.first) * SWIZZLE_ROW;
        u32 bytes = static_cast<u32>((tile.count + 7) / 8 *
                                     SWIZZLE_ATOM); // whole swizzle atoms; the padding rows exist
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(&shared.empty_steps[ring.stage], ring.phase ^ 1);
            mbarrier_arrive_expect_tx(&shared.full_steps[ring.stage], bytes);
            u8* to = shared.activations + ring.stage * GemmShared<TYPE, N>::ACTIVATIONS;
            cp_async_bulk(to, from + step * p.rows * SWIZZLE_ROW, bytes,
                          &shared.full_steps[ring.stage]);
            ring.next();
        }
    }
}

template <int TYPE, int N>
DEVICE void run_consumer(const VgGemmSm90Params& p, const GemmShared<TYPE, N>& shared, int steps) {
    constexpr int CHUNK_STEPS = chunk_of(TYPE) / SM90_STEP;
    constexpr bool BF16 = TYPE == VG_BF16;
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int mine = static_cast<int>(threadIdx.x / WARP - WARPGROUP / WARP) * 16 + g; // and row + 8
    int blocks = static_cast<int>(p.w.ne[0] / 32);
    TileScheduler<N> tiles(p);
    PipelineState<GemmShared<TYPE, N>::STEPS> ring;
    PipelineState<GemmShared<TYPE, N>::CHUNKS> chunks;

    for (int index = blockIdx.x; index < tiles.count; index += gridDim.x) {
        GemmTile tile = tiles.at(index);
        // The low address bits of a row in memory determine its offset in the copied bytes.
        u32 leads[2];
        UNROLL
        for (int r = 0; r < 2; r++) {
            leads[r] = lead_of<TYPE>(p.w, tile.first_row + mine + 8 * r, tile.w2, tile.w3);
        }
        auto dequantize_step = [&](int step, u32* a) {
            int within = step % CHUNK_STEPS;
            if (within == 0) {
                mbarrier_wait(&shared.full_chunks[chunks.stage], chunks.phase);
            }
            const u8* rows = shared.weights + chunks.stage * GemmShared<TYPE, N>::WEIGHTS +
                             mine * chunk_stride(TYPE);
            dequantize_rows<TYPE>(rows, leads, step, blocks, t, a);
            if (within == CHUNK_STEPS - 1 || step == steps - 1) {
                __syncwarp();
                if (lane == 0) {
                    mbarrier_arrive(&shared.empty_chunks[chunks.stage]);
                }
                chunks.next();
            }
        };

        float sums[N / 2];
        u32 a[2][16];
        dequantize_step(0, a[0]);
        u32 last = 0; // the stage that the previous wgmma group reads
        for (int step = 0; step < steps; step += 2) {
            UNROLL
            for (int u = 0; u < 2; u++) {
                mbarrier_wait(&shared.full_steps[ring.stage], ring.phase);
                u64 b = smem_descriptor(smem_address(
                    shared.activations + ring.stage * GemmShared<TYPE, N>::ACTIVATIONS));
                wgmma_fence();
                UNROLL
                for (int k = 0; k < 4; k++) {
                    wgmma<N, BF16>(sums, a[u] + 4 * k, b + 2 * k, u + k > 0 || step > 0);
                }
                wgmma_commit();
                wgmma_wait<1>(); // the previous group has read its operands
                if ((u > 0 || step > 0) && lane == 0) {
                    mbarrier_arrive(&shared.empty_steps[last]);
                }
                last = ring.stage;
                ring.next();
                if (u == 0 || step + 2 < steps) {
                    dequantize_step(step + u + 1, a[1 - u]);
                }
            }
        }
        wgmma_wait<0>();
        accumulator_fence<N / 2>(sums);
        if (lane == 0) {
            mbarrier_arrive(&shared.empty_steps[last]);
        }

        // Address of the thread's rows in column 0. With moe_order, columns are slots of tokens
        // with a common stride.
        u8* to = address(
            p.dst, Index{{tile.first_row + mine, p.moe_order ? 0 : tile.column, tile.i2, tile.i3}});
        const u32* order = p.moe_order ? tiles.order() + tile.first : nullptr;
        const float* factors = reinterpret_cast<const float*>(p.row_scales) + tile.first;
        bool has_first = tile.first_row + mine < p.dst.ne[0],
             has_second = tile.first_row + mine + 8 < p.dst.ne[0];
        i64 column_stride = p.dst.nb[1];
        UNROLL
        for (int base = 0; base < N / 4; base += 8) { // eight columns at a time, loads first
            auto column = [&](int i) { return (base + i) / 2 * 8 + 2 * t + i % 2; };
            u32 column_ids[8];
            float scales[8];
            UNROLL
            for (int i = 0; i < 8; i++) {
                int c = column(i) < tile.count ? column(i) : tile.count - 1;
                column_ids[i] = order ? order[c] : static_cast<u32>(c);
                scales[i] = factors[c];
            }
            UNROLL
            for (int i = 0; i < 8; i++) {
                bool is_valid = column(i) < tile.count && column_ids[i] != ~0u;
                float* at = reinterpret_cast<float*>(to + column_ids[i] * column_stride);
                const float* acc = sums + (base + i) / 2 * 4 + i % 2;
                if (is_valid && has_first) {
                    at[0] = acc[0] * scales[i];
                }
                if (is_valid && has_second) {
                    at[8] = acc[2] * scales[i];
                }
            }
        }
    }
}

template <int TYPE, int N> DEVICE void gemm_sm90(const VgGemmSm90Params& p) {
    DYNAMIC_SHARED(u8, memory);
    GemmShared<TYPE, N> shared(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < GemmShared<TYPE, N>::STEPS; i++) {
            mbarrier_init(&shared.full_steps[i], 1);
            mbarrier_init(&shared.empty_steps[i], 2 * WARPGROUP / WARP);
        }
        for (int i = 0; i < GemmShared<TYPE, N>::CHUNKS; i++) {
            mbarrier_init(&shared.full_chunks[i], WEIGHT_THREADS);
            mbarrier_init(&shared.empty_chunks[i], 2 * WARPGROUP / WARP);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    int steps = static_cast<int>((p.w.ne[0] + 2 * SM90_STEP - 1) / (2 * SM90_STEP)) * 2;
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<56>();
        if (threadIdx.x == 0) {
            load_activations<TYPE, N>(p, shared, steps);
        } else if (threadIdx.x >= WARP) {
            load_weights<TYPE, N>(p, shared, static_cast<int>(threadIdx.x) - WARP);
        }
    } else {
        setmaxnreg_inc<224>();
        run_consumer<TYPE, N>(p, shared, steps);
    }
}

} // namespace
