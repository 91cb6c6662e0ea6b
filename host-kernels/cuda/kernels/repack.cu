// Weights in planes: the quants of all blocks of a matrix, then their scales.
//
// Blocks of 17, 18, 34 or 210 bytes begin at any multiple of 1 or 2, so that whoever reads one reads it in small pieces and
// shifts them. In planes the quants of each block begin at a multiple of 16, and its scale is beside its neighbours'. Of
// MXFP4 and IQ4_NL, whose bytes have elements i and i + 16, element i becomes nibble i: a word has eight neighbours.
//
// The host brings blocks back (`src/cuda/planes.rs`), with a table of its own.
#include "device.cuh"

namespace {

// 16 bytes of a block.
struct alignas(16) Piece {
    u32 words[4];
};

DEVICE Piece load_piece(const u8* from) {
    Piece piece;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const u8* at = from + 4 * i;
        piece.words[i] = at[0] | at[1] << 8 | at[2] << 16 | static_cast<u32>(at[3]) << 24;
    }
    return piece;
}

// The low nibbles of four bytes, side by side.
DEVICE u32 low_nibbles(u32 bytes) {
    u32 pairs = (bytes & 0x000f000f) | (bytes & 0x0f000f00) >> 4;
    return (pairs & 0xff) | (pairs & 0x00ff0000) >> 8;
}

// Nibble i is element i, which was in byte i % 16.
DEVICE Piece in_order(const Piece& piece) {
    Piece ordered;
    UNROLL
    for (int i = 0; i < 2; ++i) {
        u32 first = piece.words[2 * i], second = piece.words[2 * i + 1];
        ordered.words[i] = low_nibbles(first) | low_nibbles(second) << 16;
        ordered.words[i + 2] = low_nibbles(first >> 4) | low_nibbles(second >> 4) << 16;
    }
    return ordered;
}

// Blocks of so many bytes of quants and of scale, which comes first or last. A thread has 16 bytes of quants at a time.
template <int QUANTS, int SCALE, bool IS_FIRST, bool HAS_NIBBLES> DEVICE void arrange(const VgRepackParams& p) {
    constexpr u64 PIECES = QUANTS / 16;
    const u8* from = reinterpret_cast<const u8*>(p.from);
    u8* scales = reinterpret_cast<u8*>(p.scales);
    for (u64 i = thread_index(), n = p.blocks * PIECES; i < n; i += thread_count()) {
        u64 block = i / PIECES, at = i % PIECES;
        const u8* begin = from + block * (QUANTS + SCALE);
        Piece piece = load_piece(begin + (IS_FIRST ? SCALE : 0) + 16 * at);
        if (HAS_NIBBLES) {
            piece = in_order(piece);
        }
        *reinterpret_cast<Piece*>(p.quants + 16 * i) = piece;
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
        case VG_MXFP4: return arrange<16, 1, true, true>(p);
        case VG_IQ4_NL: return arrange<16, 2, true, true>(p);
        case VG_Q4_0: return arrange<16, 2, true, false>(p);
        case VG_Q8_0: return arrange<32, 2, true, false>(p);
        case VG_Q6_K: return arrange<208, 2, false, false>(p);
    }
}
