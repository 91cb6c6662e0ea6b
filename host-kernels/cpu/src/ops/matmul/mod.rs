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
mod dense;
mod experts;
mod fused;
mod hadamard;
mod outer;
mod term;
mod tiles;

use vgpu_transport::ir::{OpKind, Rule, Type, TypeSet};

use super::gather::real_types;
use crate::gemm::MatmulKernel;

pub(super) use dense::mul_mat;
pub(super) use experts::mul_mat_id;
pub(super) use fused::{gated, products};
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
