//! From an operator of the IR to the id and the `op_params` of a ggml node: the reverse of the
//! plugin's `translate`. docs/ggml-versions.md says what differs between releases.

use std::ffi::c_int;

use vgpu_ggml_abi::versions::{Since, Version};
use vgpu_transport::ir::{Op, PoolKind, Precision, RopeMode, ScaleMode, SortOrder, TriKind};

use crate::ids::Ids;

/// The words of `op_params`.
pub(crate) type Words = [i32; 16];

/// An operator as ggml has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Encoded {
    /// `enum ggml_op`.
    pub(crate) op: c_int,
    /// `op_params`.
    pub(crate) words: Words,
}

/// Whether every build whose `ggml_version()` is `release` has what came with `since`.
pub(crate) fn has(release: Version, since: Since) -> bool {
    release >= since.every_build
}

/// `enum ggml_prec` for the type of sums: F32, which satisfies F32 and BF16, or the default, which
/// satisfies the smaller types. ggml's CUDA backend knows BF16 from b11401 on only, and its CPU
/// backend ends the process for other values of FLASH_ATTN_EXT.
fn accumulator(wanted: Precision) -> i32 {
    match wanted.needs_f32_range() {
        true => 10,
        false => 0,
    }
}

/// `enum ggml_prec` for the smallest type that activations may have, a word that came with
/// [`Since::PRECISIONS`]. `None` for a demand that this release would not see: F32 and BF16 exclude
/// F16. Permissions are left out for such a release.
fn activation(wanted: Precision, release: Version) -> Option<i32> {
    let is_seen = has(release, Since::PRECISIONS);
    match wanted {
        Precision::Default => Some(0),
        Precision::F32 => is_seen.then_some(10),
        Precision::Bf16 => is_seen.then_some(15),
        _ if !is_seen => Some(0),
        Precision::F16 => Some(20),
        Precision::Q8 => Some(30),
        Precision::Q4 => Some(40),
    }
}

/// The accumulator of MUL_MAT_ID, whose word came with [`Since::PRECISIONS`]. `None` for a demand
/// that this release would not see.
fn accumulator_of_experts(wanted: Precision, release: Version) -> Option<i32> {
    let is_seen = has(release, Since::PRECISIONS) || !wanted.needs_f32_range();
    is_seen.then(|| accumulator(wanted))
}

fn pool(kind: PoolKind) -> i32 {
    match kind {
        PoolKind::Max => 0,
        PoolKind::Average => 1,
    }
}

/// The words from the first on; the others are 0.
fn words<const N: usize>(first: [i32; N]) -> Words {
    let mut words = [0; 16];
    words[..N].copy_from_slice(&first);
    words
}

fn float(value: f32) -> i32 {
    value.to_bits().cast_signed()
}

/// A stride or an offset in bytes. `None` if it does not fit.
fn bytes(value: u64) -> Option<i32> {
    i32::try_from(value).ok()
}

/// `op` in terms of the ggml with these ids. `in_place`: whether the destination has the place of
/// the first source. `None` if this release of ggml does not have the operator or a parameter.
/// [`takes_sources`] says which sources the operator needs.
pub(crate) fn encode(op: &Op, in_place: bool, ids: &Ids, release: Version) -> Option<Encoded> {
    let strided = |nb1: u64, nb2, nb3, offset| {
        Some(words([
            bytes(nb1)?,
            bytes(nb2)?,
            bytes(nb3)?,
            bytes(offset)?,
            in_place.into(),
        ]))
    };
    let unsigned = |n: u32| i32::try_from(n).ok();
    let words = match *op {
        Op::Unary { kind } => words([ids.unary(kind)?]),
        Op::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => words([
            ids.extra().xielu?,
            float(alpha_n),
            float(alpha_p),
            float(beta),
            float(eps),
        ]),
        Op::Glu {
            kind,
            swapped,
            alpha,
            limit,
        } => words([ids.glu(kind)?, swapped.into(), float(alpha), float(limit)]),
        Op::Concat { dim } => words([unsigned(dim)?]),
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
        } => strided(nb1, nb2, nb3, offset)?,
        Op::DiagMaskInf { n_past } | Op::DiagMaskZero { n_past } => words([n_past]),
        Op::Pad {
            left,
            right,
            circular,
        } => words([
            left[0],
            right[0],
            left[1],
            right[1],
            left[2],
            right[2],
            left[3],
            right[3],
            circular.into(),
        ]),
        Op::PadReflect1d { p0, p1 } => words([p0, p1]),
        Op::Roll { shift } => words(shift),
        Op::Tri { kind } => words([match kind {
            TriKind::UpperDiag => 0,
            TriKind::Upper => 1,
            TriKind::LowerDiag => 2,
            TriKind::Lower => 3,
        }]),
        Op::Fill { value } => words([float(value)]),
        Op::Arange { start, stop, step } => words([float(start), float(stop), float(step)]),
        Op::Scale { scale, bias } => words([float(scale), float(bias)]),
        Op::Clamp { min, max } => words([float(min), float(max)]),
        Op::LeakyRelu { negative_slope } => words([float(negative_slope)]),
        Op::Argsort { order } => words([match order {
            SortOrder::Ascending => 0,
            SortOrder::Descending => 1,
        }]),
        Op::Norm { eps } | Op::RmsNorm { eps } | Op::RmsNormBack { eps } | Op::L2Norm { eps } => {
            words([float(eps)])
        }
        Op::GroupNorm { n_groups, eps } => words([n_groups, float(eps)]),
        Op::SoftMax { scale, max_bias } | Op::SoftMaxBack { scale, max_bias } => {
            words([float(scale), float(max_bias)])
        }
        // The third word is reserved for the precision of the first source.
        Op::MulMat {
            accumulator: sum,
            activation: smallest,
            hadamard,
        } => words([
            accumulator(sum),
            hadamard.into(),
            0,
            activation(smallest, release)?,
        ]),
        Op::MulMatId {
            accumulator: sum,
            activation: smallest,
        } => words([
            accumulator_of_experts(sum, release)?,
            0,
            0,
            activation(smallest, release)?,
        ]),
        Op::Rope {
            mode,
            backward: _,
            n_dims,
            n_offs,
            n_ctx_orig,
            freq_base,
            freq_scale,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
            sections,
        } => {
            if n_offs != 0 && !has(release, Since::ROPE_OFFSET) {
                return None;
            }
            words([
                0,
                unsigned(n_dims)?,
                match mode {
                    RopeMode::Normal => 0,
                    RopeMode::Neox => 2,
                    RopeMode::Mrope => 8,
                    RopeMode::Vision => 24,
                    RopeMode::Imrope => 40,
                },
                0,
                n_ctx_orig,
                float(freq_base),
                float(freq_scale),
                float(ext_factor),
                float(attn_factor),
                float(beta_fast),
                float(beta_slow),
                sections[0],
                sections[1],
                sections[2],
                sections[3],
                unsigned(n_offs)?,
            ])
        }
        Op::FlashAttnExt {
            scale,
            max_bias,
            logit_softcap,
            accumulator: sum,
            n_kv_max,
        } => words([
            float(scale),
            float(max_bias),
            float(logit_softcap),
            accumulator(sum),
            // A hint: 0 stands for any number.
            match has(release, Since::N_KV_MAX) {
                true => unsigned(n_kv_max)?,
                false => 0,
            },
        ]),
        Op::FlashAttnBack { masked } => words([masked.into()]),
        Op::SsmScan { snapshots } | Op::GatedDeltaNet { snapshots } => {
            words([unsigned(snapshots)?])
        }
        Op::GatedLinearAttn { scale } => words([float(scale)]),
        Op::Dsv4HcComb { eps, n_iter } => words([float(eps), unsigned(n_iter)?]),
        Op::Dsv4HcPre { scale, gated } => {
            if !has(release, Since::HC_PRE_PARAMETERS) && (scale != 1.0 || gated) {
                return None;
            }
            words([float(scale), gated.into()])
        }
        Op::Im2col {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        }
        | Op::Im2colBack {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        } => words([s0, s1, p0, p1, d0, d1, is_2d.into()]),
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
        } => words([s0, s1, s2, p0, p1, p2, d0, d1, d2, ic]),
        Op::Col2im1d { s0, oc, p0 } => words([s0, oc, p0]),
        Op::Conv2d {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        }
        | Op::Conv2dDw {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        } => words([s0, s1, p0, p1, d0, d1]),
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
        } => words([s0, s1, s2, p0, p1, p2, d0, d1, d2, c, n, oc]),
        Op::ConvTranspose1d { s0, p0, d0 } => words([s0, p0, d0]),
        Op::ConvTranspose2d { stride } => words([stride]),
        Op::Pool1d { kind, k0, s0, p0 } => words([pool(kind), k0, s0, p0]),
        Op::Pool2d {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        }
        | Op::Pool2dBack {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        } => words([pool(kind), k0, k1, s0, s1, p0, p1]),
        Op::Upscale {
            mode,
            align_corners,
            antialias,
        } => {
            let mode = match mode {
                ScaleMode::Nearest => 0,
                ScaleMode::Bilinear => 1,
                ScaleMode::Bicubic => 2,
            };
            words([mode | i32::from(align_corners) << 8 | i32::from(antialias) << 9])
        }
        Op::TimestepEmbedding { dim, max_period } => words([dim, max_period]),
        Op::WinPart { npx, npy, w } => words([npx, npy, w]),
        Op::WinUnpart { w } => words([w]),
        Op::AddRelPos {} => words([in_place.into()]),
        Op::Copy {}
        | Op::Repeat {}
        | Op::RepeatBack {}
        | Op::GetRows {}
        | Op::GetRowsBack {}
        | Op::SetRows {}
        | Op::Diag {}
        | Op::Add {}
        | Op::Sub {}
        | Op::Mul {}
        | Op::Div {}
        | Op::AddId {}
        | Op::Add1 {}
        | Op::Sqr {}
        | Op::Sqrt {}
        | Op::Log {}
        | Op::Sin {}
        | Op::Cos {}
        | Op::SiluBack {}
        | Op::Sum {}
        | Op::SumRows {}
        | Op::Mean {}
        | Op::Cumsum {}
        | Op::Argmax {}
        | Op::CountEqual {}
        | Op::TopK {}
        | Op::OutProd {}
        | Op::SolveTri {}
        | Op::LightningIndexer {}
        | Op::SsmConv {}
        | Op::RwkvWkv6 {}
        | Op::RwkvWkv7 {}
        | Op::Dsv4HcPost {}
        | Op::GetRelPos {}
        | Op::CrossEntropyLoss {}
        | Op::CrossEntropyLossBack {}
        | Op::OptStepAdamw {}
        | Op::OptStepSgd {} => [0; 16],
    };
    let op = match op {
        Op::Rope { backward: true, .. } => ids.extra().rope_back?,
        Op::Unary { .. } | Op::Xielu { .. } => ids.extra().unary?,
        _ => ids.op(op.kind())?,
    };
    Some(Encoded { op, words })
}

/// Whether this release of ggml computes `op` with these sources missing: `is_null` says whether
/// source `i` is.
pub(crate) fn takes_sources(op: &Op, is_null: impl Fn(usize) -> bool, release: Version) -> bool {
    match op {
        Op::Dsv4HcPost {} => !is_null(COMB) || has(release, Since::HC_POST_WITHOUT_COMB),
        _ => true,
    }
}

/// The source `comb` of DSV4_HC_POST.
const COMB: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn number(minor: u32) -> Version {
        Version::new(0, minor)
    }

    #[test]
    fn demand_that_a_release_would_not_see_is_refused() {
        for minor in 20..=26 {
            let written = |wanted| activation(wanted, number(minor));
            // Builds of 0.23 are with the word and without it.
            assert_eq!(
                written(Precision::F32),
                (minor >= 24).then_some(10),
                "0.{minor}"
            );
            assert_eq!(written(Precision::Default), Some(0), "0.{minor}");
            // A permission is left out.
            let q8 = if minor >= 24 { 30 } else { 0 };
            assert_eq!(written(Precision::Q8), Some(q8), "0.{minor}");
            // BF16 is a demand, too: it excludes F16.
            assert_eq!(
                written(Precision::Bf16),
                (minor >= 24).then_some(15),
                "0.{minor}"
            );
            // The sum of MUL_MAT has had the word in every release, that of MUL_MAT_ID has not.
            let of_experts = |wanted| accumulator_of_experts(wanted, number(minor));
            for demand in [Precision::F32, Precision::Bf16] {
                let seen = (minor >= 24).then_some(10);
                assert_eq!(of_experts(demand), seen, "0.{minor}");
            }
            assert_eq!(of_experts(Precision::Default), Some(0), "0.{minor}");
        }
    }

    #[test]
    fn sums_have_one_of_the_two_types_that_every_backend_knows() {
        for (wanted, written) in [
            (Precision::Default, 0),
            (Precision::F32, 10),
            (Precision::Bf16, 10),
            (Precision::F16, 0),
            (Precision::Q8, 0),
            (Precision::Q4, 0),
        ] {
            assert_eq!(accumulator(wanted), written, "{wanted:?}");
        }
    }

    #[test]
    fn null_for_the_factors_of_mixing_is_new() {
        let takes = |minor, is_null: bool| {
            takes_sources(&Op::Dsv4HcPost {}, |i| is_null && i == COMB, number(minor))
        };
        for minor in 20..=26 {
            assert!(takes(minor, false), "0.{minor}");
            assert_eq!(takes(minor, true), minor >= 25, "0.{minor}");
        }
    }
}
