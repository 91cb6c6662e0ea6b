// Matrix-vector products: weights with one to eight columns of activations, bound by the bandwidth
// of the weights. Blocks with other columns of the same product read the same weights at about the
// same time, from L2.
//
// Activations for quantised weights are quantised to q8 first (`vg_quantize_q8`); for float weights
// they are f32. A warp handles two rows of weights at a time: neighbours, or with a gated unit the
// same row of both matrices. The warp copies tiles of both rows to shared memory with 16-byte
// cp.async at any row alignment, a few tiles ahead of the arithmetic and across the ends of rows,
// so that loads are always in flight. Of a tile of quantised weights each half of the lanes has one
// row: 64 elements for each lane, unpacked once for all columns (`vec_dot_q8.cuh`).
//
// The issue rate of a scheduler is hardly above what memory delivers;
// `docs/gpu-performance-model.md` has instruction counts for each format. Pieces are therefore
// copied and multiplied without branches, and invariants are computed before the first row.
//
// Several matrices with the same activations share a launch: their pairs of rows are counted
// through.
//
// A joint launch multiplies the same weights with columns of several plans, each column at
// addresses of its own. A column gets the sums that it gets in a launch of its own plan: the order
// of sums depends on the lengths of a row and on `splits_rows`, not on the number of columns.
#pragma once
#include "vec_dot_q8.cuh"
#include "activation_fns.cuh"

namespace {

// Warps of a block, rows of a warp.
constexpr int MMV_WARPS = 4, MMV_ROWS = 2;

constexpr int MAX_COLUMNS = 8;

DEVICE constexpr bool is_float(int type) {
    return type == VG_F32 || type == VG_F16 || type == VG_BF16;
}

// Elements of a tile: a KiB of floats, or a q8 tile.
DEVICE constexpr int tile_elements(int type) {
    return is_float(type) ? 1024 / type_traits(type).bytes : Q8_TILE;
}

// Tag of a weight type for generic lambdas.
template <int OF> struct TypeTag {
    static constexpr int TYPE = OF;
};

// Accumulators. For float weights each lane has both rows; for quantised weights only its own, in
// of[0].
template <int COLUMNS> struct Accumulators {
    float of[MMV_ROWS][COLUMNS];
};

// State of a lane for quantised weights: its row of a pair, its chunk of each tile, and its
// address in the q8 activations of the first tile of the first column. The lane also copies to
// that row's buffer.
struct LaneContext {
    int row, chunk;
    const u8 *quants, *scales;
    u32 quants_at, scales_at; // joint launches: the lane's offset in a tile of a column
    int width, blocks; // elements of a row; blocks of 32 from the lane's first one
    u32 tiles;
};

// Bytes of a tile without repacked scales, of its repacked scales, and of its buffer in shared
// memory at any alignment. Repacked scales are stored behind the quants.
DEVICE constexpr int tile_bytes(int type) {
    return tile_elements(type) / type_traits(type).elements * quant_bytes(type);
}
DEVICE constexpr int tile_scale_bytes(int type) {
    return tile_elements(type) / type_traits(type).elements * scale_bytes(type);
}
DEVICE constexpr int stage_bytes(int type) {
    return (tile_bytes(type) + tile_scale_bytes(type) + 15) / 16 * 16 + 16;
}

// Pieces in flight or in use: as many as allow eight resident blocks on an SM.
DEVICE constexpr int stages_of(int type) {
    return stage_bytes(type) < 650 ? 5 : stage_bytes(type) < 900 ? 4 : 3;
}

// Which vectors a block multiplies: that of a slot of a token with experts, else MAX_COLUMNS
// columns of a batch, from column MAX_COLUMNS * slot on.
struct BatchIndex {
    static constexpr bool IS_JOINT = false;
    bool by_expert;
    i64 i1, i2, i3, expert;
    int columns;
    i64 column, x_row; // index of the activation row overall, and in dimension 1

    // Sets the slot of a token, or the columns and the batch. Returns false if the expert does not
    // exist, which is reported to the host if `reports` is set.
    DEVICE bool find(const VgMmvParams& p, i64 slot, i64 batch, bool reports) {
        place(p, slot, batch);
        return choose_expert(p, reports);
    }

    // Sets all but the expert.
    DEVICE void place(const VgMmvParams& p, i64 slot, i64 batch) {
        const View& dst = p.products[0].dst;
        expert = 0;
        if (p.ids.data) {
            by_expert = true, i1 = slot, i2 = batch, i3 = 0;
            columns = 1;
            x_row = p.slots == 1 ? 0 : static_cast<u32>(slot) % static_cast<u32>(p.slots);
            column = batch * p.slots + x_row;
            return;
        }
        by_expert = false, i1 = slot * MAX_COLUMNS, i2 = i3 = 0;
        // Slots and batches are grid sizes and fit 32 bits, whose division needs few instructions
        // and no call. There is nearly always one batch.
        if (batch != 0) {
            u32 of_all = static_cast<u32>(batch), each = static_cast<u32>(dst.ne[2]);
            i2 = of_all % each, i3 = of_all / each;
        }
        columns = static_cast<int>(dst.ne[1] - i1);
        columns = columns < MAX_COLUMNS ? columns : MAX_COLUMNS;
        x_row = i1;
        column = batch * dst.ne[1] + i1;
    }

    // Reads the expert, if there are experts. Returns false as `find` does.
    DEVICE bool choose_expert(const VgMmvParams& p, bool reports) {
        if (!by_expert) {
            return true;
        }
        expert = *reinterpret_cast<const int*>(address(p.ids, Index{{i1, i2, 0, 0}}));
        i64 experts = p.products[0].w.ne[2];
        return reports ? check_index(p.site, expert, experts) : expert >= 0 && expert < experts;
    }

    DEVICE const u8* weights(const VgProduct& it) const {
        i64 at2 = expert, at3 = 0;
        if (i2 + i3 != 0 && !by_expert) {
            at2 = shared_index(i2, it.dst.ne[2], it.w.ne[2]);
            at3 = shared_index(i3, it.dst.ne[3], it.w.ne[3]);
        }
        return address(it.w, Index{{0, 0, at2, at3}});
    }
    DEVICE float* result(const VgMmvParams& p, u32 product, i64 row, int column) const {
        const VgProduct& it = p.products[product];
        return reinterpret_cast<float*>(address(it.dst, Index{{row, i1 + column, i2, i3}}));
    }
    DEVICE float added(const VgMmvParams& p, u32 product, i64 row, int column) const {
        const VgProduct& it = p.products[product];
        if (!it.add.data) {
            return 0.0f;
        }
        const View& v = it.add;
        Index at = {{row,
                     by_expert     ? expert
                     : v.ne[1] > 1 ? i1 + column
                                   : 0,
                     v.ne[2] > 1 ? i2 : 0, v.ne[3] > 1 ? i3 : 0}};
        return *reinterpret_cast<const float*>(address(v, at));
    }
};

// The columns of a block of a joint launch.
struct JointIndex : BatchIndex {
    static constexpr bool IS_JOINT = true;
    const VgMmvColumn* table; // in shared memory

    // Sets the columns, whose addresses the block copies to `shared`. They are there when the
    // threads of the block have met.
    DEVICE void place(const VgMmvJointParams& p, VgMmvColumn* shared) {
        by_expert = false, i1 = i2 = i3 = expert = column = x_row = 0;
        int first = static_cast<int>(blockIdx.y) * MAX_COLUMNS,
            left = static_cast<int>(p.columns) - first;
        columns = left < MAX_COLUMNS ? left : MAX_COLUMNS;
        const u64* from = reinterpret_cast<const u64*>(p.column + first);
        u64* to = reinterpret_cast<u64*>(shared);
        int words = columns * static_cast<int>(sizeof(VgMmvColumn) / sizeof(u64));
        for (int i = threadIdx.x; i < words; i += MMV_WARPS * WARP) {
            to[i] = from[i];
        }
        table = shared;
    }

    DEVICE float* result(const VgMmvParams& p, u32 product, i64 row, int column) const {
        u64 start = table[column].dst[product];
        return reinterpret_cast<float*>(start + row * p.products[product].dst.nb[0]);
    }
    DEVICE float added(const VgMmvParams& p, u32 product, i64 row, int column) const {
        u64 start = table[column].add[product];
        if (!start) {
            return 0.0f;
        }
        return *reinterpret_cast<const float*>(start + row * p.products[product].add.nb[0]);
    }
    // The words of an address: NVRTC 12.9 does not end if it is read whole.
    DEVICE const u8* row_of(int column) const {
        int4 words = load_int4(reinterpret_cast<const u8*>(table + column));
        return start_at(words.x, words.y);
    }
    DEVICE static const u8* start_at(int low, int high) {
        return global_at(static_cast<u64>(static_cast<u32>(high)) << 32 | static_cast<u32>(low));
    }
};

// Converts 16 bytes of floats to f32.
template <int TYPE> DEVICE void unpack_floats(const int4& four, float* x) {
    const int words[4] = {four.x, four.y, four.z, four.w};
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 word = static_cast<u32>(words[i]);
        if (TYPE == VG_F32) {
            x[i] = __uint_as_float(word);
        } else if (TYPE == VG_BF16) {
            x[2 * i] = __uint_as_float(word << 16),
                  x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
        } else {
            x[2 * i] = to_float(f16{static_cast<u16>(word)}),
                  x[2 * i + 1] = to_float(f16{static_cast<u16>(word >> 16)});
        }
    }
}

// Number of pairs of rows of all products. With a gated unit a pair has a row of both matrices.
DEVICE i64 pairs_of(const VgMmvParams& p) {
    i64 pairs = 0;
    for (u32 m = 0; m < p.count; m++) {
        pairs += p.unit != VG_OP_ADD ? m ? 0 : p.products[0].dst.ne[0]
                                     : (p.products[m].dst.ne[0] + 1) / 2;
    }
    return pairs;
}

// The first row of a pair, and the product that it belongs to.
DEVICE i64 row_of_pair(const VgMmvParams& p, i64 pair, u32* product) {
    *product = 0;
    if (p.unit != VG_OP_ADD) {
        return pair;
    }
    while (*product + 1 < p.count && pair >= (p.products[*product].dst.ne[0] + 1) / 2) {
        pair -= (p.products[*product].dst.ne[0] + 1) / 2;
        ++*product;
    }
    return 2 * pair;
}

// Address of row `r` of a pair. `weights(m)` is the address of the weights of product m.
template <class Weights>
DEVICE RowPtr start_of(const VgMmvParams& p, const Weights& weights, i64 pair, int r,
                       const RowBytes& bytes) {
    bool has_unit = p.unit != VG_OP_ADD;
    u32 product;
    i64 row = row_of_pair(p, pair, &product);
    product = has_unit ? r : product;
    const VgProduct& it = p.products[product];
    row += has_unit ? 0 : r;
    row = row < it.dst.ne[0] ? row : it.dst.ne[0] - 1;
    return row_ptr(weights(product), it.w, row, bytes);
}

// Starts to copy a lane's part of a tile, at most `left` bytes of a row, in 16-byte units at any
// alignment.
DEVICE void copy_tile(u8* to, const u8* start, i64 left, int bytes, int lane) {
    int lead = static_cast<int>(reinterpret_cast<u64>(start) & 15);
    int count = (lead + static_cast<int>(left < bytes ? left : bytes) + 15) / 16;
    for (int i = lane; i < count; i += WARP) {
        cp_async(to + 16 * i, start - lead + 16 * i);
    }
}

// Starts to copy a tile of a lane's own row, by half a warp and without branches: every 16th 16
// bytes from `start` on. Rows are 16-byte aligned if ALIGNED; `left` is the number of bytes from
// the tile to the end of the row.
template <int BYTES, bool ALIGNED, int OFFSET = 0>
DEVICE void copy_lane_tile(u8* to, const u8* start, int left, int chunk) {
    u32 lead = ALIGNED ? 0 : static_cast<u32>(reinterpret_cast<u64>(start)) & 15;
    int bytes = static_cast<int>(lead) + (left < BYTES ? left : BYTES) - 16 * chunk;
    if constexpr (ALIGNED && BYTES % (16 * CHUNKS) == 0 &&
                  OFFSET < BYTES) { // every lane copies the same number of units
        cp_async_if<OFFSET>(OFFSET < left - 16 * chunk, to, start);
        copy_lane_tile<BYTES, ALIGNED, OFFSET + 16 * CHUNKS>(to, start, left, chunk);
    } else if constexpr (OFFSET < BYTES + (ALIGNED ? 0 : 15)) {
        cp_async_if<OFFSET>(left > 0 && OFFSET < bytes, to, start - lead);
        copy_lane_tile<BYTES, ALIGNED, OFFSET + 16 * CHUNKS>(to, start, left, chunk);
    }
}

// Copies the repacked scales of a lane's own row: 16 bytes of each tile, or none. If a tile has a
// multiple of 16 bytes of scales (IS_STEADY), `from` and `left` are those of the lane's next 16
// bytes; otherwise they are those of the row.
template <int TYPE> struct LaneScales {
    static constexpr int BYTES = tile_scale_bytes(TYPE);
    static constexpr bool IS_STEADY = BYTES % 16 == 0;
    static_assert(BYTES + 16 <= 16 * CHUNKS, "half a warp copies them at once");
    const u8* from;
    int left;

    DEVICE LaneScales(const u8* row, int bytes, int chunk) : from(row), left(bytes) {
        if (IS_STEADY) {
            int lead = static_cast<int>(reinterpret_cast<u64>(row)) & 15;
            from = row - lead + 16 * chunk;
            left = 16 * chunk < lead + BYTES ? lead + bytes - 16 * chunk : 0;
        }
    }
    // Skips tiles.
    DEVICE void skip(int tiles) { from += tiles * BYTES, left -= tiles * BYTES; }
    DEVICE void copy(u8* to, int chunk) {
        u32 lead = IS_STEADY ? 0 : static_cast<u32>(reinterpret_cast<u64>(from)) & 15;
        bool wanted = left > 0 && (IS_STEADY || 16 * chunk < static_cast<int>(lead) +
                                                                 (left < BYTES ? left : BYTES));
        cp_async_if<0>(wanted, to, from - lead + (IS_STEADY ? 0 : 16 * chunk));
    }
};
template <> struct LaneScales<0> {
    DEVICE LaneScales(const u8*, int, int) {}
    DEVICE void skip(int) {}
    DEVICE void copy(u8*, int) {}
};

// `are_adjacent`: the two blocks of 32 of a lane are neighbours.
DEVICE LaneContext lane_context(const VgMmvParams& p, const BatchIndex& batch, int width,
                                bool are_adjacent, int lane) {
    LaneContext own;
    own.row = static_cast<int>(opaque(static_cast<u32>(lane) / CHUNKS));
    own.chunk = static_cast<int>(opaque(static_cast<u32>(lane) % CHUNKS));
    own.width = width;
    own.blocks =
        static_cast<int>(opaque(static_cast<u32>(width / 32 - (are_adjacent ? 2 : 1) * own.chunk)));
    own.tiles = q8_tiles(width);
    own.quants = own.scales = nullptr;
    if (p.quants) {
        i64 tile = batch.column * own.tiles;
        // Neighbouring blocks: the lane's chunk; otherwise one block of a chunk, and the one 8
        // chunks behind it.
        int chunk = are_adjacent ? own.chunk : own.chunk / 2;
        int second = are_adjacent ? 0 : own.chunk % 2;
        own.quants = opaque_global(reinterpret_cast<const u8*>(p.quants) + tile * Q8_TILE +
                                   chunk * 16 + second * (Q8_TILE / 2));
        own.scales = opaque_global(reinterpret_cast<const u8*>(p.scales) + tile * Q8_TILE_SCALES +
                                   chunk * 16 + second * 4);
    }
    return own;
}

DEVICE LaneContext lane_context(const VgMmvParams& p, const JointIndex& batch, int width,
                                bool are_adjacent, int lane) {
    const BatchIndex& base = batch;
    LaneContext own = lane_context(p, base, width, are_adjacent, lane);
    int chunk = are_adjacent ? own.chunk : own.chunk / 2;
    int second = are_adjacent ? 0 : own.chunk % 2;
    own.quants_at = opaque(static_cast<u32>(chunk * 16 + second * (Q8_TILE / 2)));
    own.scales_at = opaque(static_cast<u32>(chunk * 16 + second * 4));
    return own;
}

// Multiplies a tile of two rows of floats, which are `stage_bytes` apart from `rows` on. The whole
// warp calls it.
template <int TYPE, int COLUMNS, class Batch>
DEVICE void dot_floats(const VgMmvParams& p, const Batch& batch, const u8* rows, int tile,
                       const LaneContext& own, int lane, Accumulators<COLUMNS>& sums) {
    constexpr TypeTraits SIZE = type_traits(TYPE);
    constexpr int TILE = tile_elements(TYPE), STAGE_BYTES = stage_bytes(TYPE);
    const u8* x = nullptr;
    if constexpr (!Batch::IS_JOINT) {
        x = address(p.x, Index{{0, batch.x_row, batch.i2, batch.i3}});
    }
    constexpr int EACH = 16 / SIZE.bytes;
    UNROLL
    for (int i = 0; i < TILE / EACH / WARP; i++) {
        int at = (i * WARP + lane) * EACH;
        int element = tile * TILE + at;
        if (element < own.width) {
            float weights[MMV_ROWS][EACH];
            UNROLL
            for (int r = 0; r < MMV_ROWS; r++) {
                const u8* from = rows + r * STAGE_BYTES + at * SIZE.bytes;
                unpack_floats<TYPE>(*reinterpret_cast<const int4*>(from), weights[r]);
            }
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                if (c == 0 || c < batch.columns) {
                    const u8* from = x + c * p.x.nb[1] + 4 * static_cast<i64>(element);
                    if constexpr (Batch::IS_JOINT) {
                        from = batch.row_of(c) + 4 * static_cast<i64>(element);
                    }
                    float activations[EACH];
                    UNROLL
                    for (int j = 0; j < EACH / 4; j++) {
                        unpack_floats<VG_F32>(*aligned<int4>(from + 16 * j), activations + 4 * j);
                    }
                    UNROLL
                    for (int r = 0; r < MMV_ROWS; r++) {
                        UNROLL
                        for (int j = 0; j < EACH; j++) {
                            sums.of[r][c] += weights[r][j] * activations[j];
                        }
                    }
                }
            }
        }
    }
}

// The activations of a lane for tile `tile` of column `column`.
template <int TYPE>
DEVICE Activations<TYPE> activations_of(const BatchIndex&, const LaneContext& own, int column,
                                        int tile) {
    u32 number = column * own.tiles + static_cast<u32>(tile);
    return {own.quants + static_cast<u64>(number) * Q8_TILE,
            own.scales + static_cast<u64>(number) * Q8_TILE_SCALES, own.chunk};
}
template <int TYPE>
DEVICE Activations<TYPE> activations_of(const JointIndex& batch, const LaneContext& own, int column,
                                        int tile) {
    int4 both = load_int4(reinterpret_cast<const u8*>(batch.table + column));
    u32 number = static_cast<u32>(tile);
    return {batch.start_at(both.x, both.y) + (number * Q8_TILE + own.quants_at),
            batch.start_at(both.z, both.w) + (number * Q8_TILE_SCALES + own.scales_at), own.chunk};
}

// Multiplies a lane's part of a tile of its own row, at `at`, with one column. Blocks behind the
// end of a row are computed and discarded.
template <int TYPE>
DEVICE void dot_quants_1(const VgCodebooks* grids, const RowPtr& at, int tile,
                         const LaneContext& own, const LaneOffsets& lane_offsets,
                         const LoadedActivations<TYPE>& x, float& sum) {
    constexpr bool IS_LARGE = type_traits(TYPE).elements > 32;
    Chunk<TYPE> weights(grids, at, lane_offsets);
    // A row of blocks of 32 may end between the lane's two blocks.
    int blocks = own.blocks - tile * (Q8_TILE / 32);
    float all = 0.0f;
    UNROLL
    for (int s = 0; s < 2; s++) {
        float more;
        if constexpr (splits_signs(TYPE, 1)) {
            more = dot_split_signs<TYPE>(weights, x, s, x.factor);
        } else {
            Unpacked u;
            weights.unpack_block(s, u);
            more = dot_block<TYPE>(u, x, s, x.factor, x.sum);
        }
        all = s == 0 ? more
                     : all + (IS_LARGE || second_block_offset(TYPE) < blocks ? more : 0.0f);
    }
    sum += 0 < blocks ? all : 0.0f;
}

// Multiplies a lane's part of a tile of its own row, at `at`. Blocks behind the end of a row are
// computed and discarded.
template <int TYPE, int COLUMNS, class Batch>
DEVICE void dot_quants(const Batch& batch, const VgCodebooks* grids, const RowPtr& at,
                       int tile, const LaneContext& own, const LaneOffsets& lane_offsets,
                       Accumulators<COLUMNS>& sums) {
    constexpr int BLOCKS = Q8_TILE / 32;
    constexpr bool IS_LARGE = type_traits(TYPE).elements > 32;
    Chunk<TYPE> weights(grids, at, lane_offsets);
    // A row of blocks of 32 may end between the lane's two blocks.
    int blocks = own.blocks - tile * BLOCKS;
    float factor[COLUMNS][2][2], sum[COLUMNS][2][2], all[COLUMNS] = {};
    UNROLL
    for (int s = 0; s < 2; s++) {
        Unpacked u;
        if constexpr (!splits_signs(TYPE, COLUMNS)) {
            weights.unpack_block(s, u);
        }
        UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            if (c == 0 || c < batch.columns) {
                Activations<TYPE> x = activations_of<TYPE>(batch, own, c, tile);
                if (s == 0 || COLUMNS > 1) {
                    x.factors(factor[c], sum[c]);
                }
                float more;
                if constexpr (splits_signs(TYPE, COLUMNS)) {
                    more = dot_split_signs<TYPE>(weights, x, s, factor[c]);
                } else {
                    more = dot_block<TYPE>(u, x, s, factor[c], sum[c]);
                }
                all[c] = s == 0 ? more
                                : all[c] + (IS_LARGE || second_block_offset(TYPE) < blocks ? more
                                                                                           : 0.0f);
            }
        }
    }
    UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        sums.of[0][c] += 0 < blocks ? all[c] : 0.0f;
    }
}

// Whether rows of weights (or of repacked quants) are always 16-byte aligned. The host ensures it
// (`alignment` in `launch/kernel_table.rs`).
DEVICE constexpr bool are_aligned(int type) {
    return is_float(type) || type == VG_Q4_K || type == VG_Q5_K || is_repacked(type);
}

// Increment of the low address bits from tile to tile.
DEVICE constexpr int low_bits_per_tile(int type) {
    return is_repacked(type)   ? tile_scale_bytes(type) % 16
           : are_aligned(type) ? 0
                               : tile_bytes(type);
}

// Low address bits of the array of a row that need not be 16-byte aligned.
template <int TYPE> DEVICE u32 low_bits(const RowPtr& at) {
    return static_cast<u32>(reinterpret_cast<u64>(is_repacked(TYPE) ? at.scales : at.quants));
}

// Multiplies a tile: of two rows of floats, `stage_bytes` apart from `rows` on; or of the lane's
// own quantised row at `rows`. `start` has the low bits of the row's address in memory
// (`low_bits`).
template <int TYPE, int COLUMNS, class Batch>
DEVICE void dot_tile(const VgMmvParams& p, const Batch& batch, const VgCodebooks* grids,
                     const u8* rows, u32 start, int tile, const LaneContext& own,
                     const LaneOffsets& lane_offsets, int lane, Accumulators<COLUMNS>& sums) {
    if constexpr (is_float(TYPE)) {
        dot_floats<TYPE, COLUMNS>(p, batch, rows, tile, own, lane, sums);
    } else {
        RowPtr at = {rows + (are_aligned(TYPE) ? 0 : start & 15),
                     rows + tile_bytes(TYPE) + (start & 15)};
        dot_quants<TYPE, COLUMNS>(batch, grids, at, tile, own, lane_offsets, sums);
    }
}

// Reduces a pair's sums over the lanes, and clears them. Half a warp has a row, and lane c of it
// gets the sum of column c. `has_both`: each lane has sums of both rows.
template <int COLUMNS>
DEVICE float reduce_pair(int lane, Accumulators<COLUMNS>& sums, bool has_both) {
    int r = lane / CHUNKS, column = lane % CHUNKS;
    float own = 0.0f;
    UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        float sum = sums.of[0][c];
        if (has_both) {
            float given = r ? sum : sums.of[1][c];
            sum = (r ? sums.of[1][c] : sum) + __shfl_xor_sync(0xffffffffu, given, CHUNKS);
        }
        UNROLL
        for (int step = CHUNKS / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        }
        own = column == c ? sum : own;
        sums.of[0][c] = sums.of[1][c] = 0.0f;
    }
    return own;
}

// Stores the sums of a pair, distributed as by `reduce_pair`, with bias and gated unit.
template <class Batch>
DEVICE void store_sums(const VgMmvParams& p, const Batch& batch, i64 pair, int lane, float own) {
    int r = lane / CHUNKS, column = lane % CHUNKS;
    bool has_unit = p.unit != VG_OP_ADD;
    u32 product;
    i64 row = row_of_pair(p, pair, &product);
    if (column < batch.columns) {
        row += has_unit ? 0 : r;
        u32 at = has_unit ? r : product;
        if (row < p.products[at].dst.ne[0]) {
            own += batch.added(p, at, row, column);
            if (!has_unit) {
                *batch.result(p, at, row, column) = own;
            }
        }
    }
    if (has_unit) {
        float other = __shfl_xor_sync(0xffffffffu, own, CHUNKS);
        if (r == 0 && column < batch.columns) {
            *batch.result(p, 0, row, column) = gated(p.unit, own, other, p.c);
        }
    }
}

// Reduces and stores a pair's sums, and clears them.
template <int COLUMNS>
DEVICE void store_pair(const VgMmvParams& p, const BatchIndex& batch, i64 pair, int lane,
                       Accumulators<COLUMNS>& sums, bool has_both) {
    store_sums(p, batch, pair, lane, reduce_pair(lane, sums, has_both));
}

// The products of a block whose columns are those of `batch`.
template <int TYPE, int COLUMNS, class Batch>
DEVICE void multiply(const VgMmvParams& p, Batch& batch) {
    constexpr int TILE_BYTES = tile_bytes(TYPE), STAGE_BYTES = stage_bytes(TYPE),
                  PAIR_BYTES = MMV_ROWS * STAGE_BYTES;
    constexpr int STAGES = stages_of(TYPE);
    __shared__ __align__(16) u8 stages[MMV_WARPS][STAGES][PAIR_BYTES];
    __shared__ float part_sums[MMV_WARPS][WARP];
    __shared__ const u8* weights[3];
    const VgCodebooks* grids = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const View& w = p.products[0].w;
    // Weights that no launch of the graph writes are fetched before the launches before this one
    // have ended. Which experts these are is known only then.
    bool is_ahead = p.has_constant_weights && !p.ids.data;
    int pairs = static_cast<int>(pairs_of(p)), width = static_cast<int>(w.ne[0]);
    int row_bytes = width / type_traits(TYPE).elements * quant_bytes(TYPE);
    RowBytes repacked = repacked_row_bytes(TYPE, width);
    int tiles = (width + tile_elements(TYPE) - 1) / tile_elements(TYPE);
    // A warp has every pair of rows of its own, or the warps of a block share one, each with every
    // fourth tile (`splits_rows`). The latter keeps more warps busy where pairs are few.
    bool splits_rows = p.splits_rows != 0;
    int parts = splits_rows ? MMV_WARPS : 1, part = splits_rows ? warp : 0;
    int step = static_cast<int>(gridDim.x) * (MMV_WARPS / parts);
    int pair = static_cast<int>(blockIdx.x) * (MMV_WARPS / parts) + (splits_rows ? 0 : warp),
        fetched_pair = pair;
    LaneContext own = lane_context(p, batch, width, second_block_offset(TYPE) == 1, lane);
    LaneOffsets lane_offsets = opaque_lane_offsets<TYPE, COLUMNS>(own.chunk);
    u8* ring = opaque_shared(stages[warp][0] + (is_float(TYPE) ? 0 : own.row * STAGE_BYTES));
    u8* copy_dst = opaque_shared(stages[warp][0] + own.row * STAGE_BYTES + own.chunk * 16);
    // One column: the activations of the next tile are loaded behind the product of this one.
    constexpr bool LOADS_AHEAD = !is_float(TYPE) && COLUMNS == 1;
    LoadedActivations<LOADS_AHEAD ? TYPE : VG_Q8_0> x = {};
    auto wait_and_load = [&]() {
        grid_dependency_wait();
        if constexpr (LOADS_AHEAD) {
            x.load(activations_of<TYPE>(batch, own, 0, part));
        }
    };
    if (!is_ahead) {
        wait_and_load();
        if (!batch.choose_expert(p, true)) {
            return;
        }
    }
    // The next tile to fetch: its pair of rows, the lane's address in its own row, the bytes left
    // of it, and the destination.
    // The weights of each product are the same for all rows of a block.
    if (threadIdx.x < p.count) {
        weights[threadIdx.x] = batch.weights(p.products[threadIdx.x]);
    }
    __syncthreads();
    if (pair >= pairs) {
        return;
    }
    auto weights_of = [&](u32 product) { return weights[product]; };
    auto start = [&](i64 pair) { return start_of(p, weights_of, pair, own.row, repacked); };
    using Scales = LaneScales<is_repacked(TYPE) ? TYPE : 0>;
    RowPtr begin = start(pair);
    const u8* from = begin.quants + own.chunk * 16 + part * TILE_BYTES;
    Scales scales(begin.scales, repacked.scales, own.chunk);
    scales.skip(part);
    int left = row_bytes - part * TILE_BYTES;
    int to = 0;
    auto fetch = [&]() {
        copy_lane_tile<TILE_BYTES, are_aligned(TYPE)>(copy_dst + to, from, left, own.chunk);
        scales.copy(copy_dst + to + TILE_BYTES, own.chunk);
        cp_async_commit();
        to = to < (STAGES - 1) * PAIR_BYTES ? to + PAIR_BYTES : 0;
        from += parts * TILE_BYTES;
        left -= parts * TILE_BYTES;
        scales.skip(parts);
        if (left <= 0 && fetched_pair < pairs) {
            fetched_pair += step;
            if (fetched_pair < pairs) {
                RowPtr next = start(fetched_pair);
                from = next.quants + own.chunk * 16 + part * TILE_BYTES;
                scales = Scales(next.scales, repacked.scales, own.chunk);
                scales.skip(part);
                left = row_bytes - part * TILE_BYTES;
            }
        }
    };
    // The next tile to multiply, and the low bits of its address in memory.
    int tile = part, at = 0;
    u32 bits = low_bits<TYPE>(begin) + part * low_bits_per_tile(TYPE);
    UNROLL_TIMES(1)
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch();
    }
    if (is_ahead) {
        wait_and_load();
    }
    Accumulators<COLUMNS> sums = {};
    while (true) {
        cp_async_wait<STAGES - 2>();
        // Makes the copies of other lanes visible, and orders their reads before the next
        // overwrite.
        __syncwarp();
        fetch();
        if constexpr (LOADS_AHEAD) {
            const u8* row = ring + at;
            RowPtr begin = {row + (are_aligned(TYPE) ? 0 : bits & 15),
                            row + tile_bytes(TYPE) + (bits & 15)};
            dot_quants_1<TYPE>(grids, begin, tile, own, lane_offsets, x, sums.of[0][0]);
            // The next ones arrive while weights are unpacked. Loading them before this product
            // takes more registers, and copies between registers that wait for the loads.
            x.load(activations_of<TYPE>(batch, own, 0, tile + parts < tiles ? tile + parts : part));
        } else {
            dot_tile<TYPE, COLUMNS>(p, batch, grids, ring + at, bits, tile, own, lane_offsets, lane,
                                    sums);
        }
        at = at < (STAGES - 1) * PAIR_BYTES ? at + PAIR_BYTES : 0;
        bits += parts * low_bits_per_tile(TYPE);
        tile += parts;
        if (tile < tiles) {
            continue;
        }
        float sum = reduce_pair(lane, sums, is_float(TYPE));
        if (splits_rows) {
            part_sums[warp][lane] = sum;
            __syncthreads();
            if (warp == 0) {
                sum = part_sums[0][lane] + part_sums[1][lane] + part_sums[2][lane] +
                      part_sums[3][lane];
                store_sums(p, batch, pair, lane, sum);
            }
            __syncthreads(); // before the next sums
        } else {
            store_sums(p, batch, pair, lane, sum);
        }
        tile = part;
        pair += step;
        if (pair >= pairs) {
            break;
        }
        if (!are_aligned(TYPE) || is_repacked(TYPE)) {
            bits = low_bits<TYPE>(start(pair)) + part * low_bits_per_tile(TYPE);
        }
    }
}

template <int TYPE, int COLUMNS> DEVICE void mmv(const VgMmvParams& p) {
    BatchIndex batch;
    batch.place(p, blockIdx.y, blockIdx.z);
    multiply<TYPE, COLUMNS>(p, batch);
}

template <int TYPE> DEVICE void mmv_joint(const VgMmvJointParams& p) {
    __shared__ __align__(16) VgMmvColumn table[MAX_COLUMNS];
    JointIndex batch;
    batch.place(p, table);
    multiply<TYPE, MAX_COLUMNS>(p.of, batch);
}

} // namespace
