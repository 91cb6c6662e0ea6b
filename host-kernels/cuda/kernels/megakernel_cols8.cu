// The megakernel for up to eight columns (tokens or sequences): see `megakernel.cuh`.
#include "megakernel.cuh"

KERNEL(vg_megakernel_cols8, VgMegakernelParams, 128, 3) { megakernel<MAX_COLUMNS>(p); }
