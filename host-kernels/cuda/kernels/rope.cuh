// ROPE and ROPE_BACK: a block for some heads of a token.
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

// Rotates some heads of a token: `store_element(head, i, value)` stores their elements. `at` is the
// first head. A thread computes an angle once for all its heads; with more threads than pairs,
// several share the heads. Waits for the launches before this one.
template <class Store>
DEVICE void rotate(const VgRopeParams& p, const Index& at, Store store_element) {
    const int* positions = reinterpret_cast<const int*>(p.positions.data);
    const float* factors = reinterpret_cast<const float*>(p.factors.data);
    i64 tokens = p.src.ne[2];
    bool neighbours = p.mode == NORMAL;
    int pairs = static_cast<int>(p.pairs), threads = static_cast<int>(blockDim.x);
    int thread = static_cast<int>(threadIdx.x), first_head = static_cast<int>(at.i[1]);
    int heads = static_cast<int>(p.src.ne[1]) - first_head;
    heads = heads < static_cast<int>(p.heads) ? heads : static_cast<int>(p.heads);
    auto row = [&](int head) {
        return address(p.src, Index{{0, first_head + head, at.i[2], at.i[3]}});
    };
    auto load_at = [&](const u8* from, i64 i) {
        return load(p.src.type, from + i * p.src.nb[0]);
    };
    int width = pairs > 0 ? pairs : 1; // nothing is rotated with n_dims = 0
    int shares = width < threads ? threads / width : 1;
    int share = shares > 1 ? thread / width : 0;
    for (int i = thread - share * pairs; i < pairs && share < shares; i += threads) {
        int axis = 0, begin = 0;
        if (p.mode >= MROPE) {
            axis = axis_of(p, i, &begin);
        }
        float frequency = powf(p.step, static_cast<float>(i - begin));
        grid_dependency_wait();
        float position = static_cast<float>(positions[axis * tokens + at.i[2]]);
        float theta = position * frequency;
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
        // The first head is loaded while its sine and cosine are computed.
        i64 first = p.start + (neighbours ? 2 * i : i), second = first + (neighbours ? 1 : pairs);
        float a = 0.0f, b = 0.0f;
        if (share < heads) {
            const u8* from = row(share);
            a = load_at(from, first), b = load_at(from, second);
        }
        float c = cosf(angle) * p.magnitude, s = sinf(angle) * p.magnitude * p.sign;
        for (int head = share; head < heads;) {
            store_element(first_head + head, first, a * c - b * s);
            store_element(first_head + head, second, a * s + b * c);
            head += shares;
            if (head < heads) {
                const u8* from = row(head);
                a = load_at(from, first), b = load_at(from, second);
            }
        }
    }
    // Elements outside the rotated range are copied.
    i64 turned = p.start + 2 * static_cast<i64>(pairs);
    if (p.start == 0 && turned >= p.src.ne[0]) {
        return;
    }
    grid_dependency_wait();
    for (int head = 0; head < heads; head++) {
        const u8* from = row(head);
        for (i64 i = thread; i < p.src.ne[0]; i += threads) {
            if (i < p.start || i >= turned) {
                store_element(first_head + head, i, load_at(from, i));
            }
        }
    }
}

// The first head of block `r`, of those that have `p.heads` heads of a token each. The host ensures
// that there are fewer than 2^31 heads.
DEVICE Index first_head_of(const VgRopeParams& p, u32 r) {
    u32 group = r, token = 0, sequence = 0;
    if (p.src.ne[2] * p.src.ne[3] != 1) { // one token needs no division
        u32 groups = (static_cast<u32>(p.src.ne[1]) + p.heads - 1) / p.heads;
        u32 tokens = static_cast<u32>(p.src.ne[2]);
        token = r / groups, group = r - token * groups;
        sequence = token / tokens, token -= sequence * tokens;
    }
    return {{0, group * p.heads, token, sequence}};
}
DEVICE u32 groups_of(const VgRopeParams& p) {
    u32 groups = (static_cast<u32>(p.src.ne[1]) + p.heads - 1) / p.heads;
    return groups * static_cast<u32>(p.src.ne[2] * p.src.ne[3]);
}

DEVICE void rope(const VgRopeParams& p, const BlockIndex& b) {
    u32 total = groups_of(p);
    for (u32 r = b.x; r < total; r += b.nx) {
        Index at = first_head_of(p, r);
        rotate(p, at, [&](int head, i64 i, float value) {
            u8* to = address(p.dst, Index{{i, head, at.i[2], at.i[3]}});
            store(p.dst.type, to, value);
        });
    }
}

// ROPE fused with SET_ROWS: the heads of a token are concatenated into a row of the cache.
DEVICE void rope_rows(const VgRopeRowsParams& p, const BlockIndex& b) {
    const View& src = p.rope.src;
    u32 total = groups_of(p.rope);
    for (u32 r = b.x; r < total; r += b.nx) {
        Index at = first_head_of(p.rope, r);
        const u8* which = address(p.ids, Index{{at.i[2], 0, 0, 0}});
        grid_dependency_wait();
        i64 id = p.ids.type == VG_I64 ? *reinterpret_cast<const i64*>(which)
                                      : *reinterpret_cast<const int*>(which);
        if (!check_index(p.site, id, p.cache.ne[1])) {
            return;
        }
        rotate(p.rope, at, [&](int head, i64 i, float value) {
            u8* to = address(p.cache, Index{{head * src.ne[0] + i, id, 0, 0}});
            store(p.cache.type, to, value);
        });
    }
}

} // namespace
