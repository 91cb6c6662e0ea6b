// Barriers that count bytes, bulk copies, and products of groups of warps: see `shim.h`.
#include "fibers.h"

#include <map>
#include <string>
#include <vector>

namespace shim {
namespace {

constexpr unsigned GROUP = 128, ROWS = 64, STEP = 16, MOST_COLUMNS = 256;

// What the hardware's counters hold.
constexpr unsigned MOST_ARRIVALS = (1 << 20) - 1, MOST_BYTES = (1 << 20) - 1;

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes;
};

struct Barrier {
    unsigned arrivals = 0, pending = 0;
    long bytes = 0;      // announced and not there yet
    unsigned phases = 0; // that have ended
    unsigned waiting = 0;
    std::vector<Copy> copies; // that are made when somebody waits
};

struct Named {
    unsigned arrived = 0, threads = 0, turns = 0;
};

// Sums that products under way belong to: what they are, and in how many products.
struct Sums {
    std::vector<float> values;
    unsigned products = 0;
};

struct Thread {
    bool begun = false;
    std::vector<std::vector<Product>> commits; // that were not waited for; the last one is open
    std::map<float*, Sums> sums;
};

struct Group {
    unsigned arrived = 0, later = 0, turns = 0;
};

struct State {
    std::map<const void*, Barrier> barriers;
    std::map<unsigned, Named> named;
    std::vector<Thread> threads;
    std::vector<Group> groups;
    // Shared memory as copies and products see it.
    std::vector<unsigned char> seen;
    bool fenced = false;
    unsigned copies = 0;
};

thread_local State state;

Barrier& barrier_at(const void* at) {
    auto found = state.barriers.find(at);
    if (found == state.barriers.end()) {
        leave("a barrier that nobody has made");
    }
    return found->second;
}

// Ends the phase if all is there.
void settle(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.arrivals;
        barrier.phases++;
        publish();
    }
}

void make(const Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    std::memcpy(state.seen.data() + (copy.to - shared().begin), copy.to, copy.bytes);
}

void deliver(Barrier& barrier) {
    std::vector<Copy> copies;
    copies.swap(barrier.copies);
    for (const Copy& copy : copies) {
        make(copy);
        barrier.bytes -= copy.bytes;
    }
    settle(barrier);
}

// A half at an address of shared memory, swizzled, as products see it.
float half_at(unsigned address, bool brain) {
    address ^= (address >> 7 & 7) << 4;
    address -= 16; // where the memory begins
    if (address + 2 > state.seen.size()) {
        leave("a product of what is not in shared memory");
    }
    uint16_t bits;
    std::memcpy(&bits, state.seen.data() + address, 2);
    return brain ? __uint_as_float(static_cast<unsigned>(bits) << 16) : half_to_float(bits);
}

// What a descriptor says: see `matrix_at`.
struct Matrix {
    unsigned begin, panels, units;

    explicit Matrix(uint64_t bits)
        : begin(static_cast<unsigned>(bits & 0x3fff) << 4), panels(static_cast<unsigned>(bits >> 16 & 0x3fff) << 4),
          units(static_cast<unsigned>(bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1 || (bits >> 49 & 7) != 0) {
            leave("a matrix that is not swizzled by 128 bytes from a multiple of 1024 on");
        }
    }
    unsigned row_major(unsigned row, unsigned k) const { return begin + row / 8 * units + row % 8 * 128 + k * 2; }
    unsigned along_n(unsigned k, unsigned n) const {
        return begin + n / 64 * panels + n % 64 * 2 + k / 8 * units + k % 8 * 128;
    }
};

// Makes one product for all threads of a group.
void multiply(Thread* threads, size_t index) {
    static thread_local float left[ROWS][STEP], right[STEP][MOST_COLUMNS], sums[ROWS][MOST_COLUMNS];
    const Product first = threads[0].commits.front()[index];
    Matrix b(first.right);
    for (unsigned k = 0; k < STEP; k++) {
        for (unsigned n = 0; n < first.n; n++) {
            right[k][n] = half_at(first.along_n ? b.along_n(k, n) : b.row_major(n, k), first.brain);
        }
    }
    if (first.registers == nullptr) {
        Matrix a(first.left);
        for (unsigned r = 0; r < ROWS; r++) {
            for (unsigned k = 0; k < STEP; k++) {
                left[r][k] = half_at(a.row_major(r, k), first.brain);
            }
        }
    }
    // Calls `visit` with row, column and place of each sum of a thread.
    auto each_sum = [&](unsigned thread, auto visit) {
        unsigned g = thread % 32 / 4, t = thread % 4;
        for (unsigned i = 0; i < first.n / 2; i++) {
            visit(thread / 32 * 16 + g + i % 4 / 2 * 8, i / 4 * 8 + 2 * t + i % 2, i);
        }
    };
    for (unsigned thread = 0; thread < GROUP; thread++) {
        const Product& mine = threads[thread].commits.front()[index];
        if (mine.right != first.right || mine.left != first.left || mine.n != first.n || mine.add != first.add ||
            mine.brain != first.brain || mine.along_n != first.along_n ||
            (mine.registers == nullptr) != (first.registers == nullptr)) {
            leave("threads of a group multiply different matrices");
        }
        for (unsigned i = 0; i < 4 && mine.registers != nullptr; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, k = thread % 4 * 2 + i / 2 * 8;
            unsigned word = mine.registers[i];
            for (unsigned e = 0; e < 2; e++, word >>= 16) {
                left[row][k + e] =
                    first.brain ? __uint_as_float(word << 16) : half_to_float(static_cast<uint16_t>(word));
            }
        }
        const float* values = threads[thread].sums.at(mine.sums).values.data();
        each_sum(thread, [&](unsigned r, unsigned c, unsigned i) { sums[r][c] = first.add ? values[i] : 0.0f; });
    }
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned k = 0; k < STEP; k++) {
            float factor = left[r][k];
            for (unsigned n = 0; n < first.n; n++) {
                sums[r][n] += factor * right[k][n];
            }
        }
    }
    for (unsigned thread = 0; thread < GROUP; thread++) {
        float* to = threads[thread].commits.front()[index].sums;
        Sums& mine = threads[thread].sums.at(to);
        each_sum(thread, [&](unsigned r, unsigned c, unsigned i) { mine.values[i] = sums[r][c]; });
        if (--mine.products == 0) {
            std::memcpy(to, mine.values.data(), mine.values.size() * sizeof(float));
            threads[thread].sums.erase(to);
        }
    }
}

// Whether a product under way reads any of these bytes of shared memory.
bool is_read(const unsigned char* to, unsigned bytes) {
    unsigned begin = shared_address(to), end = begin + bytes;
    for (const Thread& thread : state.threads) {
        for (const auto& commit : thread.commits) {
            for (const Product& product : commit) {
                auto overlaps = [&](uint64_t bits, unsigned rows, bool along_n) {
                    Matrix matrix(bits);
                    // The first and the last bytes, with what swizzling makes of them.
                    unsigned last = along_n ? matrix.along_n(STEP - 1, rows - 1) : matrix.row_major(rows - 1, STEP - 1);
                    return begin < (last | 127) + 1 && (matrix.begin & ~127u) < end;
                };
                if (overlaps(product.right, product.n, product.along_n) ||
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

void prepare_hopper() {
    state.barriers.clear();
    state.named.clear();
    state.threads.clear();
    state.groups.clear();
    state.seen.clear();
    state.fenced = false;
}

const char* end_hopper() {
    for (const auto& [at, barrier] : state.barriers) {
        if (!barrier.copies.empty()) {
            return "a copy under way that nobody waits for";
        }
    }
    for (const Thread& thread : state.threads) {
        if (thread.commits.size() > 1 || (thread.commits.size() == 1 && !thread.commits[0].empty())) {
            return "a product under way that nobody waits for";
        }
    }
    return nullptr;
}

void publish() {
    if (state.fenced) {
        state.seen.assign(shared().begin, shared().begin + shared().bytes);
        state.fenced = false;
    }
}

unsigned shared_address(const void* at) {
    auto [begin, bytes] = shared();
    const unsigned char* place = static_cast<const unsigned char*>(at);
    if (place < begin || place > begin + bytes) {
        leave("the address of what is not in shared memory");
    }
    return static_cast<unsigned>(place - begin) + 16;
}

void barrier_init(unsigned long long* barrier, unsigned arrivals) {
    shared_address(barrier);
    if (arrivals == 0 || arrivals > MOST_ARRIVALS || reinterpret_cast<uintptr_t>(barrier) % 8 != 0) {
        leave("a barrier for nobody or too many, or at what is no multiple of 8");
    }
    Barrier fresh;
    fresh.arrivals = fresh.pending = arrivals;
    state.barriers[barrier] = fresh;
    state.seen.resize(shared().bytes, 0xff);
}

void barrier_arrive(unsigned long long* at, unsigned bytes) {
    Barrier& barrier = barrier_at(at);
    if (barrier.pending == 0) {
        leave("more arrive at a barrier than it was made for");
    }
    barrier.bytes += bytes;
    if (barrier.bytes > static_cast<long>(MOST_BYTES)) {
        leave("a barrier that waits for too many bytes");
    }
    barrier.pending--;
    settle(barrier);
}

void barrier_wait(unsigned long long* at, unsigned parity) {
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

void copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* at) {
    Barrier& barrier = barrier_at(at);
    Copy copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes};
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0 || bytes == 0) {
        leave("a bulk copy of, from or to what is no multiple of 16");
    }
    if (shared_address(to) + bytes > shared().bytes + 16) {
        leave("a bulk copy beyond shared memory");
    }
    if (is_read(copy.to, bytes)) {
        leave("a bulk copy to what a product under way reads");
    }
    if (barrier.waiting != 0 || state.copies++ % 2 == 0) {
        make(copy);
        barrier.bytes -= bytes;
        settle(barrier);
    } else {
        barrier.copies.push_back(copy);
    }
}

void fence_async() { state.fenced = true; }

void named_barrier(unsigned id, unsigned threads, bool waits) {
    Named& named = state.named[id];
    if (id == 0 || id > 15 || threads % 32 != 0 || (named.arrived != 0 && named.threads != threads)) {
        leave("a named barrier that there is not, or that threads disagree about");
    }
    named.threads = threads;
    if (++named.arrived == threads) {
        named.arrived = 0;
        named.turns++;
        publish();
    } else if (waits) {
        wait(&named.turns);
    }
}

void check_registers(unsigned count) {
    if (count < 24 || count > 256 || count % 8 != 0) {
        leave("a number of registers that no thread can have");
    }
}

void group_begin() {
    state.threads.resize(threads());
    state.groups.resize(threads() / GROUP + 1);
    thread().begun = true;
}

void group_multiply(const Product& product) {
    if (state.threads.empty() || !thread().begun) {
        leave("a product that was not begun");
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

void group_commit() {
    Thread& mine = thread();
    if (mine.commits.empty()) {
        mine.commits.emplace_back();
    }
    mine.commits.emplace_back();
    mine.begun = false;
}

void group_wait(unsigned later) {
    if (state.threads.empty()) {
        return;
    }
    Group& group = state.groups[current() / GROUP];
    if (group.arrived != 0 && group.later != later) {
        leave("threads of a group wait for different products");
    }
    group.later = later;
    if (++group.arrived < GROUP) {
        wait(&group.turns);
        return;
    }
    group.arrived = 0;
    group.turns++;
    Thread* all = &state.threads[current() / GROUP * GROUP];
    while (all[0].commits.size() > later + 1) {
        size_t count = all[0].commits.front().size();
        for (unsigned i = 0; i < GROUP; i++) {
            if (all[i].commits.size() != all[0].commits.size() || all[i].commits.front().size() != count) {
                leave("threads of a group have begun different products");
            }
        }
        for (size_t i = 0; i < count; i++) {
            multiply(all, i);
        }
        for (unsigned i = 0; i < GROUP; i++) {
            all[i].commits.erase(all[i].commits.begin());
        }
    }
}

} // namespace shim
