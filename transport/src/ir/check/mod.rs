//! The shape rules of every operator: types where ggml fixes them, extents, strides, parameters.
//!
//! A kernel may rely on what is checked here and on the extents checked by
//! [`validate`](super::validate::validate), and on nothing else: the graph comes from a hostile guest. The
//! rules restate the assertions of ggml's constructors (`ggml.c`) and of its CPU kernels.
//!
//! Which *types* an engine computes is its own affair ([`Capabilities`](super::Capabilities)); here only types that an
//! operator's definition fixes (row ids are integers, masks are F16 or F32) are looked at.

mod attention;
mod conv;
mod elementwise;
mod matmul;
mod movement;
mod normalise;
mod recurrent;
mod reduce;
mod training;

use conv::Steps;

use super::graph::Shape;
use super::ops::{Op, OpKind};
use super::types::Type;

/// Why an operation cannot run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The operation breaks a rule of its operator: the guest's fault.
    #[error("{} is malformed: {why}", op.ggml_name())]
    Malformed {
        /// The operator.
        op: OpKind,
        /// The broken rule.
        why: &'static str,
    },
    /// The operation is well-formed, but the engine does not run it in this form.
    #[error("the engine does not run {} with these types and layouts", op.ggml_name())]
    NotCapable {
        /// The operator.
        op: OpKind,
    },
}

/// An operation under check.
struct Operation<'a> {
    kind: OpKind,
    dst: &'a Shape,
    src: &'a [Option<&'a Shape>],
}

impl<'a> Operation<'a> {
    fn ensure(&self, holds: bool, why: &'static str) -> Result<(), Refusal> {
        if holds {
            Ok(())
        } else {
            Err(Refusal::Malformed { op: self.kind, why })
        }
    }

    /// Source `i`, which must be there.
    fn src(&self, i: usize) -> Result<&'a Shape, Refusal> {
        self.optional(i).ok_or(Refusal::Malformed {
            op: self.kind,
            why: "a source is missing",
        })
    }

    fn optional(&self, i: usize) -> Option<&'a Shape> {
        self.src.get(i).copied().flatten()
    }

    fn not_capable(&self) -> Result<(), Refusal> {
        Err(Refusal::NotCapable { op: self.kind })
    }
}

/// Checks one operation against the rules of its operator.
pub fn check(op: &Op, dst: &Shape, src: &[Option<&Shape>]) -> Result<(), Refusal> {
    let o = Operation {
        kind: op.kind(),
        dst,
        src,
    };
    let (min, max) = o.kind.sources();
    o.ensure(src.len() <= max, "too many sources")?;
    for i in 0..min {
        o.src(i)?;
    }
    for shape in src.iter().flatten().copied().chain([dst]) {
        layout(&o, shape)?;
    }
    match *op {
        Op::Copy {} => movement::copy(&o),
        Op::Repeat {} => movement::repeat(&o),
        Op::RepeatBack {} => movement::repeat_back(&o),
        Op::Concat { dim } => movement::concat(&o, dim),
        Op::GetRows {} => movement::get_rows(&o),
        Op::GetRowsBack {} => movement::get_rows_back(&o),
        Op::SetRows {} => movement::set_rows(&o),
        Op::Set {
            nb1,
            nb2,
            nb3,
            offset,
        }
        | Op::Acc {
            nb1,
            nb2,
            nb3,
            offset,
        } => movement::set(&o, [nb1, nb2, nb3], offset),
        Op::Diag {} => movement::diag(&o),
        Op::DiagMaskInf { n_past } | Op::DiagMaskZero { n_past } => movement::diag_mask(&o, n_past),
        Op::Pad {
            left,
            right,
            circular,
        } => movement::pad(&o, left, right, circular),
        Op::PadReflect1d { p0, p1 } => movement::pad_reflect_1d(&o, p0, p1),
        Op::Roll { .. } | Op::Tri { .. } => elementwise::same_extents(&o),
        Op::Fill { .. } => Ok(()),
        Op::Arange { start, stop, step } => movement::arange(&o, start, stop, step),

        Op::Add {} | Op::Sub {} | Op::Mul {} | Op::Div {} => elementwise::broadcast(&o),
        Op::AddId {} => elementwise::add_id(&o),
        Op::Add1 {} => elementwise::add1(&o),
        Op::Glu { .. } => elementwise::glu(&o),
        Op::Scale { .. }
        | Op::Clamp { .. }
        | Op::Sqr {}
        | Op::Sqrt {}
        | Op::Log {}
        | Op::Sin {}
        | Op::Cos {}
        | Op::LeakyRelu { .. }
        | Op::Unary { .. }
        | Op::Xielu { .. } => elementwise::same_extents(&o),
        Op::SiluBack {} => elementwise::same_extents(&o),

        Op::Sum {} => reduce::sum(&o),
        Op::SumRows {} | Op::Mean {} => reduce::rows_to_one(&o),
        Op::Cumsum {} => elementwise::same_extents(&o),
        Op::Argmax {} => reduce::argmax(&o),
        Op::CountEqual {} => reduce::count_equal(&o),
        Op::Argsort { .. } => reduce::argsort(&o),
        Op::TopK {} => reduce::top_k(&o),

        Op::Norm { .. } | Op::RmsNorm { .. } | Op::L2Norm { .. } => elementwise::same_extents(&o),
        Op::RmsNormBack { .. } => elementwise::same_extents(&o),
        Op::GroupNorm { n_groups, .. } => normalise::group_norm(&o, n_groups),
        Op::SoftMax { max_bias, .. } => normalise::soft_max(&o, max_bias),
        Op::SoftMaxBack { .. } => elementwise::same_extents(&o),

        Op::MulMat { hadamard, .. } => matmul::mul_mat(&o, hadamard),
        Op::MulMatId { .. } => matmul::mul_mat_id(&o),
        Op::OutProd {} => matmul::out_prod(&o),

        Op::Rope {
            mode,
            n_dims,
            n_offs,
            sections,
            ..
        } => attention::rope(&o, mode, n_dims, n_offs, sections),
        Op::FlashAttnExt { max_bias, .. } => attention::flash_attn_ext(&o, max_bias),

        Op::Im2col {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        } => conv::im2col(
            &o,
            Steps {
                s: [s0, s1],
                p: [p0, p1],
                d: [d0, d1],
            },
            is_2d,
        ),
        Op::Im2colBack {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        } => conv::im2col_back(
            &o,
            Steps {
                s: [s0, s1],
                p: [p0, p1],
                d: [d0, d1],
            },
            is_2d,
        ),
        Op::Im2col3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            ic,
        } => conv::im2col_3d(&o, [s0, s1, s2], [p0, p1, p2], [d0, d1, d2], ic),
        Op::Col2im1d { s0, oc, p0 } => conv::col2im_1d(&o, s0, oc, p0),
        Op::Conv2d {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        } => conv::conv_2d(
            &o,
            Steps {
                s: [s0, s1],
                p: [p0, p1],
                d: [d0, d1],
            },
        ),
        Op::Conv2dDw {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        } => conv::conv_2d_dw(
            &o,
            Steps {
                s: [s0, s1],
                p: [p0, p1],
                d: [d0, d1],
            },
        ),
        Op::Conv3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            c,
            n,
            oc,
        } => conv::conv_3d(&o, [s0, s1, s2], [p0, p1, p2], [d0, d1, d2], [c, n, oc]),
        Op::ConvTranspose1d { s0, p0, d0 } => conv::conv_transpose_1d(&o, s0, p0, d0),
        Op::ConvTranspose2d { stride } => conv::conv_transpose_2d(&o, stride),
        Op::Pool1d { k0, s0, p0, .. } => conv::pool_1d(&o, k0, s0, p0),
        Op::Pool2d {
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
            ..
        } => conv::pool_2d(&o, [(k0, s0, p0), (k1, s1, p1)]),
        Op::Pool2dBack {
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
            ..
        } => conv::pool_2d_back(&o, [(k0, s0, p0), (k1, s1, p1)]),
        Op::Upscale { .. } => conv::upscale(&o),
        Op::TimestepEmbedding { dim, max_period } => conv::timestep_embedding(&o, dim, max_period),
        Op::WinPart { npx, npy, w } => conv::win_part(&o, npx, npy, w),
        Op::WinUnpart { w } => conv::win_unpart(&o, w),
        Op::GetRelPos {} => conv::get_rel_pos(&o),
        Op::AddRelPos {} => conv::add_rel_pos(&o),

        Op::SolveTri {} => recurrent::solve_tri(&o),
        Op::LightningIndexer {} => recurrent::lightning_indexer(&o),
        Op::SsmConv {} => recurrent::ssm_conv(&o),
        Op::SsmScan { snapshots } => recurrent::ssm_scan(&o, snapshots),
        Op::RwkvWkv6 {} => recurrent::rwkv_wkv6(&o),
        Op::RwkvWkv7 {} => recurrent::linear_attention(&o, &[0, 1, 2, 3, 4, 5], 6),
        Op::GatedLinearAttn { .. } => recurrent::linear_attention(&o, &[0, 1, 2, 3], 4),
        Op::GatedDeltaNet { snapshots } => recurrent::gated_delta_net(&o, snapshots),
        Op::Dsv4HcComb { n_iter, .. } => recurrent::dsv4_hc_comb(&o, n_iter),
        Op::Dsv4HcPre { gated, .. } => recurrent::dsv4_hc_pre(&o, gated),
        Op::Dsv4HcPost {} => recurrent::dsv4_hc_post(&o),

        Op::CrossEntropyLoss {} => training::cross_entropy_loss(&o),
        Op::CrossEntropyLossBack {} => training::cross_entropy_loss_back(&o),
        Op::OptStepAdamw {} => training::opt_step(&o, 7),
        Op::OptStepSgd {} => training::opt_step(&o, 2),

        // No rules, no kernel: an engine's claim alone never lets an operation through. (ggml itself can
        // no longer make one.)
        Op::FlashAttnBack { .. } => o.not_capable(),
    }
}

/// What holds for every tensor of every operation: whole blocks, blocks of quantised rows adjacent,
/// strides that keep plain elements aligned, sizes that fit.
fn layout(o: &Operation<'_>, shape: &Shape) -> Result<(), Refusal> {
    let block = shape.ty.block_bytes();
    if shape.ty.is_quantized() {
        o.ensure(
            shape.ne[0].is_multiple_of(shape.ty.block_elements()),
            "a row ends within a block",
        )?;
        o.ensure(
            shape.nb[0] == block || shape.ne[0] <= shape.ty.block_elements(),
            "the blocks of a quantised row are not adjacent",
        )?;
    } else {
        o.ensure(
            shape.nb.iter().all(|nb| nb.is_multiple_of(block)),
            "a stride is not a multiple of the element size",
        )?;
    }
    // Each extent too: those of an empty tensor are in no product, and ggml's are signed.
    o.ensure(
        shape.ne.iter().all(|&n| n <= i64::MAX as u64),
        "an extent does not fit a signed integer",
    )?;
    // Without the extents that are 0, so that no product of some extents overflows.
    let elements = shape
        .ne
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(1u64, |all, &n| all.checked_mul(n));
    o.ensure(
        elements.is_some_and(|n| n <= i64::MAX as u64) && shape.extent().is_some(),
        "the tensor's size does not fit 64 bits",
    )
}

/// Types of integers that ggml uses as indices.
fn is_index(ty: Type) -> bool {
    matches!(ty, Type::I32 | Type::I64)
}
