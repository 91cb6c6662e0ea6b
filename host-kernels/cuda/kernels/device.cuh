// What every kernel is written in: addresses, element types, reductions, faults.
//
// The same source is compiled for GPUs and, with VGPU_SHIM, for the CPU (see `../shim`), where the tests run
// it. So it has no includes, names no vendor type, and reaches what only a GPU has through this file.
#pragma once

#ifdef VGPU_SHIM
#include "shim.h"
#else
#define DEVICE __device__ __forceinline__
// `KERNEL(name, Params, threads) { ... p ... }`: a kernel with its parameters in `p`, in blocks of at most
// `threads`. So many blocks as a fourth argument says are to fit a multiprocessor.
#define KERNEL(name, Params, ...) \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)
#define DYNAMIC_SHARED(T, name)                              \
    extern __shared__ __align__(16) unsigned char vg_shared[]; \
    T* name = reinterpret_cast<T*>(vg_shared)
#define CONSTANT static __device__ const
#define UNROLL _Pragma("unroll")
#define UNROLL_BY_4 _Pragma("unroll 4")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_TIMES(n) PRAGMA(unroll (n))
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

// Threads of a warp.
constexpr int WARP = 32;

// ---- Halves, without a vendor header.

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

#ifdef VGPU_SHIM
DEVICE float to_float(f16 x) { return shim::half_to_float(x.bits); }
DEVICE f16 to_f16(float x) { return {shim::float_to_half(x)}; }
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

// To the nearest, ties to even; NaN stays NaN.
DEVICE bf16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return {static_cast<u16>(bits >> 16 | 64)};
    }
    return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// ---- Copies to shared memory that go on by themselves.

#ifdef VGPU_SHIM
DEVICE void copy_async(void* to, const void* from) { shim::copy_async(to, from); }
template <int BEYOND> DEVICE void copy_async_if(bool wanted, u8* to, const u8* from) {
    if (wanted) {
        shim::copy_async(to + BEYOND, from + BEYOND);
    }
}
DEVICE void commit_async() { shim::commit_async(); }
template <int LATER> DEVICE void wait_async() { shim::wait_async(LATER); }
// `at` as what lies there, which a GPU wants at a multiple of its size.
template <class T> DEVICE const T* aligned(const u8* at) {
    shim::check_aligned(at, sizeof(T));
    return reinterpret_cast<const T*>(at);
}
#else
// 16 bytes, on either side at a multiple of 16.
DEVICE void copy_async(void* to, const void* from) {
    u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
// The same so many bytes on, or nothing: without a branch.
template <int BEYOND> DEVICE void copy_async_if(bool wanted, u8* to, const u8* from) {
    u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global [%0 + %3], [%1 + %3], 16;\n}" ::"r"(shared),
                 "l"(from), "r"(static_cast<u32>(wanted)), "n"(BEYOND)
                 : "memory");
}
// What was begun since the last time is a group.
DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of this thread but the `LATER` last ones.
template <int LATER> DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }
template <class T> DEVICE const T* aligned(const u8* at) { return reinterpret_cast<const T*>(at); }
#endif

// ---- Bytes.

// The bytes of `a` and `b` that nibbles of the selector's low half choose, which are 0 to 7.
DEVICE u32 choose_bytes(u32 a, u32 b, u32 selector) {
#ifdef VGPU_SHIM
    return __byte_perm(a, b, selector);
#else
    u32 chosen;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(a), "r"(b), "r"(selector));
    return chosen;
#endif
}

// The same, and 0 where a nibble is 8 to 15. Bytes are below 128.
DEVICE u32 choose_bytes_or_0(u32 a, u32 b, u32 selector) {
#ifdef VGPU_SHIM
    u32 chosen = __byte_perm(a, b, selector);
    for (int i = 0; i < 4; i++) {
        chosen &= selector >> (4 * i) & 8 ? ~(255u << 8 * i) : ~0u;
    }
    return chosen;
#else
    return choose_bytes(a, b, selector); // eight times the highest bit of the byte
#endif
}

// ---- What is calculated once.

// The same values, of which the compiler does not know where they come from: it keeps them, and does not calculate them again
// wherever they are needed. All lanes of a warp have to ask.
#ifdef VGPU_SHIM
DEVICE u32 kept(u32 x) { return x; }
template <class T> DEVICE T* kept_shared(T* at) { return at; }
DEVICE const u8* kept_global(const u8* at) { return at; }
#else
DEVICE u32 kept(u32 x) { return __shfl_sync(0xffffffffu, x, threadIdx.x); }
template <class T> DEVICE T* kept_shared(T* at) {
    return static_cast<T*>(__cvta_shared_to_generic(kept(static_cast<u32>(__cvta_generic_to_shared(at)))));
}
DEVICE const u8* kept_global(const u8* at) {
    u64 place = __cvta_generic_to_global(at);
    u64 low = kept(static_cast<u32>(place)), high = kept(static_cast<u32>(place >> 32));
    return static_cast<const u8*>(__cvta_global_to_generic(high << 32 | low));
}
#endif

// Waits for all groups of this thread but at least the `later` last ones, of up to so many.
constexpr int MOST_LATER = 8;
DEVICE void wait_async_but(u32 later) {
    switch (later) {
    case 0: wait_async<0>(); break;
    case 1: wait_async<1>(); break;
    case 2: wait_async<2>(); break;
    case 3: wait_async<3>(); break;
    case 4: wait_async<4>(); break;
    case 5: wait_async<5>(); break;
    case 6: wait_async<6>(); break;
    case 7: wait_async<7>(); break;
    default: wait_async<MOST_LATER>();
    }
}

// Bytes of a line of the L2 cache, and the wish to have the line of `at` there.
constexpr int LINE = 128;
#ifdef VGPU_SHIM
DEVICE void prefetch(const u8* at) { shim::check_aligned(at, 1), (void)*static_cast<const volatile u8*>(at); }
#else
DEVICE void prefetch(const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
#endif

// ---- Blocks that wait for each other, all of which are running.

#ifdef VGPU_SHIM
DEVICE void await_count(const u32* at, u32 count) { shim::await_count(at, count); }
DEVICE void count_up(u32* at) { shim::count_up(at); }
DEVICE u32 count_in(u32* at) { return shim::count_in(at); }
#else
// So many times a block looks before it takes the others for dead: tens of seconds.
constexpr u32 MOST_LOOKS = 1u << 26;

// Waits until `count` blocks have counted up at `at`. What they wrote before, and those they waited for, is there for
// this thread; and behind a barrier for all of the block.
DEVICE void await_count(const u32* at, u32 count) {
    for (u32 looks = 0; looks < MOST_LOOKS; looks++) {
        u32 now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
        if (now >= count) {
            return;
        }
    }
    asm volatile("trap;");
}

// One thread says so for its block, behind a barrier: what the block has written is there for who waits.
DEVICE void count_up(u32* at) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }

// The same, and how many came before.
DEVICE u32 count_in(u32* at) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}
#endif

// ---- Tensor cores.

// Adds the product of 16 rows by 16 and 16 by 8 columns of halves to the lanes' sums. Of the lanes, with g = lane / 4 and
// t = lane % 4: a are rows g and g + 8, elements 2t and 2t + 1, then the same 8 further; b is column g, elements 2t and
// 2t + 1, then 8 further; sums are row g, columns 2t and 2t + 1, then row g + 8.
template <bool BRAIN> DEVICE void multiply_fragments(float* sums, const u32* a, const u32* b) {
#ifdef VGPU_SHIM
    shim::multiply_fragments(sums, a, b, BRAIN);
#else
    if (BRAIN) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// Four matrices of 8 by 8 halves from shared memory. Lane 8i + j says where row j of matrix i is, at a multiple of 16
// bytes; of matrix i, lane 4r + t gets elements 2t and 2t + 1 of row r in fragments[i], or, `TRANSPOSED`, of column r.
template <bool TRANSPOSED> DEVICE void load_matrices(u32* fragments, const void* row) {
#ifdef VGPU_SHIM
    shim::load_matrices(fragments, row, TRANSPOSED);
#else
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}

// Two numbers as halves (`BRAIN`: as bfloat16), the first in the low bits.
template <bool BRAIN> DEVICE u32 two_halves(float a, float b) {
#ifdef VGPU_SHIM
    return BRAIN ? to_bf16(a).bits | static_cast<u32>(to_bf16(b).bits) << 16
                 : to_f16(a).bits | static_cast<u32>(to_f16(b).bits) << 16;
#else
    u32 both;
    if (BRAIN) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
    }
    return both;
#endif
}

// Two numbers as pairs of bfloat16: the first of both, and what it leaves of both. Together they are off by 2^-16; what is no
// number, or has no end, becomes no number.
DEVICE void split(float x, float y, u32& first, u32& rest) {
    first = two_halves<true>(x, y);
    rest = two_halves<true>(x - __uint_as_float(first << 16), y - __uint_as_float(first & 0xffff0000u));
}

// A power of two that numbers up to `largest` divided by are about 1. It and one over it are normal numbers.
DEVICE float factor_of(float largest) {
    int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    return __uint_as_float(static_cast<u32>(exponent) << 23);
}

// 2 to the power of x, off by some units of the last place: what soft-max takes.
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
    default: return 0.0f; // the host lets no other type through
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

// The indices of element `e`, counted with dimension 0 fastest.
DEVICE Index index_of(const View& v, i64 e) {
    Index at;
    // 64-bit divisions cost four times as much, and few tensors need them.
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
            at.i[d] = e % v.ne[d];
            e /= v.ne[d];
        }
        at.i[3] = e;
    }
    return at;
}

// The indices of row `r`; index 0 is 0.
DEVICE Index row_of(const View& v, i64 r) {
    Index at;
    at.i[0] = 0;
    at.i[1] = r % v.ne[1];
    r /= v.ne[1];
    at.i[2] = r % v.ne[2];
    at.i[3] = r / v.ne[2];
    return at;
}

DEVICE u8* address(const View& v, const Index& at) {
    return reinterpret_cast<u8*>(v.data) + at.i[0] * v.nb[0] + at.i[1] * v.nb[1] + at.i[2] * v.nb[2] +
           at.i[3] * v.nb[3];
}

// The place in `v`, repeated as often as needed, that belongs to `at`.
DEVICE u8* repeated(const View& v, Index at) {
    for (int d = 0; d < 4; d++) {
        if (at.i[d] >= v.ne[d]) {
            at.i[d] %= v.ne[d];
        }
    }
    return address(v, at);
}

// Which of how many blocks does the work: one of a launch, or one of those that a block of a step stands for.
struct Blocks {
    u32 x, y, z, nx, ny, nz;
};

DEVICE Blocks this_block() { return {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y, gridDim.z}; }

DEVICE i64 thread_index(const Blocks& b) { return static_cast<i64>(b.x) * blockDim.x + threadIdx.x; }
DEVICE i64 thread_count(const Blocks& b) { return static_cast<i64>(b.nx) * blockDim.x; }
DEVICE i64 thread_index() { return thread_index(this_block()); }
DEVICE i64 thread_count() { return thread_count(this_block()); }

// ---- Reductions. All threads of the warp, or of the block, take part; all get the result.

struct Sum {
    template <class T> static DEVICE T of(T a, T b) { return a + b; }
};
struct Largest {
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
};
struct LargestOrNan {
    static DEVICE float of(float a, float b) { return a > b || a != a ? a : b; }
};

template <class R, class T> DEVICE T warp_reduce(T x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = R::of(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

// `identity` leaves values as they are. Blocks have whole warps, at most 32.
template <class R, class T> DEVICE T block_reduce(T x, T identity) {
    __shared__ T parts[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_reduce<R>(x);
    if (warps == 1) {
        return x;
    }
    __syncthreads(); // `parts` may still be read from the time before
    if (lane == 0) {
        parts[warp] = x;
    }
    __syncthreads();
    return warp_reduce<R>(lane < warps ? parts[lane] : identity);
}

// What a row of `n` elements `x(i)` is to be divided by so that none overflows as a half, by all threads of a block.
template <class X> DEVICE float factor_of_row(i64 n, const X& x) {
    float largest = 0.0f;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        largest = fmaxf(largest, fabsf(x(i)));
    }
    return factor_of(block_reduce<Largest>(largest, 0.0f));
}

// ---- Faults.

// Whether `index` is one of `count`; says so to the host if it is not.
DEVICE bool check_index(const VgFaultSite& place, i64 index, i64 count) {
    if (index >= 0 && index < count) {
        return true;
    }
    VgFault* fault = reinterpret_cast<VgFault*>(place.fault);
    if (atomicCAS(&fault->taken, 0u, 1u) == 0u) {
        fault->node = place.node;
        fault->index = index;
        fault->count = count;
    }
    return false;
}

// ---- ALiBi.

// By how much the mask counts for a head; `heads_log2` is the largest power of two of heads.
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
