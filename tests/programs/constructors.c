// Operators that ggml's test-backend-ops has no case of, on VGPU0 and on ggml's CPU backend.
//
// constructors FOLDER SEED [OPERATOR]
//
// Compiled against the headers and libraries of each release. Each operator is built by the public
// constructor of that release, with random parameters and values from SEED, once for VGPU0 and once
// for the CPU backend in FOLDER. Prints a line for each case, and ends with status 1 if a result
// differs. With OPERATOR one value of VGPU0's results of that operator is changed before the
// comparison: then the program must fail.

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#define CASES 24
#define MAX_TENSORS 16
// As test-backend-ops: the mean square of the error, relative to that of the values.
#define MAX_NMSE 1e-7

static uint64_t state;

// SplitMix64.
static uint64_t next(void) {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// A number from `low` to `high`, both included.
static int from_to(int low, int high) {
    return low + (int) (next() % (uint64_t) (high - low + 1));
}

static struct ggml_tensor * tensor(struct ggml_context * ctx, enum ggml_type type, int64_t ne0,
        int64_t ne1, int64_t ne2, int64_t ne3) {
    return ggml_new_tensor_4d(ctx, type, ne0, ne1, ne2, ne3);
}

// Each returns the operator, and writes its parameters to `text`.
typedef struct ggml_tensor * build_t(struct ggml_context * ctx, char * text);

static struct ggml_tensor * add1(struct ggml_context * ctx, char * text) {
    bool inplace = next() & 1;
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F32, from_to(1, 70), from_to(1, 5),
            from_to(1, 4), from_to(1, 3));
    struct ggml_tensor * b = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
    sprintf(text, "inplace=%d", inplace);
    return inplace ? ggml_add1_inplace(ctx, a, b) : ggml_add1(ctx, a, b);
}

static struct ggml_tensor * diag_mask_zero(struct ggml_context * ctx, char * text) {
    bool inplace = next() & 1;
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F32, from_to(1, 40), from_to(1, 40),
            from_to(1, 4), from_to(1, 3));
    int n_past = from_to(0, (int) a->ne[0]);
    sprintf(text, "n_past=%d,inplace=%d", n_past, inplace);
    return inplace ? ggml_diag_mask_zero_inplace(ctx, a, n_past)
                   : ggml_diag_mask_zero(ctx, a, n_past);
}

static struct ggml_tensor * im2col_back(struct ggml_context * ctx, char * text) {
    bool is_2d = next() & 1;
    int iw = from_to(6, 20), ih = is_2d ? from_to(6, 20) : 1;
    int kw = from_to(1, 3), kh = is_2d ? from_to(1, 3) : 1;
    int s0 = from_to(1, 3), s1 = is_2d ? from_to(1, 3) : 0;
    int p0 = from_to(0, 2), p1 = is_2d ? from_to(0, 2) : 0;
    int d0 = from_to(1, 2), d1 = is_2d ? from_to(1, 2) : 0;
    int ic = from_to(1, 5), oc = from_to(1, 4), n = from_to(1, 3);
    int ow = (iw + 2 * p0 - d0 * (kw - 1) - 1) / s0 + 1;
    int oh = is_2d ? (ih + 2 * p1 - d1 * (kh - 1) - 1) / s1 + 1 : 1;
    // The gradient is that of im2col's result, the kernel gives only its shape.
    struct ggml_tensor * gradient = is_2d ? tensor(ctx, GGML_TYPE_F32, ic * kh * kw, ow, oh, n)
                                          : tensor(ctx, GGML_TYPE_F32, ic * kw, ow, n, 1);
    struct ggml_tensor * kernel = is_2d ? tensor(ctx, GGML_TYPE_F32, kw, kh, ic, oc)
                                        : tensor(ctx, GGML_TYPE_F32, kw, ic, oc, 1);
    int64_t ne_2d[4] = { iw, ih, ic, n };
    int64_t ne_1d[4] = { iw, ic, n, 1 };
    sprintf(text, "k=%dx%d,s=%d,%d,p=%d,%d,d=%d,%d,is_2d=%d", kw, kh, s0, s1, p0, p1, d0, d1,
            is_2d);
    return ggml_im2col_back(ctx, gradient, kernel, is_2d ? ne_2d : ne_1d, s0, s1, p0, p1, d0, d1,
            is_2d);
}

static struct ggml_tensor * pool_2d_back(struct ggml_context * ctx, char * text) {
    bool max = next() & 1;
    int k0 = from_to(1, 3), k1 = from_to(1, 3), s0 = from_to(1, 3), s1 = from_to(1, 3);
    int p0 = from_to(0, k0 - 1), p1 = from_to(0, k1 - 1);
    struct ggml_tensor * input = tensor(ctx, GGML_TYPE_F32, from_to(4, 20), from_to(4, 20),
            from_to(1, 4), from_to(1, 3));
    int64_t ow = (input->ne[0] + 2 * p0 - k0) / s0 + 1, oh = (input->ne[1] + 2 * p1 - k1) / s1 + 1;
    struct ggml_tensor * gradient = tensor(ctx, GGML_TYPE_F32, ow, oh, input->ne[2], input->ne[3]);
    sprintf(text, "%s,k=%dx%d,s=%d,%d,p=%d,%d", max ? "max" : "avg", k0, k1, s0, s1, p0, p1);
    enum ggml_op_pool kind = max ? GGML_OP_POOL_MAX : GGML_OP_POOL_AVG;
    return ggml_pool_2d_back(ctx, gradient, input, kind, k0, k1, s0, s1, (float) p0, (float) p1);
}

static struct ggml_tensor * win_part(struct ggml_context * ctx, char * text) {
    int w = from_to(1, 9);
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F32, from_to(1, 40), from_to(1, 30),
            from_to(1, 30), 1);
    sprintf(text, "w=%d", w);
    return ggml_win_part(ctx, a, w);
}

static struct ggml_tensor * win_unpart(struct ggml_context * ctx, char * text) {
    int w = from_to(1, 9), w0 = from_to(1, 30), h0 = from_to(1, 30);
    int np = ((w0 + w - 1) / w) * ((h0 + w - 1) / w);
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F32, from_to(1, 40), w, w, np);
    sprintf(text, "w0=%d,h0=%d,w=%d", w0, h0, w);
    return ggml_win_unpart(ctx, a, w0, h0, w);
}

static struct ggml_tensor * get_rel_pos(struct ggml_context * ctx, char * text) {
    int size = from_to(1, 20);
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F16, from_to(1, 40), 2 * size - 1, 1, 1);
    sprintf(text, "size=%d", size);
    return ggml_get_rel_pos(ctx, a, size, size);
}

static struct ggml_tensor * add_rel_pos(struct ggml_context * ctx, char * text) {
    bool inplace = next() & 1;
    int k = from_to(1, 8), rows = from_to(1, 8), columns = from_to(1, 8), batch = from_to(1, 5);
    struct ggml_tensor * a = tensor(ctx, GGML_TYPE_F32, k * k, rows * columns, batch, 1);
    struct ggml_tensor * pw = tensor(ctx, GGML_TYPE_F32, k, rows, columns, batch);
    struct ggml_tensor * ph = tensor(ctx, GGML_TYPE_F32, k, rows, columns, batch);
    sprintf(text, "k=%d,inplace=%d", k, inplace);
    return inplace ? ggml_add_rel_pos_inplace(ctx, a, pw, ph) : ggml_add_rel_pos(ctx, a, pw, ph);
}

static const struct {
    const char * name;
    build_t * build;
} OPERATORS[] = {
    { "ADD1", add1 },
    { "DIAG_MASK_ZERO", diag_mask_zero },
    { "IM2COL_BACK", im2col_back },
    { "POOL_2D_BACK", pool_2d_back },
    { "WIN_PART", win_part },
    { "WIN_UNPART", win_unpart },
    { "GET_REL_POS", get_rel_pos },
    { "ADD_REL_POS", add_rel_pos },
};

static float value(enum ggml_type type, const void * values, size_t i) {
    return type == GGML_TYPE_F16 ? ggml_fp16_to_fp32(((const ggml_fp16_t *) values)[i])
            : ((const float *) values)[i];
}

// Fills a tensor with values from -1 to 1.
static void fill(struct ggml_tensor * t) {
    size_t n = (size_t) ggml_nelements(t);
    void * values = malloc(ggml_nbytes(t));
    for (size_t i = 0; i < n; i++) {
        float x = (float) (next() >> 40) / (float) (1 << 23) - 1.0f;
        if (t->type == GGML_TYPE_F16) {
            ((ggml_fp16_t *) values)[i] = ggml_fp32_to_fp16(x);
        } else {
            ((float *) values)[i] = x;
        }
    }
    ggml_backend_tensor_set(t, values, 0, ggml_nbytes(t));
    free(values);
}

// The result of an operator as floats, `*n` of them.
static float * compute(ggml_backend_t backend, build_t * build, uint64_t seed, char * text,
        size_t * n, const char * name) {
    state = seed;
    struct ggml_init_params params = {
        .mem_size = MAX_TENSORS * ggml_tensor_overhead() + ggml_graph_overhead(),
        .mem_buffer = NULL,
        .no_alloc = true,
    };
    struct ggml_context * ctx = ggml_init(params);
    struct ggml_tensor * result = build(ctx, text);
    if (strcmp(ggml_op_name(result->op), name) != 0) {
        fprintf(stderr, "the constructor of %s makes %s\n", name, ggml_op_name(result->op));
        exit(2);
    }
    if (!ggml_backend_supports_op(backend, result)) {
        fprintf(stderr, "%s(%s): not supported [%s]\n", name, text, ggml_backend_name(backend));
        exit(1);
    }
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    for (int i = 0; i < GGML_MAX_SRC && result->src[i]; i++) {
        fill(result->src[i]);
    }
    if (!buffer || ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        fprintf(stderr, "%s(%s): the graph failed on %s\n", name, text, ggml_backend_name(backend));
        exit(1);
    }
    *n = (size_t) ggml_nelements(result);
    void * values = malloc(ggml_nbytes(result));
    ggml_backend_tensor_get(result, values, 0, ggml_nbytes(result));
    float * floats = malloc(*n * sizeof(float));
    for (size_t i = 0; i < *n; i++) {
        floats[i] = value(result->type, values, i);
    }
    free(values);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return floats;
}

// The mean square of the difference, relative to that of the values.
static double nmse(const float * a, const float * b, size_t n) {
    double error = 0, square = 0;
    for (size_t i = 0; i < n; i++) {
        error += ((double) a[i] - b[i]) * ((double) a[i] - b[i]);
        square += (double) b[i] * b[i];
    }
    return error == 0 ? 0 : error / (square > 0 ? square : 1e-30);
}

int main(int argc, char ** argv) {
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: %s FOLDER SEED [OPERATOR]\n", argv[0]);
        return 2;
    }
    const uint64_t seed = strtoull(argv[2], NULL, 10);
    const char * wrong = argc == 4 ? argv[3] : "";
    ggml_backend_load_all_from_path(argv[1]);
    ggml_backend_dev_t device = ggml_backend_dev_by_name("VGPU0");
    ggml_backend_t gpu = device ? ggml_backend_dev_init(device, NULL) : NULL;
    ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    if (!gpu || !cpu) {
        fprintf(stderr, "no %s\n", gpu ? "CPU backend" : "VGPU0");
        return 2;
    }
    int failed = 0, all = 0;
    for (size_t op = 0; op < sizeof(OPERATORS) / sizeof(*OPERATORS); op++) {
        const char * name = OPERATORS[op].name;
        for (int i = 0; i < CASES; i++) {
            char text[256];
            size_t n, m;
            const uint64_t one = seed + op * 1000 + (uint64_t) i;
            float * expected = compute(cpu, OPERATORS[op].build, one, text, &m, name);
            float * found = compute(gpu, OPERATORS[op].build, one, text, &n, name);
            if (strcmp(wrong, name) == 0) {
                found[n / 2] += 1.0f;
            }
            double error = n == m ? nmse(found, expected, n) : INFINITY;
            bool ok = error <= MAX_NMSE; // not if it is no number
            printf("  %s(%s): %s (NMSE %g)\n", name, text, ok ? "OK" : "FAIL", error);
            failed += !ok;
            all++;
            free(expected);
            free(found);
        }
    }
    printf("seed %llu: %d of %d cases failed\n", (unsigned long long) seed, failed, all);
    ggml_backend_free(gpu);
    ggml_backend_free(cpu);
    return failed > 0;
}
