// Conversion of activations for the GEMM kernels: to f16 or bf16, and of f32 to two bf16 values.
#include "gemm.cuh"

// Rows of `src` as halves, dense and filled up with zeros to whole steps, and what each is to be multiplied with; a block
// for each row.
KERNEL(vg_convert_f16, VgConvertF16Params, 256) {
    i64 n = p.src.ne[0], length = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        const u8* from = address(p.src, row_of(p.src, r));
        auto x = [&](i64 i) { return load(p.src.type, from + i * p.src.nb[0]); };
        float factor = p.brain ? 1.0f : factor_of_row(n, x), inverse = 1.0f / factor;
        u16* to = reinterpret_cast<u16*>(p.halves) + r * length;
        for (i64 i = threadIdx.x; i < length; i += blockDim.x) {
            float value = i < n ? x(i) * inverse : 0.0f;
            to[i] = p.brain ? to_bf16(value).bits : to_f16(value).bits;
        }
        if (threadIdx.x == 0) {
            reinterpret_cast<float*>(p.factors)[r] = factor;
        }
    }
}

// Rows of `src` as pairs of bfloat16, for each row those that come first, then what they leave, both filled up with zeros to
// whole steps; a block for each row.
KERNEL(vg_split_bf16, VgConvertF16Params, 256) {
    const VgCodebooks* books = codebooks(p.codebooks);
    i64 n = p.src.ne[0], length = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        const u8* from = address(p.src, row_of(p.src, r));
        u32* to = reinterpret_cast<u32*>(p.halves) + r * length;
        auto x = [&](i64 i) { return i < n ? row_value(p.src.type, books, from, p.src.nb[0], i) : 0.0f; };
        for (i64 i = threadIdx.x; i < length / 2; i += blockDim.x) {
            split(x(2 * i), x(2 * i + 1), to[i], to[length / 2 + i]);
        }
    }
}
