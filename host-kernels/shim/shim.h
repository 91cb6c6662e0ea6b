// CUDA C++ as far as the kernels use it, on the CPU. `device.cuh` includes this when VGPU_SHIM is defined.
//
// The threads of a block are fibers that one thread of the process runs in turn: each until it waits for
// others, at a barrier or in a warp's exchange. Blocks run one after the other. Every launch is so the same
// each time, and what only a wrong kernel does is caught: a barrier that some threads never reach, an exchange
// that lanes of the mask left out, reading shared memory that nobody wrote (it is filled with NaN).
//
// Blocks that wait for each other (a cooperative launch) have a thread of the process each, of which one runs at a
// time: at every place where blocks can tell that they are not alone, a generator of random numbers says who goes on. So
// all orders come up, the most unfair ones too, and the same seed gives the same order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE inline __attribute__((always_inline))
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define CONSTANT static const
#define UNROLL
#define UNROLL_BY_4
#define UNROLL_TIMES(n)
#define INFINITY_F __builtin_inff()
#define NAN_F __builtin_nanf("")

#define KERNEL(name, Params, ...)                                               \
    static void name(const Params& p);                                           \
    static const shim::Registered name##_registered(                             \
        #name, shim::first(__VA_ARGS__), sizeof(Params),                                          \
        [](const void* p) { name(*static_cast<const Params*>(p)); });            \
    static void name(const Params& p)

#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(shim::dynamic_shared())

// Of two words one after the other, the 32 bits from `shift` on.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

struct float2 {
    float x, y;
};

struct int4 {
    int x, y, z, w;
};

struct Dim3 {
    unsigned x, y, z;
};

// Of the running thread; changed whenever another one goes on.
extern thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// Of a kernel's bounds the threads; how many blocks fit a multiprocessor is nothing here.
inline unsigned first(unsigned threads, unsigned = 1) { return threads; }

// A kernel, known by name from before `main`.
struct Registered {
    Registered(const char* name, unsigned threads, size_t params, void (*body)(const void*));
};

void* dynamic_shared();

// Waits for all threads of the block.
void block_barrier();

// Hands `mine` over to the warp and returns what lane `from` handed over, once all lanes of `mask` have.
uint64_t exchange(unsigned mask, uint64_t mine, int from);

// The lanes of `mask` whose `predicate` holds.
unsigned ballot(unsigned mask, bool predicate);

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);

// a * b + c of two halves each, rounded once.
inline unsigned of_two_halves(unsigned a, unsigned b, unsigned c) {
    auto of = [&](unsigned shift) -> unsigned {
        auto half = [&](unsigned word) { return static_cast<double>(half_to_float(static_cast<uint16_t>(word >> shift))); };
        _Float16 result = static_cast<_Float16>(half(a) * half(b) + half(c));
        uint16_t bits;
        std::memcpy(&bits, &result, 2);
        return static_cast<unsigned>(bits) << shift;
    };
    return of(0) | of(16);
}

// Copies that are under way until they are waited for: each in a group of its thread.
void copy_async(void* to, const void* from);
void commit_async();
void wait_async(unsigned later);

// Waits until blocks have counted up to `count` at `at`; counts up, and says what was there before.
void await_count(const unsigned* at, unsigned count);
unsigned count_in(unsigned* at);
inline void count_up(unsigned* at) { count_in(at); }

// A place where another block may go on.
void give_way();

// The product of fragments of halves, added to `sums`: see `multiply_fragments` in `device.cuh`.
void multiply_fragments(float* sums, const unsigned* a, const unsigned* b, bool brain);

// Matrices of halves from where the lanes say: see `load_matrices` in `device.cuh`.
void load_matrices(unsigned* fragments, const void* row, bool transposed);

// ---- What only Hopper GPUs have: see `sm90.cuh`.

// Where in the block's shared memory `at` is, which kernels ask for.
unsigned shared_address(const void* at);

void barrier_init(unsigned long long* barrier, unsigned arrivals);
// Arrives; so many bytes are to come before the phase ends.
void barrier_arrive(unsigned long long* barrier, unsigned bytes);
void barrier_wait(unsigned long long* barrier, unsigned parity);
// Of two copies one is made at once, so that what is still read is written over, and one when its barrier is waited for.
void copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* barrier);
// Products see what was written before the next barrier of any kind.
void fence_async();
void named_barrier(unsigned id, unsigned threads, bool waits);
// Ends the kernel if no thread can have so many registers.
void check_registers(unsigned count);

// A product that a group of four warps starts: sums of 64 rows and `n` columns, left factors in registers or at `left`.
// Sums are not a number until it was waited for, and its factors are read then.
struct Product {
    float* sums;
    const unsigned* registers;
    uint64_t left, right;
    unsigned n;
    bool brain, along_n, add;
};
void group_begin();
void group_multiply(const Product& product);
void group_commit();
void group_wait(unsigned later);

// Ends the kernel if an address is not a multiple of `size`, which a GPU does not read.
void check_aligned(const void* at, size_t size);

template <class T> inline T shuffle(unsigned mask, T mine, int from) {
    static_assert(sizeof(T) <= 8, "registers are exchanged, not structures");
    uint64_t bits = 0;
    std::memcpy(&bits, &mine, sizeof(T));
    bits = exchange(mask, bits, from);
    std::memcpy(&mine, &bits, sizeof(T));
    return mine;
}

inline int lane() { return static_cast<int>(threadIdx.x % 32); }

} // namespace shim

inline void __syncthreads() { shim::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::exchange(mask, 0, shim::lane()); }

template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int step) {
    return shim::shuffle(mask, x, shim::lane() ^ step);
}
template <class T> inline T __shfl_sync(unsigned mask, T x, int from) {
    return shim::shuffle(mask, x, from & 31);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned step) {
    int from = shim::lane() - static_cast<int>(step);
    return shim::shuffle(mask, x, from < 0 ? shim::lane() : from);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, unsigned step) {
    int from = shim::lane() + static_cast<int>(step);
    return shim::shuffle(mask, x, from > 31 ? shim::lane() : from);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) { return shim::ballot(mask, predicate); }

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

// The bytes that the nibbles of `selector` choose of the eight of `a` and `b`.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    }
    return result;
}

// Four products of bytes, added up.
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) {
        sum += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    }
    return sum;
}

namespace shim {
// The same, of bytes of which the first four are unsigned.
inline int dot_unsigned(unsigned a, int b, int sum) {
    for (int i = 0; i < 4; i++) {
        sum += static_cast<uint8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    }
    return sum;
}
} // namespace shim

// Threads of a process run the blocks of a cooperative launch. One runs at a time, and hands over in order, so plain code
// is atomic and everybody sees what was written; but others may go on in between.
inline void __threadfence() { shim::give_way(); }
template <class T> inline T atomicAdd(T* at, T x) {
    shim::give_way();
    T old = *at;
    *at = old + x;
    return old;
}
template <class T> inline T atomicMax(T* at, T x) {
    shim::give_way();
    T old = *at;
    *at = old > x ? old : x;
    return old;
}
template <class T> inline T atomicCAS(T* at, T expected, T x) {
    shim::give_way();
    T old = *at;
    if (old == expected) {
        *at = x;
    }
    return old;
}
template <class T> inline T __ldg(const T* at) { return *at; }
