// All kernels, in one unit: they register themselves.
#include "elementwise.cu"
