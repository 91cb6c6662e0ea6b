//! The parts of a fused product: the products with their biases, and the GLU.

use vgpu_transport::ir::{GluKind, Type};

use super::super::elementwise::Add;
use super::super::f32_rows::{Access, apply};
use super::super::glu::gate;
use crate::operands::Operands;
use crate::view::View;

/// A product of a group of nodes, its bias, and the destination of the sum.
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

    /// Whether tiles of the result can be written to `dst` while other tiles are computed: `dst`
    /// does not overlap any source, and its rows do not overlap each other.
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

/// Adds `row` to `to`.
///
/// # Safety
/// `to` is writable and `row` readable for `n` floats. The two rows do not overlap.
pub(super) unsafe fn add_row(to: *mut f32, row: *const f32, n: usize) {
    let to = to.cast::<u8>();
    let src = [to.cast_const(), row.cast()].map(|row| (Access::direct(), row));
    // SAFETY: the caller guarantees `n` floats at `to` and `row`, which do not overlap.
    unsafe { apply(Add {}, (Access::direct(), to), src, n) };
}

/// The GLU of two products.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub(super) kind: GluKind,
    pub(super) parameters: [f32; 2],
    pub(super) dst: View,
}

impl Unit {
    /// Computes `n` elements. `from` has the elements that are activated, and their factors. The
    /// first may be the same memory as `to`.
    ///
    /// # Safety
    /// `to` is writable and both sources are readable for `n` floats.
    pub(super) unsafe fn apply(&self, to: *mut f32, from: [*mut f32; 2], n: usize) {
        let from = from.map(<*mut f32>::cast_const);
        // SAFETY: the caller guarantees `n` floats at `to` and at both sources.
        unsafe { gate(self.parameters, self.kind, to, from, n) };
    }
}
