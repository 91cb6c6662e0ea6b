// Conversion of activations for the GEMM kernels: to f16 or bf16, and of f32 to two bf16 values.
#include "gemm.cuh"

// Rows of `src` as f16 or bf16, contiguous and padded with zeros to whole k steps, and the scale of
// each row. A block for each row.
KERNEL(vg_convert_f16, VgConvertF16Params, 256) {
    i64 n = p.src.ne[0], length = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        const u8* from = address(p.src, row_of(p.src, r));
        auto x = [&](i64 i) { return load(p.src.type, from + i * p.src.nb[0]); };
        float factor = p.is_bf16 ? 1.0f : row_scale(n, x), inverse = 1.0f / factor;
        u16* to = reinterpret_cast<u16*>(p.values) + r * length;
        for (i64 i = threadIdx.x; i < length; i += blockDim.x) {
            float value = i < n ? x(i) * inverse : 0.0f;
            to[i] = p.is_bf16 ? to_bf16(value).bits : to_f16(value).bits;
        }
        if (threadIdx.x == 0) {
            reinterpret_cast<float*>(p.row_scales)[r] = factor;
        }
    }
}

// Rows of `src` as two bf16 terms: for each row all first terms, then all remainders, both padded
// with zeros to whole k steps. A block for each row.
KERNEL(vg_split_bf16, VgConvertF16Params, 256) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    i64 n = p.src.ne[0], length = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        const u8* from = address(p.src, row_of(p.src, r));
        u32* to = reinterpret_cast<u32*>(p.values) + r * length;
        auto x = [&](i64 i) {
            return i < n ? dequantize_element(p.src.type, grids, from, p.src.nb[0], i) : 0.0f;
        };
        for (i64 i = threadIdx.x; i < length / 2; i += blockDim.x) {
            split_bf16(x(2 * i), x(2 * i + 1), to[i], to[length / 2 + i]);
        }
    }
}
