// The same for several columns, tokens or sequences: see `step.cuh`.
#include "step.cuh"

KERNEL(vg_steps, VgStagesParams, 128, 3) { step<MOST_COLUMNS>(p); }
