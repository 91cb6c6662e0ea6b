// Runs kernels on the CPU: see `shim.h`.
#include "fibers.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

// Fiber contexts: `switch_context` saves the current one and resumes another.
#ifdef __x86_64__
// Callee-saved registers (System V ABI) are pushed to the stack; the context is the stack pointer.
// ucontext makes a system call for the signal mask at each switch and takes ten times as long.
using Context = void*;
extern "C" void vgpu_shim_switch(Context* from, Context to);
asm(R"(
    .text
    .globl vgpu_shim_switch
    .hidden vgpu_shim_switch
    .type vgpu_shim_switch, @function
vgpu_shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size vgpu_shim_switch, .-vgpu_shim_switch
)");

static void switch_context(Context& from, Context& to) { vgpu_shim_switch(&from, to); }

static void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    // A frame as if `entry` had been called: a return address that is never used, 8 below a
    // multiple of 16.
    void** top = reinterpret_cast<void**>(stack + bytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) {
        *--top = nullptr;
    }
    context = top;
}
#else
using Context = ucontext_t;

static void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

static void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

namespace shim {
namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned LANES = 32;

struct Kernel {
    unsigned threads;
    size_t params;
    void (*body)(const void*);
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

// Shuffle state of a warp. Values are double-buffered so that the next shuffle may begin while some
// lanes have yet to read.
struct Warp {
    uint64_t values[2][LANES];
    unsigned arrived; // bit mask of arrived lanes
    unsigned mask;    // lane mask of the current shuffle
    unsigned turn;
    // Operands of mma, buffered as the values: a, then b of each lane, as f32.
    float fragments[2][LANES][12];
};

enum class State { Fresh, Ready, Done };

// A pending cp.async of 16 bytes. The source is read when the copy is issued, or when it is waited
// for.
struct AsyncCopy {
    void* to;
    const void* from; // null if already read
    unsigned char bytes[16];
};

struct Fiber {
    Context context;
    State state;
    Dim3 index;
    // The counter that the fiber waits on, and its value at the start of the wait.
    const unsigned* waits;
    unsigned seen;
    // cp.async groups in flight; the last one is open.
    std::vector<std::vector<AsyncCopy>> copies;
};

// Scheduler of the blocks of a cooperative launch. Each block has a host thread; one runs at a
// time.
class BlockScheduler {
public:
    BlockScheduler(unsigned blocks, uint64_t seed)
        : states(blocks, Ready), wakes(blocks), random(seed * 2 + 1), policy(seed % 4) {
        turn = pick();
    }

    // Waits for the block's first turn. Returns false if the launch has failed.
    bool begin(unsigned me) {
        std::unique_lock<std::mutex> lock(mutex);
        return await_turn(me, lock);
    }

    // Switches to another block at random. Returns false if the launch has failed.
    bool maybe_switch_block(unsigned me) {
        std::unique_lock<std::mutex> lock(mutex);
        if (next() % 4 != 0) {
            return !failed;
        }
        schedule_next();
        return await_turn(me, lock);
    }

    // Runs other blocks until `*at` is at least `count`. Returns an error on a deadlock.
    const char* await(unsigned me, const unsigned* at, unsigned count) {
        std::unique_lock<std::mutex> lock(mutex);
        while (!failed && *at < count) {
            states[me] = Waiting;
            if (!schedule_next()) {
                fail();
                return "the blocks of a launch wait for each other for ever";
            }
            await_turn(me, lock);
        }
        return failed ? "another block has failed" : nullptr;
    }

    // Increments; waiting blocks check again.
    unsigned signal_counter_fetch(unsigned* at) {
        std::unique_lock<std::mutex> lock(mutex);
        for (State& state : states) {
            state = state == Waiting ? Ready : state;
        }
        return (*at)++;
    }

    // The block has ended, or failed.
    void end(unsigned me, bool is_good) {
        std::unique_lock<std::mutex> lock(mutex);
        states[me] = Done;
        if (!is_good) {
            fail();
        } else if (!schedule_next() && std::count(states.begin(), states.end(), Waiting) != 0) {
            // No block can increment any more: a waiting one reports the deadlock.
            std::replace(states.begin(), states.end(), Waiting, Ready);
            schedule_next();
        }
    }

    unsigned next() {
        random = random * 6364136223846793005u + 1442695040888963407u;
        return static_cast<unsigned>(random >> 33);
    }

private:
    enum State { Ready, Waiting, Done };

    // Scheduling policies: uniform; mostly the last ready block; mostly the first; mostly the
    // current one.
    unsigned pick() {
        std::vector<unsigned> ready;
        for (unsigned i = 0; i < states.size(); i++) {
            if (states[i] == Ready) {
                ready.push_back(i);
            }
        }
        if (ready.empty()) {
            return static_cast<unsigned>(states.size());
        }
        bool at_random = policy == 0 || next() % 16 == 0;
        if (at_random) {
            return ready[next() % ready.size()];
        }
        if (policy == 3 && turn < states.size() && states[turn] == Ready) {
            return turn;
        }
        return policy == 1 ? ready.back() : ready.front();
    }

    bool schedule_next() {
        unsigned next = pick();
        if (next == states.size()) {
            return false;
        }
        turn = next;
        wakes[turn].notify_one();
        return true;
    }

    bool await_turn(unsigned me, std::unique_lock<std::mutex>& lock) {
        wakes[me].wait(lock, [&] { return failed || turn == me; });
        return !failed;
    }

    void fail() {
        failed = true;
        for (std::condition_variable& wake : wakes) {
            wake.notify_one();
        }
    }

    std::mutex mutex;
    std::vector<State> states;
    std::vector<std::condition_variable> wakes;
    uint64_t random;
    unsigned policy, turn = 0;
    bool failed = false;
};

struct Block {
    // Set for cooperative launches: the scheduler, and the index of the block.
    BlockScheduler* grid_scheduler = nullptr;
    unsigned number = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    char* stacks = nullptr;
    unsigned threads = 0;
    unsigned alive = 0;
    unsigned at_barrier = 0;
    unsigned barriers = 0;
    unsigned current = 0;
    Context scheduler;
    void (*body)(const void*) = nullptr;
    const void* params = nullptr;
    std::vector<unsigned char> memory; // backing store of shared memory
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    // Whether the memory is as before the launches that this one depends on. Threads that wait for
    // them wait for `released`.
    bool is_ahead = false;
    unsigned released = 0;
    std::string error;

    ~Block() {
        if (stacks != nullptr) {
            munmap(stacks, STACK_BYTES * MAX_THREADS);
        }
    }
};

thread_local Block block;

// A range of memory that launches before this one have written, and its content before them.
struct StaleRange {
    unsigned char* at;
    size_t bytes;
    unsigned char* before;
};
thread_local std::vector<StaleRange> stale;

// Exchanges the content of all ranges with their content before, or back.
void swap_stale() {
    for (const StaleRange& range : stale) {
        std::swap_ranges(range.at, range.at + range.bytes, range.before);
    }
}

// The launches before this one are complete.
void release() {
    swap_stale();
    block.is_ahead = false;
    block.released++;
}

// Switches to the fiber scheduler.
void yield() { switch_context(block.fibers[block.current].context, block.scheduler); }

} // namespace

[[noreturn]] void fail_block(const char* error) {
    if (block.error.empty()) {
        block.error = error;
    }
    for (;;) {
        yield();
    }
}

void wait(const unsigned* count) {
    Fiber& fiber = block.fibers[block.current];
    fiber.waits = count;
    fiber.seen = *count;
    yield();
}

void grid_dependency_wait() {
    if (block.is_ahead) {
        wait(&block.released);
    }
}

unsigned current() { return block.current; }
unsigned threads() { return block.threads; }
Shared shared() { return {block.shared, block.shared_bytes}; }

namespace {

void enter() {
    block.body(block.params);
    Fiber& fiber = block.fibers[block.current];
    fiber.state = State::Done;
    block.alive--;
    if (block.at_barrier != 0) {
        fail_block("a thread ended while others wait at a barrier");
    }
    for (;;) {
        yield();
    }
}

void prepare(unsigned threads) {
    if (block.stacks == nullptr) {
        void* stacks = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            std::fprintf(stderr, "no memory for the stacks of a block\n");
            std::abort();
        }
        block.stacks = static_cast<char*>(stacks);
        block.fibers.resize(MAX_THREADS);
        block.warps.resize(MAX_THREADS / LANES);
    }
    block.threads = block.alive = threads;
    block.at_barrier = block.barriers = 0;
    block.error.clear();
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.state = State::Fresh;
        fiber.waits = nullptr;
        fiber.copies.clear();
        fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    }
    for (Warp& warp : block.warps) {
        warp.arrived = warp.turn = 0;
    }
    begin_sm90();
    block.is_ahead = !stale.empty();
    if (block.is_ahead) {
        swap_stale();
    }
}

// Runs fiber `i` until it waits or ends.
void resume(unsigned i) {
    Fiber& fiber = block.fibers[i];
    block.current = i;
    threadIdx = fiber.index;
    if (fiber.state == State::Fresh) {
        fiber.state = State::Ready;
        make_context(fiber.context, block.stacks + i * STACK_BYTES, STACK_BYTES, enter);
    }
    switch_context(block.scheduler, fiber.context);
}

bool run_block() {
    while (block.alive != 0) {
        bool moved = false;
        for (unsigned i = 0; i < block.threads; i++) {
            Fiber& fiber = block.fibers[i];
            bool waiting = fiber.waits != nullptr && *fiber.waits == fiber.seen;
            if (fiber.state == State::Done || waiting) {
                continue;
            }
            fiber.waits = nullptr;
            resume(i);
            moved = true;
            if (!block.error.empty()) {
                return false;
            }
        }
        if (!moved && block.is_ahead) {
            release(); // all threads wait for it, or for one that does
            continue;
        }
        if (!moved) {
            block.error = "the threads of a block wait for each other for ever";
            return false;
        }
    }
    if (const char* error = end_sm90()) {
        block.error = error;
        return false;
    }
    return true;
}

} // namespace

Registered::Registered(const char* name, unsigned threads, size_t params,
                       void (*body)(const void*)) {
    kernels()[name] = Kernel{threads, params, body};
}

void* dynamic_shared() { return block.shared; }

void wait_counter(const unsigned* at, unsigned count) {
    if (block.grid_scheduler == nullptr) {
        if (*at < count) {
            fail_block("a block waits for others that do not run beside it");
        }
        return;
    }
    if (const char* error = block.grid_scheduler->await(block.number, at, count)) {
        fail_block(error);
    }
}

unsigned signal_counter_fetch(unsigned* at) {
    if (block.grid_scheduler == nullptr) {
        return (*at)++;
    }
    maybe_switch_block();
    unsigned before = block.grid_scheduler->signal_counter_fetch(at);
    maybe_switch_block();
    return before;
}

void maybe_switch_block() {
    if (block.grid_scheduler != nullptr &&
        !block.grid_scheduler->maybe_switch_block(block.number)) {
        fail_block("another block has failed");
    }
}

void block_barrier() {
    if (++block.at_barrier == block.threads) {
        block.at_barrier = 0;
        block.barriers++;
        publish_fenced_writes();
        return;
    }
    if (block.alive != block.threads) {
        fail_block("a barrier that threads which have ended never reach");
    }
    wait(&block.barriers);
}

uint64_t exchange(unsigned mask, uint64_t mine, int from) {
    Warp& warp = block.warps[block.current / LANES];
    unsigned lane = block.current % LANES;
    if (warp.arrived == 0) {
        warp.mask = mask;
    }
    if (warp.mask != mask || (mask >> lane & 1) == 0 || (mask >> from & 1) == 0) {
        fail_block("lanes of a warp disagree about who exchanges");
    }
    uint64_t* values = warp.values[warp.turn % 2];
    values[lane] = mine;
    warp.arrived |= 1u << lane;
    if (warp.arrived == mask) {
        warp.arrived = 0;
        warp.turn++;
    } else {
        wait(&warp.turn);
    }
    return values[from];
}

unsigned ballot(unsigned mask, bool predicate) {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        // All lanes shuffle in the same order.
        if (mask >> lane & 1) {
            lanes |= static_cast<unsigned>(exchange(mask, predicate, static_cast<int>(lane)))
                     << lane;
        }
    }
    return lanes;
}

// Copies take effect when they are waited for, so a kernel that does not wait reads stale data.
void cp_async(void* to, const void* from) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) {
        fail_block("a copy to shared memory from or to what is no multiple of 16");
    }
    auto& groups = block.fibers[block.current].copies;
    if (groups.empty()) {
        groups.emplace_back();
    }
    AsyncCopy copy = {to, from, {}};
    bool is_early = block.grid_scheduler != nullptr && block.grid_scheduler->next() % 2 == 0;
    if (is_early || block.is_ahead) {
        std::memcpy(copy.bytes, from, sizeof(copy.bytes));
        copy.from = nullptr;
    }
    groups.back().push_back(copy);
}

void cp_async_commit() {
    auto& groups = block.fibers[block.current].copies;
    if (groups.empty()) {
        groups.emplace_back();
    }
    groups.emplace_back();
}

void cp_async_wait(unsigned later) {
    auto& groups = block.fibers[block.current].copies;
    // The last group is open.
    while (groups.size() > later + 1) {
        for (const AsyncCopy& copy : groups.front()) {
            std::memcpy(copy.to, copy.from != nullptr ? copy.from : copy.bytes, sizeof(copy.bytes));
        }
        groups.erase(groups.begin());
    }
}

std::vector<std::pair<void*, const void*>> take_copies() {
    std::vector<std::pair<void*, const void*>> all;
    for (const auto& group : block.fibers[block.current].copies) {
        for (const AsyncCopy& copy : group) {
            if (copy.from == nullptr) {
                fail_block("a copy that arrives at a barrier, in a cooperative launch, or while "
                           "earlier launches run");
            }
            all.emplace_back(copy.to, copy.from);
        }
    }
    block.fibers[block.current].copies.clear();
    return all;
}

void mma_m16n8k16(float* sums, const unsigned* a, const unsigned* b, bool bf16) {
    Warp& warp = block.warps[block.current / LANES];
    unsigned lane = block.current % LANES;
    auto& all = warp.fragments[warp.turn % 2];
    for (int i = 0; i < 12; i++) {
        unsigned word = i < 8 ? a[i / 2] : b[(i - 8) / 2];
        uint16_t half = static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16);
        if (bf16) {
            unsigned bits = static_cast<unsigned>(half) << 16;
            std::memcpy(&all[lane][i], &bits, 4);
        } else {
            all[lane][i] = f16_to_f32(half);
        }
    }
    exchange(0xffffffffu, 0, static_cast<int>(lane));
    for (unsigned e = 0; e < 4; e++) {
        // Row and column of this accumulator, and the lanes that hold its operands.
        unsigned row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (unsigned k = 0; k < 16; k++) {
            const float* left = all[row % 8 * 4 + k % 8 / 2];
            const float* right = all[column * 4 + k % 8 / 2];
            sums[e] += left[k / 8 * 4 + row / 8 * 2 + k % 2] * right[8 + k / 8 * 2 + k % 2];
        }
    }
}

void ldmatrix_x4(unsigned* fragments, const void* row, bool transposed) {
    Warp& warp = block.warps[block.current / LANES];
    unsigned lane = block.current % LANES;
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        fail_block("a row of a matrix at what is no multiple of 16");
    }
    const uint64_t* rows = warp.values[warp.turn % 2];
    exchange(0xffffffffu, reinterpret_cast<uintptr_t>(row), static_cast<int>(lane));
    for (unsigned i = 0; i < 4; i++) {
        auto half = [&](unsigned r, unsigned c) {
            return static_cast<unsigned>(reinterpret_cast<const uint16_t*>(rows[8 * i + r])[c]);
        };
        unsigned r = lane / 4, t = lane % 4 * 2;
        fragments[i] =
            transposed ? half(t, r) | half(t + 1, r) << 16 : half(r, t) | half(r, t + 1) << 16;
    }
}

void check_aligned(const void* at, size_t size) {
    if (reinterpret_cast<uintptr_t>(at) % size != 0) {
        fail_block("a read at what is no multiple of its size");
    }
}

float f16_to_f32(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}

uint16_t f32_to_f16(float x) {
    _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

} // namespace shim

// Maximum threads per block of the kernel, and the size of its parameters; 0 if there is no such
// kernel.
extern "C" unsigned vgpu_shim_find(const char* name, size_t* params) {
    auto found = shim::kernels().find(name);
    if (found == shim::kernels().end()) {
        return 0;
    }
    *params = found->second.params;
    return found->second.threads;
}

namespace {

// Runs the block at `blockIdx`.
bool run_this_block(const shim::Kernel& kernel, const unsigned grid[3], const unsigned threads[3],
                    size_t shared, const void* params) {
    using shim::block;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    block.body = kernel.body;
    block.params = params;
    // A GPU guarantees 16-byte alignment only.
    constexpr size_t UNIT = 1024, LEAD = 16;
    block.memory.resize(shared + UNIT + LEAD + 1);
    void* begin = block.memory.data();
    size_t room = block.memory.size();
    block.shared = static_cast<unsigned char*>(std::align(UNIT, shared + LEAD, begin, room)) + LEAD;
    block.shared_bytes = shared;
    std::memset(block.shared, 0xff, shared);
    shim::prepare(threads[0] * threads[1] * threads[2]);
    bool is_good = shim::run_block();
    if (block.is_ahead) {
        shim::release(); // the block has failed
    }
    return is_good;
}

} // namespace

// Ranges of memory that launches before the next ones of this thread have written. Each block of a
// launch begins with their content before (programmatic dependent launch).
extern "C" void vgpu_shim_set_stale(const shim::StaleRange* ranges, size_t count) {
    shim::stale.assign(ranges, ranges + count);
}

// Runs a kernel. Returns null, or an error that is valid until the next launch of this thread.
extern "C" const char* vgpu_shim_launch(const char* name, const unsigned grid[3],
                                        const unsigned threads[3], size_t shared,
                                        const void* params) {
    const shim::Kernel& kernel = shim::kernels().at(name);
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++) {
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++) {
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++) {
                if (!run_this_block(kernel, grid, threads, shared, params)) {
                    return shim::block.error.c_str();
                }
            }
        }
    }
    return nullptr;
}

// Runs the blocks of a one-dimensional grid concurrently, in an order given by `seed`.
extern "C" const char* vgpu_shim_launch_cooperative(const char* name, unsigned blocks,
                                                    const unsigned threads[3], size_t shared,
                                                    const void* params, uint64_t seed) {
    static thread_local std::string last_error;
    std::string error;
    const shim::Kernel& kernel = shim::kernels().at(name);
    const unsigned grid[3] = {blocks, 1, 1};
    shim::BlockScheduler grid_scheduler(blocks, seed);
    std::mutex mutex;
    std::vector<std::thread> all;
    for (unsigned i = 0; i < blocks; i++) {
        all.emplace_back([&, i] {
            shim::block.grid_scheduler = &grid_scheduler;
            shim::block.number = i;
            blockIdx = {i, 0, 0};
            bool is_good =
                grid_scheduler.begin(i) && run_this_block(kernel, grid, threads, shared, params);
            if (!is_good && !shim::block.error.empty()) {
                std::lock_guard<std::mutex> lock(mutex);
                // The first error; those of other blocks follow from it.
                error = error.empty() ? shim::block.error : error;
            }
            grid_scheduler.end(i, is_good);
        });
    }
    for (std::thread& thread : all) {
        thread.join();
    }
    last_error = error;
    return error.empty() ? nullptr : last_error.c_str();
}
