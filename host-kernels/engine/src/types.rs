//! Sets of types that the rules of every engine are made of.

use vgpu_transport::ir::{Type, TypeSet};

/// All types there are.
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

/// Types that kernels compute with element by element.
pub const FLOATS: TypeSet = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);

/// F32 alone.
pub const F32: TypeSet = TypeSet::of(&[Type::F32]);
/// I32 alone.
pub const I32: TypeSet = TypeSet::of(&[Type::I32]);
