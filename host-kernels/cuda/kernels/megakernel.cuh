// Many launches as one: blocks that are all resident walk through stages, of which each does what a launch would do.
//
// A stage's blocks are shared out among those of the step, and so are the pairs of rows that products have, to its warps.
// What a stage needs of others it waits for: each block that has done its part of a stage counts up in global memory, and
// whoever needs the result waits until as many have as there are. Waits point backwards only, and all blocks are
// resident, so somebody can always go on.
//
// Weights are read by nobody's leave: nothing in a step writes them. Each warp knows which rows it will multiply, and
// fetches them in order, across the ends of stages, as far ahead as its ring in shared memory has room. While a block
// waits for a norm or for attention, the next product's weights arrive, and those behind them are asked for, so that they come
// from the L2 cache when it is their turn. Where it depends on results which rows those are
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
#include "fattn.cuh"
#include "fused.cuh"
#include "elementwise.cuh"
#include "rope.cuh"
#include "quantize_q8.cuh"
#include "rows.cuh"
#include "mmv.cuh"

namespace {

static_assert(sizeof(VgStage) + sizeof(VgMmvParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) + sizeof(VgFattnParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) + sizeof(VgRopeRowsParams) <= VG_STAGE_BYTES, "stages have room for what they are given");
static_assert(sizeof(VgStage) % 16 == 0 && VG_STAGE_BYTES % 16 == 0, "stages are copied in 16 bytes");
static_assert(VG_STAGE_BYTES / 16 <= VECTOR_WARPS * WARP, "each thread copies 16 bytes of a stage");

// A place among the weights that a warp will multiply: of which stage, which of the warp's pairs, which piece of it.
struct Cursor {
    const u8* table;
    const VgMmvParams* p;
    u32 stages, stage, from, unit, units, pairs, slots, next;
    Begin rows[VECTOR_ROWS]; // of the pair, if that is known yet
    bool is_known;
    int piece, pieces, piece_bytes, piece_scales, place_bytes;
    RowBytes row_bytes; // scales are 0 if they have no plane

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
        p = reinterpret_cast<const VgMmvParams*>(&it + 1);
        from = it.from;
        next = it.next;
        pairs = it.grid[0], slots = it.grid[1];
        units = pairs * slots * it.grid[2];
        unit = (blockIdx.x + gridDim.x - it.first) % gridDim.x * VECTOR_WARPS + threadIdx.x / WARP;
        int type = static_cast<int>(it.type), piece_elements = piece_of(type);
        piece_bytes = ::piece_bytes(type), piece_scales = ::piece_scales(type), place_bytes = stage_bytes(type);
        i64 width = p->products[0].w.ne[0];
        pieces = static_cast<int>((width + piece_elements - 1) / piece_elements);
        i64 blocks = width / geometry(type).elements;
        row_bytes = {blocks * quant_bytes(type), blocks * scale_bytes(type)};
    }

    // Whether there is a piece that may be fetched by a block that has waited for stage `begun` - 1 (or, 0, for none). Then
    // it is known where that lies.
    DEVICE bool find(u32 begun) {
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
                    rows[r] = start_of(*p, place, unit - rest * pairs, r, row_bytes);
                }
                piece = 0;
                is_known = true;
            } else {
                unit += gridDim.x * VECTOR_WARPS;
            }
        }
        return true;
    }

    DEVICE void advance() {
        if (++piece == pieces) {
            is_known = false;
            unit += gridDim.x * VECTOR_WARPS;
        }
    }
};

// Bytes of a warp's weights that are asked for beyond its ring while it waits, to be in the L2 cache: 20 MB for all warps of an
// H200, whose cache holds 50.
constexpr u32 MOST_AHEAD = 12 << 10;

// The weights of a warp, from where they lie to its ring.
struct Flow {
    Cursor next; // what is fetched next
    u8* ring;
    u32 bytes;
    // Where the next piece goes, and where the oldest one is; bytes between them, and pieces.
    u32 head, tail, used, count;
    u32 asked; // pieces from the next on that have been asked for already

    // Begins to copy a piece, if there is one and room.
    DEVICE bool fetch(u32 begun, int lane) {
        if (!next.find(begun)) {
            return false;
        }
        if (count == 0) {
            head = tail = used = 0;
        }
        u32 size = VECTOR_ROWS * next.place_bytes, place = head + size <= bytes ? head : 0;
        u32 skipped = place == head ? 0 : bytes - head;
        if (used + skipped + size > bytes) {
            return false;
        }
        i64 offset = static_cast<i64>(next.piece) * next.piece_bytes;
        i64 scales = static_cast<i64>(next.piece) * next.piece_scales;
        UNROLL
        for (int r = 0; r < VECTOR_ROWS; r++) {
            u8* to = ring + place + r * next.place_bytes;
            copy_piece(to, next.rows[r].quants + offset, next.row_bytes.quants - offset, next.piece_bytes, lane);
            if (next.piece_scales) {
                copy_piece(to + next.piece_bytes, next.rows[r].scales + scales, next.row_bytes.scales - scales,
                           next.piece_scales, lane);
            }
        }
        commit_async();
        head = place + size;
        used += skipped + size;
        count++;
        asked -= asked > 0;
        next.advance();
        return true;
    }

    // Asks for what comes behind the ring.
    DEVICE void ask(u32 begun, int lane) {
        Cursor ahead = next;
        u32 passed = 0;
        for (u32 sum = 0; sum < MOST_AHEAD && ahead.find(begun); sum += VECTOR_ROWS * ahead.piece_bytes) {
            if (passed >= asked) {
                i64 offset = static_cast<i64>(ahead.piece) * ahead.piece_bytes;
                i64 left = ahead.row_bytes.quants - offset;
                int size = static_cast<int>(left < ahead.piece_bytes ? left : ahead.piece_bytes);
                UNROLL
                for (int r = 0; r < VECTOR_ROWS; r++) {
                    for (int i = lane * LINE; i < size; i += WARP * LINE) {
                        prefetch(ahead.rows[r].quants + offset + i);
                    }
                    // Scales are less than a line, which may be two.
                    if (ahead.piece_scales && lane < 2) {
                        i64 of_scales = static_cast<i64>(ahead.piece) * ahead.piece_scales;
                        i64 last = ahead.row_bytes.scales - 1 - of_scales;
                        int size = static_cast<int>(last < ahead.piece_scales ? last : ahead.piece_scales - 1);
                        prefetch(ahead.rows[r].scales + of_scales + lane * size);
                    }
                }
            }
            passed++;
            ahead.advance();
        }
        asked = passed > asked ? passed : asked;
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
template <int COLUMNS> DEVICE void products_of(const VgStage& stage, const VgMmvParams& p, u32 begun, Flow& flow) {
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
        Own own = own_of(p, place, static_cast<int>(width), second_of(type) == 1, lane);
        Begin begin = start_of(p, place, pair, own.row, planes_row(type, width));
        u32 start = static_cast<u32>(reinterpret_cast<u64>(is_planes(type) ? begin.scales : begin.quants));
        Sums<COLUMNS> sums = {};
        for (int piece = 0; piece < pieces; piece++) {
            flow.fill(begun, lane);
            const u8* rows = flow.oldest(place_bytes);
            auto multiply = [&](auto of) {
                constexpr int TYPE = decltype(of)::TYPE;
                const u8* at = rows + (is_float(TYPE) ? 0 : own.row * stage_bytes(TYPE));
                multiply_piece<TYPE, COLUMNS>(p, place, nullptr, at, start, piece, own, chosen_of<TYPE, COLUMNS>(own.chunk),
                                              lane, sums);
                start += low_bits_of_piece(TYPE);
            };
            switch (type) {
            case VG_F32: multiply(Weights<VG_F32>()); break;
            case VG_F16: multiply(Weights<VG_F16>()); break;
            case VG_BF16: multiply(Weights<VG_BF16>()); break;
            case VG_Q4_0: multiply(Weights<VG_Q4_0>()); break;
            case VG_Q8_0: multiply(Weights<VG_Q8_0>()); break;
            case VG_IQ4_NL: multiply(Weights<VG_IQ4_NL>()); break;
            case VG_MXFP4: multiply(Weights<VG_MXFP4>()); break;
            case VG_Q4_0 | VG_REPACKED: multiply(Weights<VG_Q4_0 | VG_REPACKED>()); break;
            case VG_Q8_0 | VG_REPACKED: multiply(Weights<VG_Q8_0 | VG_REPACKED>()); break;
            case VG_IQ4_NL | VG_REPACKED: multiply(Weights<VG_IQ4_NL | VG_REPACKED>()); break;
            case VG_MXFP4 | VG_REPACKED: multiply(Weights<VG_MXFP4 | VG_REPACKED>()); break;
            case VG_Q4_K: multiply(Weights<VG_Q4_K>()); break;
            case VG_Q5_K: multiply(Weights<VG_Q5_K>()); break;
            case VG_Q6_K | VG_REPACKED: multiply(Weights<VG_Q6_K | VG_REPACKED>()); break;
            default: multiply(Weights<VG_Q6_K>()); // the host lets no other through
            }
            flow.release(place_bytes);
        }
        finish_pair(p, place, pair, lane, sums, is_float(type));
    }
}

// What a warp remembers of a step: in shared memory, since registers are for what a stage does.
struct Warp {
    Flow flow;
    u32 number;    // of the stage
    u32 item;      // of the stage's blocks, the one that is done
    Blocks blocks; // the same as a launch has it
    // The last stage, plus 1, for which the block has waited. It passes by those in which it has no part.
    u32 begun;
    u32 reserved;
};

struct OfStep {
    // The stage that is done and the one behind it, with their parameters.
    u8 records[2][VG_STAGE_BYTES];
    Warp warps[VECTOR_WARPS];
    AttendOwn attention;
    u32 arena; // where tiles lie in the shared memory that the launch gives
};

// One for all functions below: an address that is known when they are compiled takes no registers.
__shared__ __align__(16) OfStep of_step;

// Which of the block. It is asked for anew each time, so that nothing that follows from it is kept in registers from stage to
// stage, to be put aside around every call.
DEVICE u32 this_thread() {
#ifdef VGPU_SHIM
    return threadIdx.x;
#else
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#endif
}

DEVICE Warp& this_warp() { return of_step.warps[this_thread() / WARP]; }

// All lanes put the same there, and then find it. It is looked up each time, so that no register keeps it.
DEVICE void put(u32& at, u32 value) {
    __syncwarp();
    if (this_thread() % WARP == 0) {
        at = value;
    }
    __syncwarp();
}
DEVICE u32 get(const u32& at) { return *const_cast<const volatile u32*>(&at); }

// The stage that is done, its parameters, and which of its blocks.
DEVICE const VgStage& this_stage() {
    return *reinterpret_cast<const VgStage*>(of_step.records[get(this_warp().number) % 2]);
}
template <class T> DEVICE const T& given() { return *reinterpret_cast<const T*>(&this_stage() + 1); }
DEVICE const Blocks& this_item() { return this_warp().blocks; }
DEVICE void put_item(u32 v) {
    const VgStage& stage = this_stage();
    __syncwarp();
    if (this_thread() % WARP == 0) {
        u32 nx = stage.grid[0], ny = stage.grid[1];
        this_warp().item = v;
        this_warp().blocks = {v % nx, v / nx % ny, v / (nx * ny), nx, ny, stage.grid[2]};
    }
    __syncwarp();
}

// Does something with the warp's weights.
template <class Body> DEVICE void with_flow(Body body) {
    Flow flow = this_warp().flow;
    body(flow);
    __syncwarp(); // all lanes have read it, and have the same
    if (this_thread() % WARP == 0) {
        this_warp().flow = flow;
    }
    __syncwarp();
}

// What needs nearly all registers that a thread may have is in a function of its own, where it shares them with nothing.
// Around a call there is next to nothing to put aside.
#ifdef VGPU_SHIM
#define APART static inline
#else
#define APART static __device__ __noinline__
#endif

template <int COLUMNS> APART void products_apart() {
    with_flow([&](Flow& flow) {
        products_of<COLUMNS>(this_stage(), given<VgMmvParams>(), get(this_warp().begun), flow);
    });
}

// One block of attention.
template <int K, int KIND> APART void attend_apart() {
    DYNAMIC_SHARED(u8, shared);
    u16* arena = reinterpret_cast<u16*>(shared + of_step.arena);
    Attention<K, K, 1, ATTEND_WARPS, 64, KIND>(given<VgFattnParams>(), this_item(), arena, of_step.attention).run();
}

// Rows of quantised types: numbers are packed one by one.
APART void set_blocks_apart() { set_rows<true>(given<VgRowsParams>(), this_item()); }

// One block of a stage that has no products.
APART void body_apart() {
    switch (this_stage().body) {
    case VG_STAGE_NORM_FUSED: norm_fused(given<VgNormFusedParams>(), this_item()); break;
    case VG_STAGE_QUANTIZE_Q8: quantize(given<VgQuantizeQ8Params>(), this_item()); break;
    case VG_STAGE_ROPE: rope(given<VgRopeParams>(), this_item()); break;
    case VG_STAGE_ROPE_ROWS: rope_rows(given<VgRopeRowsParams>(), this_item()); break;
    case VG_STAGE_SET_ROWS: set_rows<false>(given<VgRowsParams>(), this_item()); break;
    case VG_STAGE_SET_BLOCKS: set_blocks_apart(); break;
    case VG_STAGE_GET_ROWS: get_rows<false>(given<VgRowsParams>(), this_item()); break;
    case VG_STAGE_ADD_ID: add_id(given<VgAddIdParams>(), this_item()); break;
    case VG_STAGE_ELEMENTWISE: map(given<VgElementwiseParams>(), this_item()); break;
    case VG_STAGE_TOPK_MOE: route(given<VgTopkMoeParams>(), this_item()); break;
    case VG_STAGE_WEIGHTED_SUM: weighted_sum(given<VgWeightedSumParams>(), this_item()); break;
    case VG_STAGE_FATTN_F16_64: attend_apart<64, HALVES>(); break;
    case VG_STAGE_FATTN_BF16_64: attend_apart<64, BRAIN_HALVES>(); break;
    case VG_STAGE_FATTN_QUANT_64: attend_apart<64, RAW>(); break;
    case VG_STAGE_FATTN_F16_128: attend_apart<128, HALVES>(); break;
    case VG_STAGE_FATTN_BF16_128: attend_apart<128, BRAIN_HALVES>(); break;
    default: attend_apart<128, RAW>();
    }
}

template <int COLUMNS> DEVICE void step(const VgMegakernelParams& p) {
    DYNAMIC_SHARED(u8, shared);
    auto counter_of = [&](u32 at) { return reinterpret_cast<u32*>(p.counters) + at * VG_COUNTER_STRIDE; };
    if (this_thread() % WARP == 0) {
        Flow flow = {};
        flow.next.table = reinterpret_cast<const u8*>(p.table);
        flow.next.stages = p.stages;
        flow.next.open(p.products);
        flow.ring = shared + this_thread() / WARP * p.ring;
        flow.bytes = p.ring;
        this_warp().flow = flow;
        this_warp().begun = 0;
        of_step.arena = VECTOR_WARPS * p.ring; // the same by all warps
    }
    __syncwarp();

    // A stage is read while the one before it is done.
    auto table_of = [&](u32 number) {
        return reinterpret_cast<const int4*>(p.table) + number * (VG_STAGE_BYTES / 16) + this_thread();
    };
    auto record_of = [&](u32 number) { return reinterpret_cast<int4*>(of_step.records[number % 2]) + this_thread(); };
    if (16 * this_thread() < p.beginning) {
        *record_of(0) = *table_of(0);
    }
    for (u32 number = 0; number < p.stages; number = get(this_warp().number) + 1) {
        __syncthreads(); // the stage is there, and the place of the one before it may be written over
        put(this_warp().number, number);
        const VgStage& stage = this_stage();
        int4 ahead = {};
        bool has_ahead = 16 * this_thread() < stage.following;
        if (has_ahead) {
            ahead = *table_of(number + 1);
        }
        u32 mine = (blockIdx.x + gridDim.x - stage.first) % gridDim.x;
        bool is_mine = mine < stage.total;
        if (is_mine) {
            with_flow([&](Flow& flow) { flow.fill(get(this_warp().begun), this_thread() % WARP); });
        }
        if (has_ahead) {
            *record_of(number + 1) = ahead;
        }
        if (!is_mine) {
            continue;
        }
        // A thread waits; the warps that it is not in have nothing else to do. Warps take turns.
        u32 who = number % VECTOR_WARPS;
        if (this_thread() == who * WARP) {
            for (u32 i = 0; i < stage.waits; i++) {
                await_count(counter_of(stage.wait[i].stage + 1), stage.wait[i].count);
            }
        } else if (stage.waits > 0 && this_thread() / WARP != who) {
            with_flow([&](Flow& flow) { flow.ask(get(this_warp().begun), this_thread() % WARP); });
        }
        __syncthreads();
        put(this_warp().begun, number + 1);
        if (stage.body == VG_STAGE_MMV) {
            products_apart<COLUMNS>();
        } else {
            for (u32 v = mine; v < this_stage().total; v = get(this_warp().item) + gridDim.x) {
                put_item(v);
                body_apart();
                __syncthreads(); // shared memory may be written again
            }
        }
        __syncthreads(); // all is written
        if (this_thread() == 0) {
            count_up(counter_of(get(this_warp().number) + 1));
        }
    }

    // Nobody waits any more when the last block is here: it leaves counters as they were.
    if (this_thread() == 0) {
        of_step.attention.last = count_in(counter_of(0)) == gridDim.x - 1;
    }
    __syncthreads();
    if (of_step.attention.last) {
        for (u32 i = this_thread(); i <= p.stages; i += blockDim.x) {
            *counter_of(i) = 0;
        }
    }
}

} // namespace
