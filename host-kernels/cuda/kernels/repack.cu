// Repacks weights to a structure of arrays: the quants of all blocks of a matrix, then their
// scales.
//
// Blocks of 17, 18, 34 or 210 bytes (ggml-common.h) are aligned to 1 or 2 bytes, so kernels must
// assemble words from smaller loads. Repacked quants of a block are 16-byte aligned and scales are
// contiguous. In ggml's MXFP4 and IQ4_NL blocks a byte holds elements i and i + 16; repacked,
// nibble i is element i, so that a word has eight neighbours.
//
// The host reverses the repacking with a table of its own
// (`host-kernels/cuda/src/repack/format.rs`).
#include "device.cuh"

namespace {

// 16 bytes of a block.
struct alignas(16) Bytes16 {
    u32 words[4];
};

DEVICE Bytes16 load_bytes16(const u8* from) {
    Bytes16 vec;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const u8* at = from + 4 * i;
        vec.words[i] = at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24;
    }
    return vec;
}

// Packs the low nibbles of four bytes into 16 bits.
DEVICE u32 low_nibbles(u32 bytes) {
    u32 pairs = (bytes & 0x000f000f) | (bytes & 0x0f000f00) >> 4;
    return (pairs & 0xff) | (pairs & 0x00ff0000) >> 8;
}

// Reorders nibbles: nibble i becomes element i, which was in byte i % 16.
DEVICE Bytes16 interleave_nibbles(const Bytes16& vec) {
    Bytes16 ordered;
    UNROLL
    for (int i = 0; i < 2; ++i) {
        u32 first = vec.words[2 * i], second = vec.words[2 * i + 1];
        ordered.words[i] = low_nibbles(first) | low_nibbles(second) << 16;
        ordered.words[i + 2] = low_nibbles(first >> 4) | low_nibbles(second >> 4) << 16;
    }
    return ordered;
}

// Repacks blocks of QUANTS bytes of quants and SCALE bytes of scale, which comes first or last. A
// thread handles 16 bytes of quants at a time.
template <int QUANTS, int SCALE, bool IS_FIRST, bool HAS_NIBBLES>
DEVICE void repack(const VgRepackParams& p) {
    constexpr u64 VECS = QUANTS / 16;
    const u8* from = reinterpret_cast<const u8*>(p.from);
    u8* scales = reinterpret_cast<u8*>(p.scales);
    for (u64 i = thread_index(), n = p.blocks * VECS; i < n; i += thread_count()) {
        u64 block = i / VECS, at = i % VECS;
        const u8* begin = from + block * (QUANTS + SCALE);
        Bytes16 vec = load_bytes16(begin + (IS_FIRST ? SCALE : 0) + 16 * at);
        if (HAS_NIBBLES) {
            vec = interleave_nibbles(vec);
        }
        *reinterpret_cast<Bytes16*>(p.quants + 16 * i) = vec;
        if (at == 0) {
            const u8* scale = begin + (IS_FIRST ? 0 : QUANTS);
            UNROLL
            for (int k = 0; k < SCALE; ++k) {
                scales[block * SCALE + k] = scale[k];
            }
        }
    }
}

} // namespace

KERNEL(vg_repack, VgRepackParams, 256) {
    switch (p.type) {
    case VG_MXFP4: return repack<16, 1, true, true>(p);
    case VG_IQ4_NL: return repack<16, 2, true, true>(p);
    case VG_Q4_0: return repack<16, 2, true, false>(p);
    case VG_Q8_0: return repack<32, 2, true, false>(p);
    case VG_Q6_K: return repack<208, 2, false, false>(p);
    }
}
