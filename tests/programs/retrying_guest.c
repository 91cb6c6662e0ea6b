// A program that loads a model and generates repeatedly, also after the loss of its executor.
//
// retrying_guest BACKENDS MODEL LAYERS
//
// Loads the backends in the folder BACKENDS, and the one that GGML_BACKEND_PATH names. For each
// line "run N" on stdin the program loads the model, generates N tokens greedily, frees everything,
// and prints "tokens ID ID ..." or "failed REASON". It prints "token" for each token at once. The
// program ends at the end of stdin.
//
// For each line "fork N" the program does the same, and forks in the middle. The child must not be
// able to use its parent's session: its next graph fails. Then the child loads the model itself,
// and generates N tokens, too. These tokens must be those of the child's parent.

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ggml-backend.h"
#include "llama.h"

enum { MAX_TOKENS = 480, CONTEXT = 512, BATCH = 64 };

static const char PROMPT[] = "A virtual machine has no graphics processor of its own.";

// How a child ends.
enum { CHILD_WORKED = 0, CHILD_FAILED = 3, CHILD_USED_PARENT = 4 };

// The arguments of the program.
static const char * model_path;
static int layers;

static const char * generate(struct llama_model * model, int count, int fork_at, llama_token * out);

// Whether a graph of the context computes.
static bool computes(struct llama_context * context, llama_token token) {
    if (llama_decode(context, llama_batch_get_one(&token, 1)) != 0) {
        return false;
    }
    const float * logits = llama_get_logits_ith(context, -1);
    return logits != NULL && logits[0] == logits[0];
}

// What a forked child does. Writes its tokens to `to`, and ends.
static void be_child(struct llama_context * context, llama_token token, int count, int to) {
    if (freopen("/dev/null", "w", stdout) == NULL) {
        _exit(CHILD_FAILED);
    }
    if (computes(context, token)) {
        _exit(CHILD_USED_PARENT);
    }
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = layers;
    struct llama_model * model = llama_model_load_from_file(model_path, params);
    llama_token out[MAX_TOKENS];
    if (model == NULL || generate(model, count, -1, out) != NULL) {
        _exit(CHILD_FAILED);
    }
    const size_t size = (size_t) count * sizeof(out[0]);
    _exit(write(to, out, size) == (ssize_t) size ? CHILD_WORKED : CHILD_FAILED);
}

// Waits for a child, which has written to `from`. Returns why it is not as it must be.
static const char * check_child(pid_t child, int from, int count, const llama_token * expected) {
    llama_token tokens[MAX_TOKENS];
    const size_t size = (size_t) count * sizeof(tokens[0]);
    const ssize_t got = read(from, tokens, size);
    close(from);
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) {
        return "the child has crashed";
    }
    switch (WEXITSTATUS(status)) {
        case CHILD_WORKED: break;
        case CHILD_USED_PARENT: return "the child has used the session of its parent";
        default: return "the child cannot load a model";
    }
    if (got != (ssize_t) size || memcmp(tokens, expected, size) != 0) {
        return "the child has other tokens";
    }
    return NULL;
}

static const char * generate(struct llama_model * model, int count, int fork_at,
                             llama_token * out) {
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
    pid_t child = 0;
    int ends[2] = { -1, -1 };
    for (int i = 0; failure == NULL && i < count; ++i) {
        if (i == fork_at) {
            if (pipe(ends) != 0 || (child = fork()) < 0) {
                failure = "fork";
                break;
            }
            if (child == 0) {
                be_child(context, tokens[0], count, ends[1]);
            }
            close(ends[1]);
        }
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
    if (child > 0) {
        const char * of_child = check_child(child, ends[0], count, out);
        failure = failure != NULL ? failure : of_child;
    }
    return failure;
}

static void run(int count, int fork_at) {
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = layers;
    struct llama_model * model = llama_model_load_from_file(model_path, params);
    if (model == NULL) {
        puts("failed no model");
        return;
    }
    llama_token out[MAX_TOKENS];
    const char * failure = generate(model, count, fork_at, out);
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
    model_path = argv[2];
    layers = atoi(argv[3]);
    char line[64];
    int count = 0;
    while (fgets(line, sizeof(line), stdin) != NULL) {
        const bool forks = sscanf(line, "fork %d", &count) == 1;
        if ((!forks && sscanf(line, "run %d", &count) != 1) || count < 1 || count > MAX_TOKENS) {
            fprintf(stderr, "not a command: %s", line);
            return 2;
        }
        run(count, forks ? count / 2 : -1);
    }
    llama_backend_free();
    return 0;
}
