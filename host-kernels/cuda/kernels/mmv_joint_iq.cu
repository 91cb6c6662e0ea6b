// Matrix-vector products for columns of several plans, with weights in IQ formats (codebooks).
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_iq2_xxs_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_IQ2_XXS>(p); }
KERNEL_AHEAD(vg_mmv_iq2_xs_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_IQ2_XS>(p); }
KERNEL_AHEAD(vg_mmv_iq2_s_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_IQ2_S>(p); }
KERNEL_AHEAD(vg_mmv_iq3_xxs_joint, VgMmvJointParams, 128, 5) { mmv_joint<VG_IQ3_XXS>(p); }
KERNEL_AHEAD(vg_mmv_iq3_s_joint, VgMmvJointParams, 128, 5) { mmv_joint<VG_IQ3_S>(p); }
KERNEL_AHEAD(vg_mmv_iq1_s_joint, VgMmvJointParams, 128, 5) { mmv_joint<VG_IQ1_S>(p); }
KERNEL_AHEAD(vg_mmv_iq1_m_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_IQ1_M>(p); }
