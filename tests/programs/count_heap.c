// Counts the bytes that a program holds in the heap of the C library. Preloaded.
//
// Resident memory cannot show a small leak: an allocator keeps freed memory, and more of it with
// each thread. The bytes that a program has allocated and not freed are exact.
//
// The library writes the count, 8 bytes, into a file with the number of the process as its name, in
// the folder HEAP_COUNTS, which the compiler is told. A forked child counts for itself alone, and
// writes nothing.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

// The functions of the GNU C library under these further names.
extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic int64_t own;
static _Atomic int64_t * held = &own;

static void * added(void * at) {
    if (at != NULL) {
        atomic_fetch_add_explicit(held, (int64_t) malloc_usable_size(at), memory_order_relaxed);
    }
    return at;
}

static void removed(size_t size) {
    atomic_fetch_sub_explicit(held, (int64_t) size, memory_order_relaxed);
}

void * malloc(size_t size) { return added(__libc_malloc(size)); }

void * calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }

void * memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }

void * aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void ** to, size_t alignment, size_t size) {
    void * at = memalign(alignment, size);
    if (at == NULL) {
        return ENOMEM;
    }
    *to = at;
    return 0;
}

void free(void * at) {
    if (at != NULL) {
        removed(malloc_usable_size(at));
        __libc_free(at);
    }
}

void * realloc(void * at, size_t size) {
    const size_t before = at != NULL ? malloc_usable_size(at) : 0;
    void * now = __libc_realloc(at, size);
    if (now == NULL && size > 0) {
        return NULL; // the old memory stays
    }
    removed(before);
    return added(now);
}

static void count_alone(void) { held = &own; }

__attribute__((constructor)) static void begin(void) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/%d", HEAP_COUNTS, (int) getpid());
    const int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) {
        return;
    }
    if (ftruncate(file, sizeof(int64_t)) == 0) {
        void * at = mmap(NULL, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at != MAP_FAILED && pthread_atfork(NULL, NULL, count_alone) == 0) {
            // No other thread runs yet.
            _Atomic int64_t * count = at;
            atomic_store(count, atomic_load(&own));
            held = count;
        }
    }
    close(file);
}
