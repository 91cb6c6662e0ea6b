// What only Hopper GPUs (sm_90a) have: barriers that count bytes, bulk copies to shared memory, products of matrices that
// a group of four warps starts and that go on by themselves, and registers that one group of warps gives to another.
//
// The shim has all of it, too: copies arrive when they are waited for, products read shared memory when they are
// waited for, and what has not been waited for is NaN.
#pragma once
#include "device.cuh"

// Threads of a group of warps that multiplies together.
constexpr int GROUP = 128;

// Bytes of a row of a matrix in shared memory, as products of groups read it: 64 halves. Eight rows make a unit, at a
// multiple of its size; in row r of a unit, piece i of 16 bytes lies in place i ^ r.
constexpr int MATRIX_ROW = 128, MATRIX_UNIT = 8 * MATRIX_ROW;

#ifdef VGPU_SHIM

DEVICE u32 shared_address(const void* at) { return shim::shared_address(at); }
DEVICE void barrier_init(u64* barrier, u32 arrivals) { shim::barrier_init(barrier, arrivals); }
DEVICE void barriers_are_ready() { shim::fence_async(); }
DEVICE void barrier_arrive(u64* barrier) { shim::barrier_arrive(barrier, 0); }
DEVICE void barrier_expect(u64* barrier, u32 bytes) { shim::barrier_arrive(barrier, bytes); }
DEVICE void barrier_wait(u64* barrier, u32 parity) { shim::barrier_wait(barrier, parity); }
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) { shim::copy_bulk(to, from, bytes, barrier); }
DEVICE void fence_async() { shim::fence_async(); }
DEVICE void named_barrier(int id, int threads) { shim::named_barrier(id, threads, true); }
DEVICE void named_arrive(int id, int threads) { shim::named_barrier(id, threads, false); }
template <int REGISTERS> DEVICE void take_registers() { shim::check_registers(REGISTERS); }
template <int REGISTERS> DEVICE void give_registers() { shim::check_registers(REGISTERS); }
DEVICE void group_begin() { shim::group_begin(); }
DEVICE void group_commit() { shim::group_commit(); }
template <int LATER> DEVICE void group_wait() { shim::group_wait(LATER); }
template <int COUNT> DEVICE void settle(float*) {}
template <int N, bool BRAIN, bool ALONG_N = false> DEVICE void group_multiply(float* sums, const u32* a, u64 b, bool add) {
    shim::group_multiply({sums, a, 0, b, N, BRAIN, ALONG_N, add});
}
template <int N, bool BRAIN, bool ALONG_N = false> DEVICE void group_multiply(float* sums, u64 a, u64 b, bool add) {
    shim::group_multiply({sums, nullptr, a, b, N, BRAIN, ALONG_N, add});
}

#else

DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }

// ---- Barriers in shared memory. One goes from phase to phase: each ends when as many threads have arrived as it was made
// for, and all bytes are there that they have announced.

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// By who has made them, before others use them.
DEVICE void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and announces bytes of bulk copies.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first, then 1, 0 and so on. A new barrier counts as if a phase
// of parity 1 had ended.
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    u32 at = shared_address(barrier), done;
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
// Copies to shared memory; places and bytes are multiples of 16. The barrier's phase has their arrival in it.
DEVICE void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// What this thread has written to shared memory is seen by products of groups that begin after a barrier from here.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of some warps of the block, which has sixteen; 0 is that of the whole block. Who only arrives does not wait.
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- Registers: how many each thread of this group of warps has from now on.

template <int REGISTERS> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- Products of a group of warps: begin, multiply, commit, wait. Between those nobody touches sums or factors.

DEVICE void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all but the `LATER` last commits.
template <int LATER> DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory"); }
// Keeps what the compiler does with sums behind a wait.
template <int COUNT> DEVICE void settle(float* sums) {
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
}

#define VG_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define VG_SUMS_16(i) VG_SUMS_4(i), VG_SUMS_4(i + 4), VG_SUMS_4(i + 8), VG_SUMS_4(i + 12)
#define VG_SUMS_32(i) VG_SUMS_16(i), VG_SUMS_16(i + 16)
#define VG_SUMS_64(i) VG_SUMS_32(i), VG_SUMS_32(i + 32)
#define VG_SUMS_128(i) VG_SUMS_64(i), VG_SUMS_64(i + 64)
#define VG_NUMBERS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VG_NUMBERS_64 VG_NUMBERS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define VG_NUMBERS_128 VG_NUMBERS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Left factors in registers (four numbers), or in shared memory (one), then the right ones, then whether to add.
#define VG_MULTIPLY(SUMS, n, types, left, right, add, order, ...)                                                  \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " add ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types " {" VG_NUMBERS_##SUMS "}, " left ", " right \
                 ", adds, 1, 1, " order ";\n}"                                                                     \
                 : VG_SUMS_##SUMS(0)                                                                              \
                 : __VA_ARGS__, "l"(b), "r"(static_cast<int>(adds)), "n"(ALONG_N))
#define VG_LEFT_REGISTERS(SUMS, n, types, left, right, add, order) \
    VG_MULTIPLY(SUMS, n, types, left, right, add, order, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define VG_LEFT_SHARED(SUMS, n, types, left, right, add, order) \
    VG_MULTIPLY(SUMS, n, types, left, right, add, "0, " order, "l"(a))

// Adds to (or makes) sums of 64 rows and N columns the product of 16 elements, from matrices in shared memory or, of the
// left one, in registers. `ALONG_N`: the right one's rows are not columns of the result but elements of the sum.
//
// Of thread 32w + 4g + t of the group: left factors are rows 16w + g and 8 further, elements 2t and 2t + 1, then the same 8
// further; sums 4j to 4j + 3 are row 16w + g, columns 8j + 2t and 8j + 2t + 1, then row 16w + g + 8.
template <int N, bool BRAIN, bool ALONG_N = false> DEVICE void group_multiply(float* sums, const u32* a, u64 b, bool adds) {
    static_assert(N == 64 || N == 128 || N == 256, "what there are lists for");
    if constexpr (N == 64 && !BRAIN) {
        VG_LEFT_REGISTERS(32, "64", "f16.f16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
    } else if constexpr (N == 64 && BRAIN) {
        VG_LEFT_REGISTERS(32, "64", "bf16.bf16", "{%32, %33, %34, %35}", "%36", "%37", "%38");
    } else if constexpr (N == 128 && !BRAIN) {
        VG_LEFT_REGISTERS(64, "128", "f16.f16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
    } else if constexpr (N == 128 && BRAIN) {
        VG_LEFT_REGISTERS(64, "128", "bf16.bf16", "{%64, %65, %66, %67}", "%68", "%69", "%70");
    } else if constexpr (N == 256 && !BRAIN) {
        VG_LEFT_REGISTERS(128, "256", "f16.f16", "{%128, %129, %130, %131}", "%132", "%133", "%134");
    } else if constexpr (N == 256 && BRAIN) {
        VG_LEFT_REGISTERS(128, "256", "bf16.bf16", "{%128, %129, %130, %131}", "%132", "%133", "%134");
    }
}
template <int N, bool BRAIN, bool ALONG_N = false> DEVICE void group_multiply(float* sums, u64 a, u64 b, bool adds) {
    static_assert(N == 64 || N == 128 || N == 256, "what there are lists for");
    if constexpr (N == 64 && !BRAIN) {
        VG_LEFT_SHARED(32, "64", "f16.f16", "%32", "%33", "%34", "%35");
    } else if constexpr (N == 64 && BRAIN) {
        VG_LEFT_SHARED(32, "64", "bf16.bf16", "%32", "%33", "%34", "%35");
    } else if constexpr (N == 128 && !BRAIN) {
        VG_LEFT_SHARED(64, "128", "f16.f16", "%64", "%65", "%66", "%67");
    } else if constexpr (N == 128 && BRAIN) {
        VG_LEFT_SHARED(64, "128", "bf16.bf16", "%64", "%65", "%66", "%67");
    } else if constexpr (N == 256 && !BRAIN) {
        VG_LEFT_SHARED(128, "256", "f16.f16", "%128", "%129", "%130", "%131");
    } else if constexpr (N == 256 && BRAIN) {
        VG_LEFT_SHARED(128, "256", "bf16.bf16", "%128", "%129", "%130", "%131");
    }
}

#endif

// Where products of groups find a matrix of units of eight rows, each 64 halves wide. From one unit to the next it is
// `units` bytes; of a matrix along N that is wider than 64, from each 64 columns to the next, `panels`. It begins at a
// multiple of MATRIX_UNIT, or 32 bytes further for every 16 elements of the sum (along N: two units further).
DEVICE u64 matrix_at(u32 address, u32 units = MATRIX_UNIT, u32 panels = 16) {
    return static_cast<u64>(address >> 4 & 0x3fff) | static_cast<u64>(panels >> 4) << 16 |
           static_cast<u64>(units >> 4) << 32 | 1ull << 62;
}

// A place in a ring, and the parity of the phase that it is in.
template <int COUNT> struct Ring {
    u32 stage = 0, phase = 0;
    DEVICE void next() {
        if (++stage == COUNT) {
            stage = 0, phase ^= 1;
        }
    }
};
