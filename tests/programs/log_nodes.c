/* A library to preload into a program of llama.cpp that prints no debug messages: loads all
 * backends as load_backends.c does, and prints every message of ggml and llama.cpp, whatever the
 * program asks for. With GGML_SCHED_DEBUG=2 the device of each node is among the messages. The
 * messages go to standard output, so that their order with the program's own lines is kept. */

#include <stdio.h>

#include "ggml.h"
#include "load_backends.c"

static void print(enum ggml_log_level level, const char * text, void * user_data) {
    (void) level;
    (void) user_data;
    fputs(text, stdout);
}

/* In place of libllama's. */
void llama_log_set(ggml_log_callback callback, void * user_data);

void llama_log_set(ggml_log_callback callback, void * user_data) {
    (void) callback;
    (void) user_data;
    ggml_log_set(print, NULL);
}
