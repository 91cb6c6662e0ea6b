// Products of weights with one to eight columns of activations, for which reading the weights is what takes time.
//
// Activations for quantised weights are rounded to 8 bits in blocks of 32 first (`vg_quantize`); with weights that are
// floats they are f32 as they come. A warp takes two rows of weights at a time: neighbours, or, where a gated unit follows,
// the same row of both matrices. It copies pieces of both to shared memory in whole 16-byte pieces, wherever rows begin, a
// few pieces ahead of its arithmetic and across the ends of rows: so loads are always on their way, whatever the format's
// block looks like. Of a piece of quantised weights each lane has 32 elements, which it unpacks once for all columns.
//
// Several matrices that are multiplied with the same activations are one launch: their pairs of rows are counted through.
#pragma once
#include "quants.cuh"
#include "scales.cuh"
#include "units.cuh"

namespace {

// Warps of a block, rows of a warp, pieces on their way or in use.
constexpr int VECTOR_WARPS = 4, VECTOR_ROWS = 2, STAGES = 3;

constexpr int MOST_COLUMNS = 8;

DEVICE constexpr bool is_float(int type) { return type == VG_F32 || type == VG_F16 || type == VG_BF16; }

// Elements of a piece: of floats a KiB of them.
DEVICE constexpr int piece_of(int type) { return is_float(type) ? 1024 / geometry(type).bytes : 32 * WARP; }

// A type of weights, for functions that are given one.
template <int OF> struct Weights {
    static constexpr int TYPE = OF;
};

template <int COLUMNS> struct Sums {
    float of[VECTOR_ROWS][COLUMNS];
};

// Bytes of a piece, and of its place in shared memory, wherever the piece begins.
DEVICE constexpr int piece_bytes(int type) { return piece_of(type) / geometry(type).elements * geometry(type).bytes; }
DEVICE constexpr int stage_bytes(int type) { return (piece_bytes(type) + 15) / 16 * 16 + 16; }

// Which vectors a block of threads multiplies: of the experts' those of a slot of a token, else those of a batch.
struct Place {
    bool by_expert;
    i64 i1, i2, i3, expert;
    int columns;
    i64 column, x_row; // of the activations: of all, and in dimension 1

    // That of `slot` of a token, or of a batch. False if there is no such expert, which is told to the host if it `reports`.
    DEVICE bool find(const VgVectorParams& p, i64 slot, i64 batch, bool reports) {
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
DEVICE i64 pairs_of(const VgVectorParams& p) {
    i64 pairs = 0;
    for (u32 m = 0; m < p.count; m++) {
        pairs += p.unit != VG_MAP_ADD ? m ? 0 : p.products[0].dst.ne[0] : (p.products[m].dst.ne[0] + 1) / 2;
    }
    return pairs;
}

// The first row of a pair, and which product's it is.
DEVICE i64 row_of_pair(const VgVectorParams& p, i64 pair, u32* product) {
    *product = 0;
    if (p.unit != VG_MAP_ADD) {
        return pair;
    }
    while (*product + 1 < p.count && pair >= (p.products[*product].dst.ne[0] + 1) / 2) {
        pair -= (p.products[*product].dst.ne[0] + 1) / 2;
        ++*product;
    }
    return 2 * pair;
}

// Where row `r` of a pair begins.
DEVICE const u8* start_of(const VgVectorParams& p, const Place& place, i64 pair, int r) {
    bool has_unit = p.unit != VG_MAP_ADD;
    u32 product;
    i64 row = row_of_pair(p, pair, &product);
    const VgProduct& it = p.products[has_unit ? r : product];
    row += has_unit ? 0 : r;
    row = row < it.dst.ne[0] ? row : it.dst.ne[0] - 1;
    return place.weights(it) + row * it.w.nb[1];
}

// Begins to copy a lane's part of a piece, `left` bytes of a row at most, in whole 16 bytes, wherever it lies.
DEVICE void copy_piece(u8* to, const u8* start, i64 left, int bytes, int lane) {
    int lead = static_cast<int>(reinterpret_cast<u64>(start) & 15);
    int count = (lead + static_cast<int>(left < bytes ? left : bytes) + 15) / 16;
    for (int i = lane; i < count; i += WARP) {
        copy_async(to + 16 * i, start - lead + 16 * i);
    }
}

// Adds a warp's products of a piece of two rows, which lie `stage_bytes` apart from `rows` on. `starts` has the low bits of
// where the rows begin.
template <int TYPE, int COLUMNS>
DEVICE void multiply_piece(const VgVectorParams& p, const Place& place, const VgCodebooks* books, const u8* rows,
                           const u32* starts, int piece, i64 width, int lane, Sums<COLUMNS>& sums) {
    constexpr Geometry SIZE = geometry(TYPE);
    constexpr int PIECE = piece_of(TYPE), PIECE_BYTES = piece_bytes(TYPE), STAGE_BYTES = stage_bytes(TYPE);
    if constexpr (is_float(TYPE)) {
        const u8* x = address(p.x, Index{{0, place.x_row, place.i2, place.i3}});
        constexpr int EACH = 16 / SIZE.bytes;
        UNROLL
        for (int i = 0; i < PIECE / EACH / WARP; i++) {
            int at = (i * WARP + lane) * EACH;
            i64 element = static_cast<i64>(piece) * PIECE + at;
            if (element < width) {
                float weights[VECTOR_ROWS][EACH];
                UNROLL
                for (int r = 0; r < VECTOR_ROWS; r++) {
                    const u8* from = rows + r * STAGE_BYTES + at * SIZE.bytes;
                    floats_of<TYPE>(*reinterpret_cast<const int4*>(from), weights[r]);
                }
                UNROLL
                for (int c = 0; c < COLUMNS; c++) {
                    if (c < place.columns) {
                        const u8* from = x + c * p.x.nb[1] + element * 4;
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
    } else {
        i64 blocks = width / 32;
        const int4* quants = reinterpret_cast<const int4*>(p.quants) + place.column * blocks * 2;
        const Scales* scales = reinterpret_cast<const Scales*>(p.scales) + place.column * blocks;
        i64 block = static_cast<i64>(piece) * WARP + lane;
        if (block < blocks) {
            constexpr int SUBS = SIZE.elements / 32;
            Unpacked u[VECTOR_ROWS];
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                int lead = static_cast<int>((starts[r] + static_cast<u32>(piece) * PIECE_BYTES) & 15);
                const u8* at = rows + r * STAGE_BYTES + lead + lane / SUBS * SIZE.bytes;
                unpack<TYPE>(books, at, lane % SUBS, u[r]);
            }
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                if (c < place.columns) {
                    int4 low = quants[(c * blocks + block) * 2], high = quants[(c * blocks + block) * 2 + 1];
                    Scales s = scales[c * blocks + block];
                    UNROLL
                    for (int r = 0; r < VECTOR_ROWS; r++) {
                        int a = __dp4a(u[r].words[0], low.x, 0), b = __dp4a(u[r].words[4], high.x, 0);
                        a = __dp4a(u[r].words[1], low.y, a), b = __dp4a(u[r].words[5], high.y, b);
                        a = __dp4a(u[r].words[2], low.z, a), b = __dp4a(u[r].words[6], high.z, b);
                        a = __dp4a(u[r].words[3], low.w, a), b = __dp4a(u[r].words[7], high.w, b);
                        sums.of[r][c] += s.factor * (u[r].scale[0] * static_cast<float>(a) +
                                                     u[r].scale[1] * static_cast<float>(b));
                        sums.of[r][c] += u[r].offset[0] * s.low + u[r].offset[1] * s.high;
                    }
                }
            }
        }
    }
}

// Writes a pair's sums, with what belongs to them, and begins anew. Lane c writes what belongs to column c.
template <int COLUMNS>
DEVICE void finish_pair(const VgVectorParams& p, const Place& place, i64 pair, int lane, Sums<COLUMNS>& sums) {
    float both[VECTOR_ROWS] = {};
    UNROLL
    for (int c = 0; c < COLUMNS; c++) {
        UNROLL
        for (int r = 0; r < VECTOR_ROWS; r++) {
            float sum = warp_reduce<Sum>(sums.of[r][c]);
            both[r] = lane == c ? sum : both[r];
            sums.of[r][c] = 0.0f;
        }
    }
    if (lane < place.columns) {
        u32 product;
        i64 row = row_of_pair(p, pair, &product);
        if (p.unit != VG_MAP_ADD) {
            float a = both[0] + place.added(p.products[0], row, lane);
            float b = both[1] + place.added(p.products[1], row, lane);
            *place.result(p.products[0], row, lane) = gated(p.unit, a, b, p.c);
        } else {
            const VgProduct& it = p.products[product];
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                if (row + r < it.dst.ne[0]) {
                    *place.result(it, row + r, lane) = both[r] + place.added(it, row + r, lane);
                }
            }
        }
    }
}

template <int TYPE, int COLUMNS> DEVICE void vector_product(const VgVectorParams& p) {
    constexpr int PIECE_BYTES = piece_bytes(TYPE);
    __shared__ __align__(16) u8 stages[VECTOR_WARPS][STAGES][VECTOR_ROWS][stage_bytes(TYPE)];
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const View& w = p.products[0].w;
    Place place;
    if (!place.find(p, blockIdx.y, blockIdx.z, true)) {
        return;
    }
    i64 pairs = pairs_of(p);
    i64 row_bytes = w.ne[0] / geometry(TYPE).elements * geometry(TYPE).bytes;
    int pieces = static_cast<int>((w.ne[0] + piece_of(TYPE) - 1) / piece_of(TYPE));
    i64 step = static_cast<i64>(gridDim.x) * VECTOR_WARPS;
    i64 pair = static_cast<i64>(blockIdx.x) * VECTOR_WARPS + warp, fetched_pair = pair;
    if (pair >= pairs) {
        return;
    }
    // What is fetched next, and what is multiplied next: a pair of rows, and a piece of it.
    int fetched_piece = 0, piece = 0, fetched_stage = 0, stage = 0;
    const u8* fetched[VECTOR_ROWS];
    u32 starts[VECTOR_ROWS]; // the low bits of where the rows begin that are multiplied
    UNROLL
    for (int r = 0; r < VECTOR_ROWS; r++) {
        fetched[r] = start_of(p, place, pair, r);
        starts[r] = static_cast<u32>(reinterpret_cast<u64>(fetched[r]));
    }
    auto fetch = [&]() {
        if (fetched_pair < pairs) {
            i64 offset = static_cast<i64>(fetched_piece) * PIECE_BYTES;
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                copy_piece(stages[warp][fetched_stage][r], fetched[r] + offset, row_bytes - offset, PIECE_BYTES, lane);
            }
            if (++fetched_piece == pieces) {
                fetched_piece = 0;
                fetched_pair += step;
                UNROLL
                for (int r = 0; r < VECTOR_ROWS && fetched_pair < pairs; r++) {
                    fetched[r] = start_of(p, place, fetched_pair, r);
                }
            }
            fetched_stage = fetched_stage + 1 < STAGES ? fetched_stage + 1 : 0;
        }
        commit_async();
    };
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch();
    }
    Sums<COLUMNS> sums = {};
    while (pair < pairs) {
        fetch();
        wait_async<STAGES - 1>();
        __syncwarp(); // what other lanes copied is there, too
        multiply_piece<TYPE, COLUMNS>(p, place, books, stages[warp][stage][0], starts, piece, w.ne[0], lane, sums);
        __syncwarp(); // the stage may be written again
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        if (++piece < pieces) {
            continue;
        }
        finish_pair(p, place, pair, lane, sums);
        piece = 0;
        pair += step;
        UNROLL
        for (int r = 0; r < VECTOR_ROWS && pair < pairs; r++) {
            starts[r] = static_cast<u32>(reinterpret_cast<u64>(start_of(p, place, pair, r)));
        }
    }
}

} // namespace
