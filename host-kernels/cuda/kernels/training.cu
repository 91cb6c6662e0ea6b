// CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD.
#include "device.cuh"

namespace {

DEVICE float float_at(const u8* row, i64 step, i64 i) {
    return *reinterpret_cast<const float*>(row + i * step);
}

// ln(sum(e^x)) of a row, in every thread of the block.
DEVICE float log_sum_exp(const View& v, const u8* row) {
    float largest = -INFINITY_F;
    for (i64 i = threadIdx.x; i < v.ne[0]; i += blockDim.x) {
        largest = fmaxf(largest, float_at(row, v.nb[0], i));
    }
    largest = block_reduce<Max>(largest, -INFINITY_F);
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < v.ne[0]; i += blockDim.x) {
        sum += expf(float_at(row, v.nb[0], i) - largest);
    }
    return largest + static_cast<float>(log(block_reduce<Sum>(sum, 0.0)));
}

} // namespace

KERNEL(vg_cross_entropy, VgCrossEntropyParams, 256) {
    double* parts = reinterpret_cast<double*>(p.scratch);
    double sum = 0.0;
    if (p.finish) {
        for (u32 i = threadIdx.x; i < p.parts; i += blockDim.x) {
            sum += parts[i];
        }
    } else if (p.a.ne[0] > 0) {
        for (i64 r = blockIdx.x; r < rows(p.a); r += gridDim.x) {
            Index at = row_of(p.a, r);
            const u8 *a = address(p.a, at), *b = address(p.b, at);
            float offset = log_sum_exp(p.a, a);
            for (i64 i = threadIdx.x; i < p.a.ne[0]; i += blockDim.x) {
                sum += (float_at(a, p.a.nb[0], i) - offset) * float_at(b, p.b.nb[0], i);
            }
        }
    }
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) {
        if (p.finish) {
            double count = static_cast<double>(p.a.ne[0] ? rows(p.a) : 0);
            *reinterpret_cast<float*>(p.dst.data) = static_cast<float>(-sum / count);
        } else {
            parts[blockIdx.x] = sum;
        }
    }
}

KERNEL(vg_cross_entropy_back, VgCrossEntropyParams, 256) {
    float scale = *reinterpret_cast<const float*>(p.gradient.data) / static_cast<float>(rows(p.a));
    for (i64 r = blockIdx.x; r < rows(p.dst); r += gridDim.x) {
        Index at = row_of(p.dst, r);
        const u8 *a = address(p.a, at), *b = address(p.b, at);
        u8* to = address(p.dst, at);
        float offset = log_sum_exp(p.a, a);
        for (i64 i = threadIdx.x; i < p.dst.ne[0]; i += blockDim.x) {
            float x = expf(float_at(a, p.a.nb[0], i) - offset) - float_at(b, p.b.nb[0], i);
            *reinterpret_cast<float*>(to + i * p.dst.nb[0]) = x * scale;
        }
    }
}

namespace {

DEVICE float& element(const View& v, const Index& at) {
    return *reinterpret_cast<float*>(address(v, at));
}

DEVICE float hyperparameter(const VgOptimizerParams& p, int i) {
    return *reinterpret_cast<const float*>(p.settings.data + i * p.settings.nb[0]);
}

} // namespace

// dst is the updated w; the moments m and v are updated in place.
KERNEL(vg_adamw, VgOptimizerParams, 256) {
    float alpha = hyperparameter(p, 0), beta1 = hyperparameter(p, 1);
    float beta2 = hyperparameter(p, 2), eps = hyperparameter(p, 3);
    float keep = 1.0f - alpha * hyperparameter(p, 4);
    float beta1h = hyperparameter(p, 5), beta2h = hyperparameter(p, 6);
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.dst, e);
        float g = element(p.gradient, at);
        float& m = element(p.m, at);
        float& v = element(p.v, at);
        m = m * beta1 + g * (1.0f - beta1);
        v = v * beta2 + g * g * (1.0f - beta2);
        element(p.dst, at) =
            element(p.w, at) * keep - m * beta1h * alpha / (sqrtf(v * beta2h) + eps);
    }
}

KERNEL(vg_sgd, VgOptimizerParams, 256) {
    float alpha = hyperparameter(p, 0), keep = 1.0f - alpha * hyperparameter(p, 1);
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.dst, e);
        element(p.dst, at) = element(p.w, at) * keep - alpha * element(p.gradient, at);
    }
}
