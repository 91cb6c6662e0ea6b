//! The shape rules of every operator: types that ggml fixes, lengths, strides, parameters.
//!
//! A kernel may rely on the rules of this module and on the bounds that
//! [`validate`](super::validate::validate) checks, and on nothing else: the graph comes from a
//! hostile guest. The rules follow the assertions of ggml's constructors (`ggml.c`) and of its CPU
//! kernels.
//!
//! This module checks a type only where an operator's definition fixes the type: row ids are
//! integers, masks are F16 or F32. The types that an engine supports are part of its
//! [`Capabilities`](super::Capabilities).

mod attention;
mod conv;
mod elementwise;
mod matmul;
mod movement;
mod normalise;
mod operation;
mod recurrent;
mod reduce;
mod training;

use super::conv::{ConvGeometry, PoolWindow};
use super::graph::Shape;
use super::ops::Op;
use operation::{Operation, layout};

pub use operation::Refusal;

/// Checks one operation against the rules of its operator.
///
/// # Errors
///
/// [`Refusal::Malformed`] names the violated rule.
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
        Op::Roll { .. } | Op::Tri { .. } => elementwise::same_lengths(&o),
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
        | Op::Xielu { .. } => elementwise::same_lengths(&o),
        Op::SiluBack {} => elementwise::same_lengths(&o),

        Op::Sum {} => reduce::sum(&o),
        Op::SumRows {} | Op::Mean {} => reduce::rows_to_one(&o),
        Op::Cumsum {} => elementwise::same_lengths(&o),
        Op::Argmax {} => reduce::argmax(&o),
        Op::CountEqual {} => reduce::count_equal(&o),
        Op::Argsort { .. } => reduce::argsort(&o),
        Op::TopK {} => reduce::top_k(&o),

        Op::Norm { .. } | Op::RmsNorm { .. } | Op::L2Norm { .. } => elementwise::same_lengths(&o),
        Op::RmsNormBack { .. } => elementwise::same_lengths(&o),
        Op::GroupNorm { n_groups, .. } => normalise::group_norm(&o, n_groups),
        Op::SoftMax { max_bias, .. } => normalise::soft_max(&o, max_bias),
        Op::SoftMaxBack { .. } => elementwise::same_lengths(&o),

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

        Op::Im2col { is_2d, .. } => conv::im2col(&o, o.geometry(ConvGeometry::<2>::of(op))?, is_2d),
        Op::Im2colBack { is_2d, .. } => {
            conv::im2col_back(&o, o.geometry(ConvGeometry::<2>::of(op))?, is_2d)
        }
        Op::Im2col3d { ic, .. } => conv::im2col_3d(&o, o.geometry(ConvGeometry::<3>::of(op))?, ic),
        Op::Col2im1d { oc, .. } => conv::col2im_1d(&o, o.geometry(ConvGeometry::<1>::of(op))?, oc),
        Op::Conv2d { .. } => conv::conv_2d(&o, o.geometry(ConvGeometry::<2>::of(op))?),
        Op::Conv2dDw { .. } => conv::conv_2d_dw(&o, o.geometry(ConvGeometry::<2>::of(op))?),
        Op::Conv3d { c, n, oc, .. } => {
            conv::conv_3d(&o, o.geometry(ConvGeometry::<3>::of(op))?, [c, n, oc])
        }
        Op::ConvTranspose1d { .. } => {
            conv::conv_transpose_1d(&o, o.geometry(ConvGeometry::<1>::of(op))?)
        }
        Op::ConvTranspose2d { .. } => {
            conv::conv_transpose_2d(&o, o.geometry(ConvGeometry::<2>::of(op))?)
        }
        Op::Pool1d { .. } => conv::pool_1d(&o, o.geometry(PoolWindow::<1>::of(op))?),
        Op::Pool2d { .. } => conv::pool_2d(&o, o.geometry(PoolWindow::<2>::of(op))?),
        Op::Pool2dBack { .. } => conv::pool_2d_back(&o, o.geometry(PoolWindow::<2>::of(op))?),
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

        // The operator has no shape rules and no kernel. ggml itself no longer creates it, so the
        // check refuses it even if an engine claims to support it.
        Op::FlashAttnBack { .. } => o.not_capable(),
    }
}
