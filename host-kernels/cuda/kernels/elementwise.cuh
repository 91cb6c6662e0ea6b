// ADD, SUB, MUL, DIV, ADD1, SCALE, CLAMP, all UNARY functions and GLU kinds, ADD_ID.
#pragma once
#include "activation_fns.cuh"

namespace {

// Comparisons with NaN are false, as in ggml.
DEVICE float at_most(float x, float limit) {
    return x < limit ? x : limit;
}
DEVICE float at_least(float x, float limit) { return x > limit ? x : limit; }
DEVICE float gelu_erf(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440084436210484f));
}
DEVICE float gelu_quick(float x) { return x / (1.0f + expf(-1.702f * x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE float xielu(float x, float alpha_n, float alpha_p, float beta, float eps) {
    if (x > 0.0f) {
        return alpha_p * x * x + beta * x;
    }
    return (expm1f(at_most(x, eps)) - x) * alpha_n + beta * x;
}

DEVICE float silu_back(float gradient, float x) {
    float s = sigmoid(x);
    return gradient * s * (1.0f + x * (1.0f - s));
}

DEVICE float swiglu_clamp(float x, float gate, float limit) {
    return silu(x > limit ? limit : x) * clamp_abs(gate, limit);
}

DEVICE float apply(u32 op, float a, float b, const float* c) {
    switch (op) {
    case VG_OP_ADD: return a + b;
    case VG_OP_SUB: return a - b;
    case VG_OP_MUL: return a * b;
    case VG_OP_DIV: return a / b;
    case VG_OP_SCALE: return a * c[0] + c[1];
    case VG_OP_CLAMP: return at_least(at_most(a, c[1]), c[0]);
    case VG_OP_SQR: return a * a;
    case VG_OP_SQRT: return sqrtf(a);
    case VG_OP_LOG: return logf(a);
    case VG_OP_SIN: return sinf(a);
    case VG_OP_COS: return cosf(a);
    case VG_OP_LEAKY_RELU: return at_least(a, 0.0f) + c[0] * at_most(a, 0.0f);
    case VG_OP_XIELU: return xielu(a, c[0], c[1], c[2], c[3]);
    case VG_OP_SILU_BACK: return silu_back(a, b);
    case VG_OP_ABS: return fabsf(a);
    case VG_OP_SGN: return a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : 0.0f;
    case VG_OP_NEG: return -a;
    case VG_OP_STEP: return a > 0.0f ? 1.0f : 0.0f;
    case VG_OP_TANH: return tanhf(a);
    case VG_OP_ELU: return a > 0.0f ? a : expm1f(a);
    case VG_OP_RELU: return at_least(a, 0.0f);
    case VG_OP_SIGMOID: return sigmoid(a);
    case VG_OP_GELU: return gelu(a);
    case VG_OP_GELU_QUICK: return gelu_quick(a);
    case VG_OP_SILU: return silu(a);
    case VG_OP_HARDSWISH: return a * at_most(at_least((a + 3.0f) / 6.0f, 0.0f), 1.0f);
    case VG_OP_HARDSIGMOID: return at_most(at_least((a + 3.0f) / 6.0f, 0.0f), 1.0f);
    case VG_OP_EXP: return expf(a);
    case VG_OP_EXPM1: return expm1f(a);
    case VG_OP_SOFTPLUS: return softplus(a);
    case VG_OP_GELU_ERF: return gelu_erf(a);
    case VG_OP_FLOOR: return floorf(a);
    case VG_OP_CEIL: return ceilf(a);
    case VG_OP_ROUND: return roundf(a);
    case VG_OP_TRUNC: return truncf(a);
    case VG_OP_REGLU: return a > 0.0f ? a * b : 0.0f;
    case VG_OP_GEGLU: return gelu(a) * b;
    case VG_OP_SWIGLU: return silu(a) * b;
    case VG_OP_SWIGLU_OAI: return swiglu_oai(a, b, c[0], c[1]);
    case VG_OP_GEGLU_ERF: return gelu_erf(a) * b;
    case VG_OP_GEGLU_QUICK: return gelu_quick(a) * b;
    case VG_OP_SWIGLU_CLAMP: return swiglu_clamp(a, b, c[1]);
    default: return NAN_F;
    }
}

DEVICE void elementwise(const VgElementwiseParams& p, const BlockIndex& at_block) {
    i64 n = elements(p.dst);
    if (p.flat) {
        const float* a = reinterpret_cast<const float*>(p.a.data);
        const float* b = reinterpret_cast<const float*>(p.b.data);
        float* dst = reinterpret_cast<float*>(p.dst.data);
        for (i64 e = thread_index(at_block); e < n; e += thread_count(at_block)) {
            dst[e] = apply(p.op, a[e], b ? b[e] : 0.0f, p.c);
        }
        return;
    }
    for (i64 e = thread_index(at_block); e < n; e += thread_count(at_block)) {
        Index at = index_of(p.dst, e);
        float a = load(p.a.type, repeated(p.a, at));
        float b = p.b.data ? load(p.b.type, repeated(p.b, at)) : 0.0f;
        store(p.dst.type, address(p.dst, at), apply(p.op, a, b, p.c));
    }
}

DEVICE void add_id(const VgAddIdParams& p, const BlockIndex& b) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(b); e < n; e += thread_count(b)) {
        Index at = index_of(p.dst, e);
        const u8* ids = reinterpret_cast<const u8*>(p.ids.data);
        i64 id = *reinterpret_cast<const int*>(ids + at.i[1] * p.ids.nb[0] + at.i[2] * p.ids.nb[1]);
        if (!check_index(p.site, id, p.b.ne[1])) {
            return;
        }
        Index row = {{at.i[0], id, 0, 0}};
        float x = load(p.a.type, address(p.a, at)) + load(p.b.type, address(p.b, row));
        store(p.dst.type, address(p.dst, at), x);
    }
}

} // namespace
