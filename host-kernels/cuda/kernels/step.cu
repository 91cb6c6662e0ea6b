// A step of a model as one launch: see `step.cuh`.
#include "step.cuh"

KERNEL(vg_step, VgStagesParams, 128, 3) { step<1>(p); }
