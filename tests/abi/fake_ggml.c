// The symbols that the plugin looks for when it searches for ggml.
//
// -DVERSION="..." is the answer of ggml_version. -DAPI_3 adds the symbol that is new in API version
// 3. -DINCOMPLETE leaves out a function.

#include <stdarg.h>
#include <stdio.h>

void * ggml_backend_buffer_init(void) { return 0; }
const char * ggml_version(void) { return VERSION; }
const char * ggml_op_name(int id) { (void) id; return "MUL_MAT"; }
const char * ggml_unary_op_name(int id) { (void) id; return "ABS"; }
const char * ggml_type_name(int id) { (void) id; return "f32"; }
unsigned long ggml_nbytes(const void * tensor) { (void) tensor; return 0; }

#ifndef INCOMPLETE
const char * ggml_glu_op_name(int id) { (void) id; return "REGLU"; }
#endif

#ifdef API_3
void ggml_backend_buft_alloc_buffer_n(void) {}
#endif

static char logged[4096];

void ggml_log_internal(int level, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(logged, sizeof logged, "%d ", level);
    vsnprintf(logged + length, sizeof logged - length, format, arguments);
    va_end(arguments);
}

const char * fake_logged(void) { return logged; }
