//! A list of operations, and the operands of which it is made.

use vgpu_transport::ir::{Op, Type};

use super::operation::Operation;
use crate::graph::{Fill, Operand};

pub(super) fn numbers_of(ty: Type, ne: [u64; 4]) -> Operand {
    Operand {
        ty,
        ne,
        fill: Fill::Numbers(-1.0, 1.0),
    }
}

pub(super) fn f32s(ne: [u64; 4]) -> Operand {
    numbers_of(Type::F32, ne)
}

pub(super) fn between(low: f32, high: f32, ne: [u64; 4]) -> Operand {
    Operand {
        fill: Fill::Numbers(low, high),
        ..f32s(ne)
    }
}

pub(super) fn indices(ty: Type, fill: Fill, ne: [u64; 4]) -> Operand {
    Operand { ty, ne, fill }
}

/// The list of operations.
#[derive(Default)]
pub(super) struct List(pub(super) Vec<Operation>);

impl List {
    pub(super) fn add(&mut self, op: Op, limit: f64, dst: Operand, src: &[Operand]) {
        let src: Vec<Option<Operand>> = src.iter().copied().map(Some).collect();
        self.with(op, limit, dst, &src);
    }

    pub(super) fn with(&mut self, op: Op, limit: f64, dst: Operand, src: &[Option<Operand>]) {
        let types: Vec<_> = src.iter().flatten().map(|s| s.ty.ggml_name()).collect();
        self.0.push(Operation {
            name: format!(
                "{} {} -> [{}]",
                op.kind().ggml_name(),
                types.join(" "),
                dst.ne.map(|n| n.to_string()).join(",")
            ),
            op,
            dst,
            src: src.to_vec(),
            limit,
            over: None,
        });
    }

    /// The last operation once more, with the result in the memory of this source.
    pub(super) fn again_over(&mut self, source: usize) {
        let Some(last) = self.0.last() else { return };
        let again = Operation {
            name: format!("{} over source {source}", last.name),
            src: last.src.clone(),
            over: Some(source),
            ..*last
        };
        self.0.push(again);
    }
}
