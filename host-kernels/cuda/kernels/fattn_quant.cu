// Attention over quantised keys and values, and halves that lie in unusual places.
#include "fattn.cuh"

KERNEL(vg_fattn_quant_64_decode, VgFattnParams, 128, 4) { attend<64, 64, 1, 4, 64, RAW>(p); }
KERNEL(vg_fattn_quant_64_prefill, VgFattnParams, 128, 3) { attend<64, 64, 4, 1, 64, RAW>(p); }
KERNEL(vg_fattn_quant_128_decode, VgFattnParams, 128, 3) { attend<128, 128, 1, 4, 64, RAW>(p); }
KERNEL(vg_fattn_quant_128_prefill, VgFattnParams, 128) { attend<128, 128, 4, 1, 64, RAW>(p); }
KERNEL(vg_fattn_quant_256_decode, VgFattnParams, 128, 3) { attend<256, 256, 1, 2, 32, RAW>(p); }
KERNEL(vg_fattn_quant_256_prefill, VgFattnParams, 128) { attend<256, 256, 4, 1, 32, RAW>(p); }
KERNEL(vg_fattn_quant_576_decode, VgFattnParams, 128) { attend<576, 512, 1, 2, 32, RAW>(p); }
