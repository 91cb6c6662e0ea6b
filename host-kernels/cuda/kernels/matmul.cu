// MUL_MAT, MUL_MAT_ID and OUT_PROD with operands of any type and layout.
#include "gemm.cuh"
#include "gemm_simt.cuh"

namespace {

// Columns that a warp of `vg_mul_vec` multiplies at a time.
constexpr int MAX_VECTORS = 8;

// The batch of the weights that is broadcast to batch (i2, i3) of the result.
DEVICE const u8* weights_of(const VgMulMatParams& p, i64 i2, i64 i3) {
    i64 w2 = i2 / (p.dst.ne[2] / p.w.ne[2]), w3 = i3 / (p.dst.ne[3] / p.w.ne[3]);
    return address(p.w, Index{{0, 0, w2, w3}});
}

DEVICE float* result(const View& dst, i64 i0, i64 i1, i64 i2, i64 i3) {
    return reinterpret_cast<float*>(address(dst, Index{{i0, i1, i2, i3}}));
}

// A block for each tile; blockIdx.z counts batches. OUTER: k runs over the rows of both operands
// (OUT_PROD) instead of their elements.
template <bool OUTER> DEVICE void mul_mat_simt(const VgMulMatParams& p) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    auto value = [&](const View& v, const u8* matrix, i64 i, i64 k) {
        return dequantize_element(v.type, grids, matrix + (OUTER ? k : i) * v.nb[1], v.nb[0],
                                  OUTER ? i : k);
    };
    for (i64 batch = blockIdx.z; batch < p.dst.ne[2] * p.dst.ne[3]; batch += gridDim.z) {
        i64 i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2];
        const u8* w = weights_of(p, i2, i3);
        const u8* x = address(p.x, Index{{0, 0, i2, i3}});
        gemm_tile(
            p.dst.ne[0], p.dst.ne[1], p.w.ne[OUTER ? 1 : 0],
            [&](i64 r, i64 k) { return value(p.w, w, r, k); },
            [&](i64 c, i64 k) { return value(p.x, x, c, k); },
            [&](i64 r, i64 c, float sum) { *result(p.dst, r, c, i2, i3) = sum; });
    }
}

} // namespace

KERNEL(vg_gemm_any, VgGemmParams, 256) { gemm<ANY_TYPE>(p); }

// Many columns, for more batches than the grid of `vg_gemm_any` can have.
KERNEL(vg_mul_mat, VgMulMatParams, 256) { mul_mat_simt<false>(p); }

// Few columns: a warp for each row of weights, which it reads once for up to eight columns.
// blockIdx.y counts groups of columns, blockIdx.z batches.
KERNEL(vg_mul_vec, VgMulMatParams, 128) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP;
    i64 r = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (r >= p.dst.ne[0]) {
        return;
    }
    i64 first = static_cast<i64>(blockIdx.y) * MAX_VECTORS;
    int cols =
        static_cast<int>(p.dst.ne[1] - first < MAX_VECTORS ? p.dst.ne[1] - first : MAX_VECTORS);
    for (i64 batch = blockIdx.z; batch < p.dst.ne[2] * p.dst.ne[3]; batch += gridDim.z) {
        i64 i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2];
        const u8* w = weights_of(p, i2, i3) + r * p.w.nb[1];
        const u8* x = address(p.x, Index{{0, first, i2, i3}});
        float sums[MAX_VECTORS] = {};
        for (i64 k = lane; k < p.w.ne[0]; k += WARP) {
            float weight = dequantize_element(p.w.type, grids, w, p.w.nb[0], k);
            UNROLL
            for (int c = 0; c < MAX_VECTORS; c++) {
                if (c < cols) {
                    sums[c] += weight *
                               dequantize_element(p.x.type, grids, x + c * p.x.nb[1], p.x.nb[0], k);
                }
            }
        }
        UNROLL
        for (int c = 0; c < MAX_VECTORS; c++) {
            if (c < cols) {
                float sum = warp_reduce<Sum>(sums[c]);
                if (lane == 0) {
                    *result(p.dst, r, first + c, i2, i3) = sum;
                }
            }
        }
    }
}

// A warp for each row of an expert's weights; blockIdx.y and z count slots and tokens.
KERNEL(vg_mul_mat_id, VgMulMatParams, 128) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP;
    i64 r = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (r >= p.dst.ne[0]) {
        return;
    }
    for (i64 slot = blockIdx.y; slot < p.dst.ne[1]; slot += gridDim.y) {
        for (i64 token = blockIdx.z; token < p.dst.ne[2]; token += gridDim.z) {
            i64 expert = *reinterpret_cast<const int*>(address(p.ids, Index{{slot, token, 0, 0}}));
            if (!check_index(p.site, expert, p.w.ne[2])) {
                return;
            }
            const u8* w = address(p.w, Index{{0, r, expert, 0}});
            const u8* x = address(p.x, Index{{0, slot % p.x.ne[1], token, 0}});
            float sum = 0.0f;
            for (i64 k = lane; k < p.w.ne[0]; k += WARP) {
                sum += dequantize_element(p.w.type, grids, w, p.w.nb[0], k) *
                       dequantize_element(p.x.type, grids, x, p.x.nb[0], k);
            }
            sum = warp_reduce<Sum>(sum);
            if (lane == 0) {
                *result(p.dst, r, slot, token, 0) = sum;
            }
        }
    }
}

KERNEL(vg_out_prod, VgMulMatParams, 256) { mul_mat_simt<true>(p); }
