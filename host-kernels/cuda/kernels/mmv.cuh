// Products of weights with one to eight columns of activations, for which reading the weights is what takes time.
//
// Activations for quantised weights are rounded to 8 bits in blocks of 32 first (`vg_quantize_q8`); with weights that are
// floats they are f32 as they come. A warp takes two rows of weights at a time: neighbours, or, where a gated unit follows,
// the same row of both matrices. It copies pieces of both to shared memory in whole 16-byte pieces, wherever rows begin, a
// few pieces ahead of its arithmetic and across the ends of rows: so loads are always on their way, whatever the format's
// block looks like. Of a piece of quantised weights half the lanes have the one row, and half the other: 64 elements each, which
// they unpack once for all columns (`vec_dot_q8.cuh`).
//
// What a scheduler of a GPU can issue is little more than what memory brings: `docs/GPU.md` has the instructions of each
// format beside that. So pieces are copied and multiplied without branches, and what is the same for all is calculated
// before the first row.
//
// Several matrices that are multiplied with the same activations are one launch: their pairs of rows are counted through.
#pragma once
#include "vec_dot_q8.cuh"
#include "activation_fns.cuh"

namespace {

// Warps of a block, rows of a warp.
constexpr int VECTOR_WARPS = 4, VECTOR_ROWS = 2;

constexpr int MOST_COLUMNS = 8;

DEVICE constexpr bool is_float(int type) { return type == VG_F32 || type == VG_F16 || type == VG_BF16; }

// Elements of a piece: of floats a KiB of them.
DEVICE constexpr int piece_of(int type) { return is_float(type) ? 1024 / geometry(type).bytes : ROUNDED_PIECE; }

// A type of weights, for functions that are given one.
template <int OF> struct Weights {
    static constexpr int TYPE = OF;
};

// Of floats each lane has sums of both rows; of quantised weights of its own one, in the first place.
template <int COLUMNS> struct Sums {
    float of[VECTOR_ROWS][COLUMNS];
};

// What a lane multiplies of quantised weights: which row of a pair, which chunk of each piece of it; and its part of the
// activations, from the first piece of the first column on. It also copies to that row's place.
struct Own {
    int row, chunk;
    const u8 *quants, *scales;
    int width, blocks; // elements of a row; blocks of 32 of it, from the lane's first on
    u32 pieces;
};

// Bytes of a piece, but for scales that have a plane of their own, bytes of those, and of a piece's place in shared memory,
// wherever it begins: scales that have a plane lie behind the quants.
DEVICE constexpr int piece_bytes(int type) { return piece_of(type) / geometry(type).elements * quant_bytes(type); }
DEVICE constexpr int piece_scales(int type) { return piece_of(type) / geometry(type).elements * scale_bytes(type); }
DEVICE constexpr int stage_bytes(int type) { return (piece_bytes(type) + piece_scales(type) + 15) / 16 * 16 + 16; }

// Pieces on their way or in use: as many as leave room for eight blocks on a multiprocessor.
DEVICE constexpr int stages_of(int type) { return stage_bytes(type) < 900 ? 4 : 3; }

// Which vectors a block of threads multiplies: of the experts' those of a slot of a token, else those of a batch.
struct Place {
    bool by_expert;
    i64 i1, i2, i3, expert;
    int columns;
    i64 column, x_row; // of the activations: of all, and in dimension 1

    // That of `slot` of a token, or of a batch. False if there is no such expert, which is told to the host if it `reports`.
    DEVICE bool find(const VgMmvParams& p, i64 slot, i64 batch, bool reports) {
        const View& dst = p.products[0].dst;
        if (p.ids.data) {
            expert = *reinterpret_cast<const int*>(address(p.ids, Index{{slot, batch, 0, 0}}));
            by_expert = true, i1 = slot, i2 = batch, i3 = 0;
            columns = 1;
            x_row = static_cast<u32>(slot) % static_cast<u32>(p.slots);
            column = batch * p.slots + x_row;
            i64 experts = p.products[0].w.ne[2];
            return reports ? check_index(p.place, expert, experts) : expert >= 0 && expert < experts;
        }
        by_expert = false, i1 = i2 = i3 = expert = 0;
        // Slots and batches are of a grid: 32 bits hold them, which divide in a few instructions and not in a call. Nearly
        // always there is one batch.
        if (batch != 0) {
            u32 of_all = static_cast<u32>(batch), each = static_cast<u32>(dst.ne[2]);
            i2 = of_all % each, i3 = of_all / each;
        }
        columns = static_cast<int>(dst.ne[1]);
        x_row = 0;
        column = batch * columns;
        return true;
    }

    // Which of `few` matrices that `all` share equally is that of number `i`.
    DEVICE static i64 shared(i64 i, i64 all, i64 few) {
        return static_cast<u32>(i) / (static_cast<u32>(all) / static_cast<u32>(few));
    }

    DEVICE const u8* weights(const VgProduct& it) const {
        i64 at2 = expert, at3 = 0;
        if (i2 + i3 != 0 && !by_expert) {
            at2 = shared(i2, it.dst.ne[2], it.w.ne[2]);
            at3 = shared(i3, it.dst.ne[3], it.w.ne[3]);
        }
        return address(it.w, Index{{0, 0, at2, at3}});
    }
    DEVICE float* result(const VgProduct& it, i64 row, int column) const {
        return reinterpret_cast<float*>(address(it.dst, Index{{row, i1 + column, i2, i3}}));
    }
    DEVICE float added(const VgProduct& it, i64 row, int column) const {
        if (!it.add.data) {
            return 0.0f;
        }
        const View& v = it.add;
        Index at = {{row, by_expert ? expert : v.ne[1] > 1 ? column : 0, v.ne[2] > 1 ? i2 : 0, v.ne[3] > 1 ? i3 : 0}};
        return *reinterpret_cast<const float*>(address(v, at));
    }
};

// 16 bytes of floats.
template <int TYPE> DEVICE void floats_of(const int4& four, float* x) {
    const int words[4] = {four.x, four.y, four.z, four.w};
    UNROLL
    for (int i = 0; i < 4; i++) {
        u32 word = static_cast<u32>(words[i]);
        if (TYPE == VG_F32) {
            x[i] = __uint_as_float(word);
        } else if (TYPE == VG_BF16) {
            x[2 * i] = __uint_as_float(word << 16), x[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
        } else {
            x[2 * i] = to_float(f16{static_cast<u16>(word)}), x[2 * i + 1] = to_float(f16{static_cast<u16>(word >> 16)});
        }
    }
}

// Pairs of rows of all products. With a gated unit, pairs are of both.
DEVICE i64 pairs_of(const VgMmvParams& p) {
    i64 pairs = 0;
    for (u32 m = 0; m < p.count; m++) {
        pairs += p.unit != VG_OP_ADD ? m ? 0 : p.products[0].dst.ne[0] : (p.products[m].dst.ne[0] + 1) / 2;
    }
    return pairs;
}

// The first row of a pair, and which product's it is.
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

// Where row `r` of a pair begins. `bytes` is of such rows.
DEVICE Begin start_of(const VgMmvParams& p, const Place& place, i64 pair, int r, const RowBytes& bytes) {
    bool has_unit = p.unit != VG_OP_ADD;
    u32 product;
    i64 row = row_of_pair(p, pair, &product);
    const VgProduct& it = p.products[has_unit ? r : product];
    row += has_unit ? 0 : r;
    row = row < it.dst.ne[0] ? row : it.dst.ne[0] - 1;
    return begin_of(place.weights(it), it.w, row, bytes);
}

// Begins to copy a lane's part of a piece, `left` bytes of a row at most, in whole 16 bytes, wherever it lies.
DEVICE void copy_piece(u8* to, const u8* start, i64 left, int bytes, int lane) {
    int lead = static_cast<int>(reinterpret_cast<u64>(start) & 15);
    int count = (lead + static_cast<int>(left < bytes ? left : bytes) + 15) / 16;
    for (int i = lane; i < count; i += WARP) {
        copy_async(to + 16 * i, start - lead + 16 * i);
    }
}

// The same of a lane's own row, by half a warp and without a branch: every 16th 16 bytes from `start` on. Rows begin at
// multiples of 16 if they are `ALIGNED`; `left` is what there is of the row from the piece on.
template <int BYTES, bool ALIGNED, int BEYOND = 0> DEVICE void copy_own_piece(u8* to, const u8* start, int left, int chunk) {
    u32 lead = ALIGNED ? 0 : static_cast<u32>(reinterpret_cast<u64>(start)) & 15;
    int bytes = static_cast<int>(lead) + (left < BYTES ? left : BYTES) - 16 * chunk;
    if constexpr (ALIGNED && BYTES % (16 * CHUNKS) == 0 && BEYOND < BYTES) { // every lane has as many of a whole piece
        copy_async_if<BEYOND>(BEYOND < left - 16 * chunk, to, start);
        copy_own_piece<BYTES, ALIGNED, BEYOND + 16 * CHUNKS>(to, start, left, chunk);
    } else if constexpr (BEYOND < BYTES + (ALIGNED ? 0 : 15)) {
        copy_async_if<BEYOND>(left > 0 && BEYOND < bytes, to, start - lead);
        copy_own_piece<BYTES, ALIGNED, BEYOND + 16 * CHUNKS>(to, start, left, chunk);
    }
}

// The scales of a lane's own row that it copies: 16 bytes of each piece's, or none. If pieces have whole 16 bytes of them, those of
// all pieces of a row begin as many bytes behind a multiple of 16: then `from` is what the lane copies next, and `left` what there
// is from there on; else they are those of the row.
template <int TYPE> struct OwnScales {
    static constexpr int BYTES = piece_scales(TYPE);
    static constexpr bool IS_STEADY = BYTES % 16 == 0;
    static_assert(BYTES + 16 <= 16 * CHUNKS, "half a warp copies them at once");
    const u8* from;
    int left;

    DEVICE OwnScales(const u8* row, int bytes, int chunk) : from(row), left(bytes) {
        if (IS_STEADY) {
            int lead = static_cast<int>(reinterpret_cast<u64>(row)) & 15;
            from = row - lead + 16 * chunk;
            left = 16 * chunk < lead + BYTES ? lead + bytes - 16 * chunk : 0;
        }
    }
    DEVICE void copy(u8* to, int chunk) {
        u32 lead = IS_STEADY ? 0 : static_cast<u32>(reinterpret_cast<u64>(from)) & 15;
        bool wanted = left > 0 && (IS_STEADY || 16 * chunk < static_cast<int>(lead) + (left < BYTES ? left : BYTES));
        copy_async_if<0>(wanted, to, from - lead + (IS_STEADY ? 0 : 16 * chunk));
        from += BYTES, left -= BYTES;
    }
};
template <> struct OwnScales<0> {
    DEVICE OwnScales(const u8*, int, int) {}
    DEVICE void copy(u8*, int) {}
};

// `are_near`: a lane's two blocks of 32 are neighbours.
DEVICE Own own_of(const VgMmvParams& p, const Place& place, int width, bool are_near, int lane) {
    Own own;
    own.row = static_cast<int>(kept(static_cast<u32>(lane) / CHUNKS));
    own.chunk = static_cast<int>(kept(static_cast<u32>(lane) % CHUNKS));
    own.width = width;
    own.blocks = static_cast<int>(kept(static_cast<u32>(width / 32 - (are_near ? 2 : 1) * own.chunk)));
    own.pieces = rounded_pieces(width);
    own.quants = own.scales = nullptr;
    if (p.quants) {
        i64 piece = place.column * own.pieces;
        // Of two neighbours the lane's chunk; else one block of a chunk, and of that 8 chunks further.
        int chunk = are_near ? own.chunk : own.chunk / 2, second = are_near ? 0 : own.chunk % 2;
        own.quants = kept_global(reinterpret_cast<const u8*>(p.quants) + piece * ROUNDED_PIECE + chunk * 16 +
                                 second * (ROUNDED_PIECE / 2));
        own.scales = kept_global(reinterpret_cast<const u8*>(p.scales) + piece * ROUNDED_SCALES + chunk * 16 + second * 4);
    }
    return own;
}

// Adds a warp's products of a piece of two rows of floats, which lie `stage_bytes` apart from `rows` on.
template <int TYPE, int COLUMNS>
DEVICE void multiply_floats(const VgMmvParams& p, const Place& place, const u8* rows, int piece, const Own& own, int lane,
                            Sums<COLUMNS>& sums) {
    constexpr Geometry SIZE = geometry(TYPE);
    constexpr int PIECE = piece_of(TYPE), STAGE_BYTES = stage_bytes(TYPE);
    const u8* x = address(p.x, Index{{0, place.x_row, place.i2, place.i3}});
    constexpr int EACH = 16 / SIZE.bytes;
    UNROLL
    for (int i = 0; i < PIECE / EACH / WARP; i++) {
        int at = (i * WARP + lane) * EACH;
        int element = piece * PIECE + at;
        if (element < own.width) {
            float weights[VECTOR_ROWS][EACH];
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                const u8* from = rows + r * STAGE_BYTES + at * SIZE.bytes;
                floats_of<TYPE>(*reinterpret_cast<const int4*>(from), weights[r]);
            }
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                if (c == 0 || c < place.columns) {
                    const u8* from = x + c * p.x.nb[1] + 4 * static_cast<i64>(element);
                    float activations[EACH];
                    UNROLL
                    for (int j = 0; j < EACH / 4; j++) {
                        floats_of<VG_F32>(*aligned<int4>(from + 16 * j), activations + 4 * j);
                    }
                    UNROLL
                    for (int r = 0; r < VECTOR_ROWS; r++) {
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

// Adds a lane's products of a piece of its own row, at `at`. What lies behind the end of a row is multiplied, too, and
// left out.
template <int TYPE, int COLUMNS>
DEVICE void multiply_quants(const Place& place, const VgCodebooks* books, const Begin& at, int piece, const Own& own,
                            const Chosen& chosen, Sums<COLUMNS>& sums) {
    constexpr int BLOCKS = ROUNDED_PIECE / 32;
    constexpr bool IS_LARGE = geometry(TYPE).elements > 32;
    Chunk<TYPE> weights(books, at, chosen);
    // A row of blocks of 32 may end between the lane's two.
    int blocks = own.blocks - piece * BLOCKS;
    float factor[COLUMNS][2][2], sum[COLUMNS][2][2], all[COLUMNS] = {};
    UNROLL
    for (int s = 0; s < 2; s++) {
        Unpacked u;
        if constexpr (!has_sides(TYPE, COLUMNS)) {
            weights.unpack_block(s, u);
        }
        UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            if (c == 0 || c < place.columns) {
                u32 number = c * own.pieces + static_cast<u32>(piece);
                Activations<TYPE> x = {own.quants + static_cast<u64>(number) * ROUNDED_PIECE,
                                       own.scales + static_cast<u64>(number) * ROUNDED_SCALES, own.chunk};
                if (s == 0 || COLUMNS > 1) {
                    x.factors(factor[c], sum[c]);
                }
                float more;
                if constexpr (has_sides(TYPE, COLUMNS)) {
                    more = multiply_sides<TYPE>(weights, x, s, factor[c]);
                } else {
                    more = multiply_block<TYPE>(u, x, s, factor[c], sum[c]);
                }
                all[c] = s == 0 ? more : all[c] + (IS_LARGE || second_of(TYPE) < blocks ? more : 0.0f);
            }
        }
    }
    UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        sums.of[0][c] += 0 < blocks ? all[c] : 0.0f;
    }
}

// Whether rows of weights, or of their quants, always begin at multiples of 16 bytes: the host sees to it (`alignment` in
// `ops/matmul.rs`).
DEVICE constexpr bool are_aligned(int type) {
    return is_float(type) || type == VG_Q4_K || type == VG_Q5_K || is_planes(type);
}

// By how much the low bits go on from piece to piece.
DEVICE constexpr int low_bits_of_piece(int type) {
    return is_planes(type) ? piece_scales(type) % 16 : are_aligned(type) ? 0 : piece_bytes(type);
}

// The low bits of where the part of a row lies that need not begin at a multiple of 16 bytes.
template <int TYPE> DEVICE u32 low_bits(const Begin& at) {
    return static_cast<u32>(reinterpret_cast<u64>(is_planes(TYPE) ? at.scales : at.quants));
}

// Adds a warp's products of a piece of two rows of floats, which lie `stage_bytes` apart from `rows` on; or of quants a lane's,
// whose row lies at `rows`. `start` has the low bits of where that lies in memory (`low_bits`). `chosen` is of the type and the
// lane's chunk.
template <int TYPE, int COLUMNS>
DEVICE void multiply_piece(const VgMmvParams& p, const Place& place, const VgCodebooks* books, const u8* rows, u32 start,
                           int piece, const Own& own, const Chosen& chosen, int lane, Sums<COLUMNS>& sums) {
    if constexpr (is_float(TYPE)) {
        multiply_floats<TYPE, COLUMNS>(p, place, rows, piece, own, lane, sums);
    } else {
        Begin at = {rows + (are_aligned(TYPE) ? 0 : start & 15), rows + piece_bytes(TYPE) + (start & 15)};
        multiply_quants<TYPE, COLUMNS>(place, books, at, piece, own, chosen, sums);
    }
}

// Writes a pair's sums, with what belongs to them, and begins anew. Half a warp has a row, of which lane c writes what belongs to
// column c. `has_both`: each lane has sums of both rows.
template <int COLUMNS>
DEVICE void finish_pair(const VgMmvParams& p, const Place& place, i64 pair, int lane, Sums<COLUMNS>& sums, bool has_both) {
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
    bool has_unit = p.unit != VG_OP_ADD;
    u32 product;
    i64 row = row_of_pair(p, pair, &product);
    if (column < place.columns) {
        row += has_unit ? 0 : r;
        const VgProduct& it = p.products[has_unit ? r : product];
        if (row < it.dst.ne[0]) {
            own += place.added(it, row, column);
            if (!has_unit) {
                *place.result(it, row, column) = own;
            }
        }
    }
    if (has_unit) {
        float other = __shfl_xor_sync(0xffffffffu, own, CHUNKS);
        if (r == 0 && column < place.columns) {
            *place.result(p.products[0], row, column) = gated(p.unit, own, other, p.c);
        }
    }
}

template <int TYPE, int COLUMNS> DEVICE void vector_product(const VgMmvParams& p) {
    constexpr int PIECE_BYTES = piece_bytes(TYPE), STAGE_BYTES = stage_bytes(TYPE), PAIR_BYTES = VECTOR_ROWS * STAGE_BYTES;
    constexpr int STAGES = stages_of(TYPE);
    __shared__ __align__(16) u8 stages[VECTOR_WARPS][STAGES][PAIR_BYTES];
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const View& w = p.products[0].w;
    Place place;
    if (!place.find(p, blockIdx.y, blockIdx.z, true)) {
        return;
    }
    int pairs = static_cast<int>(pairs_of(p)), width = static_cast<int>(w.ne[0]);
    int row_bytes = width / geometry(TYPE).elements * quant_bytes(TYPE);
    RowBytes planes = planes_row(TYPE, width);
    int pieces = (width + piece_of(TYPE) - 1) / piece_of(TYPE);
    int step = static_cast<int>(gridDim.x) * VECTOR_WARPS;
    int pair = static_cast<int>(blockIdx.x) * VECTOR_WARPS + warp, fetched_pair = pair;
    if (pair >= pairs) {
        return;
    }
    Own own = own_of(p, place, width, second_of(TYPE) == 1, lane);
    Chosen chosen = kept_chosen<TYPE, COLUMNS>(own.chunk);
    u8* ring = kept_shared(stages[warp][0] + (is_float(TYPE) ? 0 : own.row * STAGE_BYTES));
    u8* places = kept_shared(stages[warp][0] + own.row * STAGE_BYTES + own.chunk * 16);
    // What is fetched next: a pair of rows, where the lane's part of its own goes on and how much is left of it, and where it
    // goes.
    auto start = [&](i64 pair) { return start_of(p, place, pair, own.row, planes); };
    using Scales = OwnScales<is_planes(TYPE) ? TYPE : 0>;
    Begin begin = start(pair);
    const u8* from = begin.quants + own.chunk * 16;
    Scales scales(begin.scales, planes.scales, own.chunk);
    int left = row_bytes;
    int to = 0;
    auto fetch = [&]() {
        copy_own_piece<PIECE_BYTES, are_aligned(TYPE)>(places + to, from, left, own.chunk);
        scales.copy(places + to + PIECE_BYTES, own.chunk);
        commit_async();
        to = to < (STAGES - 1) * PAIR_BYTES ? to + PAIR_BYTES : 0;
        from += PIECE_BYTES;
        left -= PIECE_BYTES;
        if (left <= 0 && fetched_pair < pairs) {
            fetched_pair += step;
            if (fetched_pair < pairs) {
                Begin next = start(fetched_pair);
                from = next.quants + own.chunk * 16;
                scales = Scales(next.scales, planes.scales, own.chunk);
                left = row_bytes;
            }
        }
    };
    // And what is multiplied next, with the low bits of where it lay.
    int piece = 0, at = 0;
    u32 bits = low_bits<TYPE>(begin);
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch();
    }
    Sums<COLUMNS> sums = {};
    while (true) {
        wait_async<STAGES - 2>();
        // What other lanes copied is there, too; and they have read what is written over now.
        __syncwarp();
        fetch();
        multiply_piece<TYPE, COLUMNS>(p, place, books, ring + at, bits, piece, own, chosen, lane, sums);
        at = at < (STAGES - 1) * PAIR_BYTES ? at + PAIR_BYTES : 0;
        bits += low_bits_of_piece(TYPE);
        if (++piece < pieces) {
            continue;
        }
        finish_pair(p, place, pair, lane, sums, is_float(TYPE));
        piece = 0;
        pair += step;
        if (pair >= pairs) {
            break;
        }
        if (!are_aligned(TYPE) || is_planes(TYPE)) {
            bits = low_bits<TYPE>(start(pair));
        }
    }
}

} // namespace
