// Buffer types in backend API version 3 (ggml 0.26): version 2 and two slots for lists of tensors.

#ifndef VGPU_GGML_ABI_V3_H
#define VGPU_GGML_ABI_V3_H

#include "ggml-abi-common.h"

#define GGML_BACKEND_API_VERSION_V3 3

// What a kind of memory can do. Slots marked optional may be null.
struct ggml_backend_buffer_type_i_v3 {
    const char * (*get_name)(ggml_backend_buffer_type_t buft);
    // null when there is no room
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    // optional; one buffer with all the tensors placed in it, by default done with alloc_buffer
    ggml_backend_buffer_t (*alloc_buffer_n)(ggml_backend_buffer_type_t buft,
        struct ggml_tensor ** tensors, int n_tensors);
    // every tensor starts at a multiple of this power of two
    size_t (*get_alignment)(ggml_backend_buffer_type_t buft);
    // optional; largest buffer, unlimited by default
    size_t (*get_max_size)(ggml_backend_buffer_type_t buft);
    // optional; bytes that a tensor takes, by default its own size
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor);
    // optional; bytes that the tensors take together, by default from get_alloc_size
    size_t (*get_alloc_size_n)(ggml_backend_buffer_type_t buft, struct ggml_tensor ** tensors,
        int n_tensors);
    // optional; whether the program's CPU can access the memory, no by default
    bool (*is_host)(ggml_backend_buffer_type_t buft);
};

struct ggml_backend_buffer_type_v3 {
    struct ggml_backend_buffer_type_i_v3 iface;
    ggml_backend_dev_t                   device;
    void *                               context;
};

#endif
