//! Sets of tensor types, for the rules of every engine.

use vgpu_transport::ir::{Type, TypeSet};

/// All types.
pub const ANY: TypeSet = TypeSet::of(Type::ALL);

/// Types with one element per block.
pub const PLAIN: TypeSet = TypeSet::of(&[
    Type::F32,
    Type::F16,
    Type::Bf16,
    Type::F64,
    Type::I8,
    Type::I16,
    Type::I32,
    Type::I64,
]);

/// Floating-point types of element-wise kernels.
pub const FLOATS: TypeSet = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);

/// Only F32.
pub const F32: TypeSet = TypeSet::of(&[Type::F32]);
/// Only I32.
pub const I32: TypeSet = TypeSet::of(&[Type::I32]);
