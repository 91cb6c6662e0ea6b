// Attention over keys and values in bfloat16.
#include "fattn.cuh"

KERNEL(vg_fattn_bf16_64_decode, VgFattnParams, 128, 4) { attend<64, 64, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_64_prefill, VgFattnParams, 128, 3) { attend<64, 64, 4, 1, 64, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_128_decode, VgFattnParams, 128, 3) { attend<128, 128, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_128_prefill, VgFattnParams, 128) { attend<128, 128, 4, 1, 64, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_256_decode, VgFattnParams, 128) { attend<256, 256, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_256_prefill, VgFattnParams, 128) { attend<256, 256, 4, 1, 32, BRAIN_HALVES>(p); }
KERNEL(vg_fattn_bf16_576_decode, VgFattnParams, 128) { attend<576, 512, 1, 2, 32, BRAIN_HALVES>(p); }
