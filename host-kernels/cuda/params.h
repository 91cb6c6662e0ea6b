/* What the host passes to kernels. Three compilers read this file: NVRTC (or nvcc), the C++ compiler of the
 * CPU build, and bindgen, which gives the host the same structures. Plain C, no includes. */
#pragma once

/* Element types: the ids of the wire (transport's `Type`). */
enum VgType {
    VG_F32 = 0,
    VG_F16 = 1,
    VG_Q4_0 = 2,
    VG_Q4_1 = 3,
    VG_Q5_0 = 6,
    VG_Q5_1 = 7,
    VG_Q8_0 = 8,
    VG_Q8_1 = 9,
    VG_Q2_K = 10,
    VG_Q3_K = 11,
    VG_Q4_K = 12,
    VG_Q5_K = 13,
    VG_Q6_K = 14,
    VG_Q8_K = 15,
    VG_IQ2_XXS = 16,
    VG_IQ2_XS = 17,
    VG_IQ3_XXS = 18,
    VG_IQ1_S = 19,
    VG_IQ4_NL = 20,
    VG_IQ3_S = 21,
    VG_IQ2_S = 22,
    VG_IQ4_XS = 23,
    VG_I8 = 24,
    VG_I16 = 25,
    VG_I32 = 26,
    VG_I64 = 27,
    VG_F64 = 28,
    VG_IQ1_M = 29,
    VG_BF16 = 30,
    VG_TQ1_0 = 34,
    VG_TQ2_0 = 35,
    VG_MXFP4 = 39,
    VG_NVFP4 = 40,
    VG_Q1_0 = 41,
    VG_Q2_0 = 42,
};

/* A tensor: the address of its first element, extents (ne[0] the fastest) and strides in bytes. nb[0] is from
 * block to block for quantised types. `data` is 0 for a tensor that is not there. */
struct VgView {
    unsigned long long data;
    long long ne[4];
    long long nb[4];
    unsigned type;
    unsigned reserved;
};

/* Where a kernel says that an index in tensor data points nowhere. The first one to say so wins. */
struct VgFault {
    unsigned taken;
    unsigned node; /* of the graph */
    long long index;
    long long count;
};

/* Which fault to fill in, and what node the kernel belongs to. */
struct VgPlace {
    unsigned long long fault; /* VgFault * */
    unsigned node;
    unsigned reserved;
};

/* vg_map: dst[i] = f(a[i], b[i]), sources repeated over the destination. */
enum VgMap {
    VG_MAP_ADD,
    VG_MAP_SUB,
    VG_MAP_MUL,
    VG_MAP_DIV,
    VG_MAP_SCALE,      /* a * c[0] + c[1] */
    VG_MAP_CLAMP,      /* to c[0]..c[1] */
    VG_MAP_SQR,
    VG_MAP_SQRT,
    VG_MAP_LOG,
    VG_MAP_SIN,
    VG_MAP_COS,
    VG_MAP_LEAKY_RELU, /* slope c[0] */
    VG_MAP_XIELU,      /* alpha_n, alpha_p, beta, eps */
    VG_MAP_SILU_BACK,  /* gradient a, input b */
    VG_MAP_ABS,
    VG_MAP_SGN,
    VG_MAP_NEG,
    VG_MAP_STEP,
    VG_MAP_TANH,
    VG_MAP_ELU,
    VG_MAP_RELU,
    VG_MAP_SIGMOID,
    VG_MAP_GELU,
    VG_MAP_GELU_QUICK,
    VG_MAP_SILU,
    VG_MAP_HARDSWISH,
    VG_MAP_HARDSIGMOID,
    VG_MAP_EXP,
    VG_MAP_EXPM1,
    VG_MAP_SOFTPLUS,
    VG_MAP_GELU_ERF,
    VG_MAP_FLOOR,
    VG_MAP_CEIL,
    VG_MAP_ROUND,
    VG_MAP_TRUNC,
    /* Gated linear units: f(a) times b. */
    VG_MAP_REGLU,
    VG_MAP_GEGLU,
    VG_MAP_SWIGLU,
    VG_MAP_SWIGLU_OAI, /* alpha, limit */
    VG_MAP_GEGLU_ERF,
    VG_MAP_GEGLU_QUICK,
    VG_MAP_SWIGLU_CLAMP, /* alpha unused, limit */
};

struct VgMapParams {
    struct VgView dst, a, b;
    float c[4];
    unsigned op; /* enum VgMap */
    unsigned flat; /* all operands there are f32, dense and of the same extents */
};

/* vg_add_id: dst[:, u, t] = a[:, u, t] + b[:, ids[u, t]]. */
struct VgAddIdParams {
    struct VgView dst, a, b, ids;
    struct VgPlace place;
};
