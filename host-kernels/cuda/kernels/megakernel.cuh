// The megakernel: one persistent cooperative launch instead of many. All blocks are resident and
// walk through a table of stages, each of which does what a launch would do.
//
// The blocks of a stage are distributed over the blocks of the megakernel, and the pairs of rows of
// matrix-vector products over its warps. Dependencies: each block that has finished its part of a
// stage increments the stage's counter in global memory, and a block that needs the result waits
// until the counter is complete. Stages wait for earlier stages only and all blocks are resident,
// so there is always a block that can proceed.
//
// Weights have no dependencies: nothing in the launch writes them. Each warp knows which rows it
// will multiply and fetches them in order, across the ends of stages, as far ahead as its ring
// buffer in shared memory permits. While a block waits for a norm or attention, the next weights
// arrive, and those behind them are prefetched to the L2 cache. If the rows depend on results (MoE
// experts), the stage says from which stage on they may be fetched.
//
// Memory order. Data that other blocks write is read with plain loads, never through the read-only
// path: addresses come from memory, without `__restrict__` and `__ldg`. A block's writes precede
// its barrier, which precedes the release of its first thread (`signal_counter`). The acquire that
// observes the counter (`wait_counter`) precedes the barrier of the waiting block, which precedes
// its reads. Causality order is transitive in PTX (PTX ISA, "Memory Consistency Model"), so a chain
// of waits is as good as waiting for each. Increments of a counter are read-modify-writes and form
// one release sequence. cp.async bypasses the L1 cache and is ordered as an access of its thread,
// behind that barrier.
#pragma once
#include "fattn.cuh"
#include "fused.cuh"
#include "elementwise.cuh"
#include "rope.cuh"
#include "quantize_q8.cuh"
#include "rows.cuh"
#include "mmv.cuh"

namespace {

static_assert(sizeof(VgStage) + sizeof(VgMmvParams) <= VG_STAGE_BYTES,
              "the parameters fit a table entry");
static_assert(sizeof(VgStage) + sizeof(VgFattnParams) <= VG_STAGE_BYTES,
              "the parameters fit a table entry");
static_assert(sizeof(VgStage) + sizeof(VgRopeRowsParams) <= VG_STAGE_BYTES,
              "the parameters fit a table entry");
static_assert(sizeof(VgStage) % 16 == 0 && VG_STAGE_BYTES % 16 == 0,
              "table entries are copied in units of 16 bytes");
static_assert(VG_STAGE_BYTES / 16 <= MMV_WARPS * WARP, "one copy by each thread covers an entry");

// Position in the sequence of weights that a warp will multiply: stage, pair of rows, and tile of
// the pair. A work item is a pair of rows for a slot of a token, or for a batch.
struct WeightCursor {
    const u8* table;
    const VgMmvParams* p;
    u32 stages, stage, from, item, items, pairs, slots, next;
    RowPtr rows[MMV_ROWS]; // rows of the pair, valid if is_known
    bool is_known;
    int tile, tiles, tile_bytes, tile_scale_bytes, buffer_bytes;
    RowBytes row_bytes; // scales is 0 if the type is not repacked

    DEVICE const VgStage& at(u32 stage) const {
        return *reinterpret_cast<const VgStage*>(table + static_cast<u64>(stage) * VG_STAGE_BYTES);
    }

    // Moves to an MMV stage.
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
        items = pairs * slots * it.grid[2];
        item = (blockIdx.x + gridDim.x - it.first) % gridDim.x * MMV_WARPS + threadIdx.x / WARP;
        int type = static_cast<int>(it.type), elements = tile_elements(type);
        tile_bytes = ::tile_bytes(type), tile_scale_bytes = ::tile_scale_bytes(type),
        buffer_bytes = stage_bytes(type);
        i64 width = p->products[0].w.ne[0];
        tiles = static_cast<int>((width + elements - 1) / elements);
        i64 blocks = width / type_traits(type).elements;
        row_bytes = {blocks * quant_bytes(type), blocks * scale_bytes(type)};
    }

    // Whether there is a tile that may be fetched by a block that has started stage `started` - 1
    // (0: none). If so, its rows are known.
    DEVICE bool find(u32 started) {
        while (!is_known) {
            if (stage >= stages || from > started) {
                return false;
            }
            if (item >= items) {
                open(next);
                continue;
            }
            u32 rest = item / pairs;
            BatchIndex batch;
            if (batch.find(*p, rest % slots, rest / slots, false)) {
                auto weights = [&](u32 m) { return batch.weights(p->products[m]); };
                UNROLL
                for (int r = 0; r < MMV_ROWS; r++) {
                    rows[r] = start_of(*p, weights, item - rest * pairs, r, row_bytes);
                }
                tile = 0;
                is_known = true;
            } else {
                item += gridDim.x * MMV_WARPS;
            }
        }
        return true;
    }

    DEVICE void advance() {
        if (++tile == tiles) {
            is_known = false;
            item += gridDim.x * MMV_WARPS;
        }
    }
};

// Bytes of weights that a waiting warp prefetches beyond its ring: 20 MB for all warps of an H200,
// whose L2 cache has 50 MB.
constexpr u32 MAX_PREFETCH = 12 << 10;

// Ring buffer of a warp's weights in shared memory.
struct WeightPipeline {
    WeightCursor next; // the next tile to fetch
    u8* ring;
    u32 bytes;
    // Offsets of the next tile and of the oldest one; bytes and tiles in between.
    u32 head, tail, used, count;
    u32 prefetched; // tiles from the next on that were prefetched

    // Starts to copy the next tile, if there is one and room for it.
    DEVICE bool fetch(u32 started, int lane) {
        if (!next.find(started)) {
            return false;
        }
        if (count == 0) {
            head = tail = used = 0;
        }
        u32 size = MMV_ROWS * next.buffer_bytes, ring_offset = head + size <= bytes ? head : 0;
        u32 skipped = ring_offset == head ? 0 : bytes - head;
        if (used + skipped + size > bytes) {
            return false;
        }
        i64 offset = static_cast<i64>(next.tile) * next.tile_bytes;
        i64 scales = static_cast<i64>(next.tile) * next.tile_scale_bytes;
        UNROLL
        for (int r = 0; r < MMV_ROWS; r++) {
            u8* to = ring + ring_offset + r * next.buffer_bytes;
            copy_tile(to, next.rows[r].quants + offset, next.row_bytes.quants - offset,
                      next.tile_bytes, lane);
            if (next.tile_scale_bytes) {
                copy_tile(to + next.tile_bytes, next.rows[r].scales + scales,
                          next.row_bytes.scales - scales, next.tile_scale_bytes, lane);
            }
        }
        cp_async_commit();
        head = ring_offset + size;
        used += skipped + size;
        count++;
        prefetched -= prefetched > 0;
        next.advance();
        return true;
    }

    // Prefetches the weights behind the ring.
    DEVICE void prefetch_ahead(u32 started, int lane) {
        WeightCursor ahead = next;
        u32 passed = 0;
        for (u32 sum = 0; sum < MAX_PREFETCH && ahead.find(started);
             sum += MMV_ROWS * ahead.tile_bytes) {
            if (passed >= prefetched) {
                i64 offset = static_cast<i64>(ahead.tile) * ahead.tile_bytes;
                i64 left = ahead.row_bytes.quants - offset;
                int size = static_cast<int>(left < ahead.tile_bytes ? left : ahead.tile_bytes);
                UNROLL
                for (int r = 0; r < MMV_ROWS; r++) {
                    for (int i = lane * L2_LINE; i < size; i += WARP * L2_LINE) {
                        prefetch_l2(ahead.rows[r].quants + offset + i);
                    }
                    // Scales are shorter than a cache line but may straddle two.
                    if (ahead.tile_scale_bytes && lane < 2) {
                        i64 of_scales = static_cast<i64>(ahead.tile) * ahead.tile_scale_bytes;
                        i64 last = ahead.row_bytes.scales - 1 - of_scales;
                        int size = static_cast<int>(
                            last < ahead.tile_scale_bytes ? last : ahead.tile_scale_bytes - 1);
                        prefetch_l2(ahead.rows[r].scales + of_scales + lane * size);
                    }
                }
            }
            passed++;
            ahead.advance();
        }
        prefetched = passed > prefetched ? passed : prefetched;
    }

    DEVICE void fill(u32 started, int lane) {
        while (fetch(started, lane)) {
        }
    }

    // Waits for the oldest tile: two rows in buffers of `buffer_bytes` each.
    DEVICE const u8* oldest(u32 buffer_bytes) {
        u32 size = MMV_ROWS * buffer_bytes;
        if (tail + size > bytes) {
            used -= bytes - tail;
            tail = 0;
        }
        cp_async_wait_dynamic(count - 1);
        __syncwarp(); // makes the copies of other lanes visible
        return ring + tail;
    }

    // Frees the oldest tile.
    DEVICE void release(u32 buffer_bytes) {
        __syncwarp();
        u32 size = MMV_ROWS * buffer_bytes;
        tail += size;
        used -= size;
        count--;
    }
};

// An MMV stage: the warp's pairs in the order in which they are fetched.
template <int COLUMNS>
DEVICE void mmv_stage(const VgStage& stage, const VgMmvParams& p, u32 started,
                      WeightPipeline& pipeline) {
    int lane = threadIdx.x % WARP, type = static_cast<int>(stage.type);
    u32 pairs = stage.grid[0], slots = stage.grid[1], items = pairs * slots * stage.grid[2];
    u32 buffer_bytes = stage_bytes(type);
    i64 width = p.products[0].w.ne[0];
    int tiles = static_cast<int>((width + tile_elements(type) - 1) / tile_elements(type));
    u32 item = (blockIdx.x + gridDim.x - stage.first) % gridDim.x * MMV_WARPS + threadIdx.x / WARP;
    for (; item < items; item += gridDim.x * MMV_WARPS) {
        u32 rest = item / pairs, pair = item - rest * pairs;
        BatchIndex batch;
        if (!batch.find(p, rest % slots, rest / slots, true)) {
            continue;
        }
        LaneContext own =
            lane_context(p, batch, static_cast<int>(width), second_block_offset(type) == 1, lane);
        auto weights = [&](u32 m) { return batch.weights(p.products[m]); };
        RowPtr begin = start_of(p, weights, pair, own.row, repacked_row_bytes(type, width));
        u32 start = static_cast<u32>(
            reinterpret_cast<u64>(is_repacked(type) ? begin.scales : begin.quants));
        Accumulators<COLUMNS> sums = {};
        for (int tile = 0; tile < tiles; tile++) {
            pipeline.fill(started, lane);
            const u8* rows = pipeline.oldest(buffer_bytes);
            auto multiply = [&](auto of) {
                constexpr int TYPE = decltype(of)::TYPE;
                const u8* at = rows + (is_float(TYPE) ? 0 : own.row * stage_bytes(TYPE));
                dot_tile<TYPE, COLUMNS>(p, batch, nullptr, at, start, tile, own,
                                        lane_offsets_of<TYPE, COLUMNS>(own.chunk), lane, sums);
                start += low_bits_per_tile(TYPE);
            };
            switch (type) {
            case VG_F32: multiply(TypeTag<VG_F32>()); break;
            case VG_F16: multiply(TypeTag<VG_F16>()); break;
            case VG_BF16: multiply(TypeTag<VG_BF16>()); break;
            case VG_Q4_0: multiply(TypeTag<VG_Q4_0>()); break;
            case VG_Q8_0: multiply(TypeTag<VG_Q8_0>()); break;
            case VG_IQ4_NL: multiply(TypeTag<VG_IQ4_NL>()); break;
            case VG_MXFP4: multiply(TypeTag<VG_MXFP4>()); break;
            case VG_Q4_0 | VG_REPACKED: multiply(TypeTag<VG_Q4_0 | VG_REPACKED>()); break;
            case VG_Q8_0 | VG_REPACKED: multiply(TypeTag<VG_Q8_0 | VG_REPACKED>()); break;
            case VG_IQ4_NL | VG_REPACKED: multiply(TypeTag<VG_IQ4_NL | VG_REPACKED>()); break;
            case VG_MXFP4 | VG_REPACKED: multiply(TypeTag<VG_MXFP4 | VG_REPACKED>()); break;
            case VG_Q4_K: multiply(TypeTag<VG_Q4_K>()); break;
            case VG_Q5_K: multiply(TypeTag<VG_Q5_K>()); break;
            case VG_Q6_K | VG_REPACKED: multiply(TypeTag<VG_Q6_K | VG_REPACKED>()); break;
            default: multiply(TypeTag<VG_Q6_K>()); // the host rejects other types
            }
            pipeline.release(buffer_bytes);
        }
        store_pair(p, batch, pair, lane, sums, is_float(type));
    }
}

// State of a warp across stages, in shared memory to leave registers to the stages.
struct WarpState {
    WeightPipeline pipeline;
    u32 number;        // index of the stage
    u32 item;          // index of the current block of the stage
    BlockIndex blocks; // the same as a grid index
    // 1 + the last stage that the block has waited for. Stages without a part for the block are
    // skipped.
    u32 started;
    u32 reserved;
};

struct MegakernelState {
    // The current and the next stage with their parameters.
    u8 records[2][VG_STAGE_BYTES];
    WarpState warps[MMV_WARPS];
    FattnShared attention;
    u32 arena; // offset of the tiles in dynamic shared memory
};

// Shared by all functions below: a compile-time address needs no registers.
__shared__ __align__(16) MegakernelState megakernel_state;

// Thread index, read anew each time so that nothing derived from the index occupies registers
// across calls.
DEVICE u32 this_thread() {
#ifdef VGPU_SHIM
    return threadIdx.x;
#else
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#endif
}

DEVICE WarpState& this_warp() { return megakernel_state.warps[this_thread() / WARP]; }

// All lanes store and load the same value. The volatile load keeps it out of registers.
DEVICE void warp_store(u32& at, u32 value) {
    __syncwarp();
    if (this_thread() % WARP == 0) {
        at = value;
    }
    __syncwarp();
}
DEVICE u32 volatile_load(const u32& at) { return *const_cast<const volatile u32*>(&at); }

// The current stage, its parameters, and the index of its block.
DEVICE const VgStage& this_stage() {
    u32 record = volatile_load(this_warp().number) % 2;
    return *reinterpret_cast<const VgStage*>(megakernel_state.records[record]);
}
template <class T> DEVICE const T& stage_params() {
    return *reinterpret_cast<const T*>(&this_stage() + 1);
}
DEVICE const BlockIndex& stage_block() { return this_warp().blocks; }
DEVICE void set_stage_block(u32 v) {
    const VgStage& stage = this_stage();
    __syncwarp();
    if (this_thread() % WARP == 0) {
        u32 nx = stage.grid[0], ny = stage.grid[1];
        this_warp().item = v;
        this_warp().blocks = {v % nx, v / nx % ny, v / (nx * ny), nx, ny, stage.grid[2]};
    }
    __syncwarp();
}

// Runs `body` on the warp's pipeline.
template <class Body> DEVICE void with_pipeline(Body body) {
    WeightPipeline pipeline = this_warp().pipeline;
    body(pipeline);
    __syncwarp(); // all lanes have read it
    if (this_thread() % WARP == 0) {
        this_warp().pipeline = pipeline;
    }
    __syncwarp();
}

// Functions that need nearly all registers are not inlined, so that little is live across a call.
#ifdef VGPU_SHIM
#define NOINLINE static inline
#else
#define NOINLINE static __device__ __noinline__
#endif

template <int COLUMNS> NOINLINE void mmv_noinline() {
    with_pipeline([&](WeightPipeline& pipeline) {
        mmv_stage<COLUMNS>(this_stage(), stage_params<VgMmvParams>(),
                           volatile_load(this_warp().started), pipeline);
    });
}

// One block of attention.
template <int K, int KIND> NOINLINE void fattn_noinline() {
    DYNAMIC_SHARED(u8, shared);
    u16* arena = reinterpret_cast<u16*>(shared + megakernel_state.arena);
    using Shape = FattnShape<K, K, 1, FATTN_WARPS, 64, KIND>;
    FlashAttention<Shape>(stage_params<VgFattnParams>(), stage_block(), arena,
                          megakernel_state.attention)
        .run();
}

// SET_ROWS into a quantised type.
NOINLINE void set_rows_quantized_noinline() {
    set_rows<true>(stage_params<VgRowsParams>(), stage_block());
}

// One block of a stage other than MMV.
NOINLINE void stage_noinline() {
    switch (this_stage().op) {
    case VG_STAGE_NORM_FUSED: norm_fused(stage_params<VgNormFusedParams>(), stage_block()); break;
    case VG_STAGE_QUANTIZE_Q8: quantize(stage_params<VgQuantizeQ8Params>(), stage_block()); break;
    case VG_STAGE_ROPE: rope(stage_params<VgRopeParams>(), stage_block()); break;
    case VG_STAGE_ROPE_ROWS: rope_rows(stage_params<VgRopeRowsParams>(), stage_block()); break;
    case VG_STAGE_SET_ROWS: set_rows<false>(stage_params<VgRowsParams>(), stage_block()); break;
    case VG_STAGE_SET_BLOCKS: set_rows_quantized_noinline(); break;
    case VG_STAGE_GET_ROWS: get_rows<false>(stage_params<VgRowsParams>(), stage_block()); break;
    case VG_STAGE_ADD_ID: add_id(stage_params<VgAddIdParams>(), stage_block()); break;
    case VG_STAGE_ELEMENTWISE:
        elementwise(stage_params<VgElementwiseParams>(), stage_block());
        break;
    case VG_STAGE_TOPK_MOE: topk_moe(stage_params<VgTopkMoeParams>(), stage_block()); break;
    case VG_STAGE_WEIGHTED_SUM:
        weighted_sum(stage_params<VgWeightedSumParams>(), stage_block());
        break;
    case VG_STAGE_FATTN_F16_64: fattn_noinline<64, KV_F16>(); break;
    case VG_STAGE_FATTN_BF16_64: fattn_noinline<64, KV_BF16>(); break;
    case VG_STAGE_FATTN_QUANT_64: fattn_noinline<64, KV_QUANT>(); break;
    case VG_STAGE_FATTN_F16_128: fattn_noinline<128, KV_F16>(); break;
    case VG_STAGE_FATTN_BF16_128: fattn_noinline<128, KV_BF16>(); break;
    default: fattn_noinline<128, KV_QUANT>();
    }
}

template <int COLUMNS> DEVICE void megakernel(const VgMegakernelParams& p) {
    DYNAMIC_SHARED(u8, shared);
    auto counter_of = [&](u32 at) {
        return reinterpret_cast<u32*>(p.counters) + at * VG_COUNTER_STRIDE;
    };
    if (this_thread() % WARP == 0) {
        WeightPipeline pipeline = {};
        pipeline.next.table = reinterpret_cast<const u8*>(p.table);
        pipeline.next.stages = p.stages;
        pipeline.next.open(p.products);
        pipeline.ring = shared + this_thread() / WARP * p.ring;
        pipeline.bytes = p.ring;
        this_warp().pipeline = pipeline;
        this_warp().started = 0;
        megakernel_state.arena = MMV_WARPS * p.ring; // all warps write the same value
    }
    __syncwarp();

    // The next stage is loaded while the current one runs.
    auto table_word = [&](u32 number) {
        return reinterpret_cast<const int4*>(p.table) + number * (VG_STAGE_BYTES / 16) +
               this_thread();
    };
    auto record_of = [&](u32 number) {
        return reinterpret_cast<int4*>(megakernel_state.records[number % 2]) + this_thread();
    };
    if (16 * this_thread() < p.first_stage_bytes) {
        *record_of(0) = *table_word(0);
    }
    for (u32 number = 0; number < p.stages; number = volatile_load(this_warp().number) + 1) {
        __syncthreads(); // the stage is loaded; the previous entry is free
        warp_store(this_warp().number, number);
        const VgStage& stage = this_stage();
        int4 ahead = {};
        bool has_ahead = 16 * this_thread() < stage.next_stage_bytes;
        if (has_ahead) {
            ahead = *table_word(number + 1);
        }
        u32 mine = (blockIdx.x + gridDim.x - stage.first) % gridDim.x;
        bool is_mine = mine < stage.total;
        if (is_mine) {
            with_pipeline([&](WeightPipeline& pipeline) {
                pipeline.fill(volatile_load(this_warp().started), this_thread() % WARP);
            });
        }
        if (has_ahead) {
            *record_of(number + 1) = ahead;
        }
        if (!is_mine) {
            continue;
        }
        // One thread waits; the other warps prefetch. Warps take turns.
        u32 who = number % MMV_WARPS;
        if (this_thread() == who * WARP) {
            for (u32 i = 0; i < stage.waits; i++) {
                wait_counter(counter_of(stage.wait[i].stage + 1), stage.wait[i].count);
            }
        } else if (stage.waits > 0 && this_thread() / WARP != who) {
            with_pipeline([&](WeightPipeline& pipeline) {
                pipeline.prefetch_ahead(volatile_load(this_warp().started), this_thread() % WARP);
            });
        }
        __syncthreads();
        warp_store(this_warp().started, number + 1);
        if (stage.op == VG_STAGE_MMV) {
            mmv_noinline<COLUMNS>();
        } else {
            for (u32 v = mine; v < this_stage().total;
                 v = volatile_load(this_warp().item) + gridDim.x) {
                set_stage_block(v);
                stage_noinline();
                __syncthreads(); // shared memory is free
            }
        }
        __syncthreads(); // all results are stored
        if (this_thread() == 0) {
            signal_counter(counter_of(volatile_load(this_warp().number) + 1));
        }
    }

    // No block waits any more when the last one arrives: it resets the counters.
    if (this_thread() == 0) {
        megakernel_state.attention.last = signal_counter_fetch(counter_of(0)) == gridDim.x - 1;
    }
    __syncthreads();
    if (megakernel_state.attention.last) {
        for (u32 i = this_thread(); i <= p.stages; i += blockDim.x) {
            *counter_of(i) = 0;
        }
    }
}

} // namespace
