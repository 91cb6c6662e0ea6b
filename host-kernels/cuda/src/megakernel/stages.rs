//! Stages of a megakernel: which launches have one, and what memory each accesses.

use std::collections::HashMap;

use vgpu_transport::ir::Type;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::access::MemoryAccess;
use super::no_stage::NoStage;
use crate::device::{Address, Device, KernelId, Launch};
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::{MMV_COLUMNS, q8_elements};
use crate::params::*;

/// The most stages of a megakernel.
pub(crate) const MAX_STAGES: usize = 1024;

/// Bytes of the counters of a megakernel: one for the launch and one for each stage.
pub(crate) const COUNTER_BYTES: u64 =
    (MAX_STAGES as u64 + 1) * VG_COUNTER_STRIDE as u64 * size_of::<u32>() as u64;

/// The most bytes of a stage's parameters.
const MAX_PARAMS: usize = VG_STAGE_BYTES as usize - size_of::<VgStage>();

/// Pairs of weight rows that a block multiplies in a work item, one for each warp.
pub(crate) const BLOCK_PAIRS: u64 = 4;

/// The megakernels: for one column, and for several.
pub(crate) const MEGAKERNELS: [&str; 2] = ["vg_megakernel", "vg_megakernel_cols8"];

/// Threads of a block.
pub(crate) const THREADS: u32 = 128;

/// The weight types of products, plain and repacked, with the kernels for one column and for
/// several.
const WEIGHTS: [(&str, &str, VgType); 15] = [
    ("vg_mmv_f32", "vg_mmv_f32_cols8", VG_F32),
    ("vg_mmv_f16", "vg_mmv_f16_cols8", VG_F16),
    ("vg_mmv_bf16", "vg_mmv_bf16_cols8", VG_BF16),
    ("vg_mmv_q4_0", "vg_mmv_q4_0_cols8", VG_Q4_0),
    ("vg_mmv_q8_0", "vg_mmv_q8_0_cols8", VG_Q8_0),
    ("vg_mmv_iq4_nl", "vg_mmv_iq4_nl_cols8", VG_IQ4_NL),
    ("vg_mmv_mxfp4", "vg_mmv_mxfp4_cols8", VG_MXFP4),
    ("vg_mmv_q4_k", "vg_mmv_q4_k_cols8", VG_Q4_K),
    ("vg_mmv_q5_k", "vg_mmv_q5_k_cols8", VG_Q5_K),
    ("vg_mmv_q6_k", "vg_mmv_q6_k_cols8", VG_Q6_K),
    (
        "vg_mmv_q4_0_repacked",
        "vg_mmv_q4_0_repacked_cols8",
        VG_Q4_0 | VG_REPACKED,
    ),
    (
        "vg_mmv_q8_0_repacked",
        "vg_mmv_q8_0_repacked_cols8",
        VG_Q8_0 | VG_REPACKED,
    ),
    (
        "vg_mmv_iq4_nl_repacked",
        "vg_mmv_iq4_nl_repacked_cols8",
        VG_IQ4_NL | VG_REPACKED,
    ),
    (
        "vg_mmv_mxfp4_repacked",
        "vg_mmv_mxfp4_repacked_cols8",
        VG_MXFP4 | VG_REPACKED,
    ),
    (
        "vg_mmv_q6_k_repacked",
        "vg_mmv_q6_k_repacked_cols8",
        VG_Q6_K | VG_REPACKED,
    ),
];

/// The other kernels that have a stage.
const BODIES: [(&str, VgStageOp); 10] = [
    ("vg_norm_fused", VG_STAGE_NORM_FUSED),
    ("vg_quantize_q8", VG_STAGE_QUANTIZE_Q8),
    ("vg_rope", VG_STAGE_ROPE),
    ("vg_rope_rows", VG_STAGE_ROPE_ROWS),
    ("vg_set_rows", VG_STAGE_SET_ROWS),
    ("vg_get_rows", VG_STAGE_GET_ROWS),
    ("vg_elementwise", VG_STAGE_ELEMENTWISE),
    ("vg_add_id", VG_STAGE_ADD_ID),
    ("vg_topk_moe", VG_STAGE_TOPK_MOE),
    ("vg_weighted_sum", VG_STAGE_WEIGHTED_SUM),
];

/// The attention kernels that have a stage, and their head size.
const ATTENTION: [(&str, VgStageOp, i64); 6] = [
    ("vg_fattn_f16_64_decode", VG_STAGE_FATTN_F16_64, 64),
    ("vg_fattn_f16_128_decode", VG_STAGE_FATTN_F16_128, 128),
    ("vg_fattn_bf16_64_decode", VG_STAGE_FATTN_BF16_64, 64),
    ("vg_fattn_bf16_128_decode", VG_STAGE_FATTN_BF16_128, 128),
    ("vg_fattn_quant_64_decode", VG_STAGE_FATTN_QUANT_64, 64),
    ("vg_fattn_quant_128_decode", VG_STAGE_FATTN_QUANT_128, 128),
];

/// Query rows of a tile of these kernels.
const TILE_ROWS: i64 = 16;

/// The most tokens of a megakernel: the most columns of a matrix-vector kernel.
pub(crate) const MAX_TOKENS: i64 = MMV_COLUMNS;

/// The stage of a kernel.
#[derive(Debug, Clone, Copy)]
struct StageKernel {
    name: &'static str,
    body: VgStageOp,
    /// Whether the stage has several columns, which needs the megakernel for several columns.
    is_cols8: bool,
    /// The head size, of attention.
    width: i64,
}

/// The kernels of a device that have a stage.
pub(crate) struct StageKernels {
    stage_kernels: HashMap<u32, StageKernel>,
    /// The megakernels: for one column, and for several.
    kernels: [KernelId; 2],
}

impl StageKernels {
    /// The kernels of a device, if it has the megakernels.
    pub(crate) fn of(device: &dyn Device) -> Option<StageKernels> {
        let [one, several] = MEGAKERNELS.map(|name| device.kernel(name).ok());
        let kernels = [one?, several?];
        let plain = |name, body, is_cols8| StageKernel {
            name,
            body,
            is_cols8,
            width: 0,
        };
        let products = WEIGHTS.iter().flat_map(|&(one, several, _)| {
            [
                plain(one, VG_STAGE_MMV, false),
                plain(several, VG_STAGE_MMV, true),
            ]
        });
        let attention = ATTENTION.iter().map(|&(name, body, width)| StageKernel {
            width,
            ..plain(name, body, false)
        });
        let others = BODIES.iter().map(|&(name, body)| plain(name, body, false));
        let stage_kernels = { products.chain(attention).chain(others) }
            .filter_map(|stage_kernel| {
                Some((device.kernel(stage_kernel.name).ok()?.0, stage_kernel))
            })
            .collect();
        Some(StageKernels {
            stage_kernels,
            kernels,
        })
    }

    /// The megakernel that runs these stages.
    pub(crate) fn kernel(&self, stages: &[&Stage]) -> KernelId {
        self.kernels[usize::from(stages.iter().any(|stage| stage.is_cols8))]
    }

    /// A launch as a stage.
    ///
    /// # Errors
    /// The reason why the launch has no stage, for the log.
    pub(crate) fn stage(&self, step: &PlannedLaunch) -> Result<Stage, NoStage> {
        let launch = &step.launch;
        let stage_kernel = self.stage_kernels.get(&launch.kernel.0);
        let stage_kernel = *stage_kernel.ok_or(NoStage::OtherKernel)?;
        let mut body = stage_kernel.body;
        if launch.params.len() > MAX_PARAMS {
            return Err(NoStage::ParamsTooLarge);
        }
        let mut access = MemoryAccess::default();
        let [x, y, z] = launch.grid.map(u64::from);
        // Kernels with one thread per element loop over the grid.
        let each_element = (x * u64::from(launch.threads[0])).div_ceil(u64::from(THREADS));
        let mut shape = StageShape {
            grid: launch.grid,
            total: x * y * z,
            ..StageShape::default()
        };
        match body {
            VG_STAGE_MMV => access.products(&read(launch)?, &mut shape)?,
            VG_STAGE_NORM_FUSED => access.norm(&read(launch)?),
            VG_STAGE_QUANTIZE_Q8 => access.quantize(&read(launch)?),
            VG_STAGE_ROPE => {
                let it: VgRopeParams = read(launch)?;
                access.reads_at(&it.src, &[&it.dst]);
                access.rope(&it);
                access.writes(&it.dst);
            }
            VG_STAGE_ROPE_ROWS => {
                let it: VgRopeRowsParams = read(launch)?;
                access.reads(&it.rope.src);
                access.rope(&it.rope);
                access.reads(&it.ids);
                access.writes(&it.cache);
            }
            VG_STAGE_SET_ROWS => {
                let it: VgRowsParams = read(launch)?;
                if Type::from_id(it.dst.type_ as u8).is_some_and(Type::is_quantized) {
                    body = VG_STAGE_SET_BLOCKS;
                }
                access.reads(&it.src);
                access.reads(&it.ids);
                access.writes(&it.dst);
                shape.elements(each_element);
            }
            VG_STAGE_GET_ROWS => {
                let it: VgRowsParams = read(launch)?;
                if ![VG_F32, VG_F16, VG_BF16, VG_I32].contains(&it.src.type_) {
                    return Err(NoStage::QuantisedRows);
                }
                access.reads(&it.src);
                access.reads(&it.ids);
                access.writes(&it.dst);
                shape.elements(each_element);
            }
            VG_STAGE_ADD_ID => {
                let it: VgAddIdParams = read(launch)?;
                access.reads_at(&it.a, &[&it.dst]);
                access.reads(&it.b);
                access.reads(&it.ids);
                access.writes(&it.dst);
                shape.elements(each_element);
            }
            VG_STAGE_ELEMENTWISE => {
                let it: VgElementwiseParams = read(launch)?;
                access.reads_at(&it.a, &[&it.dst]);
                access.reads_at(&it.b, &[&it.dst]);
                access.writes(&it.dst);
                shape.elements(each_element);
            }
            VG_STAGE_TOPK_MOE => {
                let it: VgTopkMoeParams = read(launch)?;
                access.reads(&it.logits);
                access.reads_bytes(it.bias, it.logits.ne[0] * 4);
                access.writes(&it.ids);
                access.writes(&it.weights);
            }
            VG_STAGE_WEIGHTED_SUM => {
                let it: VgWeightedSumParams = read(launch)?;
                access.reads(&it.experts);
                access.reads(&it.weights);
                access.writes(&it.dst);
                shape.elements(each_element);
            }
            _ => {
                access.fattn(&read(launch)?, launch, stage_kernel.width)?;
                shape.arena = launch.shared;
            }
        }
        if access.has_internal_conflict() {
            return Err(NoStage::DependsOnOrder);
        }
        let total = u32::try_from(shape.total).map_err(|_| NoStage::GridTooLarge)?;
        Ok(Stage {
            body,
            weights: shape.weights,
            is_cols8: stage_kernel.is_cols8,
            grid: shape.grid,
            total,
            arena: shape.arena,
            params: launch.params.clone(),
            access,
        })
    }
}

/// A launch as a stage.
pub(crate) struct Stage {
    pub(crate) body: VgStageOp,
    /// The weight type of products, repacked or not.
    pub(crate) weights: Option<VgType>,
    /// Whether only the megakernel for several columns has the stage.
    is_cols8: bool,
    pub(crate) grid: [u32; 3],
    /// The number of work items.
    pub(crate) total: u32,
    /// Bytes of shared memory for tiles.
    pub(crate) arena: u32,
    pub(crate) params: Vec<u8>,
    pub(crate) access: MemoryAccess,
}

impl Stage {
    /// Bytes of a warp's ring for one chunk of two weight rows: twice `stage_bytes` of `mmv.cuh`,
    /// plain or repacked.
    pub(crate) fn slot(&self) -> u32 {
        let plain = |of: VgType| Type::from_id((of & !VG_REPACKED) as u8);
        self.weights.and_then(plain).map_or(0, |ty| {
            let chunk = match ty.is_quantized() {
                true => 1024 / ty.block_elements() * ty.block_bytes(),
                false => 1024,
            };
            2 * (chunk.next_multiple_of(16) + 16) as u32
        })
    }
}

#[derive(Default)]
struct StageShape {
    grid: [u32; 3],
    total: u64,
    arena: u32,
    weights: Option<VgType>,
}

impl StageShape {
    fn elements(&mut self, blocks: u64) {
        self.total = blocks;
        self.grid = [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1];
    }
}

impl MemoryAccess {
    /// The accesses of an MMV stage.
    ///
    /// # Errors
    /// The reason why the launch has no stage, for the log.
    fn products(&mut self, it: &VgMmvParams, shape: &mut StageShape) -> Result<(), NoStage> {
        let has_unit = it.unit != VG_OP_ADD;
        let all = &it.products[..it.count as usize];
        let (first, dst) = (&all[0], &all[0].dst);
        // A stage has one group of columns.
        if it.ids.data == 0 && dst.ne[1] > MAX_TOKENS {
            return Err(NoStage::TooManyTokens);
        }
        let of = first.w.type_;
        let known = WEIGHTS.iter().any(|&(_, _, known)| known == of);
        let (ty, _) = { first.w.weights() }
            .filter(|_| known)
            .ok_or(NoStage::WeightType)?;
        for (i, product) in all.iter().enumerate() {
            self.ahead.push(product.w.address_range());
            match it.ids.data != 0 {
                true => self.reads(&product.add),
                false => self.reads_at(&product.add, &[&all[if has_unit { 0 } else { i }].dst]),
            }
            if i == 0 || !has_unit {
                self.writes(&product.dst);
            }
        }
        if it.ids.data != 0 {
            self.reads(&it.ids);
            self.ids.push(it.ids.address_range());
        }
        if ty.is_quantized() {
            let elements = q8_elements(&it.x);
            self.reads_bytes(it.quants, elements);
            self.reads_bytes(it.scales, elements / 2);
        } else {
            self.reads(&it.x);
        }
        let pairs: i64 = match has_unit {
            true => dst.ne[0],
            false => all.iter().map(|product| (product.dst.ne[0] + 1) / 2).sum(),
        };
        let (slots, batches) = match it.ids.data != 0 {
            true => (dst.ne[1], dst.ne[2]),
            false => (1, dst.ne[2] * dst.ne[3]),
        };
        let grid = [pairs, slots, batches].map(u32::try_from);
        let [Ok(x), Ok(y), Ok(z)] = grid else {
            return Err(NoStage::GridTooLarge);
        };
        let units = u64::from(x).saturating_mul(u64::from(y) * u64::from(z));
        // Items are counted in 32 bits, with one more round of blocks.
        if units > 1 << 30 {
            return Err(NoStage::GridTooLarge);
        }
        shape.grid = [x, y, z];
        shape.total = units.div_ceil(BLOCK_PAIRS);
        shape.weights = Some(of);
        Ok(())
    }

    fn norm(&mut self, it: &VgNormFusedParams) {
        for view in [&it.a, &it.add, &it.w] {
            self.reads_at(view, &[&it.sum, &it.dst]);
        }
        self.writes(&it.sum);
        self.writes(&it.dst);
        self.writes_q8(it.quants, it.scales, &it.a);
    }

    fn quantize(&mut self, it: &VgQuantizeQ8Params) {
        self.reads(&it.src);
        self.writes_q8(it.quants, it.scales, &it.src);
    }

    fn writes_q8(&mut self, quants: Address, scales: Address, x: &VgView) {
        let elements = q8_elements(x);
        self.writes_bytes(quants, elements);
        self.writes_bytes(scales, elements / 2);
    }

    fn rope(&mut self, it: &VgRopeParams) {
        for view in [&it.positions, &it.factors] {
            self.reads(view);
        }
    }

    /// The accesses of an attention stage, whose results have `width` columns a head.
    ///
    /// # Errors
    /// The reason why the launch has no stage, for the log.
    fn fattn(&mut self, it: &VgFattnParams, launch: &Launch, width: i64) -> Result<(), NoStage> {
        if it.q.ne[1] > MAX_TOKENS {
            return Err(NoStage::TooManyTokens);
        }
        if it.mask_tiles != 0 {
            return Err(NoStage::MaskTiles);
        }
        for view in [&it.q, &it.k, &it.v, &it.mask, &it.sinks] {
            self.reads(view);
        }
        self.writes(&it.dst);
        self.writes_q8(it.quants, it.scales, &it.dst.with_merged_heads());
        if it.splits > 1 {
            let [x, y, z] = launch.grid.map(i64::from);
            let items = x * y * (z / i64::from(it.splits));
            let each = TILE_ROWS * (width + 2) * 4;
            self.writes_bytes(it.partials, items * i64::from(it.splits) * each);
            self.writes_bytes(it.counters, items * 4);
        }
        Ok(())
    }
}

/// The parameter structure of a launch.
///
/// # Errors
/// The reason why the launch has no stage: its parameters have another size than `T`.
fn read<T: FromBytes + KnownLayout + Immutable>(launch: &Launch) -> Result<T, NoStage> {
    T::read_from_bytes(&launch.params).map_err(|_| NoStage::OtherParams)
}
