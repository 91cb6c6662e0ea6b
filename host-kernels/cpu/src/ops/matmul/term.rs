//! The terms of a fused product: a product, its bias, and the GLU.

use vgpu_transport::ir::{GluKind, Type};

use super::super::elementwise::Add;
use super::super::f32_rows::{Access, apply};
use super::super::glu::gate;
use crate::operands::Operands;
use crate::view::View;

/// A product of a group, what is added to it, and where the result lies in the end.
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    pub(super) node: &'a Operands<'a>,
    /// The row of an ADD; for products of experts the rows of an ADD_ID.
    pub(super) bias: Option<View>,
    pub(super) dst: View,
}

impl Term<'_> {
    pub(super) fn weight(&self) -> View {
        self.node.src(0)
    }

    /// Whether tiles of the result, which lies at `dst`, can be written there while others are
    /// computed: where it shares no memory with what is read, or with itself.
    pub(super) fn fits(&self, dst: &View) -> bool {
        let (weight, rows) = (self.weight(), self.weight().ne[1]);
        let is_bias = |bias: &View| bias.ty == Type::F32 && bias.dense_rows() && bias.ne[0] == rows;
        let sources = [
            Some(weight),
            self.node.optional(1),
            self.node.optional(2),
            self.bias,
        ];
        self.bias.as_ref().is_none_or(is_bias)
            && dst.ty == Type::F32
            && dst.dense_rows()
            && dst.distinct_rows()
            && dst.ne == self.node.dst().ne
            && !sources.iter().flatten().any(|source| source.overlaps(dst))
    }
}

/// Adds a row to another one.
///
/// # Safety
/// Both have `n` floats, and are apart.
pub(super) unsafe fn add_row(to: *mut f32, row: *const f32, n: usize) {
    let to = to.cast::<u8>();
    let src = [to.cast_const(), row.cast()].map(|row| (Access::direct(), row));
    // SAFETY: the caller's contract is that of the callee.
    unsafe { apply(Add {}, (Access::direct(), to), src, n) };
}

/// A unit that one of two products gates.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub(super) kind: GluKind,
    pub(super) parameters: [f32; 2],
    pub(super) dst: View,
}

impl Unit {
    /// `n` elements, from those that are activated and those that they are multiplied with; the
    /// first may lie at `to`.
    ///
    /// # Safety
    /// There are `n` floats everywhere.
    pub(super) unsafe fn apply(&self, to: *mut f32, from: [*mut f32; 2], n: usize) {
        let from = from.map(<*mut f32>::cast_const);
        // SAFETY: the caller's contract is that of the callee.
        unsafe { gate(self.parameters, self.kind, to, from, n) };
    }
}
