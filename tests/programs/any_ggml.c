// Computes on the plugin's device with a ggml of any release, loaded in any way.
//
// any_ggml SCOPE GGML PLUGIN
//
// SCOPE is the scope of GGML's symbols: `global` or `local`, as in dlopen, or `self` if this
// program contains a ggml (the argument GGML is then not used). Prints "RELEASE api VERSION DEVICE
// ok". Exit status 3: the plugin does not support this ggml, or reaches no executor.
//
// No header of ggml is used, so that one program works with all releases.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void * ggml;

static void * need(void * library, const char * name) {
    void * symbol = dlsym(library, name);
    if (!symbol) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        exit(1);
    }
    return symbol;
}

struct init_params {
    size_t size;
    void * buffer;
    bool no_alloc;
};

// The beginning of `struct ggml_backend_reg`, the same in all releases.
struct registry {
    int api_version;
    const char * (*name)(void *);
    size_t (*device_count)(void *);
    void * (*device)(void *, size_t);
};

#define GGML(result, name, ...) ((result (*)(__VA_ARGS__)) need(ggml, name))

enum { K = 4, N = 3, M = 2, F32 = 0 };

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s global|local|self GGML PLUGIN\n", argv[0]);
        return 2;
    }
    if (!strcmp(argv[1], "self")) {
        ggml = dlopen(NULL, RTLD_NOW);
    } else {
        ggml = dlopen(argv[2], RTLD_NOW | (strcmp(argv[1], "global") ? RTLD_LOCAL : RTLD_GLOBAL));
    }
    void * plugin = dlopen(argv[3], RTLD_NOW | RTLD_LOCAL);
    if (!ggml || !plugin) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int (*score)(void) = (int (*)(void)) need(plugin, "ggml_backend_score");
    struct registry * (*init)(void) =
        (struct registry * (*)(void)) need(plugin, "ggml_backend_init");
    if (score() == 0) {
        // A program that calls the registry function nevertheless gets null and continues.
        return init() ? 1 : 3;
    }
    struct registry * registry = init();
    if (!registry || registry->device_count(registry) < 1) {
        return 1;
    }
    void * device = registry->device(registry, 0);
    void * backend = GGML(void *, "ggml_backend_dev_init", void *, const char *)(device, NULL);

    struct init_params params = { 1 << 20, NULL, true };
    void * context = GGML(void *, "ggml_init", struct init_params)(params);
    void * (*tensor)(void *, int, int64_t, int64_t) =
        GGML(void *, "ggml_new_tensor_2d", void *, int, int64_t, int64_t);
    void * a = tensor(context, F32, K, N);
    void * b = tensor(context, F32, K, M);
    void * c = tensor(context, F32, N, 1);
    void * product = GGML(void *, "ggml_mul_mat", void *, void *, void *)(context, a, b);
    void * sum = GGML(void *, "ggml_add", void *, void *, void *)(context, product, c);
    void * graph = GGML(void *, "ggml_new_graph", void *)(context);
    GGML(void, "ggml_build_forward_expand", void *, void *)(graph, sum);
    void * buffer =
        GGML(void *, "ggml_backend_alloc_ctx_tensors", void *, void *)(context, backend);
    if (!backend || !buffer) {
        fprintf(stderr, "no backend or no memory\n");
        return 1;
    }

    void (*set)(void *, const void *, size_t, size_t) =
        GGML(void, "ggml_backend_tensor_set", void *, const void *, size_t, size_t);
    void (*get)(const void *, void *, size_t, size_t) =
        GGML(void, "ggml_backend_tensor_get", const void *, void *, size_t, size_t);
    int (*compute)(void *, void *) = GGML(int, "ggml_backend_graph_compute", void *, void *);
    // Several rounds: the graph is sent in the first one.
    for (int round = 1; round <= 3; round++) {
        float x[N][K], y[M][K], z[N], result[M][N];
        for (int i = 0; i < N * K; i++) { (&x[0][0])[i] = (float) (i % 5 - 2); }
        for (int i = 0; i < M * K; i++) { (&y[0][0])[i] = (float) (i * round % 7 - 3); }
        for (int i = 0; i < N; i++) { z[i] = (float) (100 * i + round); }
        set(a, x, 0, sizeof x);
        set(b, y, 0, sizeof y);
        set(c, z, 0, sizeof z);
        int status = compute(backend, graph);
        get(sum, result, 0, sizeof result);
        for (int m = 0; m < M; m++) {
            for (int n = 0; n < N; n++) {
                float expected = z[n];
                for (int k = 0; k < K; k++) { expected += x[n][k] * y[m][k]; }
                if (status != 0 || result[m][n] != expected) {
                    fprintf(stderr, "round %d, [%d][%d]: %g instead of %g, status %d\n", round,
                            m, n, result[m][n], expected, status);
                    return 1;
                }
            }
        }
    }
    const char * name = GGML(const char *, "ggml_backend_dev_name", void *)(device);
    const char * version = GGML(const char *, "ggml_version", void)();
    printf("%s api %d %s ok\n", version, registry->api_version, name);
    GGML(void, "ggml_backend_buffer_free", void *)(buffer);
    GGML(void, "ggml_backend_free", void *)(backend);
    GGML(void, "ggml_free", void *)(context);
    return 0;
}
