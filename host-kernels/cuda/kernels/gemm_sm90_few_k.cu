// sm_90a GEMM of few columns with weights in blocks of 256.
#include "gemm_sm90_few.cuh"

KERNEL_AHEAD(vg_gemm_sm90_q2_k_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q2_K, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q2_k_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q2_K, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q2_k_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q2_K, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q3_k_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q3_K, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q3_k_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q3_K, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q3_k_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q3_K, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_k_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_K, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_k_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_K, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_k_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_K, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_k_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_K, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_k_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_K, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_k_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_K, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q6_k_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q6_K, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q6_k_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q6_K, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q6_k_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q6_K, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_xs_16, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_XS, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_xs_32, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_XS, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_xs_64, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_XS, 64>(p); }
