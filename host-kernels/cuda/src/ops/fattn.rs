//! Flash attention on tensor cores.

use vgpu_transport::ir::Type;

use super::fattn_operands::{KvPath, is_aligned, mask_states, path_of};
use crate::context::COUNTERS;
use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil};
use crate::launch::q8::Q8Activations;
use crate::params::*;
use vgpu_engine::EngineError;

/// The tiles for a head size: the kernel of each [`KvPath`], the largest head sizes of keys and
/// values, query rows, and keys.
struct FattnShape {
    kernels: [&'static str; 4],
    k: i64,
    v: i64,
    rows: i64,
    keys: i64,
}

macro_rules! shape {
    ($name:literal, [$k:literal, $v:literal], [$rows:expr, $keys:expr]) => {
        FattnShape {
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

/// The tiles for few rows and for many, by head size. For large heads the paths differ in what fits
/// into shared memory: keys with few rows and rows with many for heads of 256, keys for heads of
/// 576.
const fn shapes(keys_of_256: i64, rows_of_256: i64, keys_of_576: i64) -> [[FattnShape; 2]; 4] {
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

const SHAPES: [[FattnShape; 2]; 4] = shapes(64, 64, 32);
/// Tiles of quantised keys and values are unpacked, which takes shared memory for their bytes.
const SHAPES_QUANT: [[FattnShape; 2]; 4] = shapes(32, 64, 32);
const SHAPES_F32: [[FattnShape; 2]; 4] = shapes(32, 32, 16);

fn shapes_of(path: KvPath) -> &'static [[FattnShape; 2]] {
    match path {
        KvPath::Quant => &SHAPES_QUANT,
        KvPath::F32 => &SHAPES_F32,
        KvPath::F16 | KvPath::Bf16 => &SHAPES,
    }
}

/// The rows of the tiles for few rows, of which most may be unused.
const FEW_ROWS: i64 = 16;

/// Bytes that an SM should have in flight from global memory.
const BYTES_IN_FLIGHT: i64 = 64 << 10;

/// The fewest tiles of keys that are worth a block: a tile takes about a microsecond, the exchange
/// of results between blocks five.
const MIN_TILES_PER_BLOCK: i64 = 4;

/// A launch of a kernel on tensor cores.
pub(crate) struct Tiles {
    kernel: &'static str,
    shape: &'static FattnShape,
    /// Query heads that share keys and values, and a tile.
    pub(crate) gqa_ratio: i64,
    quant_stride: i64,
    shared: u32,
}

impl Tiles {
    /// The kernel for an attention, if there is one for such operands. `max_dynamic_shared`: the
    /// most bytes of dynamic shared memory of a block of a kernel. `is_few`: use the tiles for few
    /// rows in any case.
    pub(crate) fn of(
        params: &VgFattnSimtParams,
        max_dynamic_shared: impl Fn(&'static str) -> u32,
        is_few: bool,
    ) -> Option<Tiles> {
        let path = path_of(&params.k, &params.v);
        // The F32 path needs the least shared memory for wide heads.
        let paths = [path, KvPath::F32].into_iter();
        { paths }.find_map(|path| Tiles::of_path(path, params, &max_dynamic_shared, is_few))
    }

    fn of_path(
        path: KvPath,
        params: &VgFattnSimtParams,
        max_dynamic_shared: impl Fn(&'static str) -> u32,
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
        // Query heads that share keys, values and the mask.
        let alike = k.ne[2] == v.ne[2] && (mask.data == 0 || mask.ne[2] == 1);
        let gqa_ratio = if alike { q.ne[2] / k.ne[2] } else { 1 };
        let rows = q.ne[1].checked_mul(gqa_ratio).filter(|&n| n <= 1 << 28)?;
        let shapes = { shapes_of(path).iter() }
            .find(|[shape, _]| k.ne[0] <= shape.k && v.ne[0] <= shape.v)?;
        let shape = &shapes[usize::from(rows > FEW_ROWS && !is_few)];
        let quant_stride = match path {
            KvPath::Quant => [k, v].map(row_bytes).into_iter().max().unwrap_or(0),
            _ => 0,
        };
        let [queries, keys, values] = [
            shape.rows * (shape.k + 8),
            shape.keys * (shape.k + 8),
            shape.keys * (shape.v + 8),
        ];
        let elements = match path {
            // Two numbers for each element; keys and values share their memory.
            KvPath::F32 => 2 * (queries + keys.max(values)),
            _ => queries + keys + values,
        };
        let shared = u32::try_from(2 * elements + 2 * shape.keys * quant_stride).ok()?;
        let kernel = shape.kernels[path as usize];
        let fits = shared <= max_dynamic_shared(kernel)
            && q.ne[2] / gqa_ratio <= MAX_GRID_YZ
            && q.ne[3] <= MAX_GRID_YZ
            && (mask.data == 0 || mask.ne[2] * mask.ne[3] <= MAX_GRID_YZ);
        fits.then_some(Tiles {
            kernel,
            shape,
            gqa_ratio,
            quant_stride,
            shared,
        })
    }

    /// Adds the launches: the classification of mask tiles if there are many rows, then attention.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    pub(crate) fn fattn(
        &self,
        b: &mut Builder<'_>,
        params: &VgFattnSimtParams,
    ) -> Result<(), EngineError> {
        let VgFattnSimtParams { q, k, mask, .. } = params;
        let FattnShape { rows, keys, v, .. } = *self.shape;
        let across = div_ceil(q.ne[1] * self.gqa_ratio, rows);
        let tiles = div_ceil(k.ne[1], keys);
        let mask_tiles = match rows > FEW_ROWS {
            true => mask_states(b, params, self.gqa_ratio, [rows, keys])?,
            false => 0,
        };
        let heads = q.ne[2] / self.gqa_ratio;
        let items = across * heads * q.ne[3];
        let mut splits = 1;
        if items <= COUNTERS {
            // A block has one tile of keys and one of values in flight.
            let bytes = match self.quant_stride {
                0 => keys * 2 * (k.ne[0] + params.v.ne[0]),
                quant_stride => 2 * keys * quant_stride,
            };
            let blocks = (BYTES_IN_FLIGHT / bytes).clamp(2, 4);
            let wanted = div_ceil(i64::from(b.sm_count()) * blocks, items);
            splits = wanted
                .min(div_ceil(tiles, MIN_TILES_PER_BLOCK))
                .min(MAX_GRID_YZ / q.ne[3])
                .max(1);
            // None without a tile.
            splits = div_ceil(tiles, div_ceil(tiles, splits));
        }
        let partials = if splits > 1 {
            b.scratch((items * splits * rows * (v + 2) * 4) as u64)
        } else {
            0
        };
        let q8 = reserve_q8_result(b, &params.dst);
        let params = VgFattnParams {
            dst: params.dst,
            q: *q,
            k: *k,
            v: params.v,
            mask: *mask,
            sinks: params.sinks,
            mask_tiles,
            partials,
            counters: b.counters(),
            codebooks: params.codebooks,
            quants: q8.map_or(0, |q8| q8.quants),
            scales: q8.map_or(0, |q8| q8.scales),
            scale: params.scale,
            logit_softcap: params.logit_softcap,
            max_bias: params.max_bias,
            heads_log2: params.heads_log2,
            gqa_ratio: self.gqa_ratio as u32,
            splits: splits as u32,
            quant_stride: self.quant_stride as u32,
            reserved: 0,
        };
        let grid = [across, heads, splits * q.ne[3]];
        b.launch_over(self.kernel, grid, 128, self.shared, &params)
    }
}

/// Room for the q8 result, if a product comes next that quantises it.
fn reserve_q8_result(b: &mut Builder<'_>, dst: &VgView) -> Option<Q8Activations> {
    let rows = dst.with_merged_heads();
    let fits = dst.is_dense(Type::F32) && dst.ne[0] % 32 == 0 && b.next_quantizes(&rows);
    fits.then(|| b.reserve_q8(&rows, true)).flatten()
}

/// Bytes of a row in shared memory: whole units of 16 bytes, from any first byte.
fn row_bytes(x: &VgView) -> i64 {
    let Some(ty) = Type::from_id(x.type_ as u8) else {
        return 0;
    };
    let bytes = x.ne[0] / ty.block_elements() as i64 * ty.block_bytes() as i64;
    div_ceil(bytes + 15, 16) * 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::Shape as TensorShape;

    /// The types that llama.cpp offers for the KV cache, keys and values independently.
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
        let view = |ty, ne| {
            VgView::new(
                4096,
                &TensorShape::contiguous(ty, ne).expect("a small shape"),
            )
        };
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
                    // Shared memory of a block on the smallest supported GPUs.
                    let tiles = Tiles::of(&params, |_| 99 << 10, false);
                    assert!(tiles.is_some(), "{k:?} and {v:?}, {width} wide");
                }
            }
        }
    }

    /// The kernel for these head sizes, query heads, KV heads and tokens, with keys and values of a
    /// type.
    fn kernel(
        ty: Type,
        [dk, dv]: [u64; 2],
        [heads, shared, tokens]: [u64; 3],
        address: u64,
    ) -> Option<&'static str> {
        let view = |ty, ne| {
            VgView::new(
                address,
                &TensorShape::contiguous(ty, ne).expect("a small shape"),
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
        Tiles::of(&params, |_| 96 << 10, false).map(|tiles| tiles.kernel)
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
        // F16 where 16-byte copies are not possible, and heads that only the SIMT kernel takes.
        let sizes = [32, 8, 1];
        let odd = kernel(Type::F16, [128; 2], sizes, 4096 + 8);
        assert_eq!(odd, Some("vg_fattn_quant_128_decode"));
        assert_eq!(kernel(Type::F16, [1024; 2], sizes, 4096), None);
    }
}
