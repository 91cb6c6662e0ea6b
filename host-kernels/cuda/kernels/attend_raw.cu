// Attention over quantised keys and values, and halves that lie in unusual places.
#include "attend.cuh"

KERNEL(vg_attend_raw_64_few, VgAttendParams, 128, 4) { attend<64, 64, 1, 4, 64, RAW>(p); }
KERNEL(vg_attend_raw_64_many, VgAttendParams, 128, 3) { attend<64, 64, 4, 1, 64, RAW>(p); }
KERNEL(vg_attend_raw_128_few, VgAttendParams, 128, 3) { attend<128, 128, 1, 4, 64, RAW>(p); }
KERNEL(vg_attend_raw_128_many, VgAttendParams, 128) { attend<128, 128, 4, 1, 64, RAW>(p); }
KERNEL(vg_attend_raw_256_few, VgAttendParams, 128, 3) { attend<256, 256, 1, 2, 32, RAW>(p); }
KERNEL(vg_attend_raw_256_many, VgAttendParams, 128) { attend<256, 256, 4, 1, 32, RAW>(p); }
KERNEL(vg_attend_raw_576_few, VgAttendParams, 128) { attend<576, 512, 1, 2, 32, RAW>(p); }
