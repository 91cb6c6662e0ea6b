// A program that holds memory of the device VGPU0, and uses it later.
//
// held_memory BACKENDS COUNT MIB
//
// Loads the backends in the folder BACKENDS, and the one that GGML_BACKEND_PATH names. Allocates
// COUNT buffers of MIB mebibytes, which nobody has written, and prints "held". For each line
// "fill N" on stdin the program writes N into each byte of all buffers. Then, and for each line
// "check N", it reads the first bytes of each buffer, and computes with them. It prints "right" if
// these bytes are N and the sums right, and otherwise "wrong". The program ends at the end of stdin.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

enum { MAX_BUFFERS = 64, NODES = 8 };

static ggml_backend_t backend;
static ggml_backend_buffer_t buffers[MAX_BUFFERS];
// The numbers that a buffer begins with: the source and the result of a graph.
static struct ggml_tensor * numbers[MAX_BUFFERS];
static struct ggml_tensor * sums[MAX_BUFFERS];
static struct ggml_cgraph * graphs[MAX_BUFFERS];
static size_t size;

// Allocates buffer `i`, and a graph that adds its numbers to themselves.
static bool hold(int i) {
    buffers[i] = ggml_backend_alloc_buffer(backend, size);
    if (buffers[i] == NULL) {
        return false;
    }
    const struct ggml_init_params params = {
        .mem_size = NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(NODES, false),
        .mem_buffer = NULL,
        .no_alloc = true,
    };
    struct ggml_context * context = ggml_init(params);
    numbers[i] = ggml_new_tensor_1d(context, GGML_TYPE_F32, 64);
    sums[i] = ggml_add(context, numbers[i], numbers[i]);
    char * base = ggml_backend_buffer_get_base(buffers[i]);
    if (ggml_backend_tensor_alloc(buffers[i], numbers[i], base) != GGML_STATUS_SUCCESS ||
        ggml_backend_tensor_alloc(buffers[i], sums[i], base + size / 2) != GGML_STATUS_SUCCESS) {
        return false;
    }
    graphs[i] = ggml_new_graph_custom(context, NODES, false);
    ggml_build_forward_expand(graphs[i], sums[i]);
    return true;
}

// Whether a buffer begins with bytes of this value, and the device adds them up.
static bool is_right(int i, uint8_t value) {
    uint8_t bytes[64 * sizeof(float)], wanted[sizeof(bytes)];
    float number, sum;
    memset(wanted, value, sizeof(wanted));
    ggml_backend_tensor_get(numbers[i], bytes, 0, sizeof(bytes));
    if (memcmp(bytes, wanted, sizeof(bytes)) != 0 ||
        ggml_backend_graph_compute(backend, graphs[i]) != GGML_STATUS_SUCCESS) {
        return false;
    }
    ggml_backend_tensor_get(sums[i], &sum, 0, sizeof(sum));
    memcpy(&number, wanted, sizeof(number));
    return sum == 2.0f * number;
}

int main(int argc, char ** argv) {
    const int count = argc == 4 ? atoi(argv[2]) : 0;
    if (count < 1 || count > MAX_BUFFERS) {
        fprintf(stderr, "usage: held_memory BACKENDS COUNT MIB\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    size = (size_t) atoi(argv[3]) << 20;
    ggml_backend_load_all_from_path(argv[1]);
    ggml_backend_dev_t device = ggml_backend_dev_by_name("VGPU0");
    backend = device != NULL ? ggml_backend_dev_init(device, NULL) : NULL;
    if (backend == NULL) {
        fprintf(stderr, "no device VGPU0\n");
        return 1;
    }
    for (int i = 0; i < count; ++i) {
        if (!hold(i)) {
            fprintf(stderr, "no buffer %d of %s MiB\n", i, argv[3]);
            return 1;
        }
    }
    puts("held");
    char line[64];
    int value;
    while (fgets(line, sizeof(line), stdin) != NULL) {
        if (sscanf(line, "fill %d", &value) == 1) {
            for (int i = 0; i < count; ++i) {
                ggml_backend_buffer_clear(buffers[i], (uint8_t) value);
            }
            ggml_backend_synchronize(backend);
        } else if (sscanf(line, "check %d", &value) != 1) {
            fprintf(stderr, "not a command: %s", line);
            return 2;
        }
        bool right = true;
        for (int i = 0; i < count && right; ++i) {
            right = is_right(i, (uint8_t) value);
        }
        puts(right ? "right" : "wrong");
    }
    return 0;
}
