// Conversion of activations to f16 or bf16 in the shared-memory layout of the sm_90a GEMM kernels.
#include "gemm_sm90.cuh"

// A block for each row: its elements as f16 or bf16 in the order that `gemm_sm90.cuh` defines,
// padded with zeros to whole k steps, and the scale of the row.
KERNEL(vg_convert_f16_sm90, VgConvertF16Sm90Params, 256) {
    const u32* starts = reinterpret_cast<const u32*>(p.moe_order);
    const u32* order = starts + 2 * (p.experts + 1);
    i64 n = p.src.ne[0];
    for (i64 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        i64 source;
        if (p.moe_order) {
            if (r >= starts[p.experts] || order[r] == ~0u) {
                continue;
            }
            // Slots of a token may share activations.
            u32 slot = order[r], slots = static_cast<u32>(p.src.ne[1]);
            source = static_cast<i64>(slot / p.slots) * slots + slot % p.slots % slots;
        } else {
            i64 batch = r / p.padded, column = r - batch * p.padded;
            if (column >= p.src.ne[1]) {
                continue;
            }
            source = batch * p.src.ne[1] + column;
        }
        const u8* from = address(p.src, row_of(p.src, source));
        auto x = [&](i64 i) { return load(p.src.type, from + i * p.src.nb[0]); };
        float factor = p.is_bf16 ? 1.0f : row_scale(n, x), inverse = 1.0f / factor;
        u8* to = reinterpret_cast<u8*>(p.values) + r * SWIZZLE_ROW;
        for (u32 i = threadIdx.x; i < p.steps * 8; i += blockDim.x) {
            // 16 bytes 4h + 2q + j of a step hold elements 4q + j and 4q + j + 2 of each eight of
            // block h.
            i64 first = static_cast<i64>(i / 4) * 32 + i / 2 % 2 * 4 + i % 2;
            u32 words[4];
            UNROLL
            for (int t = 0; t < 4; t++) {
                i64 at = first + 8 * t;
                float a = at < n ? x(at) * inverse : 0.0f,
                      b = at + 2 < n ? x(at + 2) * inverse : 0.0f;
                words[t] = p.is_bf16 ? pack_half2<true>(a, b) : pack_half2<false>(a, b);
            }
            u32 vec = i % 8 ^ static_cast<u32>(r % 8);
            *reinterpret_cast<int4*>(to + i / 8 * p.rows * SWIZZLE_ROW + vec * 16) =
                int4{static_cast<int>(words[0]), static_cast<int>(words[1]),
                     static_cast<int>(words[2]), static_cast<int>(words[3])};
        }
        if (threadIdx.x == 0) {
            reinterpret_cast<float*>(p.row_scales)[r] = factor;
        }
    }
}
