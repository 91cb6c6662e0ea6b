// Flash attention over a KV cache in bf16.
#include "fattn.cuh"

KERNEL_AHEAD(vg_fattn_bf16_64_decode, VgFattnParams, 128, 4) {
    fattn<64, 64, 1, 4, 64, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_64_prefill, VgFattnParams, 128, 3) {
    fattn<64, 64, 4, 1, 64, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_128_decode, VgFattnParams, 128, 3) {
    fattn<128, 128, 1, 4, 64, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_128_prefill, VgFattnParams, 128) {
    fattn<128, 128, 4, 1, 64, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_256_decode, VgFattnParams, 128) {
    fattn<256, 256, 1, 4, 64, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_256_prefill, VgFattnParams, 128) {
    fattn<256, 256, 4, 1, 32, KV_BF16>(p);
}
KERNEL_AHEAD(vg_fattn_bf16_576_decode, VgFattnParams, 128) {
    fattn<576, 512, 1, 2, 32, KV_BF16>(p);
}
