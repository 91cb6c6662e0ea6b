// Interface between `shim.cpp`, which schedules the threads of a block, and `sm90.cpp`.
#pragma once
#include "shim.h"

#include <cstddef>
#include <utility>
#include <vector>

namespace shim {

// Fails the block with an error; its fibers are abandoned.
[[noreturn]] void fail_block(const char* error);

// Suspends the fiber until `*count` changes.
void wait(const unsigned* count);

// Index of the running thread, and number of threads of the block.
unsigned current();
unsigned threads();

// The block's dynamic shared memory, which begins 16 bytes behind a multiple of 1024: a GPU
// guarantees an alignment of 16 only.
struct Shared {
    unsigned char* begin;
    size_t bytes;
};
Shared shared();

// Resets the state at the start of a block; at its end returns an error or null.
void begin_sm90();
const char* end_sm90();

// Takes the cp.async copies of the running thread that nobody has waited for: destination and
// source of 16 bytes each.
std::vector<std::pair<void*, const void*>> take_copies();

// Called at every barrier: fenced writes become visible to wgmma.
void publish_fenced_writes();

} // namespace shim
