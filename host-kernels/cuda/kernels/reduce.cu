// SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL, ARGSORT, TOP_K.
#include "device.cuh"

namespace {

// Monotonic integer key of a float: zeros are equal, NaN is last in either order.
DEVICE u32 sort_key(float x, u32 descending) {
    if (x != x) {
        return 0xffffffffu;
    }
    u32 bits = __float_as_uint(x + 0.0f);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return descending ? ~bits : bits;
}

} // namespace

KERNEL(vg_sum_rows, VgReduceParams, 256) {
    for (i64 r = blockIdx.x; r < rows(p.dst); r += gridDim.x) {
        Index at = row_of(p.dst, r);
        const u8* from = address(p.src, at);
        double sum = 0.0; // rows can be long
        for (i64 i = threadIdx.x; i < p.src.ne[0]; i += blockDim.x) {
            sum += load(p.src.type, from + i * p.src.nb[0]);
        }
        sum = block_reduce<Sum>(sum, 0.0);
        if (threadIdx.x == 0) {
            store(p.dst.type, address(p.dst, at), static_cast<float>(sum / p.by));
        }
    }
}

// A warp for each row: inclusive scan of 32 elements at a time, plus the sum of those before.
KERNEL(vg_cumsum, VgReduceParams, 32) {
    i64 n = p.src.ne[0];
    int lane = threadIdx.x;
    for (i64 r = blockIdx.x; r < rows(p.dst); r += gridDim.x) {
        Index at = row_of(p.dst, r);
        const u8* from = address(p.src, at);
        u8* to = address(p.dst, at);
        double before = 0.0;
        for (i64 start = 0; start < n; start += WARP) {
            i64 i = start + lane;
            double sum = i < n ? load(p.src.type, from + i * p.src.nb[0]) : 0.0;
            for (int step = 1; step < WARP; step *= 2) {
                double other = __shfl_up_sync(0xffffffffu, sum, step);
                sum += lane >= step ? other : 0.0;
            }
            if (i < n) {
                store(p.dst.type, to + i * p.dst.nb[0], static_cast<float>(before + sum));
            }
            before += __shfl_sync(0xffffffffu, sum, WARP - 1);
        }
    }
}

// Index of the largest element, the last of several.
KERNEL(vg_argmax, VgReduceParams, 32) {
    for (i64 r = blockIdx.x; r < p.src.ne[1]; r += gridDim.x) {
        const u8* from = address(p.src, Index{{0, r, 0, 0}});
        float largest = -INFINITY_F;
        i64 where = 0;
        for (i64 i = threadIdx.x; i < p.src.ne[0]; i += WARP) {
            float x = load(p.src.type, from + i * p.src.nb[0]);
            if (x >= largest) {
                largest = x;
                where = i;
            }
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, largest, step);
            i64 there = __shfl_xor_sync(0xffffffffu, where, step);
            if (other > largest || (other == largest && there > where)) {
                largest = other;
                where = there;
            }
        }
        if (threadIdx.x == 0) {
            *reinterpret_cast<int*>(p.dst.data + r * p.dst.nb[0]) = static_cast<int>(where);
        }
    }
}

// Bitonic sort of (key, index), in shared memory or scratch memory; a block for each row.
KERNEL(vg_argsort, VgReduceParams, 256) {
    DYNAMIC_SHARED(u64, shared);
    u64* keys = shared;
    if (p.scratch) {
        keys = reinterpret_cast<u64*>(p.scratch) + static_cast<u64>(blockIdx.x) * p.columns;
    }
    u32 n = static_cast<u32>(p.src.ne[0]);
    for (i64 r = blockIdx.x; r < rows(p.dst); r += gridDim.x) {
        Index at = row_of(p.dst, r);
        const u8* from = address(p.src, at);
        u8* to = address(p.dst, at);
        for (u32 i = threadIdx.x; i < p.columns; i += blockDim.x) {
            u64 key = ~0ull;
            if (i < n) {
                key = sort_key(load(p.src.type, from + i * p.src.nb[0]), p.descending);
                key = key << 32 | i;
            }
            keys[i] = key;
        }
        __syncthreads();
        for (u32 size = 2; size <= p.columns; size *= 2) {
            for (u32 step = size / 2; step > 0; step /= 2) {
                for (u32 i = threadIdx.x; i < p.columns / 2; i += blockDim.x) {
                    u32 low = 2 * i - (i & (step - 1)), high = low + step;
                    bool ascending = (low & size) == 0;
                    u64 a = keys[low], b = keys[high];
                    if ((a > b) == ascending) {
                        keys[low] = b;
                        keys[high] = a;
                    }
                }
                __syncthreads();
            }
        }
        for (i64 i = threadIdx.x; i < p.dst.ne[0]; i += blockDim.x) {
            *reinterpret_cast<int*>(to + i * p.dst.nb[0]) =
                static_cast<int>(static_cast<u32>(keys[i]));
        }
        __syncthreads();
    }
}

KERNEL(vg_sum, VgTotalParams, 256) {
    double* parts = reinterpret_cast<double*>(p.scratch);
    double sum = 0.0;
    if (p.finish) {
        for (u32 i = threadIdx.x; i < p.parts; i += blockDim.x) {
            sum += parts[i];
        }
    } else {
        i64 n = elements(p.a);
        for (i64 e = thread_index(); e < n; e += thread_count()) {
            sum += load(p.a.type, address(p.a, index_of(p.a, e)));
        }
    }
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) {
        if (p.finish) {
            store(p.dst.type, reinterpret_cast<u8*>(p.dst.data), static_cast<float>(sum));
        } else {
            parts[blockIdx.x] = sum;
        }
    }
}

KERNEL(vg_count_equal, VgTotalParams, 256) {
    double* parts = reinterpret_cast<double*>(p.scratch);
    double count = 0.0; // exact up to 2^53
    if (p.finish) {
        for (u32 i = threadIdx.x; i < p.parts; i += blockDim.x) {
            count += parts[i];
        }
    } else {
        i64 n = elements(p.a);
        for (i64 e = thread_index(); e < n; e += thread_count()) {
            Index at = index_of(p.a, e);
            int a = *reinterpret_cast<const int*>(address(p.a, at));
            int b = *reinterpret_cast<const int*>(address(p.b, at));
            count += a == b ? 1.0 : 0.0;
        }
    }
    count = block_reduce<Sum>(count, 0.0);
    if (threadIdx.x == 0) {
        if (p.finish) {
            *reinterpret_cast<i64*>(p.dst.data) = static_cast<i64>(count);
        } else {
            parts[blockIdx.x] = count;
        }
    }
}
