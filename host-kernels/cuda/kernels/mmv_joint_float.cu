// Matrix-vector products for columns of several plans, with weights in f16, bf16 and f32.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_f16_joint, VgMmvJointParams, 128, 4) { mmv_joint<VG_F16>(p); }
KERNEL_AHEAD(vg_mmv_bf16_joint, VgMmvJointParams, 128) { mmv_joint<VG_BF16>(p); }
KERNEL_AHEAD(vg_mmv_f32_joint, VgMmvJointParams, 128, 5) { mmv_joint<VG_F32>(p); }
