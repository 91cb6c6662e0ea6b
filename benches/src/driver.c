// Measures devices through the public interfaces of ggml and llama.cpp. The measurements of all
// devices alternate in one process, so that their results are comparable. Writes one JSON object
// per line.
//
//   driver FOLDER RPC-ENDPOINT latency REPEATS DEVICE...
//   driver FOLDER RPC-ENDPOINT transfer REPEATS DEVICE...
//   driver FOLDER RPC-ENDPOINT load REPEATS MODEL DEVICE...
//   driver FOLDER RPC-ENDPOINT guest REPEATS MODEL DEVICE
//
// FOLDER contains ggml's backends. GGML_BACKEND_PATH adds another one, as in any program.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#define MiB ((size_t) 1 << 20)
#define LARGEST (256 * MiB)
// Small transfers are measured in series of this many bytes, like the tensors of a model.
#define TRAIN (16 * MiB)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + (double) t.tv_nsec * 1e-9;
}

static void fail(const char * what, const char * which) {
    fprintf(stderr, "driver: %s: %s\n", what, which);
    exit(1);
}

static void quiet(enum ggml_log_level level, const char * text, void * data) {
    (void) data;
    if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
        fputs(text, stderr);
    }
}

static ggml_backend_dev_t device(const char * name) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(name);
    if (!dev) {
        fail("no such device", name);
    }
    return dev;
}

static int ascending(const void * a, const void * b) {
    double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

// A tensor of bytes on a device, and the device's stream.
struct target {
    const char * name;
    ggml_backend_t backend;
    ggml_backend_buffer_t buffer;
    struct ggml_context * context;
    struct ggml_tensor * tensor;
};

static struct target place(const char * name, size_t size) {
    struct target t = { .name = name };
    ggml_backend_dev_t dev = device(name);
    t.backend = ggml_backend_dev_init(dev, NULL);
    if (!t.backend) {
        fail("cannot be used", name);
    }
    struct ggml_init_params params = { 4 * ggml_tensor_overhead(), NULL, true };
    t.context = ggml_init(params);
    t.tensor = ggml_new_tensor_1d(t.context, GGML_TYPE_I8, (int64_t) size);
    t.buffer =
        ggml_backend_alloc_ctx_tensors_from_buft(t.context, ggml_backend_dev_buffer_type(dev));
    if (!t.buffer) {
        fail("no memory", name);
    }
    return t;
}

// The smallest request to the device, and the smallest read.
static double ask_memory(struct target * t) {
    size_t free, total;
    double began = now();
    ggml_backend_dev_memory(ggml_backend_get_device(t->backend), &free, &total);
    return now() - began;
}

static double read_word(struct target * t) {
    int word;
    double began = now();
    ggml_backend_tensor_get(t->tensor, &word, 0, sizeof word);
    return now() - began;
}

static void latency(int repeats, int count, char ** names) {
    enum { SAMPLES = 300 };
    struct target targets[8];
    for (int i = 0; i < count; i++) {
        targets[i] = place(names[i], 4096);
    }
    struct { const char * name; double (*act)(struct target *); } acts[] = {
        { "memory", ask_memory }, { "read4", read_word },
    };
    for (int asleep = 0; asleep < 2; asleep++) {
        for (int round = 0; round < repeats; round++) {
            for (int act = 0; act < 2; act++) {
                for (int i = 0; i < count; i++) {
                    int samples = asleep ? SAMPLES / 10 : SAMPLES;
                    double times[SAMPLES];
                    acts[act].act(&targets[i]);
                    for (int s = 0; s < samples; s++) {
                        if (asleep) {
                            struct timespec pause = { 0, 3000000 };
                            nanosleep(&pause, NULL);
                        }
                        times[s] = acts[act].act(&targets[i]);
                    }
                    qsort(times, (size_t) samples, sizeof *times, ascending);
                    printf("{\"what\":\"%s\",\"asleep\":%s,\"device\":\"%s\",\"seconds\":%.9f}\n",
                           acts[act].name, asleep ? "true" : "false", targets[i].name,
                           times[samples / 2]);
                }
            }
        }
    }
}

static void report(const char * what, const char * name, size_t size, size_t bytes,
                   double seconds) {
    printf("{\"what\":\"%s\",\"device\":\"%s\",\"size\":%zu,\"bytes\":%zu,\"seconds\":%.9f}\n",
           what, name, size, bytes, seconds);
    fflush(stdout);
}

// Transfers of the given sizes to and from a tensor of `whole` bytes on each device.
static void transfer_in(size_t whole, const size_t * sizes, size_t n_sizes, int repeats, int count,
                        char ** names) {
    struct target targets[8];
    for (int i = 0; i < count; i++) {
        targets[i] = place(names[i], whole);
    }
    char * source = malloc(whole);
    char * sink = malloc(whole);
    memset(source, 3, whole);
    memset(sink, 4, whole);
    // All pages are allocated before the first measurement.
    for (int i = 0; i < count; i++) {
        ggml_backend_tensor_set(targets[i].tensor, source, 0, whole);
        ggml_backend_tensor_get(targets[i].tensor, sink, 0, whole);
    }
    for (size_t s = 0; s < n_sizes; s++) {
        size_t size = sizes[s], train = size > TRAIN ? size : TRAIN;
        for (int round = 0; round < repeats; round++) {
            size_t at = (size_t) round * train % (whole - train + 1) / 4096 * 4096;
            double began = now();
            for (size_t p = 0; p < train; p += size) {
                memcpy(sink + at + p, source + at + p, size);
                __asm__ volatile("" ::: "memory");
            }
            report("upload", "memcpy", size, train, now() - began);
            for (int i = 0; i < count; i++) {
                struct ggml_tensor * tensor = targets[i].tensor;
                int word;
                began = now();
                for (size_t p = 0; p < train; p += size) {
                    ggml_backend_tensor_set(tensor, source + at + p, at + p, size);
                }
                // An upload is complete when a later read returns.
                ggml_backend_tensor_get(tensor, &word, at, sizeof word);
                report("upload", targets[i].name, size, train, now() - began);
                began = now();
                for (size_t p = 0; p < train; p += size) {
                    ggml_backend_tensor_get(tensor, sink + at + p, at + p, size);
                }
                report("download", targets[i].name, size, train, now() - began);
            }
        }
    }
    if (memcmp(source, sink, whole) != 0) {
        fail("the bytes read are not those written", "transfer");
    }
    for (int i = 0; i < count; i++) {
        ggml_backend_buffer_free(targets[i].buffer);
        ggml_free(targets[i].context);
        ggml_backend_free(targets[i].backend);
    }
    free(source);
    free(sink);
}

// The transfers of every graph use buffers of moderate size. The buffers of a model are large.
static void transfer(int repeats, int count, char ** names) {
    const size_t some[] = { 64 << 10, MiB, 16 * MiB }, all[] = { LARGEST };
    transfer_in(2 * TRAIN, some, 3, 4 * repeats, count, names);
    transfer_in(LARGEST, all, 1, repeats, count, names);
}

static void load(int repeats, const char * path, int count, char ** names) {
    for (int round = 0; round <= repeats; round++) {
        // The part of a load that is the same for every device: all but the weights.
        struct llama_model_params params = llama_model_default_params();
        params.vocab_only = true;
        double started = now();
        llama_model_free(llama_model_load_from_file(path, params));
        report("load-vocabulary", "ggml-cpu", 1, 1, now() - started);
        for (int mapped = 0; mapped < 2; mapped++) {
            for (int i = 0; i < count; i++) {
                ggml_backend_dev_t devices[] = { device(names[i]), NULL };
                struct llama_model_params params = llama_model_default_params();
                params.devices = devices;
                params.n_gpu_layers = 999;
                params.load_mode = mapped ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
                double began = now();
                struct llama_model * model = llama_model_load_from_file(path, params);
                double seconds = now() - began;
                if (!model) {
                    fail("does not take the model", names[i]);
                }
                size_t bytes = llama_model_size(model);
                llama_model_free(model);
                // The first round reads the file into the page cache.
                if (round > 0) {
                    report(mapped ? "load-mmap" : "load-read", names[i], bytes, bytes, seconds);
                }
            }
        }
    }
}

// The work of llama.cpp on a file before the first weight and after the last: mapping and unmapping
// every page. Returns the seconds.
static double map_and_unmap(const char * path) {
    double began = now();
    int file = open(path, O_RDONLY);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0) {
        fail("cannot be opened", path);
    }
    void * mapping =
        mmap(NULL, (size_t) about.st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
    if (mapping == MAP_FAILED) {
        fail("cannot be mapped", path);
    }
    munmap(mapping, (size_t) about.st_size);
    close(file);
    return now() - began;
}

// A guest that loads a model, computes a token, and runs until it has read a line.
static void guest(const char * path, const char * name) {
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    double began = now();
    llama_model_free(llama_model_load_from_file(path, params));
    report("load-vocabulary", name, 1, 1, now() - began);
    report("map", name, 1, 1, map_and_unmap(path));
    ggml_backend_dev_t devices[] = { device(name), NULL };
    params = llama_model_default_params();
    params.devices = devices;
    params.n_gpu_layers = 999;
    began = now();
    struct llama_model * model = llama_model_load_from_file(path, params);
    double seconds = now() - began;
    if (!model) {
        fail("does not take the model", name);
    }
    report("load", name, llama_model_size(model), llama_model_size(model), seconds);
    struct llama_context_params settings = llama_context_default_params();
    settings.n_ctx = 64;
    struct llama_context * context = llama_init_from_model(model, settings);
    llama_token token = 1;
    began = now();
    if (!context || llama_decode(context, llama_batch_get_one(&token, 1)) != 0) {
        fail("does not compute", name);
    }
    // A hash of the logits: the same weights give the same bits.
    const float * logits = llama_get_logits(context);
    int count = llama_vocab_n_tokens(llama_model_get_vocab(model));
    size_t sum = 14695981039346656037u;
    const unsigned char * end = (const unsigned char *) (logits + count);
    for (const unsigned char * at = (const unsigned char *) logits; at < end; at++) {
        sum = (sum ^ *at) * 1099511628211u;
    }
    seconds = now() - began;
    llama_free(context); // the plugin writes its statistics
    report("token", name, sum, 1, seconds);
    // Reads the whole line, so that the writer gets no SIGPIPE.
    for (int c = getchar(); c != '\n'; c = getchar()) {
        if (c == EOF) {
            fail("stdin ended before the line \"quit\" for", name);
        }
    }
    llama_model_free(model);
}

int main(int argc, char ** argv) {
    if (argc < 6) {
        fail("arguments",
             "FOLDER RPC-ENDPOINT latency|transfer|load|guest REPEATS [MODEL] DEVICE...");
    }
    setvbuf(stdout, NULL, _IOLBF, 0); // whole lines, even between lines of stderr
    ggml_log_set(quiet, NULL);
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    llama_backend_init();
    if (strcmp(argv[3], "guest") == 0) {
        guest(argv[5], argv[6]);
        return 0;
    }
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    if (!rpc) {
        fail("no RPC backend in", argv[1]);
    }
    ggml_backend_reg_t (*add_server)(const char *);
    void * symbol = ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server");
    if (!symbol) {
        fail("the RPC backend has no", "ggml_backend_rpc_add_server");
    }
    memcpy(&add_server, &symbol, sizeof symbol);
    ggml_backend_register(add_server(argv[2]));

    int repeats = atoi(argv[4]);
    if (strcmp(argv[3], "latency") == 0) {
        latency(repeats, argc - 5, argv + 5);
    } else if (strcmp(argv[3], "transfer") == 0) {
        transfer(repeats, argc - 5, argv + 5);
    } else if (strcmp(argv[3], "load") == 0) {
        load(repeats, argv[5], argc - 6, argv + 6);
    } else {
        fail("unknown measurement", argv[3]);
    }
    return 0;
}
