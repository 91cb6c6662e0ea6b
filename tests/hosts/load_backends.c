/* Preloaded into programs that use only the backends they were linked with: loads all there are, the one in
 * GGML_BACKEND_PATH included, before the program looks for one by name. */

#include "ggml-backend.h"

__attribute__((constructor)) static void load_backends(void) {
    ggml_backend_load_all();
}
