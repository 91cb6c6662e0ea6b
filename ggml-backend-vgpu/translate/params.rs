//! The untyped parameters of a ggml node.

use vgpu_transport::ir::{PoolKind, Precision};

use crate::abi::ggml_tensor;

/// The parameters of a node. Every getter takes the index of a 32-bit word.
pub(super) struct Params<'a>(&'a ggml_tensor);

impl<'a> Params<'a> {
    /// The parameters of `tensor`.
    pub(super) fn of(tensor: &'a ggml_tensor) -> Params<'a> {
        Params(tensor)
    }

    /// A signed number.
    pub(super) fn i32(&self, i: usize) -> i32 {
        self.0.op_params[i]
    }

    /// A number that is not negative.
    pub(super) fn u32(&self, i: usize) -> Option<u32> {
        u32::try_from(self.i32(i)).ok()
    }

    /// A stride or an offset in bytes.
    pub(super) fn bytes(&self, i: usize) -> Option<u64> {
        u64::try_from(self.i32(i)).ok()
    }

    /// A float.
    pub(super) fn f32(&self, i: usize) -> f32 {
        f32::from_bits(self.i32(i).cast_unsigned())
    }

    /// A truth value: any number but 0.
    pub(super) fn flag(&self, i: usize) -> bool {
        self.i32(i) != 0
    }

    /// `enum ggml_prec`.
    pub(super) fn precision(&self, i: usize) -> Option<Precision> {
        Some(match self.i32(i) {
            0 => Precision::Default,
            10 => Precision::F32,
            15 => Precision::Bf16,
            20 => Precision::F16,
            30 => Precision::Q8,
            40 => Precision::Q4,
            _ => return None,
        })
    }

    /// `enum ggml_op_pool`.
    pub(super) fn pool(&self, i: usize) -> Option<PoolKind> {
        match self.i32(i) {
            0 => Some(PoolKind::Max),
            1 => Some(PoolKind::Average),
            _ => None,
        }
    }
}
