// A step of a model as one launch: see `megakernel.cuh`.
#include "megakernel.cuh"

KERNEL(vg_megakernel, VgMegakernelParams, 128, 3) { step<1>(p); }
