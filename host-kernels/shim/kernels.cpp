// All kernels, in one unit: they register themselves.
#include "elementwise.cu"
#include "movement.cu"
#include "norm.cu"
#include "reduce.cu"
#include "rope.cu"
