// SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET, SOLVE_TRI:
// sequential over tokens (or rows). Rows or columns of a state are independent: a warp or a thread
// keeps one in registers through all tokens of the launch. A launch that does not begin with the
// first token goes on from the state in the destination, which the launch before it has stored.
#include "device.cuh"

namespace {

constexpr int WARPS = 4;

// Elements of a state row that a lane keeps in registers; longer rows stay in memory.
constexpr int MAX_REGISTERS = 8;

DEVICE float* floats(const View& v) { return reinterpret_cast<float*>(v.data); }

// Vector of head `i1`, token `t` and sequence `s` of a view [size, heads, tokens, sequences].
DEVICE const float* vector_at(const View& v, i64 i1, i64 t, i64 s) {
    return reinterpret_cast<const float*>(address(v, Index{{0, i1, t, s}}));
}

// A state row of `n` elements, shared by the lanes of a warp: in registers, or at its destination.
template <bool IN_REGISTERS> struct Row {
    float registers[MAX_REGISTERS];
    float* memory;
    int n, lane;

    // Calls `body(element, i)` for each element of the lane.
    template <class Body> DEVICE void for_each(Body body) {
        if (IN_REGISTERS) {
            UNROLL
            for (int k = 0; k < MAX_REGISTERS; k++) {
                int i = lane + k * WARP;
                if (i < n) {
                    body(registers[k], i);
                }
            }
        } else {
            for (int i = lane; i < n; i += WARP) {
                body(memory[i], i);
            }
        }
    }

    DEVICE void store_row(float* to) {
        if (IN_REGISTERS || to != memory) {
            for_each([&](float x, int i) { to[i] = x; });
        }
    }
};

// Calls `body(row, index)` for each of `count` rows of `n` elements, a warp for each.
template <class Body> DEVICE void for_each_state_row(i64 count, i64 n, Body body) {
    int lane = threadIdx.x % WARP;
    i64 first = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    for (i64 r = first; r < count; r += static_cast<i64>(gridDim.x) * WARPS) {
        if (n <= MAX_REGISTERS * WARP) {
            Row<true> row;
            row.n = static_cast<int>(n), row.lane = lane;
            body(row, r);
        } else {
            Row<false> row;
            row.n = static_cast<int>(n), row.lane = lane;
            body(row, r);
        }
    }
}

} // namespace

// dst[c, t, s] = sum over i of x[t + i, c, s] * kernel[i, c]
KERNEL(vg_ssm_conv, VgSsmConvParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index to = index_of(p.dst, e);
        float sum = 0.0f;
        for (i64 i = 0; i < p.kernel.ne[0]; i++) {
            sum += load(p.x.type, address(p.x, Index{{to.i[1] + i, to.i[0], to.i[2], 0}})) *
                   load(p.kernel.type, address(p.kernel, Index{{i, to.i[0], 0, 0}}));
        }
        *reinterpret_cast<float*>(address(p.dst, to)) = sum;
    }
}

KERNEL(vg_ssm_scan, VgSsmScanParams, WARPS* WARP) {
    i64 dim = p.x.ne[0], heads = p.x.ne[1], tokens = p.x.ne[2], sequences = p.x.ne[3],
        n = p.s.ne[0];
    i64 states = dim * heads * tokens * sequences, snapshot = n * dim * heads * sequences;
    for_each_state_row(dim * heads * sequences, n, [&](auto& row, i64 r) {
        i64 d = r % dim, head = r / dim % heads, sequence = r / (dim * heads);
        i64 id = *reinterpret_cast<const int*>(p.ids.data + sequence * p.ids.nb[0]);
        if (!check_index(p.site, id, p.s.ne[3])) {
            return;
        }
        float* state = floats(p.dst) + states + r * n;
        const float* before =
            p.tokens.begin ? state : floats(p.s) + ((id * heads + head) * dim + d) * n;
        row.memory = state;
        row.for_each([&](float& x, int i) { x = before[i]; });
        const float* a = floats(p.a) + head * p.a.ne[0];
        i64 group = head / (heads / p.b.ne[1]);
        for (i64 t = p.tokens.begin; t < p.tokens.end; t++) {
            i64 token = sequence * tokens + t;
            float dt = floats(p.dt)[token * heads + head];
            dt = dt > 20.0f ? dt : log1pf(expf(dt));
            float input = vector_at(p.x, head, t, sequence)[d] * dt;
            const float* b = vector_at(p.b, group, t, sequence);
            const float* c = vector_at(p.c, group, t, sequence);
            float sum = 0.0f;
            row.for_each([&](float& x, int i) {
                x = x * expf(dt * a[p.a.ne[0] == 1 ? 0 : i]) + b[i] * input;
                sum += x * c[i];
            });
            sum = warp_reduce<Sum>(sum);
            if (row.lane == 0) {
                floats(p.dst)[(token * heads + head) * dim + d] = sum;
            }
            i64 slot = tokens - 1 - t;
            if (slot < p.snapshots) {
                row.store_row(state + slot * snapshot);
            }
        }
        if (p.tokens.end < tokens) {
            row.store_row(state);
        }
    });
}

namespace {

// Elements of a state column that a thread keeps in registers at a time.
constexpr int COLUMN = 32;

} // namespace

// A thread for each column j of each state: state[i][j] is decayed and k[i] * v[j] is added. With a
// bonus (RWKV6) the output uses kv * bonus + the old state, without it the new state.
KERNEL(vg_linear_attention, VgLinearAttentionParams, 128) {
    i64 size = p.k.ne[0], heads = p.k.ne[1], sequences = p.state.ne[1],
        tokens = p.k.ne[2] / sequences;
    for (i64 e = thread_index(); e < size * heads * sequences; e += thread_count()) {
        i64 j = e % size, head = e / size % heads, sequence = e / (size * heads);
        i64 at = (sequence * heads + head) * size * size;
        float* after = floats(p.dst) + size * heads * p.k.ne[2] + at;
        const float* before = p.tokens.begin ? after : floats(p.state) + at;
        for (i64 first = 0; first < size; first += COLUMN) {
            float state[COLUMN];
            UNROLL
            for (int i = 0; i < COLUMN; i++) {
                state[i] = first + i < size ? before[(first + i) * size + j] : 0.0f;
            }
            for (i64 t = p.tokens.begin; t < p.tokens.end; t++) {
                i64 vector = ((sequence * tokens + t) * heads + head) * size, from = vector + first;
                float v = floats(p.v)[vector + j], sum = 0.0f;
                UNROLL
                for (int i = 0; i < COLUMN; i++) {
                    if (first + i < size) {
                        float kv = floats(p.k)[from + i] * v, r = floats(p.r)[from + i],
                              old = state[i];
                        state[i] = old * floats(p.decay)[from + i] + kv;
                        if (p.bonus.data) {
                            sum += (kv * floats(p.bonus)[head * size + first + i] + old) * r;
                        } else {
                            sum += state[i] * (r * p.scale);
                        }
                    }
                }
                float* y = floats(p.dst) + vector + j;
                *y = first == 0 ? sum : *y + sum;
            }
            UNROLL
            for (int i = 0; i < COLUMN; i++) {
                if (first + i < size) {
                    after[(first + i) * size + j] = state[i];
                }
            }
        }
    }
}

KERNEL(vg_wkv7, VgWkv7Params, WARPS* WARP) {
    i64 size = p.r.ne[0], heads = p.r.ne[1], sequences = p.state.ne[1],
        tokens = p.r.ne[2] / sequences;
    for_each_state_row(size * heads * sequences, size, [&](auto& row, i64 index) {
        i64 i = index % size, head = index / size % heads, sequence = index / (size * heads);
        row.memory = floats(p.dst) + size * heads * p.r.ne[2] + index * size;
        const float* before = p.tokens.begin ? row.memory : floats(p.state) + index * size;
        row.for_each([&](float& x, int j) { x = before[j]; });
        for (i64 t = p.tokens.begin; t < p.tokens.end; t++) {
            i64 vector = ((sequence * tokens + t) * heads + head) * size;
            const float *r = floats(p.r) + vector, *w = floats(p.w) + vector,
                        *k = floats(p.k) + vector;
            const float *a = floats(p.a) + vector, *b = floats(p.b) + vector;
            float v = floats(p.v)[vector + i], removed = 0.0f, sum = 0.0f;
            row.for_each([&](float& x, int j) { removed += a[j] * x; });
            removed = warp_reduce<Sum>(removed);
            row.for_each([&](float& x, int j) {
                x = x * w[j] + k[j] * v + b[j] * removed;
                sum += x * r[j];
            });
            sum = warp_reduce<Sum>(sum);
            if (row.lane == 0) {
                floats(p.dst)[vector + i] = sum;
            }
        }
        row.store_row(floats(p.dst) + size * heads * p.r.ne[2] + index * size);
    });
}

// The state is stored transposed: row j produces output j.
KERNEL(vg_delta_net, VgDeltaNetParams, WARPS* WARP) {
    i64 size = p.v.ne[0], heads = p.v.ne[1], tokens = p.v.ne[2], sequences = p.v.ne[3];
    float scale = 1.0f / sqrtf(static_cast<float>(size));
    for_each_state_row(size * heads * sequences, size, [&](auto& row, i64 index) {
        i64 j = index % size, head = index / size % heads, sequence = index / (size * heads);
        float* after = floats(p.dst) + size * heads * tokens * sequences + index * size;
        const float* before = p.tokens.begin ? after : floats(p.state) + index * size;
        row.memory = after;
        row.for_each([&](float& x, int i) { x = before[i]; });
        auto shared = [&](const View& v, i64 t) {
            return vector_at(v, head % v.ne[1], t, sequence / (sequences / v.ne[3]));
        };
        for (i64 t = p.tokens.begin; t < p.tokens.end; t++) {
            const float *q = shared(p.q, t), *k = shared(p.k, t),
                        *gate = vector_at(p.gate, head, t, sequence);
            float beta = *vector_at(p.beta, head, t, sequence), known = 0.0f, sum = 0.0f;
            row.for_each([&](float& x, int i) {
                x *= expf(gate[p.gate.ne[0] == 1 ? 0 : i]);
                known += x * k[i];
            });
            float delta = (vector_at(p.v, head, t, sequence)[j] - warp_reduce<Sum>(known)) * beta;
            row.for_each([&](float& x, int i) {
                x += k[i] * delta;
                sum += x * q[i];
            });
            sum = warp_reduce<Sum>(sum);
            if (row.lane == 0) {
                floats(p.dst)[((sequence * tokens + t) * heads + head) * size + j] = sum * scale;
            }
            i64 slot = tokens - 1 - t;
            if (slot > 0 && slot < p.snapshots) {
                row.store_row(after + slot * size * size * heads * sequences);
            }
        }
        row.store_row(after);
    });
}

// A thread for each column.
KERNEL(vg_solve_tri, VgSolveTriParams, 256) {
    i64 columns = p.dst.ne[0], total = columns * p.dst.ne[2] * p.dst.ne[3];
    for (i64 e = thread_index(); e < total; e += thread_count()) {
        i64 j = e % columns, i2 = e / columns % p.dst.ne[2], i3 = e / (columns * p.dst.ne[2]);
        auto at = [&](const View& v, i64 i0, i64 i1) {
            return reinterpret_cast<float*>(address(v, Index{{i0, i1, i2, i3}}));
        };
        for (i64 i = p.rows.begin; i < p.rows.end; i++) {
            float sum = *at(p.b, j, i);
            for (i64 t = 0; t < i; t++) {
                sum -= *at(p.a, t, i) * *at(p.dst, j, t);
            }
            *at(p.dst, j, i) = sum / *at(p.a, i, i);
        }
    }
}
