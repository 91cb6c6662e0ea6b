// GET_ROWS and SET_ROWS, used by kernels of their own and by the megakernel.
#pragma once
#include "formats.cuh"

namespace {

DEVICE void move_bytes(u8* to, const u8* from, u32 size) {
    switch (size) {
    case 1: *to = *from; break;
    case 2: *reinterpret_cast<u16*>(to) = *reinterpret_cast<const u16*>(from); break;
    case 4: *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from); break;
    case 8: *reinterpret_cast<u64*>(to) = *reinterpret_cast<const u64*>(from); break;
    default:
        for (u32 i = 0; i < size; i++) {
            to[i] = from[i];
        }
    }
}

// Quantises the 32 elements `value(0..32)` to a block at `to`.
template <class Value> DEVICE void quantize_block_from(u32 type, u8* to, Value value) {
    float x[32];
    for (int i = 0; i < 32; i++) {
        x[i] = value(i);
    }
    quantize_block(type, x, to);
}

DEVICE i64 id_at(const View& ids, i64 i0, i64 i1, i64 i2) {
    const u8* at = address(ids, Index{{i0, i1, i2, 0}});
    return ids.type == VG_I64 ? *reinterpret_cast<const i64*>(at)
                              : *reinterpret_cast<const int*>(at);
}

// dst[:, i, j, k] = src[:, ids[i, j, k], j, k]. Without BLOCKS from types without blocks only.
template <bool BLOCKS> DEVICE void get_rows(const VgRowsParams& p, const BlockIndex& b) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    i64 n = elements(p.dst);
    for (i64 e = thread_index(b); e < n; e += thread_count(b)) {
        Index at = index_of(p.dst, e);
        i64 id = id_at(p.ids, at.i[1], at.i[2], at.i[3]);
        if (!check_index(p.site, id, p.src.ne[1])) {
            return;
        }
        const u8* row = address(p.src, Index{{0, id, at.i[2], at.i[3]}});
        u8* to = address(p.dst, at);
        if (p.dst.type == VG_I32) {
            move_bytes(to, row + at.i[0] * p.src.nb[0], 4);
        } else if constexpr (!BLOCKS) {
            store(p.dst.type, to, load(p.src.type, row + at.i[0] * p.src.nb[0]));
        } else {
            store(p.dst.type, to, dequantize_element(p.src.type, grids, row, p.src.nb[0], at.i[0]));
        }
    }
}

// dst[:, ids[i, j, k], j, k] = src[:, i, j, k]; ids are broadcast over j and k. Without BLOCKS to
// types without blocks only. Waits for the launches before this one.
template <bool BLOCKS> DEVICE void set_rows(const VgRowsParams& p, const BlockIndex& b) {
    View src = p.src;
    int block = BLOCKS ? type_traits(p.dst.type).elements : 1;
    src.ne[0] = BLOCKS ? divide(src.ne[0], block).whole : src.ne[0];
    i64 n = elements(src);
    for (i64 e = thread_index(b); e < n; e += thread_count(b)) {
        Index at = index_of(src, e);
        i64 i2 = repeated(at.i[2], p.ids.ne[1]), i3 = repeated(at.i[3], p.ids.ne[2]);
        grid_dependency_wait();
        i64 id = id_at(p.ids, at.i[1], i2, i3);
        if (!check_index(p.site, id, p.dst.ne[1])) {
            return;
        }
        const u8* row = address(p.src, Index{{0, at.i[1], at.i[2], at.i[3]}});
        u8* to = address(p.dst, Index{{at.i[0], id, at.i[2], at.i[3]}});
        if (block == 1) {
            store(p.dst.type, to, load(src.type, row + at.i[0] * src.nb[0]));
        } else if constexpr (BLOCKS) {
            quantize_block_from(p.dst.type, to, [&](int i) {
                return load(src.type, row + (at.i[0] * 32 + i) * src.nb[0]);
            });
        }
    }
}

} // namespace
