// All kernels, in one unit: they register themselves.
#include "attention.cu"
#include "elementwise.cu"
#include "matmul.cu"
#include "movement.cu"
#include "norm.cu"
#include "reduce.cu"
#include "rope.cu"
