// COPY (DUP, CPY, CONT), REPEAT, REPEAT_BACK, CONCAT, SET, PAD, PAD_REFLECT_1D, ROLL, TRI, DIAG,
// DIAG_MASK_*, FILL, ARANGE; GET_ROWS, GET_ROWS_BACK, SET_ROWS.
#include "rows.cuh"

namespace {

DEVICE void store_bits(u8* to, u64 bits, u32 size) {
    switch (size) {
    case 1: *to = static_cast<u8>(bits); break;
    case 2: *reinterpret_cast<u16*>(to) = static_cast<u16>(bits); break;
    case 4: *reinterpret_cast<u32*>(to) = static_cast<u32>(bits); break;
    default: *reinterpret_cast<u64*>(to) = bits; break;
    }
}

DEVICE i64 modulo(i64 i, i64 n) {
    i %= n;
    return i < 0 ? i + n : i;
}

// Maps a destination index to its source. Returns false if the element has none.
DEVICE bool source_of(const VgMoveParams& p, Index* at) {
    switch (p.op) {
    case VG_MOVE_REPEAT:
        for (int d = 0; d < 4; d++) {
            at->i[d] %= p.src.ne[d];
        }
        return true;
    case VG_MOVE_PAD:
        for (int d = 0; d < 4; d++) {
            at->i[d] -= p.shift[d];
            if (at->i[d] < 0 || at->i[d] >= p.src.ne[d]) {
                return false;
            }
        }
        return true;
    case VG_MOVE_CIRCULAR:
        for (int d = 0; d < 4; d++) {
            at->i[d] = modulo(at->i[d] - p.shift[d], p.src.ne[d]);
        }
        return true;
    case VG_MOVE_REFLECT: {
        i64 i = at->i[0] - p.shift[0], last = p.src.ne[0] - 1;
        at->i[0] = i < 0 ? -i : i > last ? 2 * last - i : i;
        return true;
    }
    case VG_MOVE_DIAG: {
        bool on = at->i[0] == at->i[1];
        at->i[1] = 0;
        return on;
    }
    case VG_MOVE_BAND: {
        i64 beyond = at->i[0] - at->i[1];
        return beyond >= p.low && beyond < p.high;
    }
    default: return false;
    }
}

// The view with dimension 0 in blocks for quantised types.
DEVICE View in_blocks(View v) {
    v.ne[0] /= type_traits(v.type).elements;
    return v;
}

DEVICE float element_value(const View& v, const VgCodebooks* grids, i64 e) {
    Index at = index_of(v, e);
    i64 i0 = at.i[0];
    at.i[0] = 0;
    return dequantize_element(v.type, grids, address(v, at), v.nb[0], i0);
}

} // namespace

KERNEL(vg_move, VgMoveParams, 256) {
    i64 n = elements(p.dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.dst, e);
        u8* to = address(p.dst, at);
        if (source_of(p, &at)) {
            move_bytes(to, address(p.src, at), p.size);
        } else {
            store_bits(to, p.other, p.size);
        }
    }
}

// Copies elements in order between tensors of one type and different lengths.
KERNEL(vg_copy_same, VgCopyParams, 256) {
    View dst = in_blocks(p.dst), src = in_blocks(p.src);
    u32 size = type_traits(dst.type).bytes;
    i64 n = elements(dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        move_bytes(address(dst, index_of(dst, e)), address(src, index_of(src, e)), size);
    }
}

KERNEL(vg_copy, VgCopyParams, 256) {
    View dst = in_blocks(p.dst);
    const VgCodebooks* grids = codebooks(p.codebooks);
    int block = type_traits(dst.type).elements;
    i64 n = elements(dst);
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        u8* to = address(dst, index_of(dst, e));
        if (block == 1) {
            store(dst.type, to, element_value(p.src, grids, e));
        } else {
            quantize_block_from(dst.type, to,
                                [&](int i) { return element_value(p.src, grids, e * 32 + i); });
        }
    }
}

KERNEL(vg_repeat_back, VgRepeatBackParams, 256) {
    i64 n = elements(p.dst);
    // An empty source has no bound on its other lengths.
    bool any = elements(p.src) > 0;
    for (i64 e = thread_index(); e < n; e += thread_count()) {
        Index at = index_of(p.dst, e);
        float sum = 0.0f;
        for (i64 i3 = at.i[3]; any && i3 < p.src.ne[3]; i3 += p.dst.ne[3]) {
            for (i64 i2 = at.i[2]; i2 < p.src.ne[2]; i2 += p.dst.ne[2]) {
                for (i64 i1 = at.i[1]; i1 < p.src.ne[1]; i1 += p.dst.ne[1]) {
                    for (i64 i0 = at.i[0]; i0 < p.src.ne[0]; i0 += p.dst.ne[0]) {
                        sum += load(p.src.type, address(p.src, Index{{i0, i1, i2, i3}}));
                    }
                }
            }
        }
        store(p.dst.type, address(p.dst, at), sum);
    }
}

KERNEL(vg_arange, VgArangeParams, 256) {
    for (i64 e = thread_index(); e < p.dst.ne[0]; e += thread_count()) {
        float* to = reinterpret_cast<float*>(p.dst.data + e * p.dst.nb[0]);
        *to = p.start + p.step * static_cast<float>(e);
    }
}

KERNEL(vg_get_rows, VgRowsParams, 256) { get_rows<true>(p, this_block()); }

// dst[:, ids[i]] += src[:, i], from zero. A thread for each column keeps the order of additions.
KERNEL(vg_get_rows_back, VgRowsParams, 256) {
    const VgCodebooks* grids = codebooks(p.codebooks);
    for (i64 c = thread_index(); c < p.dst.ne[0]; c += thread_count()) {
        for (i64 r = 0; r < p.dst.ne[1]; r++) {
            store(p.dst.type, address(p.dst, Index{{c, r, 0, 0}}), 0.0f);
        }
        for (i64 i = 0; i < p.ids.ne[0]; i++) {
            i64 id = id_at(p.ids, i, 0, 0);
            if (!check_index(p.site, id, p.dst.ne[1])) {
                return;
            }
            u8* to = address(p.dst, Index{{c, id, 0, 0}});
            const u8* row = address(p.src, Index{{0, i, 0, 0}});
            store(p.dst.type, to,
                  load(p.dst.type, to) +
                      dequantize_element(p.src.type, grids, row, p.src.nb[0], c));
        }
    }
}

KERNEL_AHEAD(vg_set_rows, VgRowsParams, 256) { set_rows<true>(p, this_block()); }

// Small host writes of a batch; blockIdx.y selects the write.
KERNEL(vg_upload, VgUploadParams, 128) {
    const VgUpload upload = p.uploads[blockIdx.y];
    u8* to = reinterpret_cast<u8*>(upload.to);
    const u8* from = reinterpret_cast<const u8*>(upload.from);
    u64 before = (16 - upload.to % 16) % 16, head = before < upload.len ? before : upload.len;
    u64 vecs = (upload.len - head) / 16, rest = upload.len - 16 * vecs;
    u64 thread = thread_index(), threads = thread_count();
    for (u64 i = thread; i < vecs; i += threads) {
        *reinterpret_cast<int4*>(to + head + 16 * i) =
            *reinterpret_cast<const int4*>(from + head + 16 * i);
    }
    for (u64 i = thread; i < rest; i += threads) {
        u64 at = i < head ? i : i + 16 * vecs;
        to[at] = from[at];
    }
}
