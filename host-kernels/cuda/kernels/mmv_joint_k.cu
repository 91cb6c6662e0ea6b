// Matrix-vector products for columns of several plans, with weights in blocks of 256.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_q2_k_joint, VgMmvJointParams, 128, 5) { mmv_joint<VG_Q2_K>(p); }
KERNEL_AHEAD(vg_mmv_q3_k_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q3_K>(p); }
KERNEL_AHEAD(vg_mmv_q4_k_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_Q4_K>(p); }
KERNEL_AHEAD(vg_mmv_q5_k_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q5_K>(p); }
KERNEL_AHEAD(vg_mmv_q6_k_joint, VgMmvJointParams, 128) { mmv_joint<VG_Q6_K>(p); }
KERNEL_AHEAD(vg_mmv_iq4_xs_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_IQ4_XS>(p); }
KERNEL_AHEAD(vg_mmv_tq1_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_TQ1_0>(p); }
KERNEL_AHEAD(vg_mmv_tq2_0_joint, VgMmvJointParams, 128) { mmv_joint<VG_TQ2_0>(p); }
