// Loads the plugin as ggml does and prints its answers.
//
// score LIBGGML_BASE PLUGIN
//
// Prints the score, and whether there is a registry ("yes" or "no"). ggml asks for the registry
// only after a score above 0. A plugin that is asked all the same must not crash.

#include <dlfcn.h>
#include <stdio.h>

static void * symbol(void * library, const char * name) {
    void * address = dlsym(library, name);
    if (!address) {
        fprintf(stderr, "%s\n", dlerror());
    }
    return address;
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s LIBGGML_BASE PLUGIN\n", argv[0]);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        // In a private scope, as in a program that loads ggml itself as a plugin.
        if (!dlopen(argv[i], RTLD_NOW | RTLD_LOCAL)) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
    }
    void * plugin = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    int (*score)(void) = (int (*)(void)) symbol(plugin, "ggml_backend_score");
    void * (*init)(void) = (void * (*)(void)) symbol(plugin, "ggml_backend_init");
    if (!score || !init) {
        return 1;
    }
    int answer = score();
    printf("%d %s\n", answer, init() ? "yes" : "no");
    return 0;
}
