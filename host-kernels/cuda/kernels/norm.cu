// NORM, RMS_NORM, RMS_NORM_BACK, L2_NORM, SOFT_MAX_BACK, GROUP_NORM, SOFT_MAX: a block for each
// row.
#include "formats.cuh"

namespace {

// Sum of `value(i)` for i < n, in every thread.
template <class Value> DEVICE float row_sum(i64 n, Value value) {
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        sum += value(i);
    }
    return block_reduce<Sum>(sum, 0.0f);
}

// Stores `value(i)` to all elements of a row.
template <class Value> DEVICE void row_write(const View& dst, u8* row, Value value) {
    for (i64 i = threadIdx.x; i < dst.ne[0]; i += blockDim.x) {
        store(dst.type, row + i * dst.nb[0], value(i));
    }
}

} // namespace

KERNEL(vg_norm, VgNormParams, 256) {
    i64 n = p.dst.ne[0];
    float count = static_cast<float>(n);
    for (i64 r = blockIdx.x; r < rows(p.dst); r += gridDim.x) {
        Index at = row_of(p.dst, r);
        u8* to = address(p.dst, at);
        const u8* a_row = address(p.a, at);
        auto a = [&](i64 i) { return load(p.a.type, a_row + i * p.a.nb[0]); };
        switch (p.op) {
        case VG_NORM_STANDARD: {
            float mean = row_sum(n, a) / count;
            float variance =
                row_sum(n, [&](i64 i) { return (a(i) - mean) * (a(i) - mean); }) / count;
            float scale = 1.0f / sqrtf(variance + p.eps);
            row_write(p.dst, to, [&](i64 i) { return (a(i) - mean) * scale; });
            break;
        }
        case VG_NORM_RMS: {
            float mean = row_sum(n, [&](i64 i) { return a(i) * a(i); }) / count;
            float scale = 1.0f / sqrtf(mean + p.eps);
            row_write(p.dst, to, [&](i64 i) { return a(i) * scale; });
            break;
        }
        case VG_NORM_L2: {
            float length = sqrtf(row_sum(n, [&](i64 i) { return a(i) * a(i); }));
            float scale = 1.0f / (length > p.eps ? length : p.eps);
            row_write(p.dst, to, [&](i64 i) { return a(i) * scale; });
            break;
        }
        case VG_NORM_RMS_BACK: {
            const u8* b_row = address(p.b, at);
            auto b = [&](i64 i) { return load(p.b.type, b_row + i * p.b.nb[0]); };
            float squares = row_sum(n, [&](i64 i) { return b(i) * b(i); }) + p.eps * count;
            float factor = -row_sum(n, [&](i64 i) { return a(i) * b(i); }) / squares;
            float scale = 1.0f / sqrtf(squares / count);
            row_write(p.dst, to, [&](i64 i) { return (b(i) * factor + a(i)) * scale; });
            break;
        }
        default: {
            const u8* b_row = address(p.b, at);
            auto b = [&](i64 i) { return load(p.b.type, b_row + i * p.b.nb[0]); };
            float dot = row_sum(n, [&](i64 i) { return a(i) * b(i); });
            row_write(p.dst, to, [&](i64 i) { return (a(i) - dot) * b(i) * p.eps; });
        }
        }
    }
}

// A block for each group of channels (dimension 2).
KERNEL(vg_group_norm, VgGroupNormParams, 256) {
    i64 groups = (p.src.ne[2] + p.channels - 1) / p.channels;
    for (i64 g = blockIdx.x; g < groups * p.src.ne[3]; g += gridDim.x) {
        i64 first = g % groups * p.channels, i3 = g / groups;
        i64 channels = p.src.ne[2] - first < p.channels ? p.src.ne[2] - first : p.channels;
        i64 n = p.src.ne[0] * p.src.ne[1] * channels;
        auto element = [&](const View& v, i64 i) {
            i64 row = i / v.ne[0];
            return address(v, Index{{i % v.ne[0], row % v.ne[1], first + row / v.ne[1], i3}});
        };
        auto x = [&](i64 i) { return load(p.src.type, element(p.src, i)); };
        float count = static_cast<float>(n);
        float mean = row_sum(n, x) / count;
        float variance = row_sum(n, [&](i64 i) { return (x(i) - mean) * (x(i) - mean); }) / count;
        float scale = 1.0f / sqrtf(variance + p.eps);
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
            store(p.dst.type, element(p.dst, i), (x(i) - mean) * scale);
        }
    }
}

KERNEL(vg_soft_max, VgSoftMaxParams, 256) {
    i64 n = p.src.ne[0];
    for (i64 r = blockIdx.x; r < rows(p.src); r += gridDim.x) {
        Index at = row_of(p.src, r);
        const float* x = reinterpret_cast<const float*>(address(p.src, at));
        float* y = reinterpret_cast<float*>(address(p.dst, at));
        const u8* mask = nullptr;
        if (p.mask.data) {
            mask = address(p.mask,
                           Index{{0, at.i[1], at.i[2] % p.mask.ne[2], at.i[3] % p.mask.ne[3]}});
        }
        u32 head = static_cast<u32>(at.i[2]);
        float slope = alibi_slope(p.max_bias, p.heads_log2, head);
        float largest = -INFINITY_F;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
            float logit = x[i] * p.scale;
            if (mask) {
                logit += slope * load(p.mask.type, mask + i * p.mask.nb[0]);
            }
            y[i] = logit;
            largest = logit > largest ? logit : largest;
        }
        largest = block_reduce<Max>(largest, -INFINITY_F);
        float sink = 0.0f;
        if (p.sinks.data) {
            sink = reinterpret_cast<const float*>(p.sinks.data)[head];
            largest = largest > sink ? largest : sink;
        }
        float sum = row_sum(n, [&](i64 i) { return y[i] = expf(y[i] - largest); });
        if (p.sinks.data) {
            sum += expf(sink - largest);
        }
        float inverse = 1.0f / sum;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
            y[i] *= inverse;
        }
    }
}
