// Products of few columns with weights in blocks of 32 to 128, and what rounds activations for all such products.
#include "vector.cuh"

// Activations in blocks of 32 as integers from -127 to 127, a warp for each block; columns in the order of `src`.
KERNEL(vg_quantize, VgQuantizeParams, 128) {
    int lane = threadIdx.x % WARP;
    i64 blocks = p.src.ne[0] / 32, total = blocks * rows(p.src);
    i64 first = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    for (i64 block = first; block < total; block += static_cast<i64>(gridDim.x) * (blockDim.x / WARP)) {
        Index at = row_of(p.src, block / blocks);
        at.i[0] = block % blocks * 32 + lane;
        float x = load(p.src.type, address(p.src, at));
        float largest = warp_reduce<Largest>(fabsf(x));
        float q = largest > 0.0f ? rintf(x * (127.0f / largest)) : 0.0f;
        // NaN and infinities get into the factor.
        float factor = largest / 127.0f + (x - x), sum = q;
        factor = warp_reduce<LargestOrNan>(factor);
        for (int step = 8; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        float high = __shfl_sync(0xffffffffu, sum, 16);
        reinterpret_cast<signed char*>(p.quants)[block * 32 + lane] = static_cast<signed char>(static_cast<int>(q));
        if (lane == 0) {
            reinterpret_cast<Scales*>(p.scales)[block] = {factor, factor * sum, factor * high, 0.0f};
        }
    }
}

KERNEL(vg_vector_q4_0, VgVectorParams, 128) { vector_product<VG_Q4_0, 1>(p); }
KERNEL(vg_vectors_q4_0, VgVectorParams, 128) { vector_product<VG_Q4_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q4_1, VgVectorParams, 128) { vector_product<VG_Q4_1, 1>(p); }
KERNEL(vg_vectors_q4_1, VgVectorParams, 128) { vector_product<VG_Q4_1, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q5_0, VgVectorParams, 128) { vector_product<VG_Q5_0, 1>(p); }
KERNEL(vg_vectors_q5_0, VgVectorParams, 128) { vector_product<VG_Q5_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q5_1, VgVectorParams, 128) { vector_product<VG_Q5_1, 1>(p); }
KERNEL(vg_vectors_q5_1, VgVectorParams, 128) { vector_product<VG_Q5_1, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q8_0, VgVectorParams, 128) { vector_product<VG_Q8_0, 1>(p); }
KERNEL(vg_vectors_q8_0, VgVectorParams, 128) { vector_product<VG_Q8_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q1_0, VgVectorParams, 128) { vector_product<VG_Q1_0, 1>(p); }
KERNEL(vg_vectors_q1_0, VgVectorParams, 128) { vector_product<VG_Q1_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_q2_0, VgVectorParams, 128) { vector_product<VG_Q2_0, 1>(p); }
KERNEL(vg_vectors_q2_0, VgVectorParams, 128) { vector_product<VG_Q2_0, MOST_COLUMNS>(p); }
KERNEL(vg_vector_mxfp4, VgVectorParams, 128) { vector_product<VG_MXFP4, 1>(p); }
KERNEL(vg_vectors_mxfp4, VgVectorParams, 128) { vector_product<VG_MXFP4, MOST_COLUMNS>(p); }
KERNEL(vg_vector_nvfp4, VgVectorParams, 128) { vector_product<VG_NVFP4, 1>(p); }
KERNEL(vg_vectors_nvfp4, VgVectorParams, 128) { vector_product<VG_NVFP4, MOST_COLUMNS>(p); }
KERNEL(vg_vector_iq4_nl, VgVectorParams, 128) { vector_product<VG_IQ4_NL, 1>(p); }
KERNEL(vg_vectors_iq4_nl, VgVectorParams, 128) { vector_product<VG_IQ4_NL, MOST_COLUMNS>(p); }
