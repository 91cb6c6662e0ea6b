//! Operands of flash attention: how kernels read keys and values, and what the mask hides.

use vgpu_transport::ir::Type;

use crate::launch::builder::Builder;
use crate::launch::grid::div_ceil;
use crate::params::*;
use vgpu_engine::EngineError;

/// How a kernel on tensor cores reads keys and values.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum KvPath {
    /// Both are F16, aligned for 16-byte copies.
    F16,
    /// Both are BF16, aligned for 16-byte copies.
    Bf16,
    /// F16 with less alignment, or blocks of 32, unpacked to F16.
    Quant,
    /// Any type, as f32 split into two BF16 numbers.
    F32,
}

/// The path for keys and values of these types and alignments.
pub(crate) fn path_of(k: &VgView, v: &VgView) -> KvPath {
    let types = [k, v].map(|x| Type::from_id(x.type_ as u8));
    // F16 is multiplied and copied in units of eight.
    if [k, v].iter().any(|x| x.ne[0] % 8 != 0) {
        return KvPath::F32;
    }
    let are = |ty, alignment| {
        types == [Some(ty); 2] && [k, v].iter().all(|x| is_aligned(x, ty, alignment))
    };
    if are(Type::F16, 16) {
        return KvPath::F16;
    }
    if are(Type::Bf16, 16) {
        return KvPath::Bf16;
    }
    let is_raw = |x: &VgView| match Type::from_id(x.type_ as u8) {
        Some(ty @ (Type::F16 | Type::Q4_0 | Type::Q5_0 | Type::Q8_0 | Type::Iq4Nl)) => {
            is_aligned(x, ty, 2)
        }
        Some(ty @ (Type::Q4_1 | Type::Q5_1)) => is_aligned(x, ty, 4),
        _ => false,
    };
    match is_raw(k) && is_raw(v) {
        true => KvPath::Quant,
        false => KvPath::F32,
    }
}

/// Adds the launch that classifies the tiles of the mask (all hidden, partly hidden, all visible),
/// of `rows` tokens and heads of a group by `columns` keys. Returns the address of the classes, or
/// 0 if there is no mask or the kernel may not be used: the kernels for any GPU then read the mask
/// of each tile.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
pub(crate) fn mask_states(
    b: &mut Builder<'_>,
    params: &VgFattnSimtParams,
    gqa_ratio: i64,
    [rows, columns]: [i64; 2],
) -> Result<u64, EngineError> {
    let VgFattnSimtParams { q, k, mask, .. } = params;
    if mask.data == 0 || !b.has("vg_fattn_mask_tiles") {
        return Ok(0);
    }
    let across = div_ceil(q.ne[1] * gqa_ratio, rows);
    let masks = mask.ne[2] * mask.ne[3];
    let found = VgFattnMaskTilesParams {
        mask: *mask,
        mask_tiles: b.scratch((masks * across * div_ceil(k.ne[1], columns)) as u64),
        keys: k.ne[1] as i32,
        tokens: q.ne[1] as i32,
        gqa_ratio: gqa_ratio as u32,
        rows: rows as u32,
        columns: columns as u32,
        reserved: 0,
    };
    b.launch_over("vg_fattn_mask_tiles", [across, masks, 1], 128, 0, &found)?;
    Ok(found.mask_tiles)
}

/// Whether rows of type `ty` are dense, with address and strides that are multiples of `alignment`.
pub(crate) fn is_aligned(x: &VgView, ty: Type, alignment: i64) -> bool {
    x.type_ == u32::from(ty as u8)
        && x.nb[0] == ty.block_bytes() as i64
        && x.data.is_multiple_of(alignment as u64)
        && x.nb[1..].iter().all(|step| step % alignment == 0)
}
