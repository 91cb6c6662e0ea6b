// What products with rounded activations, and those who round them, agree on.
//
// A row of activations is blocks of 32 signed bytes, with a factor and sums of what they stand for. Of a piece of 1024
// elements a lane of a product multiplies 64 neighbours with a row of weights, 16 lanes the piece: so what lanes read at a time
// lies together. With chunk c of 64 elements in a piece, quarter q of it, block s = q / 2 of its two:
//
//     1024 bytes: 16 elements at 256 q + 16 c
//     512 bytes of scales: at 16 c the factors of both blocks, then the sums of both;
//                          at 256 + 16 c the sums of the first halves of both, then of the second halves
//
// The last piece of a row has its place in full, of which nobody reads what is not written.
#pragma once
#include "device.cuh"

constexpr int ROUNDED_PIECE = 1024, ROUNDED_SCALES = ROUNDED_PIECE / 2;
// Lanes that multiply a piece of a row, and elements of each.
constexpr int CHUNKS = 16, CHUNK = ROUNDED_PIECE / CHUNKS;

// Of a row of rounded activations.
DEVICE u32 rounded_pieces(i64 width) { return (static_cast<u32>(width) + ROUNDED_PIECE - 1) / ROUNDED_PIECE; }

// Where the first half of a block of 32 begins; the second one is CHUNK * 4 bytes on.
DEVICE i64 place_of_quants(i64 row, u32 pieces, u32 block) {
    return (row * pieces + block / 32) * ROUNDED_PIECE + block % 2 * (ROUNDED_PIECE / 2) + block % 32 / 2 * 16;
}

// Writes the factor of a block, and the sums of its halves.
DEVICE void put_scales(u64 scales, i64 row, u32 pieces, u32 block, float factor, float low, float high) {
    i64 piece = (row * pieces + block / 32) * ROUNDED_SCALES;
    float* to = reinterpret_cast<float*>(scales + piece + block % 32 / 2 * 16) + block % 2;
    to[0] = factor;
    to[2] = low + high;
    to[ROUNDED_SCALES / 8] = low;
    to[ROUNDED_SCALES / 8 + 2] = high;
}
