// What `shim.cpp`, which runs the threads of a block, and `sm90.cpp` need of each other.
#pragma once
#include "shim.h"

#include <cstddef>

namespace shim {

// Ends the block; what its threads were doing is forgotten.
[[noreturn]] void leave(const char* error);

// Lets others run until `*count` is no longer what it was.
void wait(const unsigned* count);

// The running thread, and how many the block has.
unsigned current();
unsigned threads();

// The block's dynamic shared memory; 16 bytes before it begins a multiple of 1024.
struct Shared {
    unsigned char* begin;
    size_t bytes;
};
Shared shared();

// A block begins. It ends, with what is wrong about that or null.
void prepare_hopper();
const char* end_hopper();

// A barrier was passed: what was fenced before it can be seen by all.
void publish();

} // namespace shim
