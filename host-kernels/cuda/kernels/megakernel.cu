// The megakernel for one token of one sequence: see `megakernel.cuh`.
#include "megakernel.cuh"

KERNEL(vg_megakernel, VgMegakernelParams, 128, 3) { megakernel<1>(p); }
