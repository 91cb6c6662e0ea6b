// A small program on libllama: prints the greedy tokens of one prompt as a line of numbers.
//
// complete BACKENDS MODEL GPU_LAYERS TOKENS PROMPT
//
// BACKENDS is the folder of ggml's own backends. GGML_BACKEND_PATH names another one.

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static int fail(const char * what) {
    fprintf(stderr, "complete: %s\n", what);
    return 1;
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        return fail("usage: complete BACKENDS MODEL GPU_LAYERS TOKENS PROMPT");
    }
    ggml_backend_load_all_from_path(argv[1]);
    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = atoi(argv[3]);
    llama_model * model = llama_model_load_from_file(argv[2], model_params);
    if (!model) {
        return fail("no model");
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const std::string prompt = argv[5];
    std::vector<llama_token> tokens(prompt.size() + 2);
    const int count = llama_tokenize(vocab, prompt.c_str(), (int) prompt.size(), tokens.data(),
                                     (int) tokens.size(), true, false);
    if (count <= 0) {
        return fail("no tokens");
    }
    tokens.resize(count);

    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = 1024;
    context_params.n_batch = 1024;
    llama_context * context = llama_init_from_model(model, context_params);
    if (!context) {
        return fail("no context");
    }
    llama_sampler * greedy = llama_sampler_init_greedy();
    llama_batch batch = llama_batch_get_one(tokens.data(), (int) tokens.size());
    llama_token next;
    for (int i = 0; i < atoi(argv[4]); i++) {
        if (llama_decode(context, batch) != 0) {
            return fail("decoding failed");
        }
        next = llama_sampler_sample(greedy, context, -1);
        printf(i ? " %d" : "%d", next);
        batch = llama_batch_get_one(&next, 1);
    }
    printf("\n");
    llama_sampler_free(greedy);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
