// GEMM with weights in IQ formats (codebooks).
#include "gemm.cuh"

KERNEL(vg_gemm_iq2_xxs, VgGemmParams, 256) { gemm<VG_IQ2_XXS>(p); }
KERNEL(vg_gemm_iq2_xs, VgGemmParams, 256) { gemm<VG_IQ2_XS>(p); }
KERNEL(vg_gemm_iq2_s, VgGemmParams, 256) { gemm<VG_IQ2_S>(p); }
KERNEL(vg_gemm_iq3_xxs, VgGemmParams, 256) { gemm<VG_IQ3_XXS>(p); }
KERNEL(vg_gemm_iq3_s, VgGemmParams, 256) { gemm<VG_IQ3_S>(p); }
KERNEL(vg_gemm_iq1_s, VgGemmParams, 256) { gemm<VG_IQ1_S>(p); }
KERNEL(vg_gemm_iq1_m, VgGemmParams, 256) { gemm<VG_IQ1_M>(p); }
