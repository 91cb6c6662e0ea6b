// A library to preload: the wall clock of the program jumps by years, back and forth, at each read.
// The monotonic clocks are unchanged, since Linux lets no process set them.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static time_t jump(void) {
    static atomic_uint reads;
    static const time_t years[] = {0, 20, -15, 3, -30, 12};
    const unsigned read_index = atomic_fetch_add_explicit(&reads, 1, memory_order_relaxed);
    return years[read_index % (sizeof(years) / sizeof(years[0]))] * 365 * 24 * 3600;
}

int clock_gettime(clockid_t clock, struct timespec * out) {
    static int (*_Atomic real)(clockid_t, struct timespec *);
    if (real == NULL) {
        real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    }
    const int result = real(clock, out);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        out->tv_sec += jump();
    }
    return result;
}

int gettimeofday(struct timeval * restrict out, void * restrict zone) {
    (void) zone;
    struct timespec now;
    const int result = clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t * out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) {
        *out = now.tv_sec;
    }
    return now.tv_sec;
}
