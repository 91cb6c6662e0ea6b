// Buffer types in backend API version 2 (ggml 0.21 to 0.25).

#ifndef VGPU_GGML_ABI_V2_H
#define VGPU_GGML_ABI_V2_H

#include "ggml-abi-common.h"

#define GGML_BACKEND_API_VERSION_V2 2

// What a kind of memory can do. Slots marked optional may be null.
struct ggml_backend_buffer_type_i_v2 {
    const char * (*get_name)(ggml_backend_buffer_type_t buft);
    // null when there is no room
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    // every tensor starts at a multiple of this power of two
    size_t (*get_alignment)(ggml_backend_buffer_type_t buft);
    // optional; largest buffer, unlimited by default
    size_t (*get_max_size)(ggml_backend_buffer_type_t buft);
    // optional; bytes that a tensor takes, by default its own size
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t buft, const struct ggml_tensor * tensor);
    // optional; whether the program's CPU can access the memory, no by default
    bool (*is_host)(ggml_backend_buffer_type_t buft);
};

struct ggml_backend_buffer_type_v2 {
    struct ggml_backend_buffer_type_i_v2 iface;
    ggml_backend_dev_t                   device;
    void *                               context;
};

#endif
