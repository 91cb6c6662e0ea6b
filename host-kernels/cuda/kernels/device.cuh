// Shared device code of all kernels: asynchronous copies, tensor-core instructions, element access,
// reductions, fault reports.
//
// The same source is compiled for GPUs and, with VGPU_SHIM, for the CPU (`host-kernels/shim`),
// where the tests run it. The source includes no CUDA header and uses no vendor type; GPU
// instructions are inline PTX in this file and in `sm90.cuh`. Section names below are those of the
// PTX ISA manual.
#pragma once

#ifdef VGPU_SHIM
#include "shim.h"
#else
#define DEVICE __device__ __forceinline__
// `KERNEL(name, Params, threads[, blocks]) { ... p ... }` defines a kernel with its parameters in
// `p`. The last arguments are those of `__launch_bounds__`: threads per block at most, and resident
// blocks per SM at least. The body begins when all launches before it are complete.
//
// `KERNEL_AHEAD` is the same for a body that calls `grid_dependency_wait` itself, and before that
// reads only what no launch of its graph writes. A block ends only when the launches before it are
// complete, even if its body has nothing to do: the launch behind it waits for this one alone.
#define KERNEL(name, Params, ...) \
    static DEVICE void name##_body(const Params& p); \
    KERNEL_AHEAD(name, Params, __VA_ARGS__) { \
        grid_dependency_wait(); \
        name##_body(p); \
    } \
    static DEVICE void name##_body(const Params& p)
#define KERNEL_AHEAD(name, Params, ...) \
    static DEVICE void name##_ahead(const Params& p); \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) \
        name(const __grid_constant__ Params p) { \
        launch_dependents(); \
        name##_ahead(p); \
        grid_dependency_wait(); \
    } \
    static DEVICE void name##_ahead(const Params& p)
#define DYNAMIC_SHARED(T, name) \
    extern __shared__ __align__(16) unsigned char vg_shared[]; \
    T* name = reinterpret_cast<T*>(vg_shared)
#define CONSTANT static __device__ const
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_4 _Pragma("unroll 4")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_TIMES(n) PRAGMA(unroll(n))
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)
#endif

#include "params.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef VgView View;

// Threads in a warp.
constexpr int WARP = 32;

// ---- f16 and bf16, without a vendor header.

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

#ifdef VGPU_SHIM
DEVICE float to_float(f16 x) { return shim::f16_to_f32(x.bits); }
DEVICE f16 to_f16(float x) { return {shim::f32_to_f16(x)}; }
#else
DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE f16 to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#endif

// Rounds to nearest, ties to even. NaN stays NaN.
DEVICE bf16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return {static_cast<u16>(bits >> 16 | 64)};
    }
    return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// a * b + c, rounded after each of the two operations, as ggml's CPU code is. The compiler makes a
// fused multiply-add of the plain expression.
DEVICE float mul_add_unfused(float a, float b, float c) {
#ifdef VGPU_SHIM
    volatile float product = a * b;
    return product + c;
#else
    return __fadd_rn(__fmul_rn(a, b), c);
#endif
}

// ---- Programmatic dependent launch (PTX: griddepcontrol). The launch behind this one may begin
// once all blocks of this one have begun.

#if defined(VGPU_SHIM)
DEVICE void grid_dependency_wait() { shim::grid_dependency_wait(); }
#elif __CUDA_ARCH__ < 900
DEVICE void launch_dependents() {}
DEVICE void grid_dependency_wait() {}
#else
// Lets the next launch begin. A block does so first of all: the next launch waits for the end of
// this one, not for this call, and begins sooner.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Waits until the launches before this one are complete and their writes visible. A thread that has
// not called it reads only what no launch of the graph writes, and writes no global memory.
DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

// ---- Asynchronous copies to shared memory (PTX: cp.async).

#ifdef VGPU_SHIM
DEVICE void cp_async(void* to, const void* from) { shim::cp_async(to, from); }
template <int OFFSET> DEVICE void cp_async_if(bool wanted, u8* to, const u8* from) {
    if (wanted) {
        shim::cp_async(to + OFFSET, from + OFFSET);
    }
}
DEVICE void cp_async_commit() { shim::cp_async_commit(); }
template <int PENDING> DEVICE void cp_async_wait() { shim::cp_async_wait(PENDING); }
// `at` as a pointer to T. A GPU requires alignment to sizeof(T); the shim checks it.
template <class T> DEVICE const T* aligned(const u8* at) {
    shim::check_aligned(at, sizeof(T));
    return reinterpret_cast<const T*>(at);
}
#else
// Copies 16 bytes. Both addresses are multiples of 16.
DEVICE void cp_async(void* to, const void* from) {
    u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
// cp_async at an offset of BEYOND bytes on both sides, predicated by `wanted` instead of a branch.
template <int OFFSET> DEVICE void cp_async_if(bool wanted, u8* to, const u8* from) {
    u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global [%0 + %3], "
                 "[%1 + %3], 16;\n}" ::"r"(shared),
                 "l"(from), "r"(static_cast<u32>(wanted)), "n"(OFFSET)
                 : "memory");
}
// Closes the current cp.async group of this thread.
DEVICE void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most PENDING of this thread's most recent groups are in flight.
template <int PENDING> DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
template <class T> DEVICE const T* aligned(const u8* at) { return reinterpret_cast<const T*>(at); }
#endif

// ---- Byte permutation (PTX: prmt).

// Byte i of the result is the byte of (a, b) that nibble i of the selector's low half selects.
// Nibbles are 0 to 7.
DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
#ifdef VGPU_SHIM
    return __byte_perm(a, b, selector);
#else
    u32 chosen;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(a), "r"(b), "r"(selector));
    return chosen;
#endif
}

// `prmt` with nibbles 0 to 15: a nibble of 8 to 15 replicates the sign bit of the selected byte,
// which is 0 as all bytes are below 128.
DEVICE u32 prmt_or_0(u32 a, u32 b, u32 selector) {
#ifdef VGPU_SHIM
    u32 chosen = __byte_perm(a, b, selector);
    for (int i = 0; i < 4; i++) {
        chosen &= selector >> (4 * i) & 8 ? ~(255u << 8 * i) : ~0u;
    }
    return chosen;
#else
    return prmt(a, b, selector);
#endif
}

// ---- Values that the compiler must not recompute.

// The functions return their argument through a shuffle, so the compiler cannot see its origin. The
// compiler keeps the value in a register and does not rematerialise it at each use. All lanes of a
// warp must call such a function.
#ifdef VGPU_SHIM
DEVICE u32 opaque(u32 x) { return x; }
template <class T> DEVICE T* opaque_shared(T* at) { return at; }
DEVICE const u8* opaque_global(const u8* at) { return at; }
DEVICE const u8* global_at(u64 address) { return reinterpret_cast<const u8*>(address); }
#else
DEVICE u32 opaque(u32 x) { return __shfl_sync(0xffffffffu, x, threadIdx.x); }
template <class T> DEVICE T* opaque_shared(T* at) {
    return static_cast<T*>(
        __cvta_shared_to_generic(opaque(static_cast<u32>(__cvta_generic_to_shared(at)))));
}
DEVICE const u8* opaque_global(const u8* at) {
    u64 global = __cvta_generic_to_global(at);
    u64 low = opaque(static_cast<u32>(global)), high = opaque(static_cast<u32>(global >> 32));
    return static_cast<const u8*>(__cvta_global_to_generic(high << 32 | low));
}
// The byte at an address of device memory.
DEVICE const u8* global_at(u64 address) {
    return static_cast<const u8*>(__cvta_global_to_generic(address));
}
#endif

// `cp_async_wait` for a count known at run time, up to MAX_PENDING. A larger count waits for more
// than necessary.
constexpr int MAX_PENDING = 8;
DEVICE void cp_async_wait_dynamic(u32 later) {
    switch (later) {
    case 0: cp_async_wait<0>(); break;
    case 1: cp_async_wait<1>(); break;
    case 2: cp_async_wait<2>(); break;
    case 3: cp_async_wait<3>(); break;
    case 4: cp_async_wait<4>(); break;
    case 5: cp_async_wait<5>(); break;
    case 6: cp_async_wait<6>(); break;
    case 7: cp_async_wait<7>(); break;
    default: cp_async_wait<MAX_PENDING>();
    }
}

// L2 cache line size in bytes, and a prefetch of the line at `at`.
constexpr int L2_LINE = 128;
#ifdef VGPU_SHIM
DEVICE void prefetch_l2(const u8* at) {
    shim::check_aligned(at, 1), (void)*static_cast<const volatile u8*>(at);
}
#else
DEVICE void prefetch_l2(const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
#endif

// ---- Synchronisation between the resident blocks of a cooperative launch.

#ifdef VGPU_SHIM
DEVICE void wait_counter(const u32* at, u32 count) { shim::wait_counter(at, count); }
DEVICE void signal_counter(u32* at) { shim::signal_counter(at); }
DEVICE u32 signal_counter_fetch(u32* at) { return shim::signal_counter_fetch(at); }
#else
// Polls before a waiting block traps: tens of seconds.
constexpr u32 MAX_POLLS = 1u << 26;

// Waits until the counter at `at` is at least `count`. The acquire makes the writes before each
// matching release visible to this thread, and behind a block barrier to the whole block.
DEVICE void wait_counter(const u32* at, u32 count) {
    for (u32 polls = 0; polls < MAX_POLLS; polls++) {
        u32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
        if (now >= count) {
            return;
        }
    }
    asm volatile("trap;");
}

// Increments the counter. One thread calls it for its block behind a block barrier, so the release
// covers the writes of the whole block.
DEVICE void signal_counter(u32* at) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

// `signal_counter` that returns the previous value.
DEVICE u32 signal_counter_fetch(u32* at) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(at)
                 : "memory");
    return before;
}
#endif

// ---- Tensor cores (PTX: mma.sync, ldmatrix).

// mma.sync.m16n8k16: sums += A (16x16) * B (16x8), f16 or bf16 with f32 accumulators. Fragments of
// a lane (PTX ISA, "Matrix fragments for mma.m16n8k16"), with g = lane / 4 and t = lane % 4: `a`
// has rows g and g + 8 at k = 2t, 2t + 1, then the same at k + 8; `b` has column g at k = 2t, 2t +
// 1, then at k + 8; `sums` has row g, columns 2t and 2t + 1, then row g + 8.
template <bool BF16> DEVICE void mma_m16n8k16(float* sums, const u32* a, const u32* b) {
#ifdef VGPU_SHIM
    shim::mma_m16n8k16(sums, a, b, BF16);
#else
    if (BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, "
                     "%5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, "
                     "%6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// ldmatrix.x4: four 8x8 matrices of 16-bit elements from shared memory. Lane 8i + j passes the
// address of row j of matrix i, a multiple of 16. Lane 4r + t receives in fragments[i] elements 2t
// and 2t + 1 of row r of matrix i, or with TRANSPOSED of column r.
template <bool TRANSPOSED> DEVICE void ldmatrix_x4(u32* fragments, const void* row) {
#ifdef VGPU_SHIM
    shim::ldmatrix_x4(fragments, row, TRANSPOSED);
#else
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]),
                       "=r"(fragments[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]),
                       "=r"(fragments[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}

// Packs two floats as f16x2 or bf16x2. The first is in the low bits.
template <bool BF16> DEVICE u32 pack_half2(float a, float b) {
#ifdef VGPU_SHIM
    return BF16 ? to_bf16(a).bits | static_cast<u32>(to_bf16(b).bits) << 16
                : to_f16(a).bits | static_cast<u32>(to_f16(b).bits) << 16;
#else
    u32 both;
    if (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
    }
    return both;
#endif
}

// Splits two floats into two bf16 terms each: `first` is the rounded value, `rest` the rounded
// remainder. The relative error of the sum is 2^-16. Infinities and NaN become NaN.
DEVICE void split_bf16(float x, float y, u32& first, u32& rest) {
    first = pack_half2<true>(x, y);
    rest = pack_half2<true>(x - __uint_as_float(first << 16),
                            y - __uint_as_float(first & 0xffff0000u));
}

// A power of two close to `largest`: values up to `largest`, divided by it, are below 2. Both it
// and its inverse are normal f32 numbers.
DEVICE float pow2_scale(float largest) {
    int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    return __uint_as_float(static_cast<u32>(exponent) << 23);
}

// 2^x with the approximation of `ex2.approx` (PTX ISA: maximum relative error 2^-22).
DEVICE float fast_exp2(float x) {
#ifdef VGPU_SHIM
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// ---- Elements in memory.

DEVICE float load(u32 type, const u8* at) {
    switch (type) {
    case VG_F32: return *reinterpret_cast<const float*>(at);
    case VG_F16: return to_float(*reinterpret_cast<const f16*>(at));
    case VG_BF16: return to_float(*reinterpret_cast<const bf16*>(at));
    case VG_I8: return static_cast<float>(*reinterpret_cast<const signed char*>(at));
    case VG_I16: return static_cast<float>(*reinterpret_cast<const short*>(at));
    case VG_I32: return static_cast<float>(*reinterpret_cast<const int*>(at));
    default: return 0.0f; // the host rejects other types
    }
}

DEVICE void store(u32 type, u8* at, float x) {
    switch (type) {
    case VG_F32: *reinterpret_cast<float*>(at) = x; break;
    case VG_F16: *reinterpret_cast<f16*>(at) = to_f16(x); break;
    case VG_BF16: *reinterpret_cast<bf16*>(at) = to_bf16(x); break;
    case VG_I32: *reinterpret_cast<int*>(at) = static_cast<int>(x); break;
    default: break;
    }
}

// ---- Indices.

struct Index {
    i64 i[4];
};

DEVICE i64 elements(const View& v) { return v.ne[0] * v.ne[1] * v.ne[2] * v.ne[3]; }
DEVICE i64 rows(const View& v) { return v.ne[1] * v.ne[2] * v.ne[3]; }

// Quotient and remainder of a >= 0 and n > 0.
struct Division {
    i64 whole, rest;
};
DEVICE Division divide(i64 a, i64 n) {
    // A 64-bit division takes a shorter path where both operands fit 32 bits. The remainder needs
    // no second division.
    i64 whole = static_cast<i64>(static_cast<u64>(a) / static_cast<u64>(n));
    return {whole, a - whole * n};
}

// The indices of element `e` in row-major order (dimension 0 fastest).
DEVICE Index index_of(const View& v, i64 e) {
    Index at = {{e, 0, 0, 0}};
    if (e < v.ne[0]) { // the first row needs no division
        return at;
    }
    if (elements(v) <= 0x7fffffff) {
        u32 rest = static_cast<u32>(e);
        for (int d = 0; d < 3; d++) {
            u32 n = static_cast<u32>(v.ne[d]);
            u32 whole = rest / n;
            at.i[d] = rest - whole * n;
            rest = whole;
        }
        at.i[3] = rest;
    } else {
        for (int d = 0; d < 3; d++) {
            Division by = divide(e, v.ne[d]);
            at.i[d] = by.rest;
            e = by.whole;
        }
        at.i[3] = e;
    }
    return at;
}

// The indices of row `r`; index 0 is 0.
DEVICE Index row_of(const View& v, i64 r) {
    Index at = {{0, r, 0, 0}};
    if (v.ne[2] * v.ne[3] != 1) { // matrices need no division
        Division of_matrix = divide(r, v.ne[1]), of_cube = divide(of_matrix.whole, v.ne[2]);
        at.i[1] = of_matrix.rest, at.i[2] = of_cube.rest, at.i[3] = of_cube.whole;
    }
    return at;
}

// Index among `few` matrices, each of which is broadcast over all / few neighbours.
DEVICE i64 shared_index(i64 i, i64 all, i64 few) {
    return few == 1 ? 0 : few == all ? i : divide(i, divide(all, few).whole).whole;
}

DEVICE u8* address(const View& v, const Index& at) {
    return reinterpret_cast<u8*>(v.data) + at.i[0] * v.nb[0] + at.i[1] * v.nb[1] +
           at.i[2] * v.nb[2] + at.i[3] * v.nb[3];
}

// Index `i` of a dimension of length `n` that is broadcast (repeated).
DEVICE i64 repeated(i64 i, i64 n) { return i < n ? i : n == 1 ? 0 : divide(i, n).rest; }

// The element of `v`, broadcast (repeated), that belongs to index `at`.
DEVICE u8* repeated(const View& v, Index at) {
    for (int d = 0; d < 4; d++) {
        at.i[d] = repeated(at.i[d], v.ne[d]);
    }
    return address(v, at);
}

// Index of a block and dimensions of its grid: of the launch, or of a stage of the megakernel.
struct BlockIndex {
    u32 x, y, z, nx, ny, nz;
};

DEVICE BlockIndex this_block() {
    return {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z};
}

DEVICE i64 thread_index(const BlockIndex& b) {
    return static_cast<i64>(b.x) * blockDim.x + threadIdx.x;
}
DEVICE i64 thread_count(const BlockIndex& b) { return static_cast<i64>(b.nx) * blockDim.x; }
DEVICE i64 thread_index() { return thread_index(this_block()); }
DEVICE i64 thread_count() { return thread_count(this_block()); }

// ---- Reductions. All threads of the warp (or block) take part and receive the result.

struct Sum {
    template <class T> static DEVICE T of(T a, T b) { return a + b; }
};
struct Max {
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
};
struct MaxOrNan {
    static DEVICE float of(float a, float b) { return a > b || a != a ? a : b; }
};

template <class R, class T> DEVICE T warp_reduce(T x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = R::of(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

// `identity` is the identity of R. Blocks have whole warps, at most 32.
template <class R, class T> DEVICE T block_reduce(T x, T identity) {
    __shared__ T parts[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_reduce<R>(x);
    if (warps == 1) {
        return x;
    }
    __syncthreads(); // a previous call may still read `parts`
    if (lane == 0) {
        parts[warp] = x;
    }
    __syncthreads();
    return warp_reduce<R>(lane < warps ? parts[lane] : identity);
}

// The power-of-two scale of a row of `n` elements `x(i)` that lets no element overflow f16. All
// threads of the block call it.
template <class X> DEVICE float row_scale(i64 n, const X& x) {
    float largest = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        largest = fmaxf(largest, fabsf(x(i)));
    }
    return pow2_scale(block_reduce<Max>(largest, 0.0f));
}

// ---- Faults: indices in tensor data that are out of bounds.

// Whether 0 <= index < count. Reports a fault to the host if not.
DEVICE bool check_index(const VgFaultSite& site, i64 index, i64 count) {
    if (index >= 0 && index < count) {
        return true;
    }
    VgFault* fault = reinterpret_cast<VgFault*>(site.fault);
    if (atomicCAS(&fault->taken, 0u, 1u) == 0u) {
        fault->node = site.node;
        fault->index = index;
        fault->count = count;
    }
    return false;
}

// ---- ALiBi.

// Slope that the mask is multiplied with for a head (ALiBi, as in ggml's soft_max). `heads_log2` is
// the largest power of two that is at most the number of heads.
DEVICE float alibi_slope(float max_bias, u32 heads_log2, u32 head) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    float heads = static_cast<float>(heads_log2);
    if (head < heads_log2) {
        return powf(exp2f(-max_bias / heads), static_cast<float>(head + 1));
    }
    return powf(exp2f(-max_bias / 2.0f / heads), static_cast<float>(2 * (head - heads_log2) + 1));
}
