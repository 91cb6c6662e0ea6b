//! One operation under check, and the rules that every operator shares.

use crate::ir::graph::Shape;
use crate::ir::ops::OpKind;
use crate::ir::types::Type;

/// Why an engine does not run an operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The operation violates a rule of its operator. The guest is at fault.
    #[error("{} is malformed: {why}", op.ggml_name())]
    Malformed {
        /// The operator.
        op: OpKind,
        /// The violated rule.
        why: &'static str,
    },
    /// The operation is well-formed, but no rule of the engine covers it.
    #[error("the engine does not run {} with these types and layouts", op.ggml_name())]
    NotCapable {
        /// The operator.
        op: OpKind,
    },
}

/// An operation to check.
pub(super) struct Operation<'a> {
    pub(super) kind: OpKind,
    pub(super) dst: &'a Shape,
    pub(super) src: &'a [Option<&'a Shape>],
}

impl<'a> Operation<'a> {
    /// Refuses the operation unless `holds`.
    pub(super) fn ensure(&self, holds: bool, why: &'static str) -> Result<(), Refusal> {
        if holds {
            Ok(())
        } else {
            Err(Refusal::Malformed { op: self.kind, why })
        }
    }

    /// Source `i`. The source is mandatory.
    pub(super) fn src(&self, i: usize) -> Result<&'a Shape, Refusal> {
        self.optional(i).ok_or(Refusal::Malformed {
            op: self.kind,
            why: "a source is missing",
        })
    }

    /// Source `i`, if it is present.
    pub(super) fn optional(&self, i: usize) -> Option<&'a Shape> {
        self.src.get(i).copied().flatten()
    }

    /// The geometry of a convolution or the window of pooling, which the operator must have.
    pub(super) fn geometry<T>(&self, geometry: Option<T>) -> Result<T, Refusal> {
        geometry.ok_or(Refusal::Malformed {
            op: self.kind,
            why: "the operator has no convolution parameters",
        })
    }

    /// Refuses the operation for every engine.
    pub(super) fn not_capable(&self) -> Result<(), Refusal> {
        Err(Refusal::NotCapable { op: self.kind })
    }
}

/// The rules for every tensor of every operation: rows of whole blocks, adjacent blocks in
/// quantised rows, strides that keep plain elements aligned, and sizes that fit 64 bits.
pub(super) fn layout(o: &Operation<'_>, shape: &Shape) -> Result<(), Refusal> {
    let block = shape.ty.block_bytes();
    if shape.ty.is_quantized() {
        o.ensure(
            shape.ne[0].is_multiple_of(shape.ty.block_elements()),
            "a row ends within a block",
        )?;
        o.ensure(
            shape.nb[0] == block || shape.ne[0] <= shape.ty.block_elements(),
            "the blocks of a quantised row are not adjacent",
        )?;
    } else {
        o.ensure(
            shape.nb.iter().all(|nb| nb.is_multiple_of(block)),
            "a stride is not a multiple of the element size",
        )?;
    }
    // ggml's lengths are signed. The check covers each length, because the product of an empty
    // tensor's lengths is 0 whatever the other lengths are.
    o.ensure(
        shape.ne.iter().all(|&n| n <= i64::MAX as u64),
        "a length does not fit a signed integer",
    )?;
    // The product leaves out lengths of 0, so that no partial product overflows.
    let elements = shape
        .ne
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(1u64, |all, &n| all.checked_mul(n));
    o.ensure(
        elements.is_some_and(|n| n <= i64::MAX as u64) && shape.byte_len().is_some(),
        "the tensor's size does not fit 64 bits",
    )
}

/// Whether ggml uses integers of this type as indices.
pub(super) fn is_index(ty: Type) -> bool {
    matches!(ty, Type::I32 | Type::I64)
}
