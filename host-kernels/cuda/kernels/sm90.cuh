// Instructions of sm_90a: mbarrier, cp.async.bulk, wgmma, setmaxnreg, named barriers. The comments
// name the section of the PTX ISA manual.
//
// The shim implements all of them: a copy arrives when it is waited for, wgmma reads shared memory
// when it is waited for, and accumulators are NaN until then.
#pragma once
#include "device.cuh"

// Threads of a warpgroup.
constexpr int WARPGROUP = 128;

// The 128-byte swizzle layout of wgmma operands (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Shared Memory Layout"): a row has 64 f16 elements, eight rows form an aligned atom, and in row r
// the 16-byte unit i is stored at position i ^ r.
constexpr int SWIZZLE_ROW = 128, SWIZZLE_ATOM = 8 * SWIZZLE_ROW;

#ifdef VGPU_SHIM

DEVICE u32 smem_address(const void* at) { return shim::smem_address(at); }
DEVICE void mbarrier_init(u64* barrier, u32 arrivals) { shim::mbarrier_init(barrier, arrivals); }
DEVICE void mbarrier_init_fence() { shim::fence_proxy_async(); }
DEVICE void mbarrier_arrive(u64* barrier) { shim::mbarrier_arrive(barrier, 0); }
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    shim::mbarrier_arrive(barrier, bytes);
}
DEVICE void mbarrier_arrive_copies(u64* barrier) { shim::mbarrier_arrive_copies(barrier); }
DEVICE void mbarrier_wait(u64* barrier, u32 parity) { shim::mbarrier_wait(barrier, parity); }
DEVICE void cp_async_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    shim::cp_async_bulk(to, from, bytes, barrier);
}
DEVICE void fence_proxy_async() { shim::fence_proxy_async(); }
DEVICE void named_barrier(int id, int threads) { shim::named_barrier(id, threads, true); }
DEVICE void named_barrier_arrive(int id, int threads) { shim::named_barrier(id, threads, false); }
template <int REGISTERS> DEVICE void setmaxnreg_inc() { shim::check_setmaxnreg(REGISTERS); }
template <int REGISTERS> DEVICE void setmaxnreg_dec() { shim::check_setmaxnreg(REGISTERS); }
DEVICE void wgmma_fence() { shim::wgmma_fence(); }
DEVICE void wgmma_commit() { shim::wgmma_commit(); }
template <int PENDING> DEVICE void wgmma_wait() { shim::wgmma_wait(PENDING); }
template <int COUNT> DEVICE void accumulator_fence(float*) {}
template <int N, bool BF16, bool MN_MAJOR = false>
DEVICE void wgmma(float* sums, const u32* a, u64 b, bool add) {
    shim::wgmma({sums, a, 0, b, N, BF16, MN_MAJOR, add});
}
template <int N, bool BF16, bool MN_MAJOR = false>
DEVICE void wgmma(float* sums, u64 a, u64 b, bool add) {
    shim::wgmma({sums, nullptr, a, b, N, BF16, MN_MAJOR, add});
}

#else

DEVICE u32 smem_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// ---- mbarrier objects (PTX ISA, "mbarrier"). A phase completes when the expected number of
// threads has arrived and the announced transaction bytes have been copied.

DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// Executed by the initialising thread, before a block barrier.
DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier))
                 : "memory");
}
// Arrives and announces `bytes` of bulk copies.
DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
        "r"(bytes)
        : "memory");
}
// Arrives once all earlier cp.async copies of this thread are complete. The arrival is one of those
// that the barrier was initialised for (`noinc`).
DEVICE void mbarrier_arrive_copies(u64* barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier))
        : "memory");
}
// Waits for the completion of the phase with this parity: 0 for the first, then 1, 0 and so on.
// Parity 1 of a new mbarrier counts as completed.
DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
    u32 at = smem_address(barrier), done;
    do {
        asm volatile("{\n"
                     ".reg .pred ended;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, ended;\n"
                     "}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    } while (!done);
}
// Copies to shared memory (cp.async.bulk). Addresses and size are multiples of 16. The copy
// completes `bytes` on the mbarrier.
DEVICE void cp_async_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(smem_address(barrier))
        : "memory");
}
// Makes this thread's writes to shared memory visible to wgmma and bulk copies that follow the next
// barrier.
DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Named barriers 1 to 15 for some warps of the block (PTX ISA, "bar"); 0 is __syncthreads.
// named_barrier_arrive does not wait.
DEVICE void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- setmaxnreg: registers of each thread of this warpgroup from now on.

template <int REGISTERS> DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma (PTX ISA, "wgmma.mma_async"): fence, multiply, commit, wait. No thread may touch
// accumulators or operand registers between fence and wait.

DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the most recent wgmma groups are in flight.
template <int PENDING> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Prevents the compiler from moving accesses of accumulators before the wait.
template <int COUNT> DEVICE void accumulator_fence(float* sums) {
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
}

#define VG_ACC_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define VG_ACC_16(i) VG_ACC_4(i), VG_ACC_4(i + 4), VG_ACC_4(i + 8), VG_ACC_4(i + 12)
#define VG_ACC_32(i) VG_ACC_16(i), VG_ACC_16(i + 16)
#define VG_ACC_64(i) VG_ACC_32(i), VG_ACC_32(i + 32)
#define VG_ACC_128(i) VG_ACC_64(i), VG_ACC_64(i + 64)
#define VG_OPERANDS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VG_OPERANDS_64 \
    VG_OPERANDS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define VG_OPERANDS_128 \
    VG_OPERANDS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"

// wgmma with A in registers (four operands) or in shared memory (one descriptor), then the B
// descriptor, then the scale-d predicate.
#define VG_WGMMA(SUMS, n, types, left, right, add, order, ...) \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types " {" VG_OPERANDS_##SUMS \
                 "}, " left ", " right ", adds, 1, 1, " order ";\n}" \
                 : VG_ACC_##SUMS(0) \
                 : __VA_ARGS__, "l"(b), "r"(static_cast<int>(adds)), "n"(MN_MAJOR))
#define VG_WGMMA_RS(SUMS, n, types, left, right, add, order) \
    VG_WGMMA(SUMS, n, types, left, right, add, order, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define VG_WGMMA_SS(SUMS, n, types, left, right, add, order) \
    VG_WGMMA(SUMS, n, types, left, right, add, "0, " order, "l"(a))

// wgmma.m64nNk16: accumulators of 64 rows by N columns += A * B (`adds`), or = A * B. B is in
// shared memory, A in registers or in shared memory. MN_MAJOR: B is stored with n contiguous
// instead of k (the transpose flag).
//
// Fragments of thread 32w + 4g + t of the warpgroup: `a` has rows 16w + g and + 8 at k = 2t, 2t +
// 1, then the same at k + 8; sums 4j to 4j + 3 are row 16w + g, columns 8j + 2t and 8j + 2t + 1,
// then row 16w + g + 8.
template <int N, bool BF16, bool MN_MAJOR = false>
DEVICE void wgmma(float* sums, const u32* a, u64 b, bool adds) {
    static_assert(N == 64 || N == 128 || N == 256, "operand lists exist for these widths");
    if constexpr (N == 64 && !BF16) {
        VG_WGMMA_RS(32, "64", "f16.f16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
    } else if constexpr (N == 64 && BF16) {
        VG_WGMMA_RS(32, "64", "bf16.bf16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
    } else if constexpr (N == 128 && !BF16) {
        VG_WGMMA_RS(64, "128", "f16.f16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
    } else if constexpr (N == 128 && BF16) {
        VG_WGMMA_RS(64, "128", "bf16.bf16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
    } else if constexpr (N == 256 && !BF16) {
        VG_WGMMA_RS(128, "256", "f16.f16", "{%128, %129, %130, %131}", "%132", "%133", "%134");
    } else if constexpr (N == 256 && BF16) {
        VG_WGMMA_RS(128, "256", "bf16.bf16", "{%128, %129, %130, %131}", "%132", "%133", "%134");
    }
}
template <int N, bool BF16, bool MN_MAJOR = false>
DEVICE void wgmma(float* sums, u64 a, u64 b, bool adds) {
    static_assert(N == 64 || N == 128 || N == 256, "operand lists exist for these widths");
    if constexpr (N == 64 && !BF16) {
        VG_WGMMA_SS(32, "64", "f16.f16", "%32", "%33", "%34", "%35");
    } else if constexpr (N == 64 && BF16) {
        VG_WGMMA_SS(32, "64", "bf16.bf16", "%32", "%33", "%34", "%35");
    } else if constexpr (N == 128 && !BF16) {
        VG_WGMMA_SS(64, "128", "f16.f16", "%64", "%65", "%66", "%67");
    } else if constexpr (N == 128 && BF16) {
        VG_WGMMA_SS(64, "128", "bf16.bf16", "%64", "%65", "%66", "%67");
    } else if constexpr (N == 256 && !BF16) {
        VG_WGMMA_SS(128, "256", "f16.f16", "%128", "%129", "%130", "%131");
    } else if constexpr (N == 256 && BF16) {
        VG_WGMMA_SS(128, "256", "bf16.bf16", "%128", "%129", "%130", "%131");
    }
}

#endif

// Shared-memory matrix descriptor of a 128-byte swizzled operand (PTX ISA, "Matrix Descriptor
// Format"). `stride_bytes` is the stride dimension byte offset, between atoms of eight rows.
// `leading_bytes` is the leading dimension byte offset, between groups of 64 columns of an MN-major
// matrix. The matrix begins at a multiple of SWIZZLE_ATOM, plus 32 bytes for every 16 k elements
// (MN-major: plus two atoms).
DEVICE u64 smem_descriptor(u32 address, u32 stride_bytes = SWIZZLE_ATOM, u32 leading_bytes = 16) {
    return static_cast<u64>(address >> 4 & 0x3fff) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | 1ull << 62;
}

// Stage of a ring buffer, and the parity of its current phase.
template <int COUNT> struct PipelineState {
    u32 stage = 0, phase = 0;
    DEVICE void next() {
        if (++stage == COUNT) {
            stage = 0, phase ^= 1;
        }
    }
};
