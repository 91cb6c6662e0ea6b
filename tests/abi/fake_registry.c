// A library that depends on a ggml-base and calls into plugins, as libggml.so does.

void * ggml_backend_buffer_init(void);

int fake_registry_call(int (*function)(void)) {
    return ggml_backend_buffer_init() == 0 && function();
}
