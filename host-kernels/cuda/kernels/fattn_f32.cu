// Attention over keys and values that are no halves, or lie in ways that are not copied: f32, mixtures with bfloat16, any other
// type, heads of any width. The tiles are such that a block has less than 76 KiB of shared memory.
#include "fattn.cuh"

KERNEL(vg_fattn_f32_64_decode, VgFattnParams, 128) { attend<64, 64, 1, 4, 64, PAIRS>(p); }
KERNEL(vg_fattn_f32_64_prefill, VgFattnParams, 128) { attend<64, 64, 4, 1, 64, PAIRS>(p); }
KERNEL(vg_fattn_f32_128_decode, VgFattnParams, 128) { attend<128, 128, 1, 4, 64, PAIRS>(p); }
KERNEL(vg_fattn_f32_128_prefill, VgFattnParams, 128, 2) { attend<128, 128, 4, 1, 64, PAIRS>(p); }
KERNEL(vg_fattn_f32_256_decode, VgFattnParams, 128) { attend<256, 256, 1, 2, 32, PAIRS>(p); }
KERNEL(vg_fattn_f32_256_prefill, VgFattnParams, 128) { attend<256, 256, 2, 1, 32, PAIRS>(p); }
KERNEL(vg_fattn_f32_576_decode, VgFattnParams, 128) { attend<576, 512, 1, 1, 16, PAIRS>(p); }
