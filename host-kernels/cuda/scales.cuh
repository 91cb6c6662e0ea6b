// What products with rounded activations, and those who round them, agree on.
#pragma once
#include "device.cuh"

// Of a block of 32 activations, which are bytes from -127 to 127: the factor, and the sums of its halves.
struct Scales {
    float factor, low, high, reserved;
};
