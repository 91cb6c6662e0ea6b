// sm_90a GEMM of few columns with floats and weights in blocks of 32.
#include "gemm_sm90_few.cuh"

KERNEL_AHEAD(vg_gemm_sm90_f16_16, VgGemmSm90FewParams, 128) { gemm_few<VG_F16, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_f16_32, VgGemmSm90FewParams, 128) { gemm_few<VG_F16, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_f16_64, VgGemmSm90FewParams, 128) { gemm_few<VG_F16, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_bf16_16, VgGemmSm90FewParams, 128) { gemm_few<VG_BF16, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_bf16_32, VgGemmSm90FewParams, 128) { gemm_few<VG_BF16, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_bf16_64, VgGemmSm90FewParams, 128) { gemm_few<VG_BF16, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_0_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_0, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_0_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_0, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_0_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_0, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_1_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_1, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_1_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_1, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q4_1_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q4_1, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_0_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_0, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_0_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_0, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_0_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_0, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_1_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_1, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_1_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_1, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q5_1_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q5_1, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q8_0_16, VgGemmSm90FewParams, 128) { gemm_few<VG_Q8_0, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q8_0_32, VgGemmSm90FewParams, 128) { gemm_few<VG_Q8_0, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_q8_0_64, VgGemmSm90FewParams, 128) { gemm_few<VG_Q8_0, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_16, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_NL, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_32, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_NL, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_iq4_nl_64, VgGemmSm90FewParams, 128) { gemm_few<VG_IQ4_NL, 64>(p); }
KERNEL_AHEAD(vg_gemm_sm90_mxfp4_16, VgGemmSm90FewParams, 128) { gemm_few<VG_MXFP4, 16>(p); }
KERNEL_AHEAD(vg_gemm_sm90_mxfp4_32, VgGemmSm90FewParams, 128) { gemm_few<VG_MXFP4, 32>(p); }
KERNEL_AHEAD(vg_gemm_sm90_mxfp4_64, VgGemmSm90FewParams, 128) { gemm_few<VG_MXFP4, 64>(p); }
