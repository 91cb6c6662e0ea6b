// Attention over keys and values in bfloat16.
#include "attend.cuh"

KERNEL(vg_attend_brain_64_few, VgAttendParams, 128, 4) { attend<64, 64, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_64_many, VgAttendParams, 128, 3) { attend<64, 64, 4, 1, 64, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_128_few, VgAttendParams, 128, 3) { attend<128, 128, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_128_many, VgAttendParams, 128) { attend<128, 128, 4, 1, 64, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_256_few, VgAttendParams, 128) { attend<256, 256, 1, 4, 64, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_256_many, VgAttendParams, 128) { attend<256, 256, 4, 1, 32, BRAIN_HALVES>(p); }
KERNEL(vg_attend_brain_576_few, VgAttendParams, 128) { attend<576, 512, 1, 2, 32, BRAIN_HALVES>(p); }
