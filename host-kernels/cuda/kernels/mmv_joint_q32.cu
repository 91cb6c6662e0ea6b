// Matrix-vector products for columns of several plans, with weights in blocks of 16 to 128
// elements.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_q4_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q4_0>(p); }
KERNEL_AHEAD(vg_mmv_q4_1_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q4_1>(p); }
KERNEL_AHEAD(vg_mmv_q5_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q5_0>(p); }
KERNEL_AHEAD(vg_mmv_q5_1_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q5_1>(p); }
KERNEL_AHEAD(vg_mmv_q8_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q8_0>(p); }
KERNEL_AHEAD(vg_mmv_q1_0_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_Q1_0>(p); }
KERNEL_AHEAD(vg_mmv_q2_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q2_0>(p); }
KERNEL_AHEAD(vg_mmv_mxfp4_joint, VgMmvJointParams, 128) { mmv_joint<VG_MXFP4>(p); }
KERNEL_AHEAD(vg_mmv_nvfp4_joint, VgMmvJointParams, 128) { mmv_joint<VG_NVFP4>(p); }
KERNEL_AHEAD(vg_mmv_iq4_nl_joint, VgMmvJointParams, 128) { mmv_joint<VG_IQ4_NL>(p); }
