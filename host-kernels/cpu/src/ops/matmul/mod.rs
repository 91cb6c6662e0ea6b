//! MUL_MAT, MUL_MAT_ID, OUT_PROD: products of matrices.
//!
//! The first two multiply rows of weights with columns of activations. A first kernel brings the
//! activations to the type that the weights are multiplied with ([`Activations`]), a second deals
//! tiles of the result to the threads; for MUL_MAT_ID of several tokens, these are grouped by expert in between.
//! `groups` has what several nodes compute together: products of the same activations, the rows added to them, the unit
//! that one gates.
//!
//! No result depends on how many threads there are: columns are cut by sizes alone, and how rows are
//! cut makes no difference to a product (see [`crate::gemm`]).

mod activations;
mod experts;
mod groups;
mod hadamard;
mod outer;
mod tiles;

use vgpu_transport::ir::{Op, OpKind, Precision, Rule, Type, TypeSet};

use super::gather::real_types;
use super::staging::{Layout, Output};
use crate::gemm::MatmulKernel;
use crate::plan::{Compiled, Kernel, Operands};
use activations::{Activations, converted};
use tiles::Product;
use vgpu_engine::EngineError;

pub(super) use experts::mul_mat_id;
pub(super) use groups::{gated, products};
pub(super) use outer::out_prod;

/// What these files run.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let plain = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);
    let weights: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::of(ty).is_some())
        .collect();
    let weights = TypeSet::of(&weights);
    vec![
        Rule::new(OpKind::MulMat, f32, &[weights, real_types()]),
        Rule::new(OpKind::MulMatId, f32, &[weights, real_types()]),
        Rule::new(OpKind::OutProd, f32, &[real_types(), plain]),
    ]
}

/// MUL_MAT: `dst[m, n] = weights[m] . x[n]`, batch by batch.
pub(super) fn mul_mat(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let (weight, x, dst) = (operands.src(0), operands.src(1), operands.dst());
    let mut scratch = Layout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    if matches!(operands.op(), Op::MulMat { hadamard: true, .. }) && weight.ne[0] == weight.ne[1] {
        return Ok(hadamard::hadamard(x, dst, operands.workers()));
    }
    let kernel = kernel_of(operands);
    let activations = Activations::new(operands, x, kernel);
    let output = Output::new(dst, &[weight, x], &mut scratch);
    let product = Product::new(operands, activations, output, None, 1);
    kernels.extend(converted(operands, activations));
    kernels.push(Box::new(move |w| {
        for tile in w.chunks(product.tiles(), 1).flatten() {
            // SAFETY: conversion has finished, a barrier ago; no other tile has these results.
            unsafe { product.tile(w, tile) };
        }
        Ok(())
    }));
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// How a MUL_MAT is computed.
fn kernel_of(operands: &Operands<'_>) -> MatmulKernel {
    let (weight, x) = (operands.src(0), operands.src(1));
    let exact = MatmulKernel::of(weight.ty).expect("the rules claim no other weights");
    match operands.op() {
        Op::MulMat {
            accumulator: Precision::Default,
            ..
        } => MatmulKernel::rounded(weight.ty, x.ne[0], x.ne[1]).unwrap_or(exact),
        _ => exact,
    }
}
