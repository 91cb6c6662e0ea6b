// mbarrier, cp.async.bulk, wgmma and named barriers: see `shim.h`.
#include "fibers.h"

#include <map>
#include <string>
#include <vector>

namespace shim {
namespace {

constexpr unsigned WARPGROUP = 128, ROWS = 64, STEP = 16, MAX_COLUMNS = 256;

// Limits of an mbarrier (PTX ISA, "Contents of the mbarrier object").
constexpr unsigned MAX_ARRIVALS = (1 << 20) - 1, MAX_TX_BYTES = (1 << 20) - 1;

struct AsyncCopy {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes;
    bool is_generic; // cp.async, whose writes wgmma sees only behind a fence
};

struct Barrier {
    unsigned arrivals = 0, pending = 0;
    long bytes = 0;      // pending transaction bytes
    unsigned phases = 0; // completed phases
    unsigned waiting = 0;
    std::vector<AsyncCopy> copies; // copies executed when a thread waits
};

struct NamedBarrier {
    unsigned arrived = 0, threads = 0, turns = 0;
};

// Accumulators of wgmma in flight: their values, and the number of instructions that use them.
struct Sums {
    std::vector<float> values;
    unsigned products = 0;
};

struct Thread {
    bool begun = false;
    std::vector<std::vector<WgmmaOp>> commits; // groups in flight; the last one is open
    std::map<float*, Sums> sums;
};

struct Group {
    unsigned arrived = 0, later = 0, turns = 0;
};

struct State {
    std::map<const void*, Barrier> barriers;
    std::map<unsigned, NamedBarrier> named;
    std::vector<Thread> threads;
    std::vector<Group> groups;
    // Shared memory as the async proxy (bulk copies and wgmma) sees it.
    std::vector<unsigned char> seen;
    bool fenced = false;
    unsigned copies = 0;
};

thread_local State state;

Barrier& barrier_at(const void* at) {
    auto found = state.barriers.find(at);
    if (found == state.barriers.end()) {
        fail_block("a barrier that nobody has made");
    }
    return found->second;
}

// Completes the phase if no arrivals and bytes are pending.
void try_complete_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.arrivals;
        barrier.phases++;
        publish_fenced_writes();
    }
}

void make(const AsyncCopy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    if (!copy.is_generic) {
        std::memcpy(state.seen.data() + (copy.to - shared().begin), copy.to, copy.bytes);
    }
}

void deliver(Barrier& barrier) {
    std::vector<AsyncCopy> copies;
    copies.swap(barrier.copies);
    for (const AsyncCopy& copy : copies) {
        make(copy);
        barrier.bytes -= copy.bytes;
    }
    try_complete_phase(barrier);
}

// An f16 or bf16 at a swizzled address, as the async proxy sees it.
float half_at(unsigned address, bool bf16) {
    address ^= (address >> 7 & 7) << 4;
    address -= 16; // start of the shared window
    if (address + 2 > state.seen.size()) {
        fail_block("a product of what is not in shared memory");
    }
    uint16_t bits;
    std::memcpy(&bits, state.seen.data() + address, 2);
    return bf16 ? __uint_as_float(static_cast<unsigned>(bits) << 16) : f16_to_f32(bits);
}

// A decoded matrix descriptor: see `smem_descriptor`.
struct Matrix {
    unsigned begin, panels, units;

    explicit Matrix(uint64_t bits)
        : begin(static_cast<unsigned>(bits & 0x3fff) << 4),
          panels(static_cast<unsigned>(bits >> 16 & 0x3fff) << 4),
          units(static_cast<unsigned>(bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1 || (bits >> 49 & 7) != 0) {
            fail_block("a matrix that is not swizzled by 128 bytes from a multiple of 1024 on");
        }
    }
    unsigned row_major(unsigned row, unsigned k) const {
        return begin + row / 8 * units + row % 8 * 128 + k * 2;
    }
    unsigned mn_major(unsigned k, unsigned n) const {
        return begin + n / 64 * panels + n % 64 * 2 + k / 8 * units + k % 8 * 128;
    }
};

// Executes one wgmma for all threads of a warpgroup.
void multiply(Thread* threads, size_t index) {
    static thread_local float left[ROWS][STEP], right[STEP][MAX_COLUMNS], sums[ROWS][MAX_COLUMNS];
    const WgmmaOp first = threads[0].commits.front()[index];
    Matrix b(first.right);
    for (unsigned k = 0; k < STEP; k++) {
        for (unsigned n = 0; n < first.n; n++) {
            right[k][n] =
                half_at(first.mn_major ? b.mn_major(k, n) : b.row_major(n, k), first.bf16);
        }
    }
    if (first.registers == nullptr) {
        Matrix a(first.left);
        for (unsigned r = 0; r < ROWS; r++) {
            for (unsigned k = 0; k < STEP; k++) {
                left[r][k] = half_at(a.row_major(r, k), first.bf16);
            }
        }
    }
    // Calls `visit` with row, column and index of each accumulator of a thread.
    auto each_sum = [&](unsigned thread, auto visit) {
        unsigned g = thread % 32 / 4, t = thread % 4;
        for (unsigned i = 0; i < first.n / 2; i++) {
            visit(thread / 32 * 16 + g + i % 4 / 2 * 8, i / 4 * 8 + 2 * t + i % 2, i);
        }
    };
    for (unsigned thread = 0; thread < WARPGROUP; thread++) {
        const WgmmaOp& mine = threads[thread].commits.front()[index];
        if (mine.right != first.right || mine.left != first.left || mine.n != first.n ||
            mine.add != first.add || mine.bf16 != first.bf16 || mine.mn_major != first.mn_major ||
            (mine.registers == nullptr) != (first.registers == nullptr)) {
            fail_block("threads of a group multiply different matrices");
        }
        for (unsigned i = 0; i < 4 && mine.registers != nullptr; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8,
                     k = thread % 4 * 2 + i / 2 * 8;
            unsigned word = mine.registers[i];
            for (unsigned e = 0; e < 2; e++, word >>= 16) {
                left[row][k + e] = first.bf16 ? __uint_as_float(word << 16)
                                              : f16_to_f32(static_cast<uint16_t>(word));
            }
        }
        const float* values = threads[thread].sums.at(mine.sums).values.data();
        each_sum(thread, [&](unsigned r, unsigned c, unsigned i) {
            sums[r][c] = first.add ? values[i] : 0.0f;
        });
    }
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned k = 0; k < STEP; k++) {
            float factor = left[r][k];
            for (unsigned n = 0; n < first.n; n++) {
                sums[r][n] += factor * right[k][n];
            }
        }
    }
    for (unsigned thread = 0; thread < WARPGROUP; thread++) {
        float* to = threads[thread].commits.front()[index].sums;
        Sums& mine = threads[thread].sums.at(to);
        each_sum(thread, [&](unsigned r, unsigned c, unsigned i) { mine.values[i] = sums[r][c]; });
        if (--mine.products == 0) {
            std::memcpy(to, mine.values.data(), mine.values.size() * sizeof(float));
            threads[thread].sums.erase(to);
        }
    }
}

// Whether a wgmma in flight reads any of these bytes of shared memory.
bool is_read(const unsigned char* to, unsigned bytes) {
    unsigned begin = smem_address(to), end = begin + bytes;
    for (const Thread& thread : state.threads) {
        for (const auto& commit : thread.commits) {
            for (const WgmmaOp& product : commit) {
                auto overlaps = [&](uint64_t bits, unsigned rows, bool mn_major) {
                    Matrix matrix(bits);
                    // Range from the first to the last byte, widened by the swizzle.
                    unsigned last = mn_major ? matrix.mn_major(STEP - 1, rows - 1)
                                             : matrix.row_major(rows - 1, STEP - 1);
                    return begin < (last | 127) + 1 && (matrix.begin & ~127u) < end;
                };
                if (overlaps(product.right, product.n, product.mn_major) ||
                    (product.registers == nullptr && overlaps(product.left, ROWS, false))) {
                    return true;
                }
            }
        }
    }
    return false;
}

Thread& thread() { return state.threads[current()]; }

} // namespace

void begin_sm90() {
    state.barriers.clear();
    state.named.clear();
    state.threads.clear();
    state.groups.clear();
    state.seen.clear();
    state.fenced = false;
}

const char* end_sm90() {
    for (const auto& [at, barrier] : state.barriers) {
        if (!barrier.copies.empty()) {
            return "a copy under way that nobody waits for";
        }
    }
    for (const Thread& thread : state.threads) {
        if (thread.commits.size() > 1 ||
            (thread.commits.size() == 1 && !thread.commits[0].empty())) {
            return "a product under way that nobody waits for";
        }
    }
    return nullptr;
}

void publish_fenced_writes() {
    if (state.fenced) {
        state.seen.assign(shared().begin, shared().begin + shared().bytes);
        state.fenced = false;
    }
}

unsigned smem_address(const void* at) {
    auto [begin, bytes] = shared();
    const unsigned char* place = static_cast<const unsigned char*>(at);
    if (place < begin || place > begin + bytes) {
        fail_block("the address of what is not in shared memory");
    }
    return static_cast<unsigned>(place - begin) + 16;
}

void mbarrier_init(unsigned long long* barrier, unsigned arrivals) {
    smem_address(barrier);
    if (arrivals == 0 || arrivals > MAX_ARRIVALS || reinterpret_cast<uintptr_t>(barrier) % 8 != 0) {
        fail_block("a barrier for nobody or too many, or at what is no multiple of 8");
    }
    Barrier fresh;
    fresh.arrivals = fresh.pending = arrivals;
    state.barriers[barrier] = fresh;
    state.seen.resize(shared().bytes, 0xff);
}

void mbarrier_arrive(unsigned long long* at, unsigned bytes) {
    Barrier& barrier = barrier_at(at);
    if (barrier.pending == 0) {
        fail_block("more arrive at a barrier than it was made for");
    }
    barrier.bytes += bytes;
    if (barrier.bytes > static_cast<long>(MAX_TX_BYTES)) {
        fail_block("a barrier that waits for too many bytes");
    }
    barrier.pending--;
    try_complete_phase(barrier);
}

void mbarrier_wait(unsigned long long* at, unsigned parity) {
    Barrier& barrier = barrier_at(at);
    while (barrier.phases % 2 == parity) {
        deliver(barrier);
        if (barrier.phases % 2 == parity) {
            barrier.waiting++;
            wait(&barrier.phases);
            barrier.waiting--;
        }
    }
}

void cp_async_bulk(void* to, const void* from, unsigned bytes, unsigned long long* at) {
    Barrier& barrier = barrier_at(at);
    AsyncCopy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes,
                   false};
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0 ||
        bytes == 0) {
        fail_block("a bulk copy of, from or to what is no multiple of 16");
    }
    if (smem_address(to) + bytes > shared().bytes + 16) {
        fail_block("a bulk copy beyond shared memory");
    }
    if (is_read(copy.to, bytes)) {
        fail_block("a bulk copy to what a product under way reads");
    }
    if (barrier.waiting != 0 || state.copies++ % 2 == 0) {
        make(copy);
        barrier.bytes -= bytes;
        try_complete_phase(barrier);
    } else {
        barrier.copies.push_back(copy);
    }
}

void mbarrier_arrive_copies(unsigned long long* at) {
    Barrier& barrier = barrier_at(at);
    for (auto [to, from] : take_copies()) {
        AsyncCopy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), 16,
                       true};
        if (smem_address(to) + copy.bytes > shared().bytes + 16) {
            fail_block("a copy beyond shared memory");
        }
        if (barrier.waiting != 0 || state.copies++ % 2 == 0) {
            make(copy);
        } else {
            barrier.copies.push_back(copy);
            barrier.bytes += copy.bytes;
        }
    }
    mbarrier_arrive(at, 0);
}

void fence_proxy_async() { state.fenced = true; }

void named_barrier(unsigned id, unsigned threads, bool waits) {
    NamedBarrier& named = state.named[id];
    if (id == 0 || id > 15 || threads % 32 != 0 ||
        (named.arrived != 0 && named.threads != threads)) {
        fail_block("a named barrier that there is not, or that threads disagree about");
    }
    named.threads = threads;
    if (++named.arrived == threads) {
        named.arrived = 0;
        named.turns++;
        publish_fenced_writes();
    } else if (waits) {
        wait(&named.turns);
    }
}

void check_setmaxnreg(unsigned count) {
    if (count < 24 || count > 256 || count % 8 != 0) {
        fail_block("a number of registers that no thread can have");
    }
}

void wgmma_fence() {
    state.threads.resize(threads());
    state.groups.resize(threads() / WARPGROUP + 1);
    thread().begun = true;
}

void wgmma(const WgmmaOp& product) {
    if (state.threads.empty() || !thread().begun) {
        fail_block("a product that was not begun");
    }
    Thread& mine = thread();
    if (mine.commits.empty()) {
        mine.commits.emplace_back();
    }
    Sums& sums = mine.sums[product.sums];
    unsigned count = product.n / 2;
    if (sums.products++ == 0) {
        sums.values.assign(product.sums, product.sums + count);
        for (unsigned i = 0; i < count; i++) {
            product.sums[i] = NAN_F;
        }
    }
    mine.commits.back().push_back(product);
}

void wgmma_commit() {
    Thread& mine = thread();
    if (mine.commits.empty()) {
        mine.commits.emplace_back();
    }
    mine.commits.emplace_back();
    mine.begun = false;
}

void wgmma_wait(unsigned later) {
    if (state.threads.empty()) {
        return;
    }
    Group& group = state.groups[current() / WARPGROUP];
    if (group.arrived != 0 && group.later != later) {
        fail_block("threads of a group wait for different products");
    }
    group.later = later;
    if (++group.arrived < WARPGROUP) {
        wait(&group.turns);
        return;
    }
    group.arrived = 0;
    group.turns++;
    Thread* all = &state.threads[current() / WARPGROUP * WARPGROUP];
    while (all[0].commits.size() > later + 1) {
        size_t count = all[0].commits.front().size();
        for (unsigned i = 0; i < WARPGROUP; i++) {
            if (all[i].commits.size() != all[0].commits.size() ||
                all[i].commits.front().size() != count) {
                fail_block("threads of a group have begun different products");
            }
        }
        for (size_t i = 0; i < count; i++) {
            multiply(all, i);
        }
        for (unsigned i = 0; i < WARPGROUP; i++) {
            all[i].commits.erase(all[i].commits.begin());
        }
    }
}

} // namespace shim
