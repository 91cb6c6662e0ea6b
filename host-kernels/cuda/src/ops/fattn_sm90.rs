//! Flash attention of many tokens on sm_90a: the launches of `kernels/fattn_sm90.cu`.

use super::fattn_operands::{KvPath, mask_states, path_of};
use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil};
use crate::params::*;
use vgpu_engine::EngineError;

/// Bytes of dynamic shared memory of a block, which is alone on its SM: the opt-in limit of compute
/// capability 9.0.
const SHARED: u32 = 227 << 10;

/// Threads of a block: three warpgroups.
const THREADS: u32 = 384;

/// Rows of a tile: tokens and heads.
const ROWS: i64 = 128;

/// A kernel, its head size, and the keys of a tile.
struct FattnSm90Shape {
    kernel: &'static str,
    width: i64,
    keys: i64,
}

const SHAPES: [FattnSm90Shape; 3] = [
    FattnSm90Shape {
        kernel: "vg_fattn_sm90_64",
        width: 64,
        keys: 128,
    },
    FattnSm90Shape {
        kernel: "vg_fattn_sm90_128",
        width: 128,
        keys: 128,
    },
    FattnSm90Shape {
        kernel: "vg_fattn_sm90_256",
        width: 256,
        keys: 64,
    },
];

/// A launch of one of the kernels.
pub(crate) struct FattnSm90 {
    shape: &'static FattnSm90Shape,
    /// Query heads that share a tile.
    gqa_ratio: i64,
    /// Tiles of rows.
    across: i64,
}

impl FattnSm90 {
    /// The kernel for an attention on this device, if there is one and it fills the device, since
    /// it does not split keys. The operands must be valid for the kernels on tensor cores of any
    /// GPU.
    pub(crate) fn of(
        b: &Builder<'_>,
        params: &VgFattnSimtParams,
        gqa_ratio: i64,
    ) -> Option<FattnSm90> {
        let VgFattnSimtParams { q, k, v, .. } = params;
        let shape = SHAPES.iter().find(|shape| shape.width == k.ne[0])?;
        let rows = q.ne[1] * gqa_ratio;
        let across = div_ceil(rows, ROWS);
        let blocks = across * (q.ne[2] / gqa_ratio) * q.ne[3];
        let fits = b.is_sm90()
            && b.max_dynamic_shared(shape.kernel) >= SHARED
            && (params.mask.data == 0 || b.has("vg_fattn_mask_tiles"))
            && path_of(k, v) == KvPath::F16
            && v.ne[0] == shape.width
            && 2 * rows > ROWS
            && 2 * blocks >= b.sm_count().into()
            && q.ne[3] <= MAX_GRID_YZ;
        fits.then_some(FattnSm90 {
            shape,
            gqa_ratio,
            across,
        })
    }

    /// Adds the launches: the classification of mask tiles, then attention.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device lacks a kernel.
    pub(crate) fn fattn(
        &self,
        b: &mut Builder<'_>,
        params: &VgFattnSimtParams,
    ) -> Result<(), EngineError> {
        let VgFattnSimtParams { q, k, mask, .. } = params;
        let mask_tiles = mask_states(b, params, self.gqa_ratio, [ROWS, self.shape.keys])?;
        let attention = VgFattnParams {
            dst: params.dst,
            q: *q,
            k: *k,
            v: params.v,
            mask: *mask,
            sinks: params.sinks,
            mask_tiles,
            scale: params.scale,
            logit_softcap: params.logit_softcap,
            max_bias: params.max_bias,
            heads_log2: params.heads_log2,
            gqa_ratio: self.gqa_ratio as u32,
            splits: 1,
            ..VgFattnParams::default()
        };
        let grid = [self.across, q.ne[2] / self.gqa_ratio, q.ne[3]];
        b.launch_over(self.shape.kernel, grid, THREADS, SHARED, &attention)
    }
}
