// The part of CUDA C++ that the kernels use, on the CPU. `device.cuh` includes this file when
// VGPU_SHIM is defined.
//
// The threads of a block are fibers of one host thread. A fiber runs until it waits: at a block
// barrier, or in a warp shuffle. Blocks run one after the other. Launches are therefore
// deterministic, and errors of a kernel are caught: a barrier that some threads never reach, a
// shuffle with a wrong lane mask, reads of uninitialised shared memory (it is filled with NaN).
//
// The blocks of a cooperative launch, which wait for each other, have a host thread each. One of
// them runs at a time. At every point where blocks can observe each other, a seeded random
// generator selects the block that runs next. Many interleavings are covered, the most unfair ones
// included, and a seed reproduces its interleaving.
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

#define KERNEL(name, Params, ...) \
    static void name##_body(const Params& p); \
    KERNEL_AHEAD(name, Params, __VA_ARGS__) { \
        shim::grid_dependency_wait(); \
        name##_body(p); \
    } \
    static void name##_body(const Params& p)
#define KERNEL_AHEAD(name, Params, ...) \
    static void name(const Params& p); \
    static const shim::Registered name##_registered( \
        #name, shim::first(__VA_ARGS__), sizeof(Params), \
        [](const void* p) { \
            name(*static_cast<const Params*>(p)); \
            shim::grid_dependency_wait(); \
        }); \
    static void name(const Params& p)

#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(shim::dynamic_shared())

// 32 bits of the 64-bit value high:low from bit `shift` on (`__funnelshift_r`).
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

// Indices of the running fiber, set at each switch.
extern thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// The threads per block of the launch bounds; the number of resident blocks does not matter here.
inline unsigned first(unsigned threads, unsigned = 1) { return threads; }

// Registers a kernel by name before `main`.
struct Registered {
    Registered(const char* name, unsigned threads, size_t params, void (*body)(const void*));
};

void* dynamic_shared();

// `__syncthreads`.
void block_barrier();

// A warp shuffle: publishes `mine` and returns the value of lane `from`, once all lanes of `mask`
// have arrived.
uint64_t exchange(unsigned mask, uint64_t mine, int from);

// `__ballot_sync`.
unsigned ballot(unsigned mask, bool predicate);

float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float x);

// a * b + c of two f16 each, rounded once.
inline unsigned hfma2(unsigned a, unsigned b, unsigned c) {
    auto of = [&](unsigned shift) -> unsigned {
        auto half = [&](unsigned word) {
            return static_cast<double>(f16_to_f32(static_cast<uint16_t>(word >> shift)));
        };
        _Float16 result = static_cast<_Float16>(half(a) * half(b) + half(c));
        uint16_t bits;
        std::memcpy(&bits, &result, 2);
        return static_cast<unsigned>(bits) << shift;
    };
    return of(0) | of(16);
}

// cp.async: copies take effect when their group is waited for.
void cp_async(void* to, const void* from);
void cp_async_commit();
void cp_async_wait(unsigned later);

// Counters between the blocks of a cooperative launch: wait for a value; increment and return the
// previous value.
void wait_counter(const unsigned* at, unsigned count);
unsigned signal_counter_fetch(unsigned* at);
inline void signal_counter(unsigned* at) { signal_counter_fetch(at); }

// Waits for the launches before this one: see `vgpu_shim_set_stale`.
void grid_dependency_wait();

// A point at which another block may be scheduled.
void maybe_switch_block();

// mma.m16n8k16: see `device.cuh`.
void mma_m16n8k16(float* sums, const unsigned* a, const unsigned* b, bool bf16);

// ldmatrix.x4: see `device.cuh`.
void ldmatrix_x4(unsigned* fragments, const void* row, bool transposed);

// ---- Instructions of sm_90a: see `sm90.cuh`.

// Address of `at` in the shared window, for instructions that take one. The window begins at 16.
unsigned smem_address(const void* at);

void mbarrier_init(unsigned long long* barrier, unsigned arrivals);
// Arrives and announces `bytes` of bulk copies (expect_tx).
void mbarrier_arrive(unsigned long long* barrier, unsigned bytes);
void mbarrier_wait(unsigned long long* barrier, unsigned parity);
// cp.async.mbarrier.arrive.noinc: arrives once all earlier cp.async copies of this thread are
// complete. Every other copy is executed at once; the others when their mbarrier is waited for.
void mbarrier_arrive_copies(unsigned long long* barrier);
// cp.async.bulk. Every other copy is executed at once, so that data still in use is overwritten;
// the others when their mbarrier is waited for.
void cp_async_bulk(void* to, const void* from, unsigned bytes, unsigned long long* barrier);
// fence.proxy.async: wgmma sees earlier writes after the next barrier.
void fence_proxy_async();
void named_barrier(unsigned id, unsigned threads, bool waits);
// Fails the block if setmaxnreg does not permit `count`.
void check_setmaxnreg(unsigned count);

// A wgmma instruction: 64 rows and `n` columns, A in registers or at descriptor `left`.
// Accumulators are NaN until it was waited for, and operands are read then.
struct WgmmaOp {
    float* sums;
    const unsigned* registers;
    uint64_t left, right;
    unsigned n;
    bool bf16, mn_major, add;
};
void wgmma_fence();
void wgmma(const WgmmaOp& product);
void wgmma_commit();
void wgmma_wait(unsigned later);

// Fails the block if an address is not a multiple of `size`.
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
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
    return shim::ballot(mask, predicate);
}

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

// `__byte_perm` for selector nibbles 0 to 7.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    }
    return result;
}

// `__dp4a`.
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) {
        sum += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    }
    return sum;
}

namespace shim {
// dp4a with unsigned bytes in the first operand.
inline int dp4a_u8_s8(unsigned a, int b, int sum) {
    for (int i = 0; i < 4; i++) {
        sum += static_cast<uint8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    }
    return sum;
}
} // namespace shim

// Atomics. One block runs at a time and hands over under a lock, so plain code is atomic and
// sequentially consistent; other blocks may be scheduled in between.
inline void __threadfence() { shim::maybe_switch_block(); }
template <class T> inline T atomicAdd(T* at, T x) {
    shim::maybe_switch_block();
    T old = *at;
    *at = old + x;
    return old;
}
template <class T> inline T atomicMax(T* at, T x) {
    shim::maybe_switch_block();
    T old = *at;
    *at = old > x ? old : x;
    return old;
}
template <class T> inline T atomicCAS(T* at, T expected, T x) {
    shim::maybe_switch_block();
    T old = *at;
    if (old == expected) {
        *at = x;
    }
    return old;
}
template <class T> inline T __ldg(const T* at) { return *at; }
