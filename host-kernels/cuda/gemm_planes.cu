// Products of many columns with weights whose quants and scales lie in planes of their own.
#include "gemm.cuh"

KERNEL(vg_gemm_mxfp4_planes, VgGemmParams, 256) { gemm<VG_MXFP4 | VG_PLANES>(p); }
