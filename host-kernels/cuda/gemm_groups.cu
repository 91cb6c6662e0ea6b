// Products of many columns with weights in halves and in blocks of 32 to 128, and what makes activations halves.
#include "gemm.cuh"

// Rows of `src` as halves, dense and filled up with zeros to whole steps, and what each is to be multiplied with; a block
// for each row.
KERNEL(vg_halves, VgHalvesParams, 256) {
    i64 n = p.src.ne[0], length = (n + GEMM_STEP - 1) / GEMM_STEP * GEMM_STEP;
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        const u8* from = address(p.src, row_of(p.src, r));
        auto x = [&](i64 i) { return load(p.src.type, from + i * p.src.nb[0]); };
        float inverse = 1.0f, factor = 1.0f;
        if (!p.brain) {
            float largest = 0.0f;
            for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
                largest = fmaxf(largest, fabsf(x(i)));
            }
            largest = block_reduce<Largest>(largest, 0.0f);
            // A power of two, and one over it; both are normal numbers.
            int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
            exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
            factor = __uint_as_float(static_cast<u32>(exponent) << 23);
            inverse = __uint_as_float(static_cast<u32>(254 - exponent) << 23);
        }
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

KERNEL(vg_gemm_f16, VgGemmParams, 256) { gemm<VG_F16>(p); }
KERNEL(vg_gemm_bf16, VgGemmParams, 256) { gemm<VG_BF16>(p); }
KERNEL(vg_gemm_q4_0, VgGemmParams, 256) { gemm<VG_Q4_0>(p); }
KERNEL(vg_gemm_q4_1, VgGemmParams, 256) { gemm<VG_Q4_1>(p); }
KERNEL(vg_gemm_q5_0, VgGemmParams, 256) { gemm<VG_Q5_0>(p); }
KERNEL(vg_gemm_q5_1, VgGemmParams, 256) { gemm<VG_Q5_1>(p); }
KERNEL(vg_gemm_q8_0, VgGemmParams, 256) { gemm<VG_Q8_0>(p); }
KERNEL(vg_gemm_q1_0, VgGemmParams, 256) { gemm<VG_Q1_0>(p); }
KERNEL(vg_gemm_q2_0, VgGemmParams, 256) { gemm<VG_Q2_0>(p); }
KERNEL(vg_gemm_mxfp4, VgGemmParams, 256) { gemm<VG_MXFP4>(p); }
KERNEL(vg_gemm_nvfp4, VgGemmParams, 256) { gemm<VG_NVFP4>(p); }
KERNEL(vg_gemm_iq4_nl, VgGemmParams, 256) { gemm<VG_IQ4_NL>(p); }
