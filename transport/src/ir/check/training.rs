//! Training: loss functions and optimiser steps.

use super::operation::{Operation, Refusal};
use crate::ir::{Shape, Type};

/// `dst = -mean over rows of sum(log_softmax(src0) * src1)`
pub(super) fn cross_entropy_loss(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, b) = (o.src(0)?, o.src(1)?);
    o.ensure(a.same_lengths(b), "sources differ in lengths")?;
    o.ensure(
        o.dst.ne == [1; 4],
        "the destination is not a single element",
    )
}

/// The gradient of [`cross_entropy_loss`] with inputs src1 and src2, for the gradient src0 of its
/// output.
pub(super) fn cross_entropy_loss_back(o: &Operation<'_>) -> Result<(), Refusal> {
    let (grad, a, b) = (o.src(0)?, o.src(1)?, o.src(2)?);
    o.ensure(grad.ne == [1; 4], "source 0 is not a single element")?;
    o.ensure(
        a.same_lengths(b) && a.same_lengths(o.dst),
        "lengths of sources 1, 2 and destination differ",
    )
}

/// An optimiser step. The last source holds `n` parameters, and all other sources have the
/// destination's lengths.
pub(super) fn opt_step(o: &Operation<'_>, n: u64) -> Result<(), Refusal> {
    let (parameters, rest): (_, &[Option<&Shape>]) = match o.src.split_last() {
        Some((&parameters, rest)) => (parameters, rest),
        None => (None, &[]),
    };
    o.ensure(
        rest.iter().flatten().all(|s| s.same_lengths(o.dst)),
        "lengths of sources and destination differ",
    )?;
    o.ensure(
        parameters.is_some_and(|p| p.ty == Type::F32 && p.ne == [n, 1, 1, 1]),
        "the parameters are not a vector of f32 of the right length",
    )
}
