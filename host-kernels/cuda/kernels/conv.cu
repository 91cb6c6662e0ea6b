// CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, IM2COL, IM2COL_3D,
// IM2COL_BACK, COL2IM_1D.
#include "gemm_simt.cuh"

namespace {

struct Coord {
    i64 at[3];
};

// Coordinates of position `i`, dimension 0 fastest.
DEVICE Coord coord_of(const i64* ne, i64 i) {
    return {{i % ne[0], i / ne[0] % ne[1], i / (ne[0] * ne[1])}};
}

DEVICE const u8* start_of(const VgVolume& v, i64 channel, i64 image) {
    return reinterpret_cast<const u8*>(v.data) + channel * v.channel + image * v.image;
}

// Byte offset of the element that tap `tap` reads at output position `position`. Returns false in
// the padding.
DEVICE bool tap_address(const VgConvGeometry& geometry, const VgVolume& image,
                        const Coord& position, const Coord& tap, i64* bytes) {
    *bytes = 0;
    for (int d = 0; d < 3; d++) {
        i64 i = position.at[d] * geometry.stride[d] + tap.at[d] * geometry.dilation[d] -
                geometry.padding[d];
        if (i < 0 || i >= image.ne[d]) {
            return false;
        }
        *bytes += i * image.nb[d];
    }
    return true;
}

DEVICE i64 bytes_to(const VgVolume& v, const Coord& position) {
    return position.at[0] * v.nb[0] + position.at[1] * v.nb[1] + position.at[2] * v.nb[2];
}

DEVICE i64 count(const i64* ne) { return ne[0] * ne[1] * ne[2]; }

DEVICE float* result_of(const VgConvParams& p, const Coord& position, i64 result, i64 image) {
    const u8* start = start_of(p.dst, result, image);
    return reinterpret_cast<float*>(const_cast<u8*>(start) + bytes_to(p.dst, position));
}

} // namespace

// Implicit GEMM: im2col patches, gathered on the fly, times the kernel matrix. blockIdx.z counts
// images.
KERNEL(vg_conv, VgConvParams, 256) {
    i64 taps = count(p.kernel.ne);
    for (i64 n = blockIdx.z; n < p.images; n += gridDim.z) {
        auto patch = [&](i64 r, i64 k) {
            i64 bytes;
            if (!tap_address(p.geometry, p.image, coord_of(p.dst.ne, r),
                             coord_of(p.kernel.ne, k % taps), &bytes)) {
                return 0.0f;
            }
            return load(p.image.type, start_of(p.image, k / taps, n) + bytes);
        };
        auto kernel = [&](i64 c, i64 k) {
            return load(p.kernel.type, start_of(p.kernel, k / taps, c) +
                                           bytes_to(p.kernel, coord_of(p.kernel.ne, k % taps)));
        };
        gemm_tile(
            count(p.dst.ne), p.results, taps * p.channels, patch, kernel,
            [&](i64 r, i64 c, float sum) { *result_of(p, coord_of(p.dst.ne, r), c, n) = sum; });
    }
}

KERNEL(vg_conv_depthwise, VgConvParams, 256) {
    i64 positions = count(p.dst.ne), taps = count(p.kernel.ne);
    i64 total = positions * p.channels * p.images;
    for (i64 e = thread_index(); e < total; e += thread_count()) {
        Coord position = coord_of(p.dst.ne, e % positions);
        i64 channel = e / positions % p.channels, n = e / (positions * p.channels);
        float sum = 0.0f;
        for (i64 k = 0; k < taps; k++) {
            Coord tap = coord_of(p.kernel.ne, k);
            i64 bytes;
            if (tap_address(p.geometry, p.image, position, tap, &bytes)) {
                sum +=
                    load(p.kernel.type, start_of(p.kernel, channel, 0) + bytes_to(p.kernel, tap)) *
                    load(p.image.type, start_of(p.image, channel, n) + bytes);
            }
        }
        *result_of(p, position, channel, n) = sum;
    }
}

// Transposed convolution as a gather: each output position sums the inputs that contribute to it.
KERNEL(vg_conv_transposed, VgConvParams, 256) {
    i64 positions = count(p.dst.ne), total = positions * p.results * p.images;
    i64 stride = p.geometry.stride[0];
    for (i64 e = thread_index(); e < total; e += thread_count()) {
        Coord position = coord_of(p.dst.ne, e % positions);
        i64 result = e / positions % p.results, n = e / (positions * p.results);
        float sum = 0.0f;
        for (i64 ky = position.at[1] % stride; ky < p.kernel.ne[1] && ky <= position.at[1];
             ky += stride) {
            i64 y = (position.at[1] - ky) / stride;
            for (i64 kx = position.at[0] % stride; kx < p.kernel.ne[0] && kx <= position.at[0];
                 kx += stride) {
                i64 x = (position.at[0] - kx) / stride;
                if (x >= p.image.ne[0] || y >= p.image.ne[1]) {
                    continue;
                }
                const u8* kernel =
                    start_of(p.kernel, 0, result) + kx * p.kernel.nb[0] + ky * p.kernel.nb[1];
                const u8* image = start_of(p.image, 0, n) + x * p.image.nb[0] + y * p.image.nb[1];
                for (i64 c = 0; c < p.channels; c++) {
                    sum += load(p.kernel.type, kernel + c * p.kernel.channel) *
                           load(p.image.type, image + c * p.image.channel);
                }
            }
        }
        *result_of(p, position, result, n) = sum;
    }
}

KERNEL(vg_im2col, VgIm2colParams, 256) {
    i64 n = elements(p.patches), taps = count(p.taps);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.patches, e);
        Coord position = {{at.i[1], at.i[2], at.i[3] % p.depth}};
        i64 bytes;
        float x = 0.0f;
        if (tap_address(p.geometry, p.image, position, coord_of(p.taps, at.i[0] % taps), &bytes)) {
            x = load(p.image.type, start_of(p.image, at.i[0] / taps, at.i[3] / p.depth) + bytes);
        }
        store(p.patches.type, address(p.patches, at), x);
    }
}

KERNEL(vg_im2col_back, VgIm2colParams, 256) {
    i64 pixels = count(p.image.ne), total = pixels * p.channels * p.images, taps = count(p.taps);
    for (i64 e = thread_index(); e < total; e += thread_count()) {
        Coord pixel = coord_of(p.image.ne, e % pixels);
        i64 channel = e / pixels % p.channels, n = e / (pixels * p.channels);
        float sum = 0.0f;
        for (i64 k = 0; k < taps; k++) {
            Coord tap = coord_of(p.taps, k);
            Index at = {{channel * taps + k, 0, 0, n}};
            bool inside = true;
            for (int d = 0; d < 2; d++) {
                // The output position at which this tap reads the pixel.
                i64 distance =
                    pixel.at[d] + p.geometry.padding[d] - tap.at[d] * p.geometry.dilation[d];
                at.i[1 + d] = distance / p.geometry.stride[d];
                inside = inside && distance >= 0 && distance % p.geometry.stride[d] == 0 &&
                         at.i[1 + d] < p.patches.ne[1 + d];
            }
            if (inside) {
                sum += load(p.patches.type, address(p.patches, at));
            }
        }
        u8* to = const_cast<u8*>(start_of(p.image, channel, n)) + bytes_to(p.image, pixel);
        *reinterpret_cast<float*>(to) = sum;
    }
}

// dst[t, c] is the sum of all src[c * taps + i, j] with j * stride + i == t + padding.
KERNEL(vg_col2im_1d, VgCol2imParams, 256) {
    i64 n = elements(p.dst), taps = p.src.ne[0] / p.dst.ne[1];
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        i64 at = to.i[0] + p.padding;
        i64 first = at + 1 > taps ? (at + 1 - taps + p.stride - 1) / p.stride : 0;
        float sum = 0.0f;
        for (i64 j = first; j < p.src.ne[1] && j * p.stride <= at; j++) {
            sum += load(p.src.type,
                        address(p.src, Index{{to.i[1] * taps + at - j * p.stride, j, 0, 0}}));
        }
        store(p.dst.type, address(p.dst, to), sum);
    }
}
