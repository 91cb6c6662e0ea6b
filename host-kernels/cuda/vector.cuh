// Products of quantised weights with one to eight columns of activations, for which reading the weights is what takes
// time.
//
// Activations are rounded to 8 bits in blocks of 32 first (`vg_quantize`). A warp takes two rows of weights at a time.
// It copies pieces of both, of 1024 elements, to shared memory in whole 16-byte pieces, wherever rows begin, a few
// pieces ahead of its arithmetic and across the ends of rows: so loads are always on their way, whatever the format's
// block looks like. Of a piece each lane has 32 elements, which it unpacks once for all columns.
#pragma once
#include "quants.cuh"

namespace {

// Warps of a block, rows of a warp, pieces on their way or in use.
constexpr int VECTOR_WARPS = 4, VECTOR_ROWS = 2, STAGES = 3;

// Elements of a piece.
constexpr int PIECE = 32 * WARP;

constexpr int MOST_COLUMNS = 8;

// A block of 32 activations: the factor, and the sums of its halves.
struct Scales {
    float factor, low, high, reserved;
};

template <int COLUMNS> struct Sums {
    float of[VECTOR_ROWS][COLUMNS];
};

// Where weights, activations and results of a block of threads are.
struct Place {
    const u8* weights;
    i64 column; // the first of the activations'
    u8* results;
};

template <int TYPE, int COLUMNS> DEVICE void vector_product(const VgVectorParams& p) {
    constexpr Geometry SIZE = geometry(TYPE);
    constexpr int PIECE_BYTES = PIECE / SIZE.elements * SIZE.bytes;
    constexpr int STAGE_BYTES = (PIECE_BYTES + 15) / 16 * 16 + 16;
    __shared__ __align__(16) u8 stages[VECTOR_WARPS][STAGES][VECTOR_ROWS][STAGE_BYTES];
    const VgCodebooks* books = codebooks(p.codebooks);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    Place place;
    int columns = 1;
    if (p.ids.data) {
        i64 slot = blockIdx.y, token = blockIdx.z;
        i64 expert = *reinterpret_cast<const int*>(address(p.ids, Index{{slot, token, 0, 0}}));
        if (!check_index(p.place, expert, p.w.ne[2])) {
            return;
        }
        place = {address(p.w, Index{{0, 0, expert, 0}}), token * p.slots + slot % p.slots,
                 address(p.dst, Index{{0, slot, token, 0}})};
    } else {
        i64 batch = blockIdx.z, i2 = batch % p.dst.ne[2], i3 = batch / p.dst.ne[2];
        i64 w2 = i2 / (p.dst.ne[2] / p.w.ne[2]), w3 = i3 / (p.dst.ne[3] / p.w.ne[3]);
        columns = static_cast<int>(p.dst.ne[1]);
        place = {address(p.w, Index{{0, 0, w2, w3}}), batch * columns, address(p.dst, Index{{0, 0, i2, i3}})};
    }

    i64 rows = p.dst.ne[0], blocks = p.w.ne[0] / 32;
    i64 row_bytes = p.w.ne[0] / SIZE.elements * SIZE.bytes;
    int pieces = static_cast<int>((p.w.ne[0] + PIECE - 1) / PIECE);
    i64 first = (static_cast<i64>(blockIdx.x) * VECTOR_WARPS + warp) * VECTOR_ROWS;
    i64 step = static_cast<i64>(gridDim.x) * VECTOR_WARPS * VECTOR_ROWS;
    auto start_of = [&](i64 row, int r, int piece) {
        i64 at = row + r < rows ? row + r : rows - 1;
        return place.weights + at * p.w.nb[1] + static_cast<i64>(piece) * PIECE_BYTES;
    };

    // What is fetched next, and what is multiplied next: a pair of rows, and a piece of it.
    i64 fetched_row = first, row = first;
    int fetched_piece = 0, piece = 0, fetched_stage = 0, stage = 0;
    auto fetch = [&]() {
        if (fetched_row < rows) {
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                const u8* start = start_of(fetched_row, r, fetched_piece);
                int lead = static_cast<int>(reinterpret_cast<u64>(start) & 15);
                i64 left = row_bytes - static_cast<i64>(fetched_piece) * PIECE_BYTES;
                int count = (lead + static_cast<int>(left < PIECE_BYTES ? left : PIECE_BYTES) + 15) / 16;
                for (int i = lane; i < count; i += WARP) {
                    copy_async(&stages[warp][fetched_stage][r][16 * i], start - lead + 16 * i);
                }
            }
            if (++fetched_piece == pieces) {
                fetched_piece = 0;
                fetched_row += step;
            }
            fetched_stage = fetched_stage + 1 < STAGES ? fetched_stage + 1 : 0;
        }
        commit_async();
    };
    for (int i = 0; i + 1 < STAGES; i++) {
        fetch();
    }

    const int4* quants = reinterpret_cast<const int4*>(p.quants) + place.column * blocks * 2;
    const Scales* scales = reinterpret_cast<const Scales*>(p.scales) + place.column * blocks;
    Sums<COLUMNS> sums = {};
    while (row < rows) {
        fetch();
        wait_async<STAGES - 1>();
        __syncwarp(); // what other lanes copied is there, too
        i64 block = static_cast<i64>(piece) * WARP + lane;
        if (block < blocks) {
            constexpr int SUBS = SIZE.elements / 32;
            Unpacked w[VECTOR_ROWS];
            UNROLL
            for (int r = 0; r < VECTOR_ROWS; r++) {
                int lead = static_cast<int>(reinterpret_cast<u64>(start_of(row, r, piece)) & 15);
                const u8* at = &stages[warp][stage][r][lead + lane / SUBS * SIZE.bytes];
                unpack<TYPE>(books, at, lane % SUBS, w[r]);
            }
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                if (c < columns) {
                    int4 low = quants[(c * blocks + block) * 2], high = quants[(c * blocks + block) * 2 + 1];
                    Scales s = scales[c * blocks + block];
                    UNROLL
                    for (int r = 0; r < VECTOR_ROWS; r++) {
                        int a = __dp4a(w[r].words[0], low.x, 0), b = __dp4a(w[r].words[4], high.x, 0);
                        a = __dp4a(w[r].words[1], low.y, a), b = __dp4a(w[r].words[5], high.y, b);
                        a = __dp4a(w[r].words[2], low.z, a), b = __dp4a(w[r].words[6], high.z, b);
                        a = __dp4a(w[r].words[3], low.w, a), b = __dp4a(w[r].words[7], high.w, b);
                        sums.of[r][c] += s.factor * (w[r].scale[0] * static_cast<float>(a) +
                                                     w[r].scale[1] * static_cast<float>(b));
                        sums.of[r][c] += w[r].offset[0] * s.low + w[r].offset[1] * s.high;
                    }
                }
            }
        }
        __syncwarp(); // the stage may be written again
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        if (++piece < pieces) {
            continue;
        }
        UNROLL
        for (int r = 0; r < VECTOR_ROWS; r++) {
            UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                if (c < columns) {
                    float sum = warp_reduce<Sum>(sums.of[r][c]);
                    if (lane == 0 && row + r < rows) {
                        u8* to = place.results + (row + r) * p.dst.nb[0] + c * p.dst.nb[1];
                        *reinterpret_cast<float*>(to) = sum;
                    }
                }
                sums.of[r][c] = 0.0f;
            }
        }
        piece = 0;
        row += step;
    }
}

} // namespace
