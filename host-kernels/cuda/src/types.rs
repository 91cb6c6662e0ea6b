//! Sets of tensor types that kernels read and write.

use vgpu_engine::types::FLOATS;
use vgpu_transport::ir::{Type, TypeSet};

/// The types that kernels convert real numbers to.
pub(crate) const WRITABLE: TypeSet = FLOATS.union(TypeSet::of(&[
    Type::Q4_0,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
    Type::Q8_0,
    Type::Iq4Nl,
]));

/// The types that kernels convert to real numbers.
pub(crate) const READABLE: TypeSet = WRITABLE.union(TypeSet::of(&[
    Type::Q8_1,
    Type::Q1_0,
    Type::Q2_0,
    Type::Mxfp4,
    Type::Nvfp4,
    Type::Q2K,
    Type::Q3K,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Q8K,
    Type::Iq1S,
    Type::Iq1M,
    Type::Iq2Xxs,
    Type::Iq2Xs,
    Type::Iq2S,
    Type::Iq3Xxs,
    Type::Iq3S,
    Type::Iq4Xs,
    Type::Tq1_0,
    Type::Tq2_0,
]));
