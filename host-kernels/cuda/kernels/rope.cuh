// ROPE and ROPE_BACK: a block for each row, a thread for each rotated pair.
#pragma once
#include "device.cuh"

namespace {

enum Mode { NORMAL = 1, NEOX, MROPE, IMROPE, VISION };

// The axis whose position rotates pair `i` (M-RoPE sections), and the pair at which the frequencies
// of that axis begin.
DEVICE int axis_of(const VgRopeParams& p, int i, int* begin) {
    int t = p.sections[0], h = p.sections[1], w = p.sections[2], e = p.sections[3];
    int ends[3] = {t, t + h, t + h + w};
    int sector = i % (t + h + w + e);
    *begin = 0;
    if (p.mode == IMROPE) {
        if (sector % 3 == 1 && sector < 3 * h) {
            return 1;
        }
        if (sector % 3 == 2 && sector < 3 * w) {
            return 2;
        }
        return sector % 3 == 0 && sector < 3 * t ? 0 : 3;
    }
    int axis = sector < ends[0] ? 0 : sector < ends[1] ? 1 : sector < ends[2] ? 2 : 3;
    if (p.mode == VISION) {
        // Frequencies restart in each section.
        *begin = i - sector + (axis == 0 ? 0 : ends[axis - 1]);
    }
    return axis;
}

// Rotates the row at `at` of the source: `store_element(i, value)` stores its elements.
template <class Store>
DEVICE void rotate(const VgRopeParams& p, const Index& at, Store store_element) {
    const int* positions = reinterpret_cast<const int*>(p.positions.data);
    const float* factors = reinterpret_cast<const float*>(p.factors.data);
    const u8* from = address(p.src, at);
    i64 tokens = p.src.ne[2];
    bool neighbours = p.mode == NORMAL;
    auto x = [&](i64 i) { return load(p.src.type, from + i * p.src.nb[0]); };
    for (int i = threadIdx.x; i < static_cast<int>(p.pairs); i += blockDim.x) {
        int axis = 0, begin = 0;
        if (p.mode >= MROPE) {
            axis = axis_of(p, i, &begin);
        }
        float position = static_cast<float>(positions[axis * tokens + at.i[2]]);
        float theta = position * powf(p.step, static_cast<float>(i - begin));
        if (factors) {
            theta /= factors[i];
        }
        float angle = p.freq_scale * theta;
        if (p.ext_factor != 0.0f) {
            float width = p.ramp[1] - p.ramp[0];
            float along = (static_cast<float>(i) - p.ramp[0]) / (width < 0.001f ? 0.001f : width);
            float mix = (1.0f - fminf(1.0f, fmaxf(0.0f, along))) * p.ext_factor;
            angle = angle * (1.0f - mix) + theta * mix;
        }
        float c = cosf(angle) * p.magnitude, s = sinf(angle) * p.magnitude * p.sign;
        i64 first = p.start + (neighbours ? 2 * i : i), second = first + (neighbours ? 1 : p.pairs);
        float a = x(first), b = x(second);
        store_element(first, a * c - b * s);
        store_element(second, a * s + b * c);
    }
    // Elements outside the rotated range are copied.
    i64 turned = p.start + 2 * static_cast<i64>(p.pairs);
    for (i64 i = threadIdx.x; i < p.src.ne[0]; i += blockDim.x) {
        if (i < p.start || i >= turned) {
            store_element(i, x(i));
        }
    }
}

DEVICE void rope(const VgRopeParams& p, const BlockIndex& b) {
    i64 total = p.src.ne[1] * p.src.ne[2] * p.src.ne[3];
    for (i64 r = b.x; r < total; r += b.nx) {
        Index at = row_of(p.src, r);
        u8* to = address(p.dst, at);
        rotate(p, at, [&](i64 i, float value) { store(p.dst.type, to + i * p.dst.nb[0], value); });
    }
}

// ROPE fused with SET_ROWS: the heads of a token are concatenated into a row of the cache.
DEVICE void rope_rows(const VgRopeRowsParams& p, const BlockIndex& b) {
    const View& src = p.rope.src;
    for (i64 r = b.x; r < src.ne[1] * src.ne[2]; r += b.nx) {
        Index at = row_of(src, r);
        const u8* which = address(p.ids, Index{{at.i[2], 0, 0, 0}});
        i64 id = p.ids.type == VG_I64 ? *reinterpret_cast<const i64*>(which)
                                      : *reinterpret_cast<const int*>(which);
        if (!check_index(p.site, id, p.cache.ne[1])) {
            return;
        }
        u8* to = address(p.cache, Index{{at.i[1] * src.ne[0], id, 0, 0}});
        rotate(p.rope, at,
               [&](i64 i, float value) { store(p.cache.type, to + i * p.cache.nb[0], value); });
    }
}

} // namespace
