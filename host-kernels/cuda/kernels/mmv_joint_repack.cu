// Matrix-vector products for columns of several plans, with repacked weights.
#include "mmv.cuh"

KERNEL_AHEAD(vg_mmv_mxfp4_repacked_joint, VgMmvJointParams, 128) {
    mmv_joint<VG_MXFP4 | VG_REPACKED>(p);
}
KERNEL_AHEAD(vg_mmv_iq4_nl_repacked_joint, VgMmvJointParams, 128) {
    mmv_joint<VG_IQ4_NL | VG_REPACKED>(p);
}
KERNEL_AHEAD(vg_mmv_q4_0_repacked_joint, VgMmvJointParams, 128) {
    mmv_joint<VG_Q4_0 | VG_REPACKED>(p);
}
KERNEL_AHEAD(vg_mmv_q8_0_repacked_joint, VgMmvJointParams, 128) {
    mmv_joint<VG_Q8_0 | VG_REPACKED>(p);
}
KERNEL_AHEAD(vg_mmv_q6_k_repacked_joint, VgMmvJointParams, 128) {
    mmv_joint<VG_Q6_K | VG_REPACKED>(p);
}
