//! The untyped parameters of a ggml node.

use std::cell::Cell;

use vgpu_transport::ir::{OpKind, PoolKind, Precision};

use super::releases::Release;
use crate::abi::ggml_tensor;

/// The parameters of a node. Every getter takes the index of a 32-bit word, and answers 0 for a
/// word that no build of the release writes.
pub(super) struct Params<'a> {
    words: &'a [i32; WORDS],
    op: OpKind,
    release: Release<'a>,
    /// Bit `i` is set if word `i` was read.
    read: Cell<u32>,
}

/// The words of `op_params`.
const WORDS: usize = 16;

impl<'a> Params<'a> {
    /// The parameters of `tensor`, an operator of kind `op`, made by `release`.
    pub(super) fn of(tensor: &'a ggml_tensor, op: OpKind, release: Release<'a>) -> Params<'a> {
        Params {
            words: &tensor.op_params,
            op,
            release,
            read: Cell::new(0),
        }
    }

    /// The release of ggml that made the node.
    pub(super) fn release(&self) -> Release<'a> {
        self.release
    }

    /// Marks a word that says nothing about the result.
    pub(super) fn ignore(&self, i: usize) {
        self.read.set(self.read.get() | 1 << i);
    }

    /// Whether every word that was not read is 0. Another value has a meaning that is unknown.
    pub(super) fn is_rest_zero(&self) -> bool {
        let is_read = |i: usize| self.read.get() & 1 << i != 0;
        (0..WORDS).all(|i| is_read(i) || self.words[i] == 0)
    }

    /// A signed number.
    pub(super) fn i32(&self, i: usize) -> i32 {
        if !self.release.writes(self.op, i) {
            return 0;
        }
        self.ignore(i);
        self.words[i]
    }

    /// A number that is not negative.
    pub(super) fn u32(&self, i: usize) -> Option<u32> {
        u32::try_from(self.i32(i)).ok()
    }

    /// A number above 0.
    pub(super) fn positive(&self, i: usize) -> Option<u32> {
        self.u32(i).filter(|&number| number > 0)
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
            _ if !self.release.has_all_precisions() => return None,
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
