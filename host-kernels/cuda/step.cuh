// Many launches as one: blocks that are all resident walk through stages, of which each does what a launch would do.
//
// A stage's blocks are shared out among those of the step, and so are the pairs of rows that products have, to its warps.
// What a stage needs of others it waits for: each block that has done its part of a stage counts up in global memory, and
// whoever needs the result waits until as many have as there are. Waits point backwards only, and all blocks are
// resident, so somebody can always go on.
//
// Weights are read by nobody's leave: nothing in a step writes them. Each warp knows which rows it will multiply, and
// fetches them in order, across the ends of stages, as far ahead as its ring in shared memory has room. While a block
// waits for a norm or for attention, the next product's weights arrive. Where it depends on results which rows those are
// (experts) the stage says from where on they may be fetched.
//
// What other blocks write within the step is read by plain loads, never through the read-only path: addresses come from
// memory, with no `__restrict__` and no `__ldg`, so that the compiler has no reason to take it. The order of memory: a
// block's writes come before its barrier, that before the release with which its first thread counts up (`count_up`); the
// acquire that sees the count (`await_count`) comes before the barrier of the block that waits, and that before its reads.
// Barriers order a block's threads, release and acquire at the scope of the device order those two threads, and order
// of memory is transitive in PTX; what is released is all that happened before, so that a chain of waits is as
// good as waiting for each. Counts of a stage by several blocks are one release sequence: they are all read-modify-writes.
// `cp.async` reads past the L1 cache, as an access of the thread that asks for it, which is behind that barrier.
#pragma once
#include "attend.cuh"
#include "fused.cuh"
#include "map.cuh"
#include "rope.cuh"
#include "rounding.cuh"
#include "rows.cuh"
#include "vector.cuh"

namespace {

static_assert(sizeof(VgStage) + sizeof(VgVectorParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) + sizeof(VgAttendParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) + sizeof(VgRopeRowsParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) % 16 == 0 && VG_STAGE_BYTES % 16 == 0, "stages are copied in 16 bytes");
static_assert(VG_STAGE_BYTES / 16 <= VECTOR_WARPS * WARP, "each thread copies 16 bytes of a stage");

// The weights of a warp, from where they lie to its ring.
struct Flow {
    const u8* table;
    u8* ring;
    u32 bytes, stages;
    // What is fetched next: of which stage, which of the warp's pairs, which piece of it.
    const VgVectorParams* p;
    u32 stage, from, first_unit, unit, units, pairs, slots, next;
    const u8* rows[VECTOR_ROWS]; // of the pair, if that is known yet
    bool is_known;
    int piece, pieces, piece_bytes, place_bytes;
    i64 row_bytes;
    // Where the next piece goes, and where the oldest one is; bytes between them, and pieces.
    u32 head, tail, used, count;

    DEVICE const VgStage& at(u32 stage) const {
        return *reinterpret_cast<const VgStage*>(table + static_cast<u64>(stage) * VG_STAGE_BYTES);
    }

    // Goes on with products of another stage.
    DEVICE void open(u32 number) {
        stage = number;
        is_known = false;
        if (number >= stages) {
            return;
        }
        const VgStage& it = at(number);
        p = reinterpret_cast<const VgVectorParams*>(&it + 1);
        from = it.from;
        next = it.next;
        pairs = it.grid[0], slots = it.grid[1];
        units = pairs * slots * it.grid[2];
        unit = (blockIdx.x + gridDim.x - it.first) % gridDim.x * VECTOR_WARPS + threadIdx.x / WARP;
        int type = static_cast<int>(it.type), piece_elements = piece_of(type);
        piece_bytes = ::piece_bytes(type), place_bytes = stage_bytes(type);
        i64 width = p->products[0].w.ne[0];
        pieces = static_cast<int>((width + piece_elements - 1) / piece_elements);
        row_bytes = width / geometry(type).elements * geometry(type).bytes;
    }

    // Begins to copy a piece, if there is one that may be fetched by a block that has waited for stage `begun` - 1 (or, 0,
    // for none), and room.
    DEVICE bool fetch(u32 begun, int lane) {
        while (!is_known) {
            if (stage >= stages || from > begun) {
                return false;
            }
            if (unit >= units) {
                open(next);
                continue;
            }
            u32 rest = unit / pairs;
            Place place;
            if (place.find(*p, rest % slots, rest / slots, false)) {
                UNROLL
                for (int r = 0; r < VECTOR_ROWS; r++) {
                    rows[r] = start_of(*p, place, unit - rest * pairs, r);
                }
                piece = 0;
                is_known = true;
            } else {
                unit += gridDim.x * VECTOR_WARPS;
            }
        }
        if (count == 0) {
            head = tail = used = 0;
        }
        u32 size = VECTOR_ROWS * place_bytes, place = head + size <= bytes ? head : 0;
        u32 skipped = place == head ? 0 : bytes - head;
        if (used + skipped + size > bytes) {
            return false;
        }
        i64 offset = static_cast<i64>(piece) * piece_bytes;
        UNROLL
        for (int r = 0; r < VECTOR_ROWS; r++) {
            copy_piece(ring + place + r * place_bytes, rows[r] + offset, row_bytes - offset, piece_bytes, lane);
        }
        commit_async();
        head = place + size;
        used += skipped + size;
        count++;
        if (++piece == pieces) {
            is_known = false;
            unit += gridDim.x * VECTOR_WARPS;
        }
        return true;
    }

    DEVICE void fill(u32 begun, int lane) {
        while (fetch(begun, lane)) {
        }
    }

    // The oldest piece, of two rows in places of so many bytes, when it has arrived.
    DEVICE const u8* oldest(u32 place_bytes) {
        u32 size = VECTOR_ROWS * place_bytes;
        if (tail + size > bytes) {
            used -= bytes - tail;
            tail = 0;
        }
        wait_async_but(count - 1);
        __syncwarp(); // what other lanes copied is there, too
        return ring + tail;
    }

    // Its place may be written again.
    DEVICE void release(u32 place_bytes) {
        __syncwarp();
        u32 size = VECTOR_ROWS * place_bytes;
        tail += size;
        used -= size;
        count--;
    }
};

// A stage of products: the warp's pairs, in the order in which they are fetched.
template <int COLUMNS> DEVICE void products_of(const VgStage& stage, const VgVectorParams& p, u32 begun, Flow& flow) {
    int lane = threadIdx.x % WARP, type = static_cast<int>(stage.type);
    u32 pairs = stage.grid[0], slots = stage.grid[1], units = pairs * slots * stage.grid[2];
    u32 place_bytes = stage_bytes(type);
    i64 width = p.products[0].w.ne[0];
    int pieces = static_cast<int>((width + piece_of(type) - 1) / piece_of(type));
    u32 unit = (blockIdx.x + gridDim.x - stage.first) % gridDim.x * VECTOR_WARPS + threadIdx.x / WARP;
    for (; unit < units; unit += gridDim.x * VECTOR_WARPS) {
        u32 rest = unit / pairs, pair = unit - rest * pairs;
        Place place;
        if (!place.find(p, rest % slots, rest / slots, true)) {
            continue;
        }
        u32 starts[VECTOR_ROWS];
        UNROLL
        for (int r = 0; r < VECTOR_ROWS; r++) {
            starts[r] = static_cast<u32>(reinterpret_cast<u64>(start_of(p, place, pair, r)));
        }
        Sums<COLUMNS> sums = {};
        for (int piece = 0; piece < pieces; piece++) {
            flow.fill(begun, lane);
            const u8* rows = flow.oldest(place_bytes);
            auto multiply = [&](auto of) {
                multiply_piece<decltype(of)::TYPE, COLUMNS>(p, place, nullptr, rows, starts, piece, width, lane, sums);
            };
            switch (type) {
            case VG_F32: multiply(Weights<VG_F32>()); break;
            case VG_F16: multiply(Weights<VG_F16>()); break;
            case VG_BF16: multiply(Weights<VG_BF16>()); break;
            case VG_Q4_0: multiply(Weights<VG_Q4_0>()); break;
            case VG_Q8_0: multiply(Weights<VG_Q8_0>()); break;
            case VG_IQ4_NL: multiply(Weights<VG_IQ4_NL>()); break;
            case VG_MXFP4: multiply(Weights<VG_MXFP4>()); break;
            case VG_Q4_K: multiply(Weights<VG_Q4_K>()); break;
            case VG_Q5_K: multiply(Weights<VG_Q5_K>()); break;
            default: multiply(Weights<VG_Q6_K>()); // the host lets no other through
            }
            flow.release(place_bytes);
        }
        finish_pair(p, place, pair, lane, sums);
    }
}

// Attention needs nearly all registers that a thread may have. In a function of its own it shares them with nothing, and what
// the step remembers is put aside around the call and not in its loops.
#ifdef VGPU_SHIM
#define APART DEVICE
#else
#define APART static __device__ __noinline__
#endif

// One block of a launch.
template <int K> APART void attend_half(const VgAttendParams& p, const Blocks& b, u8* arena, AttendOwn& own) {
    Attention<K, K, 1, 4, 64, HALVES>(p, b, reinterpret_cast<u16*>(arena), own).run();
}

template <int COLUMNS> DEVICE void step(const VgStagesParams& p) {
    DYNAMIC_SHARED(u8, shared);
    __shared__ __align__(16) u8 record[VG_STAGE_BYTES];
    __shared__ AttendOwn own;
    u8* arena = shared + VECTOR_WARPS * p.ring;
    u32* counters = reinterpret_cast<u32*>(p.counters);
    const int4* table = reinterpret_cast<const int4*>(p.table);
    int lane = threadIdx.x % WARP;

    // In shared memory while a block does something else: registers are for that.
    __shared__ Flow flows[VECTOR_WARPS];
    Flow& mine_at_rest = flows[threadIdx.x / WARP];
    auto with_flow = [&](auto body) {
        Flow flow = mine_at_rest;
        body(flow);
        __syncwarp(); // all lanes have read it, and have the same
        if (lane == 0) {
            mine_at_rest = flow;
        }
        __syncwarp();
    };
    if (lane == 0) {
        Flow flow = {};
        flow.table = reinterpret_cast<const u8*>(p.table);
        flow.ring = shared + threadIdx.x / WARP * p.ring;
        flow.bytes = p.ring;
        flow.stages = p.stages;
        flow.open(p.products);
        mine_at_rest = flow;
    }
    __syncwarp();

    // Of the next stage, which is read while this one is done.
    int4 ahead = {};
    if (16 * threadIdx.x < p.beginning) {
        ahead = table[threadIdx.x];
    }
    const VgStage& stage = *reinterpret_cast<const VgStage*>(record);
    const void* given = record + sizeof(VgStage);
    // The last stage, plus 1, for which this block has waited. It passes by those in which it has no part.
    u32 begun = 0;
    for (u32 number = 0; number < p.stages; number++) {
        if (16 * threadIdx.x < VG_STAGE_BYTES) {
            reinterpret_cast<int4*>(record)[threadIdx.x] = ahead;
        }
        __syncthreads();
        if (16 * threadIdx.x < stage.following) {
            ahead = table[(number + 1) * (VG_STAGE_BYTES / 16) + threadIdx.x];
        }
        u32 mine = (blockIdx.x + gridDim.x - stage.first) % gridDim.x;
        bool is_mine = mine < stage.total;
        if (is_mine) {
            with_flow([&](Flow& flow) { flow.fill(begun, lane); });
            if (threadIdx.x == 0) {
                for (u32 i = 0; i < stage.waits; i++) {
                    await_count(counters + (stage.wait[i].stage + 1) * VG_COUNTER_STEP, stage.wait[i].count);
                }
            }
            __syncthreads();
            begun = number + 1;
            if (stage.body == VG_BODY_PRODUCTS) {
                with_flow([&](Flow& flow) {
                    products_of<COLUMNS>(stage, *static_cast<const VgVectorParams*>(given), begun, flow);
                });
            } else {
                u32 nx = stage.grid[0], ny = stage.grid[1];
                for (u32 v = mine; v < stage.total; v += gridDim.x) {
                    Blocks b = {v % nx, v / nx % ny, v / (nx * ny), nx, ny, stage.grid[2]};
                    switch (stage.body) {
                    case VG_BODY_NORM_FUSED: norm_fused(*static_cast<const VgNormFusedParams*>(given), b); break;
                    case VG_BODY_QUANTIZE: quantize(*static_cast<const VgQuantizeParams*>(given), b); break;
                    case VG_BODY_ROPE: rope(*static_cast<const VgRopeParams*>(given), b); break;
                    case VG_BODY_ROPE_ROWS: rope_rows(*static_cast<const VgRopeRowsParams*>(given), b); break;
                    case VG_BODY_SET_ROWS: set_rows<false>(*static_cast<const VgRowsParams*>(given), b); break;
                    case VG_BODY_GET_ROWS: get_rows<false>(*static_cast<const VgRowsParams*>(given), b); break;
                    case VG_BODY_ADD_ID: add_id(*static_cast<const VgAddIdParams*>(given), b); break;
                    case VG_BODY_MAP: map(*static_cast<const VgMapParams*>(given), b); break;
                    case VG_BODY_ROUTE: route(*static_cast<const VgRouteParams*>(given), b); break;
                    case VG_BODY_WEIGHTED_SUM: weighted_sum(*static_cast<const VgWeightedSumParams*>(given), b); break;
                    case VG_BODY_ATTEND_HALF_64:
                        attend_half<64>(*static_cast<const VgAttendParams*>(given), b, arena, own);
                        break;
                    default: attend_half<128>(*static_cast<const VgAttendParams*>(given), b, arena, own);
                    }
                    __syncthreads(); // shared memory may be written again
                }
            }
        }
        __syncthreads(); // all is written, and the stage may be written over
        if (is_mine && threadIdx.x == 0) {
            count_up(counters + (number + 1) * VG_COUNTER_STEP);
        }
    }

    // Nobody waits any more when the last block is here: it leaves counters as they were.
    if (threadIdx.x == 0) {
        own.last = count_in(counters) == gridDim.x - 1;
    }
    __syncthreads();
    if (own.last) {
        for (u32 i = threadIdx.x; i <= p.stages; i += blockDim.x) {
            counters[i * VG_COUNTER_STEP] = 0;
        }
    }
}

} // namespace
