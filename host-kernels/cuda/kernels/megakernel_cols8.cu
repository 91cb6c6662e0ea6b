// The same for several columns, tokens or sequences: see `megakernel.cuh`.
#include "megakernel.cuh"

KERNEL(vg_megakernel_cols8, VgMegakernelParams, 128, 3) { step<MOST_COLUMNS>(p); }
