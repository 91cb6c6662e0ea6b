// A program that loads a model and generates repeatedly, also after the loss of its executor.
//
// retrying_guest BACKENDS MODEL LAYERS
//
// Loads the backends in the folder BACKENDS, and the one that GGML_BACKEND_PATH names. For each
// line "run N" on stdin the program loads the model, generates N tokens greedily, frees everything,
// and prints "tokens ID ID ..." or "failed REASON". It prints "token" for each token at once. The
// program ends at the end of stdin.

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

enum { MAX_TOKENS = 480, CONTEXT = 512, BATCH = 64 };

static const char PROMPT[] = "A virtual machine has no graphics processor of its own.";

static const char * generate(struct llama_model * model, int count, llama_token * out) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = CONTEXT;
    params.n_batch = params.n_ubatch = BATCH;
    params.n_threads = params.n_threads_batch = 1;
    struct llama_context * context = llama_init_from_model(model, params);
    if (context == NULL) {
        return "no context";
    }
    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    const int words = llama_vocab_n_tokens(vocab);
    llama_token tokens[CONTEXT];
    int n = llama_tokenize(vocab, PROMPT, (int) strlen(PROMPT), tokens, CONTEXT, true, false);
    const char * failure = n > 0 ? NULL : "no prompt";
    for (int i = 0; failure == NULL && i < count; ++i) {
        if (llama_decode(context, llama_batch_get_one(tokens, n)) != 0) {
            failure = "decode";
            break;
        }
        const float * logits = llama_get_logits_ith(context, -1);
        if (logits == NULL) {
            failure = "no logits";
            break;
        }
        llama_token best = 0;
        for (int word = 1; word < words; ++word) {
            if (logits[word] > logits[best]) {
                best = word;
            }
        }
        // The result of a read without an executor. Other failures are reported by the next graph.
        if (logits[best] != logits[best]) {
            failure = "the logits are not numbers";
            break;
        }
        out[i] = tokens[0] = best;
        n = 1;
        puts("token");
    }
    llama_free(context);
    return failure;
}

static void run(const char * path, int layers, int count) {
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = layers;
    struct llama_model * model = llama_model_load_from_file(path, params);
    if (model == NULL) {
        puts("failed no model");
        return;
    }
    llama_token out[MAX_TOKENS];
    const char * failure = generate(model, count, out);
    llama_model_free(model);
    if (failure != NULL) {
        printf("failed %s\n", failure);
        return;
    }
    printf("tokens");
    for (int i = 0; i < count; ++i) {
        printf(" %d", out[i]);
    }
    puts("");
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: retrying_guest BACKENDS MODEL LAYERS\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    ggml_backend_load_all_from_path(argv[1]);
    printf("ready %zu\n", ggml_backend_dev_count());
    char line[64];
    int count = 0;
    while (fgets(line, sizeof(line), stdin) != NULL) {
        if (sscanf(line, "run %d", &count) != 1 || count < 1 || count > MAX_TOKENS) {
            fprintf(stderr, "not a command: %s", line);
            return 2;
        }
        run(argv[2], atoi(argv[3]), count);
    }
    llama_backend_free();
    return 0;
}
