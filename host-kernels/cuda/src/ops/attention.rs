//! FLASH_ATTN_EXT.
//!
//! `cuda/fattn.cuh` has the kernels, on tensor cores: of halves where keys and values are such, or become such without loss
//! of range, and of pairs of bfloat16 for all other types and layouts. Only heads wider than 576, and queries or results that do
//! not lie as ggml has them, take `cuda/fattn_simt.cu`, which reads any element of anything.

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::fattn_sm90::FattnSm90;
use crate::context::COUNTERS;
use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil};
use crate::launch::q8::{FEW_COLUMNS, Q8Activations};
use crate::params::*;
use crate::types::READABLE;
use vgpu_engine::EngineError;
use vgpu_engine::types::F32;

/// Warps of a block of `vg_fattn_simt`, each with sums of its own.
const WARPS: i64 = 4;

pub(crate) fn rules() -> Vec<Rule> {
    vec![Rule::new(
        OpKind::FlashAttnExt,
        F32,
        &[F32, READABLE, READABLE],
    )]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let &Op::FlashAttnExt {
        scale,
        max_bias,
        logit_softcap: cap,
        ..
    } = op
    else {
        return None;
    };
    Some(b.staged(|b, dst| {
        let (q, k, v) = (b.src(0), b.src(1), b.src(2));
        let params = VgFattnSimtParams {
            dst,
            q,
            k,
            v,
            mask: b.optional(3),
            sinks: b.optional(4),
            codebooks: b.codebooks(),
            scale: if cap == 0.0 { scale } else { scale / cap },
            cap,
            max_bias,
            heads_log2: 1 << q.ne[2].ilog2(),
        };
        // A step has attention of few rows only: tiles of them for as many tokens as a step takes.
        let is_few = b.uses_megakernel() && q.ne[1] <= FEW_COLUMNS;
        match Tiles::of(&params, b.max_shared_per_block(), is_few) {
            Some(tiles) => match FattnSm90::of(b, &params, tiles.group).filter(|_| !is_few) {
                Some(hopper) => hopper.attend(b, &params),
                None => tiles.attend(b, &params),
            },
            None => attend_to_anything(b, &params),
        }
    }))
}

fn attend_to_anything(b: &mut Builder<'_>, params: &VgFattnSimtParams) -> Result<(), EngineError> {
    let (q, [dk, dv]) = (&params.q, [params.k.ne[0], params.v.ne[0]]);
    let shared = 4 * (dk + WARPS * dv);
    let shared = u32::try_from(shared)
        .ok()
        .filter(|&bytes| bytes <= b.max_shared_per_block())
        .ok_or_else(|| b.unsupported(format!("heads of {dk} and {dv}")))?;
    let grid = [q.ne[1], q.ne[2], q.ne[3]];
    b.launch_over("vg_fattn_simt", grid, 128, shared, params)
}

/// What keys and values are for the kernels on tensor cores.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Both halves, where whole 16 bytes can be copied.
    Halves,
    /// Both bfloat16, there too.
    Brain,
    /// Halves or blocks of 32.
    Raw,
    /// Anything.
    Pairs,
}

/// Tiles of rows and keys for a width of heads, and the kernels that have them, by kind.
struct Shape {
    kernels: [&'static str; 4],
    k: i64,
    v: i64,
    rows: i64,
    keys: i64,
}

macro_rules! shape {
    ($name:literal, [$k:literal, $v:literal], [$rows:expr, $keys:expr]) => {
        Shape {
            kernels: [
                concat!("vg_fattn_f16_", $name),
                concat!("vg_fattn_bf16_", $name),
                concat!("vg_fattn_quant_", $name),
                concat!("vg_fattn_f32_", $name),
            ],
            k: $k,
            v: $v,
            rows: $rows,
            keys: $keys,
        }
    };
}

/// For few rows and for many, by the widest heads they take. Where heads are wide, kinds differ in what there is room for: keys
/// for few rows and rows for many with heads of 256, keys with those of 576.
const fn shapes(keys_of_256: i64, rows_of_256: i64, keys_of_576: i64) -> [[Shape; 2]; 4] {
    [
        [
            shape!("64_decode", [64, 64], [16, 64]),
            shape!("64_prefill", [64, 64], [64, 64]),
        ],
        [
            shape!("128_decode", [128, 128], [16, 64]),
            shape!("128_prefill", [128, 128], [64, 64]),
        ],
        [
            shape!("256_decode", [256, 256], [16, keys_of_256]),
            shape!("256_prefill", [256, 256], [rows_of_256, 32]),
        ],
        [
            shape!("576_decode", [576, 512], [16, keys_of_576]),
            shape!("576_decode", [576, 512], [16, keys_of_576]),
        ],
    ]
}

const SHAPES: [[Shape; 2]; 4] = shapes(64, 64, 32);
/// Tiles are unpacked, which takes room for their bytes.
const SHAPES_OF_RAW: [[Shape; 2]; 4] = shapes(32, 64, 32);
const SHAPES_OF_PAIRS: [[Shape; 2]; 4] = shapes(32, 32, 16);

impl Kind {
    fn shapes(self) -> &'static [[Shape; 2]] {
        match self {
            Kind::Raw => &SHAPES_OF_RAW,
            Kind::Pairs => &SHAPES_OF_PAIRS,
            Kind::Halves | Kind::Brain => &SHAPES,
        }
    }
}

/// Most rows of a tile of which most are none.
const FEW_ROWS: i64 = 16;

/// Bytes that are to be on their way on a multiprocessor.
const UNDER_WAY: i64 = 64 << 10;

/// Fewest tiles of keys that are worth a block of their own.
const MIN_TILES: i64 = 2;

/// A launch of a kernel on tensor cores.
struct Tiles {
    kernel: &'static str,
    shape: &'static Shape,
    /// Query heads whose queries share tiles.
    group: i64,
    raw: i64,
    shared: u32,
}

impl Tiles {
    /// The kernel for an attention, if there is one for such operands.
    /// However many rows there are, tiles are of few if that `is_few`.
    fn of(params: &VgFattnSimtParams, max_shared_per_block: u32, is_few: bool) -> Option<Tiles> {
        let kind = kind_of(&params.k, &params.v);
        // Pairs need least of what a block shares with wide heads.
        let kinds = [kind, Kind::Pairs].into_iter();
        { kinds }.find_map(|kind| Tiles::of_kind(kind, params, max_shared_per_block, is_few))
    }

    fn of_kind(
        kind: Kind,
        params: &VgFattnSimtParams,
        max_shared_per_block: u32,
        is_few: bool,
    ) -> Option<Tiles> {
        let VgFattnSimtParams {
            dst,
            q,
            k,
            v,
            mask,
            sinks,
            ..
        } = params;
        let is_dense = |x: &VgView| x.nb[0] == 4 && x.nb.iter().all(|step| step % 4 == 0);
        let fits = is_dense(q)
            && is_dense(dst)
            && (mask.data == 0 || is_aligned(mask, Type::F16, 4))
            && (sinks.data == 0 || sinks.is_dense(Type::F32))
            && q.ne[2] % k.ne[2] == 0
            && k.ne[1] > 0
            && k.ne[1] <= 1 << 28
            && k.ne[0] > 0
            && v.ne[0] > 0;
        if !fits {
            return None;
        }
        // Heads that have keys and values in common, and the mask.
        let alike = k.ne[2] == v.ne[2] && (mask.data == 0 || mask.ne[2] == 1);
        let group = if alike { q.ne[2] / k.ne[2] } else { 1 };
        let rows = q.ne[1].checked_mul(group).filter(|&n| n <= 1 << 28)?;
        let shapes =
            { kind.shapes().iter() }.find(|[shape, _]| k.ne[0] <= shape.k && v.ne[0] <= shape.v)?;
        let shape = &shapes[usize::from(rows > FEW_ROWS && !is_few)];
        let raw = match kind {
            Kind::Raw => [k, v].map(raw_bytes).into_iter().max().unwrap_or(0),
            _ => 0,
        };
        let [queries, keys, values] = [
            shape.rows * (shape.k + 8),
            shape.keys * (shape.k + 8),
            shape.keys * (shape.v + 8),
        ];
        let halves = match kind {
            // Two of each element; keys and values have the same place.
            Kind::Pairs => 2 * (queries + keys.max(values)),
            _ => queries + keys + values,
        };
        let shared = u32::try_from(2 * halves + 2 * shape.keys * raw).ok()?;
        let fits = shared <= max_shared_per_block
            && q.ne[2] / group <= MAX_GRID_YZ
            && q.ne[3] <= MAX_GRID_YZ
            && (mask.data == 0 || mask.ne[2] * mask.ne[3] <= MAX_GRID_YZ);
        fits.then_some(Tiles {
            kernel: shape.kernels[kind as usize],
            shape,
            group,
            raw,
            shared,
        })
    }

    /// Adds the launches: what the mask does with each tile, if there are many tokens, then attention.
    fn attend(&self, b: &mut Builder<'_>, params: &VgFattnSimtParams) -> Result<(), EngineError> {
        let VgFattnSimtParams { q, k, mask, .. } = params;
        let Shape { rows, keys, v, .. } = *self.shape;
        let across = div_ceil(q.ne[1] * self.group, rows);
        let tiles = div_ceil(k.ne[1], keys);
        let states = match rows > FEW_ROWS {
            true => mask_states(b, params, self.group, [rows, keys])?,
            false => 0,
        };
        let heads = q.ne[2] / self.group;
        let items = across * heads * q.ne[3];
        let mut splits = 1;
        if items <= COUNTERS {
            // A block has a tile of keys and one of values under way.
            let bytes = match self.raw {
                0 => keys * 2 * (k.ne[0] + params.v.ne[0]),
                raw => 2 * keys * raw,
            };
            let blocks = (UNDER_WAY / bytes).clamp(2, 4);
            let wanted = div_ceil(i64::from(b.sm_count()) * blocks, items);
            splits = wanted
                .min(div_ceil(tiles, MIN_TILES))
                .min(MAX_GRID_YZ / q.ne[3])
                .max(1);
        }
        let parts = if splits > 1 {
            b.scratch((items * splits * rows * (v + 2) * 4) as u64)
        } else {
            0
        };
        let rounded = round_for_products(b, &params.dst);
        let params = VgFattnParams {
            dst: params.dst,
            q: *q,
            k: *k,
            v: params.v,
            mask: *mask,
            sinks: params.sinks,
            states,
            parts,
            counters: b.counters(),
            codebooks: params.codebooks,
            quants: rounded.map_or(0, |rounded| rounded.quants),
            scales: rounded.map_or(0, |rounded| rounded.scales),
            scale: params.scale,
            cap: params.cap,
            max_bias: params.max_bias,
            heads_log2: params.heads_log2,
            group: self.group as u32,
            splits: splits as u32,
            raw: self.raw as u32,
            reserved: 0,
        };
        let grid = [across, heads, splits * q.ne[3]];
        b.launch_over(self.kernel, grid, 128, self.shared, &params)
    }
}

/// Where the result is left rounded, too, if a product comes next that wants it so.
fn round_for_products(b: &mut Builder<'_>, dst: &VgView) -> Option<Q8Activations> {
    let rows = dst.with_merged_heads();
    let fits = dst.is_dense(Type::F32) && dst.ne[0] % 32 == 0 && b.next_quantizes(&rows);
    fits.then(|| b.reserve_q8(&rows, true)).flatten()
}

/// What the kernels take keys and values of these types and places for.
pub(crate) fn kind_of(k: &VgView, v: &VgView) -> Kind {
    let types = [k, v].map(|x| Type::from_id(x.type_ as u8));
    // Halves are multiplied and copied by eight.
    if [k, v].iter().any(|x| x.ne[0] % 8 != 0) {
        return Kind::Pairs;
    }
    let are =
        |ty, places| types == [Some(ty); 2] && [k, v].iter().all(|x| is_aligned(x, ty, places));
    if are(Type::F16, 16) {
        return Kind::Halves;
    }
    if are(Type::Bf16, 16) {
        return Kind::Brain;
    }
    let is_raw = |x: &VgView| match Type::from_id(x.type_ as u8) {
        Some(ty @ (Type::F16 | Type::Q4_0 | Type::Q5_0 | Type::Q8_0 | Type::Iq4Nl)) => {
            is_aligned(x, ty, 2)
        }
        Some(ty @ (Type::Q4_1 | Type::Q5_1)) => is_aligned(x, ty, 4),
        _ => false,
    };
    match is_raw(k) && is_raw(v) {
        true => Kind::Raw,
        false => Kind::Pairs,
    }
}

/// Adds the launch that notes what the mask does with each tile of so many rows (tokens, and heads of a group) by so many
/// keys, and returns where it does; 0 where there is no mask.
pub(crate) fn mask_states(
    b: &mut Builder<'_>,
    params: &VgFattnSimtParams,
    group: i64,
    [rows, columns]: [i64; 2],
) -> Result<u64, EngineError> {
    let VgFattnSimtParams { q, k, mask, .. } = params;
    if mask.data == 0 {
        return Ok(0);
    }
    let across = div_ceil(q.ne[1] * group, rows);
    let masks = mask.ne[2] * mask.ne[3];
    let found = VgFattnMaskTilesParams {
        mask: *mask,
        states: b.scratch((masks * across * div_ceil(k.ne[1], columns)) as u64),
        keys: k.ne[1] as i32,
        tokens: q.ne[1] as i32,
        group: group as u32,
        rows: rows as u32,
        columns: columns as u32,
        reserved: 0,
    };
    b.launch_over("vg_fattn_mask_tiles", [across, masks, 1], 128, 0, &found)?;
    Ok(found.states)
}

/// Whether rows of type `ty` are dense and lie at multiples of `places`.
fn is_aligned(x: &VgView, ty: Type, places: i64) -> bool {
    x.type_ == u32::from(ty as u8)
        && x.nb[0] == ty.block_bytes() as i64
        && x.data.is_multiple_of(places as u64)
        && x.nb[1..].iter().all(|step| step % places == 0)
}

/// Bytes that a row takes in shared memory, copied in whole 16 bytes, wherever it begins.
fn raw_bytes(x: &VgView) -> i64 {
    let Some(ty) = Type::from_id(x.type_ as u8) else {
        return 0;
    };
    let bytes = x.ne[0] / ty.block_elements() as i64 * ty.block_bytes() as i64;
    div_ceil(bytes + 15, 16) * 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::Shape as Extents;

    /// A machine that runs llama.cpp may have any of these for keys and any for values.
    const TYPES_OF_CACHES: [Type; 9] = [
        Type::F32,
        Type::F16,
        Type::Bf16,
        Type::Q8_0,
        Type::Q4_0,
        Type::Q4_1,
        Type::Iq4Nl,
        Type::Q5_0,
        Type::Q5_1,
    ];

    #[test]
    fn every_pair_of_types_of_caches_has_kernels_on_tensor_cores() {
        let view = |ty, ne| VgView::new(4096, &Extents::contiguous(ty, ne).expect("a small shape"));
        for k in TYPES_OF_CACHES {
            for v in TYPES_OF_CACHES {
                for (tokens, width) in [(1, 64), (1, 128), (512, 128), (512, 256), (1, 512)] {
                    let params = VgFattnSimtParams {
                        dst: view(Type::F32, [width, 32, tokens, 1]),
                        q: view(Type::F32, [width, tokens, 32, 1]),
                        k: view(k, [width, 500, 8, 1]),
                        v: view(v, [width, 500, 8, 1]),
                        ..VgFattnSimtParams::default()
                    };
                    // What a block may have on the smallest GPUs.
                    let tiles = Tiles::of(&params, 99 << 10, false);
                    assert!(tiles.is_some(), "{k:?} and {v:?}, {width} wide");
                }
            }
        }
    }

    /// The kernel for so many query heads and tokens over keys and values of a type.
    fn kernel(
        ty: Type,
        [dk, dv]: [u64; 2],
        [heads, shared, tokens]: [u64; 3],
        address: u64,
    ) -> Option<&'static str> {
        let view = |ty, ne| {
            VgView::new(
                address,
                &Extents::contiguous(ty, ne).expect("a small shape"),
            )
        };
        let params = VgFattnSimtParams {
            dst: view(Type::F32, [dv, heads, tokens, 1]),
            q: view(Type::F32, [dk, tokens, heads, 1]),
            k: view(ty, [dk, 500, shared, 1]),
            v: view(ty, [dv, 500, shared, 1]),
            mask: view(Type::F16, [500, tokens, 1, 1]),
            ..VgFattnSimtParams::default()
        };
        Tiles::of(&params, 96 << 10, false).map(|tiles| tiles.kernel)
    }

    #[test]
    fn usual_shapes_have_kernels_on_tensor_cores() {
        for (ty, widths, sizes, expected) in [
            (Type::F16, [128; 2], [32, 8, 1], "f16_128_decode"),
            (Type::F16, [128; 2], [32, 8, 4], "f16_128_decode"),
            (Type::F16, [128; 2], [32, 8, 5], "f16_128_prefill"),
            (Type::F16, [64; 2], [64, 8, 1], "f16_64_decode"),
            (Type::F16, [80; 2], [32, 32, 512], "f16_128_prefill"),
            (Type::F16, [256; 2], [16, 8, 512], "f16_256_prefill"),
            (Type::F16, [192, 128], [128, 128, 1], "f16_256_decode"),
            (Type::F16, [576, 512], [128, 1, 1], "f16_576_decode"),
            (Type::Bf16, [128; 2], [32, 8, 1], "bf16_128_decode"),
            (Type::Q8_0, [128; 2], [32, 8, 1], "quant_128_decode"),
            (Type::Q4_0, [256; 2], [32, 8, 20], "quant_256_prefill"),
            (Type::F32, [128; 2], [32, 8, 1], "f32_128_decode"),
            (Type::F32, [256; 2], [32, 8, 20], "f32_256_prefill"),
            (Type::F16, [68; 2], [32, 8, 1], "f32_128_decode"),
            (Type::Q4K, [512; 2], [32, 8, 1], "f32_576_decode"),
        ] {
            let kernel = kernel(ty, widths, sizes, 4096).expect("a kernel on tensor cores");
            assert_eq!(kernel.strip_prefix("vg_fattn_"), Some(expected));
        }
        // Halves where 16 bytes cannot be copied, and what takes the kernel for anything.
        let sizes = [32, 8, 1];
        let odd = kernel(Type::F16, [128; 2], sizes, 4096 + 8);
        assert_eq!(odd, Some("vg_fattn_quant_128_decode"));
        assert_eq!(kernel(Type::F16, [1024; 2], sizes, 4096), None);
    }
}
