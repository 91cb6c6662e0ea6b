// POOL_1D, POOL_2D, POOL_2D_BACK, UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS,
// ADD_REL_POS.
#include "device.cuh"

namespace {

constexpr float LOWEST = -3.402823466e38f;

struct Range {
    i64 first, last;
};

// Elements of dimension `d` that window `window` covers, clipped to `length`.
DEVICE Range covers(const VgPoolParams& p, int d, i64 window, i64 length) {
    i64 first = window * p.stride[d] - p.padding[d], last = first + p.size[d];
    first = first > 0 ? first : 0;
    return {first, last < length ? last : length};
}

} // namespace

KERNEL(vg_pool, VgPoolParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        Range xs = covers(p, 0, to.i[0], p.src.ne[0]), ys = covers(p, 1, to.i[1], p.src.ne[1]);
        float result = p.average ? 0.0f : LOWEST;
        i64 count = 0;
        for (i64 y = ys.first; y < ys.last; y++) {
            for (i64 x = xs.first; x < xs.last; x++, count++) {
                float value = load(p.src.type, address(p.src, Index{{x, y, to.i[2], to.i[3]}}));
                result = p.average ? result + value : value < result ? result : value;
            }
        }
        if (p.average) {
            i64 by = p.covered ? count : p.size[0] * p.size[1];
            result = by > 0 ? result / static_cast<float>(by) : result;
        }
        store(p.dst.type, address(p.dst, to), result);
    }
}

// Index of the maximum of each window (y * width + x), the first of several; -1 for none.
KERNEL(vg_pool_argmax, VgPoolParams, 256) {
    i64 n = elements(p.src);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.src, e);
        Range xs = covers(p, 0, at.i[0], p.dst.ne[0]), ys = covers(p, 1, at.i[1], p.dst.ne[1]);
        float largest = LOWEST;
        i64 argmax = -1;
        for (i64 y = ys.first; y < ys.last; y++) {
            for (i64 x = xs.first; x < xs.last; x++) {
                float value =
                    load(p.forward.type, address(p.forward, Index{{x, y, at.i[2], at.i[3]}}));
                if (value > largest) {
                    largest = value;
                    argmax = y * p.dst.ne[0] + x;
                }
            }
        }
        reinterpret_cast<i64*>(p.argmax)[e] = argmax;
    }
}

// A gather over the windows that cover an element, row by row. The maximum receives the whole
// gradient of a window.
KERNEL(vg_pool_back, VgPoolParams, 256) {
    i64 n = elements(p.dst);
    const i64* argmax = reinterpret_cast<const i64*>(p.argmax);
    float area = static_cast<float>(p.size[0] * p.size[1]);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        auto first_window = [&](int d) {
            i64 beyond = to.i[d] + p.padding[d] - p.size[d] + 1;
            return beyond > 0 ? (beyond + p.stride[d] - 1) / p.stride[d] : 0;
        };
        i64 plane = (to.i[3] * p.src.ne[2] + to.i[2]) * p.src.ne[1],
            mine = to.i[1] * p.dst.ne[0] + to.i[0];
        float sum = p.adds ? *reinterpret_cast<const float*>(address(p.dst, to)) : 0.0f;
        for (i64 wy = first_window(1);
             wy < p.src.ne[1] && wy * p.stride[1] - p.padding[1] <= to.i[1]; wy++) {
            for (i64 wx = first_window(0);
                 wx < p.src.ne[0] && wx * p.stride[0] - p.padding[0] <= to.i[0]; wx++) {
                float gradient =
                    load(p.src.type, address(p.src, Index{{wx, wy, to.i[2], to.i[3]}}));
                if (p.average) {
                    sum += gradient / area;
                } else if (argmax[(plane + wy) * p.src.ne[0] + wx] == mine) {
                    sum += gradient;
                }
            }
        }
        store(p.dst.type, address(p.dst, to), sum);
    }
}

namespace {

// Source index nearest to element `i` of the destination in dimension `d`.
DEVICE i64 nearest(const VgUpscaleParams& p, int d, i64 i) {
    i64 at = static_cast<i64>(static_cast<float>(i) / p.factor[d]);
    return at < p.src.ne[d] ? at : p.src.ne[d] - 1;
}

DEVICE i64 clamped(i64 i, i64 n) { return i < 0 ? 0 : i < n ? i : n - 1; }

// A 2D plane of the source with clamped coordinates.
struct Plane {
    const VgUpscaleParams& p;
    i64 i2, i3;

    DEVICE float pixel(i64 x, i64 y) const {
        Index at = {{clamped(x, p.src.ne[0]), clamped(y, p.src.ne[1]), i2, i3}};
        return *reinterpret_cast<const float*>(address(p.src, at));
    }
    // Source coordinate of element `i` of the destination.
    DEVICE float source_coord(int d, i64 i) const {
        return (static_cast<float>(i) + p.middle) / p.factor[d] - p.middle;
    }
};

// The two neighbours of a coordinate, and the distance from the first, clamped to [0, 1].
struct Neighbours {
    i64 low, high;
    float distance;
};

DEVICE Neighbours neighbours(const Plane& plane, int d, i64 i) {
    float source_coord = plane.source_coord(d, i);
    i64 floor = static_cast<i64>(floorf(source_coord)), low = clamped(floor, plane.p.src.ne[d]);
    return {low, floor + 1, fminf(fmaxf(source_coord - static_cast<float>(low), 0.0f), 1.0f)};
}

DEVICE float bilinear(const Plane& plane, i64 x, i64 y) {
    Neighbours h = neighbours(plane, 0, x), v = neighbours(plane, 1, y);
    float a = plane.pixel(h.low, v.low), b = plane.pixel(h.high, v.low);
    float c = plane.pixel(h.low, v.high), d = plane.pixel(h.high, v.high);
    float dx = h.distance, dy = v.distance;
    return a * (1.0f - dx) * (1.0f - dy) + b * dx * (1.0f - dy) + c * (1.0f - dx) * dy +
           d * dx * dy;
}

DEVICE float triangle(float x) { return fmaxf(1.0f - fabsf(x), 0.0f); }

// Bilinear with antialiasing: a triangle filter as wide as a pixel of the smaller image.
DEVICE float antialiased(const Plane& plane, i64 x, i64 y) {
    const VgUpscaleParams& p = plane.p;
    float support[2], center[2];
    Range range[2];
    for (int d = 0; d < 2; d++) {
        support[d] = fmaxf(1.0f / p.factor[d], 1.0f);
        center[d] = (static_cast<float>(d ? y : x) + p.middle) / p.factor[d];
        i64 first = static_cast<i64>(center[d] - support[d] + p.middle);
        i64 last = static_cast<i64>(center[d] + support[d] + p.middle);
        range[d] = {first > 0 ? first : 0, last < p.src.ne[d] ? last : p.src.ne[d]};
    }
    float value = 0.0f, total = 0.0f;
    for (i64 sy = range[1].first; sy < range[1].last; sy++) {
        float wy = triangle((static_cast<float>(sy) - center[1] + p.middle) * (1.0f / support[1]));
        for (i64 sx = range[0].first; sx < range[0].last; sx++) {
            float weight = wy * triangle((static_cast<float>(sx) - center[0] + p.middle) *
                                         (1.0f / support[0]));
            if (weight > 0.0f) {
                value += plane.pixel(sx, sy) * weight;
                total += weight;
            }
        }
    }
    return total > 0.0f ? value / total : value;
}

DEVICE void cubic_weights(float x, float* weights) {
    constexpr float A = -0.75f;
    auto near = [](float x) { return ((A + 2.0f) * x - (A + 3.0f)) * x * x + 1.0f; };
    auto far = [](float x) { return ((A * x - 5.0f * A) * x + 8.0f * A) * x - 4.0f * A; };
    weights[0] = far(x + 1.0f);
    weights[1] = near(x);
    weights[2] = near(1.0f - x);
    weights[3] = far(2.0f - x);
}

DEVICE float bicubic(const Plane& plane, i64 x, i64 y) {
    float px = plane.source_coord(0, x), py = plane.source_coord(1, y), wx[4], wy[4];
    cubic_weights(px - floorf(px), wx);
    cubic_weights(py - floorf(py), wy);
    i64 x0 = static_cast<i64>(floorf(px)), y0 = static_cast<i64>(floorf(py));
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < 4; j++) {
        float row = 0.0f;
        UNROLL
        for (int i = 0; i < 4; i++) {
            row += plane.pixel(x0 + i - 1, y0 + j - 1) * wx[i];
        }
        sum += row * wy[j];
    }
    return sum;
}

} // namespace

KERNEL(vg_upscale, VgUpscaleParams, 256) {
    for (i64 e = p.results.begin + thread_index(); e < p.results.end; e += thread_count()) {
        Index to = index_of(p.dst, e);
        Plane plane = {p, nearest(p, 2, to.i[2]), nearest(p, 3, to.i[3])};
        i64 x = to.i[0], y = to.i[1];
        float value;
        switch (p.op) {
        case VG_UPSCALE_NEAREST: value = plane.pixel(nearest(p, 0, x), nearest(p, 1, y)); break;
        case VG_UPSCALE_BILINEAR: value = bilinear(plane, x, y); break;
        case VG_UPSCALE_ANTIALIASED: value = antialiased(plane, x, y); break;
        default: value = bicubic(plane, x, y);
        }
        *reinterpret_cast<float*>(address(p.dst, to)) = value;
    }
}

// Cosines, then sines, of the timestep times geometrically decreasing frequencies; an odd last
// element is 0.
KERNEL(vg_timestep_embedding, VgTimestepParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        float step = *reinterpret_cast<const float*>(p.steps.data + to.i[1] * p.steps.nb[0]);
        i64 j = to.i[0] < p.half ? to.i[0] : to.i[0] - p.half;
        float value = 0.0f;
        if (to.i[0] < 2 * p.half) {
            float angle =
                step * expf(-p.log_period * static_cast<float>(j) / static_cast<float>(p.half));
            value = to.i[0] < p.half ? cosf(angle) : sinf(angle);
        }
        *reinterpret_cast<float*>(address(p.dst, to)) = value;
    }
}

KERNEL(vg_window, VgWindowParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e), from = to;
        bool inside = true;
        switch (p.op) {
        case VG_WINDOW_PART:
            from.i[1] = to.i[3] % p.across * p.size + to.i[1];
            from.i[2] = to.i[3] / p.across * p.size + to.i[2];
            from.i[3] = 0;
            inside = from.i[1] < p.src.ne[1] && from.i[2] < p.src.ne[2];
            break;
        case VG_WINDOW_UNPART:
            from.i[1] = to.i[1] % p.size;
            from.i[2] = to.i[2] % p.size;
            from.i[3] = to.i[2] / p.size * p.across + to.i[1] / p.size;
            break;
        default: from.i[1] = p.dst.ne[1] - to.i[1] - 1 + to.i[2]; from.i[2] = 0;
        }
        u8* at = address(p.dst, to);
        const u8* source = address(p.src, from);
        if (p.bytes == 2) {
            *reinterpret_cast<u16*>(at) = inside ? *reinterpret_cast<const u16*>(source) : 0;
        } else {
            *reinterpret_cast<u32*>(at) = inside ? *reinterpret_cast<const u32*>(source) : 0;
        }
    }
}

KERNEL(vg_add_rel_pos, VgRelPosParams, 256) {
    i64 n = elements(p.dst), side = p.w.ne[0];
    const float* a = reinterpret_cast<const float*>(p.a.data);
    const float* w = reinterpret_cast<const float*>(p.w.data);
    const float* h = reinterpret_cast<const float*>(p.h.data);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        i64 row = e / (side * side), i = e % side, j = e / side % side;
        reinterpret_cast<float*>(p.dst.data)[e] = a[e] + w[row * side + i] + h[row * side + j];
    }
}
