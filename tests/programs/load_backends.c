/* A library to preload into programs that use only the backends that they were linked with. Loads
 * all backends, including that of GGML_BACKEND_PATH, before the program looks for one. */

#include "ggml-backend.h"

__attribute__((constructor)) static void load_backends(void) {
    ggml_backend_load_all();
}
