// Activation functions, used by elementwise kernels and by the epilogue of mmv.
#pragma once
#include "device.cuh"

DEVICE float clamp_abs(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
// The tanh approximation: 1 + tanh(u) = 2 sigmoid(2u), which is accurate for negative u. Beyond |x|
// = 10 the result is 0 or x, and infinities would become NaN.
DEVICE float gelu(float x) {
    if (x <= -10.0f || x >= 10.0f) {
        return x > 0.0f ? x : 0.0f;
    }
    return x * sigmoid(1.59576912160573071f * x * (1.0f + 0.044715f * x * x));
}

DEVICE float swiglu_oai(float x, float gate, float alpha, float limit) {
    x = x > limit ? limit : x;
    return x / (1.0f + expf(-alpha * x)) * (1.0f + clamp_abs(gate, limit));
}

// Gated units of the mmv epilogue.
DEVICE float gated(u32 op, float a, float b, const float* c) {
    switch (op) {
    case VG_OP_REGLU: return a > 0.0f ? a * b : 0.0f;
    case VG_OP_GEGLU: return gelu(a) * b;
    case VG_OP_SWIGLU: return silu(a) * b;
    case VG_OP_SWIGLU_OAI: return swiglu_oai(a, b, c[0], c[1]);
    default: return NAN_F; // the host rejects other units
    }
}
