// Flash attention over K and V that are neither f16 nor bf16, or that cp.async cannot copy: f32,
// mixed types, any head size. Operands are two bf16 terms. A block uses less than 76 KiB of shared
// memory.
#include "fattn.cuh"

KERNEL_AHEAD(vg_fattn_f32_64_decode, VgFattnParams, 128, 3) {
    fattn<64, 64, 1, 4, 64, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_64_prefill, VgFattnParams, 128, 3) {
    fattn<64, 64, 4, 1, 64, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_128_decode, VgFattnParams, 128) {
    fattn<128, 128, 1, 4, 64, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_128_prefill, VgFattnParams, 128, 2) {
    fattn<128, 128, 4, 1, 64, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_256_decode, VgFattnParams, 128) {
    fattn<256, 256, 1, 2, 32, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_256_prefill, VgFattnParams, 128, 2) {
    fattn<256, 256, 2, 1, 32, KV_SPLIT_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_f32_576_decode, VgFattnParams, 128) {
    fattn<576, 512, 1, 1, 16, KV_SPLIT_BF16>(p);
}
