//! MUL_MAT, MUL_MAT_ID, OUT_PROD: matrix products.
//!
//! MUL_MAT and MUL_MAT_ID multiply rows of weights with columns of activations. A first kernel
//! converts the activations to the format that the weights are multiplied with (`activations`). A
//! second kernel computes tiles of the result, which the threads take one at a time or in runs
//! (`tiles`). MUL_MAT_ID of several tokens groups tokens by expert between these kernels
//! (`experts`). `fused` computes several nodes at once, `joint` the dense products of several
//! plans, and `experts::joint` their products of experts.
//!
//! No result depends on the number of threads: the division into columns depends on sizes alone,
//! and the division into rows does not change a product (see [`crate::gemm`]).

mod activations;
mod dense;
mod experts;
mod fused;
mod hadamard;
mod joint;
mod outer;
mod term;
mod tiles;
mod weight_rows;

use vgpu_transport::ir::{OpKind, Rule, Type, TypeSet};

use super::gather::real_types;
use crate::gemm::MatmulKernel;

pub(super) use dense::mul_mat;
pub(super) use experts::mul_mat_id;
pub(super) use fused::{gated, products};
pub(super) use outer::out_prod;

/// The type combinations that this family runs.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let plain = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);
    let weights: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::exists(ty))
        .collect();
    let weights = TypeSet::of(&weights);
    vec![
        Rule::new(OpKind::MulMat, f32, &[weights, real_types()]),
        Rule::new(OpKind::MulMatId, f32, &[weights, real_types()]),
        Rule::new(OpKind::OutProd, f32, &[real_types(), plain]),
    ]
}
