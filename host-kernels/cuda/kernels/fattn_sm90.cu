// FLASH_ATTN_EXT of many tokens over keys and values in halves, on Hopper GPUs.
//
// A block has 128 rows, which are pairs of a token and a query head as in `fattn.cuh`. One group of warps brings keys and
// values, two multiply, 64 rows each: scores from shared memory, weights times values with the weights in registers. While
// one of them makes weights of scores, the products of the other go on: named barriers let them issue theirs in turns, the
// weighted values of a tile together with the scores of the next.
//
// Keys and values are copied by `cp.async`, which puts each piece of 16 bytes in the place that products read it from; rows
// may lie as far apart as they like, and those that nobody sees become zeros on their way.
#include "fattn.cuh"
#include "sm90.cuh"

namespace {

constexpr int PAIR_ROWS = 128, PAIR_STAGES = 2;

// Named barriers: of each of both groups, for its own threads and for its turn, and of those who copy.
constexpr int OWN_BARRIER = 1, TURN_BARRIER = 3, COPY_BARRIER = 5;

template <int D, int KEYS> struct PairShared {
    static constexpr int QUERIES = PAIR_ROWS * D * 2, TILE = KEYS * D * 2;
    // Panels of 64 elements of a head.
    static constexpr int QUERY_PANEL = PAIR_ROWS * MATRIX_ROW, PANEL = KEYS * MATRIX_ROW;

    u8 *queries, *keys, *values, *seen;
    u64 *full_keys, *empty_keys, *full_values, *empty_values;

    DEVICE explicit PairShared(u8* memory) {
        u32 lead = shared_address(memory) & (MATRIX_UNIT - 1);
        queries = memory + (lead ? MATRIX_UNIT - lead : 0);
        keys = queries + QUERIES;
        values = keys + PAIR_STAGES * TILE;
        full_keys = reinterpret_cast<u64*>(values + PAIR_STAGES * TILE);
        empty_keys = full_keys + PAIR_STAGES;
        full_values = empty_keys + PAIR_STAGES;
        empty_values = full_values + PAIR_STAGES;
        seen = reinterpret_cast<u8*>(empty_values + PAIR_STAGES);
    }
};

// Where piece `piece` of 16 bytes of a row is in a matrix of panels.
DEVICE u32 piece_at(int row, int piece, int panel) {
    return piece / 8 * panel + row * MATRIX_ROW + ((piece % 8 ^ row % 8) * 16);
}

template <int D, int KEYS> struct PairAttention {
    using Shared = PairShared<D, KEYS>;
    const VgFattnParams& p;
    Shared shared;
    int n_keys, n_rows, first_row, head, sequence, tiles;
    const u8* states;

    DEVICE PairAttention(const VgFattnParams& params, u8* memory) : p(params), shared(memory) {
        n_keys = static_cast<int>(p.k.ne[1]);
        n_rows = static_cast<int>(p.q.ne[1]) * static_cast<int>(p.group);
        // The last tile first: of causal masks it has most to do.
        int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
        first_row = tile * PAIR_ROWS;
        head = static_cast<int>(blockIdx.y * p.group);
        sequence = static_cast<int>(blockIdx.z);
        tiles = (n_keys + KEYS - 1) / KEYS;
        states = nullptr;
        if (p.mask.data) {
            i64 index = sequence % p.mask.ne[3] * p.mask.ne[2] + head % p.mask.ne[2];
            states = reinterpret_cast<const u8*>(p.states) + (index * gridDim.x + tile) * tiles;
        }
    }

    DEVICE int token_of(int row) const { return (row < n_rows ? row : n_rows - 1) / static_cast<int>(p.group); }
    DEVICE int head_of(int row) const { return head + row % static_cast<int>(p.group); }
    DEVICE const u8* mask() const { return address(p.mask, Index{{0, 0, head % p.mask.ne[2], sequence % p.mask.ne[3]}}); }
    DEVICE int state_of(int tile) const { return states ? static_cast<int>(states[tile]) : static_cast<int>(SHOWN); }
    // The first tile from `tile` on that is not hidden.
    DEVICE int shown_from(int tile) const {
        while (tile < tiles && state_of(tile) == HIDDEN) {
            tile++;
        }
        return tile;
    }

    // ---- Those who copy.

    DEVICE const u8* rows_of(const View& v) const {
        return address(v, Index{{0, 0, head / (p.q.ne[2] / v.ne[2]), sequence / (p.q.ne[3] / v.ne[3])}});
    }

    // Begins to copy a tile. `checked`: rows that nobody sees become zeros.
    DEVICE void copy_tile(const View& v, const u8* rows, int tile, u8* to, bool checked) const {
        constexpr int PIECES = D / 8;
        UNROLL_BY_4
        for (int i = threadIdx.x; i < KEYS * PIECES; i += GROUP) {
            int row = i / PIECES, piece = i % PIECES, key = tile * KEYS + row;
            int4* at = reinterpret_cast<int4*>(to + piece_at(row, piece, Shared::PANEL));
            if (checked && !shared.seen[row]) {
                *at = int4{0, 0, 0, 0};
            } else {
                copy_async(at, rows + (key < n_keys ? key : n_keys - 1) * v.nb[1] + piece * 16);
            }
        }
        commit_async();
    }

    // Finds out which keys of a tile any row sees: a thread for each.
    DEVICE void find_seen(int tile) const {
        named_barrier(COPY_BARRIER, GROUP); // nobody reads what was found before
        int key = tile * KEYS + static_cast<int>(threadIdx.x);
        if (threadIdx.x < KEYS) {
            bool seen = false;
            if (key < n_keys) {
                seen = state_of(tile) == SHOWN;
                int last = token_of(first_row + PAIR_ROWS - 1);
                for (int token = token_of(first_row); token <= last && !seen; token++) {
                    seen = *reinterpret_cast<const u16*>(mask() + token * p.mask.nb[1] + 2 * key) != 0xfc00u;
                }
            }
            shared.seen[threadIdx.x] = seen ? 1 : 0;
        }
        named_barrier(COPY_BARRIER, GROUP);
    }

    DEVICE void bring() const {
        const u8 *keys = rows_of(p.k), *values = rows_of(p.v);
        Ring<PAIR_STAGES> ring;
        // What was copied is there when the next copies are under way.
        auto is_there = [&](u64* barrier) {
            fence_async();
            barrier_arrive(barrier);
        };
        u64* before = nullptr; // of values that are on their way
        for (int tile = shown_from(0); tile < tiles; tile = shown_from(tile + 1)) {
            barrier_wait(&shared.empty_keys[ring.stage], ring.phase ^ 1);
            copy_tile(p.k, keys, tile, shared.keys + ring.stage * Shared::TILE, false);
            if (before) {
                wait_async<1>();
                is_there(before);
            }
            bool checked = state_of(tile) != SHOWN || (tile + 1) * KEYS > n_keys;
            if (checked) {
                find_seen(tile);
            }
            barrier_wait(&shared.empty_values[ring.stage], ring.phase ^ 1);
            copy_tile(p.v, values, tile, shared.values + ring.stage * Shared::TILE, checked);
            wait_async<1>();
            is_there(&shared.full_keys[ring.stage]);
            before = &shared.full_values[ring.stage];
            ring.next();
        }
        wait_async<0>();
        if (before) {
            is_there(before);
        }
    }

    // ---- Those who multiply. Of each 64 rows a thread has rows 16 * warp + lane / 4 and 8 further.

    // The queries of the group's rows, times the scale; zeros in rows that are none.
    DEVICE void load_queries(int group) const {
        for (int i = threadIdx.x % GROUP; i < 64 * (D / 8); i += GROUP) {
            int row = group * 64 + i / (D / 8), piece = i % (D / 8);
            u32 words[4] = {};
            if (first_row + row < n_rows) {
                i64 token = token_of(first_row + row), its_head = head_of(first_row + row);
                const float* q = reinterpret_cast<const float*>(address(p.q, Index{{8 * piece, token, its_head, sequence}}));
                UNROLL
                for (int j = 0; j < 4; j++) {
                    words[j] = two_halves<false>(q[2 * j] * p.scale, q[2 * j + 1] * p.scale);
                }
            }
            *reinterpret_cast<int4*>(shared.queries + piece_at(row, piece, Shared::QUERY_PANEL)) =
                int4{static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                     static_cast<int>(words[3])};
        }
        fence_async();
        named_barrier(OWN_BARRIER + group, GROUP);
    }

    // Begins the scores of the group's rows with a tile of keys.
    DEVICE void multiply_keys(float* scores, int group, u32 stage) const {
        u32 q = shared_address(shared.queries) + group * 64 * MATRIX_ROW;
        u32 k = shared_address(shared.keys) + stage * Shared::TILE;
        UNROLL
        for (int i = 0; i < D / 16; i++) {
            u64 left = matrix_at(q + i / 4 * Shared::QUERY_PANEL + i % 4 * 32);
            group_multiply<KEYS, false>(scores, left, matrix_at(k + i / 4 * Shared::PANEL + i % 4 * 32), i > 0);
        }
        group_commit();
    }

    // Begins to add the weighted values.
    DEVICE void multiply_values(float* sums, const u32* weights, u32 stage) const {
        u32 v = shared_address(shared.values) + stage * Shared::TILE;
        UNROLL
        for (int i = 0; i < KEYS / 16; i++) {
            u64 right = matrix_at(v + i * 2 * MATRIX_UNIT, MATRIX_UNIT, D > 64 ? Shared::PANEL : 16);
            group_multiply<D, false, true>(sums, weights + 4 * i, right, true);
        }
        group_commit();
    }

    // Adds the mask to scores.
    DEVICE void hide(float* scores, int tile, int state, const u8* const* masks, const float* slopes) const {
        int lane = threadIdx.x % WARP;
        UNROLL
        for (int j = 0; j < KEYS / 8; j++) {
            int key = tile * KEYS + 8 * j + lane % 4 * 2;
            UNROLL
            for (int h = 0; h < 2; h++) {
                float bias[2] = {0.0f, 0.0f};
                if (state == MIXED && key < n_keys) {
                    mask_of_two(masks[h], key, n_keys, bias);
                }
                UNROLL
                for (int e = 0; e < 2; e++) {
                    bool hidden = key + e >= n_keys || bias[e] == -INFINITY_F;
                    float& score = scores[4 * j + 2 * h + e];
                    score = hidden ? -INFINITY_F : score + slopes[h] * bias[e];
                }
            }
        }
    }

    // Makes weights of scores, as halves that are left factors, and brings the sums to the new maximum.
    DEVICE void soft_max(float* scores, u32* weights, float* sums, float* mosts, float* totals) const {
        UNROLL
        for (int h = 0; h < 2; h++) {
            float most = mosts[h];
            UNROLL
            for (int j = 0; j < KEYS / 8; j++) {
                most = fmaxf(most, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float shrink = rescale(mosts[h], most), base = most == -INFINITY_F ? 0.0f : most * LOG2_E, total = 0.0f;
            mosts[h] = most;
            UNROLL
            for (int j = 0; j < KEYS / 8; j++) {
                float* two = scores + 4 * j + 2 * h;
                two[0] = fast_exp2(two[0] * LOG2_E - base), two[1] = fast_exp2(two[1] * LOG2_E - base);
                total += two[0] + two[1];
                weights[j / 2 * 4 + j % 2 * 2 + h] = two_halves<false>(two[0], two[1]);
            }
            totals[h] = totals[h] * shrink + total;
            UNROLL
            for (int n = 0; n < D / 8; n++) {
                sums[4 * n + 2 * h] *= shrink, sums[4 * n + 2 * h + 1] *= shrink;
            }
        }
    }

    DEVICE void attend(int group) const {
        int lane = threadIdx.x % WARP, mine = first_row + group * 64 + static_cast<int>(threadIdx.x % GROUP) / WARP * 16 + lane / 4;
        load_queries(group);
        const u8* masks[2] = {nullptr, nullptr};
        float slopes[2], mosts[2] = {-INFINITY_F, -INFINITY_F}, totals[2] = {0.0f, 0.0f};
        UNROLL
        for (int h = 0; h < 2; h++) {
            slopes[h] = alibi_slope(p.max_bias, p.heads_log2, static_cast<u32>(head_of(mine + 8 * h)));
            if (p.mask.data) {
                masks[h] = mask() + token_of(mine + 8 * h) * p.mask.nb[1];
            }
        }
        float sums[D / 2], scores[KEYS / 2];
        UNROLL
        for (int i = 0; i < D / 2; i++) {
            sums[i] = 0.0f;
        }
        auto release = [&](u64* barrier) {
            if (lane == 0) {
                barrier_arrive(barrier);
            }
        };
        Ring<PAIR_STAGES> ring;
        int tile = shown_from(0);
        if (group == 1 && tile < tiles) {
            named_arrive(TURN_BARRIER, 2 * GROUP); // the first group begins
        }
        if (tile < tiles) {
            barrier_wait(&shared.full_keys[0], 0);
            group_begin();
            multiply_keys(scores, group, 0);
            group_wait<0>();
            settle<KEYS / 2>(scores);
            release(&shared.empty_keys[0]);
        }
        while (tile < tiles) {
            int next = shown_from(tile + 1);
            if (p.cap != 0.0f) {
                UNROLL
                for (int i = 0; i < KEYS / 2; i++) {
                    scores[i] = p.cap * tanhf(scores[i]);
                }
            }
            int state = state_of(tile);
            if (state != SHOWN || (tile + 1) * KEYS > n_keys) {
                hide(scores, tile, state, masks, slopes);
            }
            u32 weights[KEYS / 4];
            soft_max(scores, weights, sums, mosts, totals);
            u32 stage = ring.stage, phase = ring.phase;
            ring.next();
            barrier_wait(&shared.full_values[stage], phase);
            if (next < tiles) {
                barrier_wait(&shared.full_keys[ring.stage], ring.phase);
            }
            named_barrier(TURN_BARRIER + group, 2 * GROUP);
            group_begin();
            multiply_values(sums, weights, stage);
            if (next < tiles) {
                group_begin(); // with other registers
                multiply_keys(scores, group, ring.stage);
                named_arrive(TURN_BARRIER + 1 - group, 2 * GROUP);
                group_wait<1>();
                release(&shared.empty_values[stage]);
                group_wait<0>();
                settle<KEYS / 2>(scores);
                release(&shared.empty_keys[ring.stage]);
            } else {
                if (group == 0) {
                    named_arrive(TURN_BARRIER + 1, 2 * GROUP);
                }
                group_wait<0>();
                release(&shared.empty_values[stage]);
            }
            settle<D / 2>(sums);
            tile = next;
        }

        UNROLL
        for (int h = 0; h < 2; h++) {
            int row = mine + 8 * h;
            float total = totals[h], factor = 1.0f;
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (row >= n_rows) {
                continue;
            }
            if (p.sinks.data) {
                float sink = reinterpret_cast<const float*>(p.sinks.data)[head_of(row)], larger = fmaxf(mosts[h], sink);
                factor = rescale(mosts[h], larger);
                total = total * factor + fast_exp2((sink - larger) * LOG2_E);
            }
            factor = total == 0.0f ? 0.0f : factor / total; // a row that sees nothing is 0
            float* to = reinterpret_cast<float*>(address(p.dst, Index{{0, head_of(row), token_of(row), sequence}}));
            UNROLL
            for (int n = 0; n < D / 8; n++) {
                to[8 * n + lane % 4 * 2] = sums[4 * n + 2 * h] * factor;
                to[8 * n + lane % 4 * 2 + 1] = sums[4 * n + 2 * h + 1] * factor;
            }
        }
    }

    DEVICE void run() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < PAIR_STAGES; i++) {
                barrier_init(&shared.full_keys[i], GROUP);
                barrier_init(&shared.full_values[i], GROUP);
                barrier_init(&shared.empty_keys[i], 2 * GROUP / WARP);
                barrier_init(&shared.empty_values[i], 2 * GROUP / WARP);
            }
            barriers_are_ready();
        }
        __syncthreads();
        if (threadIdx.x < GROUP) {
            give_registers<56>();
            bring();
        } else {
            take_registers<224>();
            attend(static_cast<int>(threadIdx.x / GROUP) - 1);
        }
    }
};

template <int D, int KEYS> DEVICE void fattn_sm90(const VgFattnParams& p) {
    DYNAMIC_SHARED(u8, memory);
    PairAttention<D, KEYS>(p, memory).run();
}

} // namespace

KERNEL(vg_fattn_sm90_64, VgFattnParams, 384, 1) { fattn_sm90<64, 128>(p); }
KERNEL(vg_fattn_sm90_128, VgFattnParams, 384, 1) { fattn_sm90<128, 128>(p); }
KERNEL(vg_fattn_sm90_256, VgFattnParams, 384, 1) { fattn_sm90<256, 64>(p); }
