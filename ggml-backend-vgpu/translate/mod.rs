//! From ggml's ids and untyped parameters to the graph IR.
//!
//! Ids are translated by name ([`Ids`]), because their values move between ggml releases.
//! `op_params` are decoded in [`op`] and [`params`] and nowhere else. [`releases`] has what differs
//! between releases.

mod op;
mod params;
mod releases;

use vgpu_transport::ir::{GluKind, Op, OpKind, Shape, Type, UnaryKind};

use crate::abi::{
    GGML_TENSOR_FLAG_COMPUTE, GGML_TENSOR_FLAG_INPUT, GGML_TENSOR_FLAG_LOSS,
    GGML_TENSOR_FLAG_OUTPUT, GGML_TENSOR_FLAG_PARAM, ggml_tensor,
};
use crate::ggml::{Ggml, Ids};
use params::Params;
use releases::Release;

/// The ids of the ggml in this process.
#[derive(Debug)]
pub(crate) struct Translator {
    ops: Ids<GgmlOp>,
    unary: Ids<GgmlUnary>,
    glu: Ids<GluKind>,
    types: Ids<Type>,
    release: Release<'static>,
}

/// An operator of ggml, in the IR's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GgmlOp {
    /// Computes nothing: the result is a view of the source.
    View,
    /// The gradient of ROPE. The IR has one operator for both.
    RopeBack,
    /// Calls a function of this process by its address, which an executor cannot do.
    Callback,
    /// An operator of the IR.
    Op(OpKind),
}

impl GgmlOp {
    fn from_name(name: &str) -> Option<GgmlOp> {
        match name {
            "NONE" | "RESHAPE" | "VIEW" | "PERMUTE" | "TRANSPOSE" => Some(GgmlOp::View),
            "DUP" | "CPY" | "CONT" => Some(GgmlOp::Op(OpKind::Copy)),
            "ROPE_BACK" => Some(GgmlOp::RopeBack),
            "MAP_CUSTOM1" | "MAP_CUSTOM2" | "MAP_CUSTOM3" | "CUSTOM" => Some(GgmlOp::Callback),
            name => OpKind::ALL
                .iter()
                .copied()
                .find(|op| op.ggml_name() == name)
                .map(GgmlOp::Op),
        }
    }
}

/// A kind of ggml's UNARY operator. XIELU has parameters and is an operator of its own in the IR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GgmlUnary {
    Kind(UnaryKind),
    Xielu,
}

impl GgmlUnary {
    fn from_name(name: &str) -> Option<GgmlUnary> {
        match name {
            "XIELU" => Some(GgmlUnary::Xielu),
            name => UnaryKind::from_ggml_name(name).map(GgmlUnary::Kind),
        }
    }
}

/// What a node of ggml means in the IR.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Meaning {
    /// Nothing is computed.
    Nothing,
    /// An operator is computed.
    Compute {
        /// The operator with its parameters.
        op: Op,
        /// The number of the node's sources that the operator reads. Some nodes of ggml have more
        /// sources, which only order the nodes.
        sources: usize,
    },
}

impl Translator {
    /// For the tensors of `ggml`.
    pub(crate) fn new(ggml: &Ggml) -> Translator {
        Translator {
            ops: ggml.ops(GgmlOp::from_name),
            unary: ggml.unary_ops(GgmlUnary::from_name),
            glu: ggml.glu_ops(GluKind::from_ggml_name),
            types: ggml.types(Type::from_ggml_name),
            release: Release::of(ggml.version()),
        }
    }

    /// The shape of a tensor. `None` if the IR does not have the type, or if a dimension is
    /// negative.
    ///
    /// # Safety
    ///
    /// The tensor must be a valid one of the translator's ggml.
    pub(crate) unsafe fn shape(&self, tensor: &ggml_tensor) -> Option<Shape> {
        let mut ne = [0; 4];
        for (ne, &elements) in ne.iter_mut().zip(&tensor.ne) {
            *ne = u64::try_from(elements).ok()?;
        }
        // SAFETY: the id is the type of a valid tensor of the translator's ggml: this function's
        // contract.
        let ty = unsafe { self.types.get(tensor.type_) }?;
        Some(Shape {
            ty,
            ne,
            nb: tensor.nb.map(|nb| nb as u64),
        })
    }

    /// Whether the node calls a function of this process.
    ///
    /// # Safety
    ///
    /// As for [`shape`](Translator::shape).
    pub(crate) unsafe fn is_callback(&self, tensor: &ggml_tensor) -> bool {
        // SAFETY: the id is the operator of a valid tensor of the translator's ggml: this
        // function's contract.
        unsafe { self.ops.get(tensor.op) == Some(GgmlOp::Callback) }
    }

    /// The meaning of a node. `None` if the IR cannot express it.
    ///
    /// # Safety
    ///
    /// As for [`shape`](Translator::shape).
    pub(crate) unsafe fn meaning(&self, tensor: &ggml_tensor) -> Option<Meaning> {
        if !has_known_flags(tensor) {
            return None;
        }
        // SAFETY: the id is the operator of a valid tensor of the translator's ggml: this
        // function's contract.
        let (kind, is_backward) = match unsafe { self.ops.get(tensor.op) }? {
            GgmlOp::View => return Some(Meaning::Nothing),
            GgmlOp::Callback => return None,
            GgmlOp::RopeBack => (OpKind::Rope, true),
            GgmlOp::Op(kind) => (kind, false),
        };
        let p = Params::of(tensor, kind, self.release);
        let op = match kind {
            OpKind::Rope if is_backward => op::rope(&p, true)?,
            // SAFETY: the first parameter of a UNARY node is an id of `ggml_unary_op`, here of the
            // translator's ggml: this function's contract.
            OpKind::Unary => match unsafe { self.unary.get(p.i32(0)) }? {
                GgmlUnary::Kind(kind) => Op::Unary { kind },
                GgmlUnary::Xielu => Op::Xielu {
                    alpha_n: p.f32(1),
                    alpha_p: p.f32(2),
                    beta: p.f32(3),
                    eps: p.f32(4),
                },
            },
            OpKind::Glu => Op::Glu {
                // SAFETY: the first parameter of a GLU node is an id of `ggml_glu_op`.
                kind: unsafe { self.glu.get(p.i32(0)) }?,
                swapped: p.flag(1),
                alpha: p.f32(2),
                limit: p.f32(3),
            },
            kind => op::with_params(kind, &p)?,
        };
        let kind = op.kind();
        // The other sources of these operators are the tensor that the result is a view of, or give
        // only its shape.
        let sources = match kind {
            OpKind::Copy | OpKind::Repeat => 1,
            OpKind::SetRows | OpKind::GetRowsBack => 2,
            _ => kind.sources().1,
        };
        // A parameter or a source that the IR does not know could change the meaning: the node is
        // left to another backend.
        let is_known = p.is_rest_zero()
            && tensor.src.iter().enumerate().all(|(i, source)| {
                if source.is_null() {
                    self.release.is_optional(kind, i)
                } else {
                    i < kind.sources().1
                }
            });
        is_known.then_some(Meaning::Compute { op, sources })
    }
}

/// Whether every flag of a node is one that the supported releases have. A new flag could change
/// the meaning.
fn has_known_flags(tensor: &ggml_tensor) -> bool {
    let known = GGML_TENSOR_FLAG_INPUT
        | GGML_TENSOR_FLAG_OUTPUT
        | GGML_TENSOR_FLAG_PARAM
        | GGML_TENSOR_FLAG_LOSS
        | GGML_TENSOR_FLAG_COMPUTE;
    tensor.flags.cast_unsigned() & !known == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_newer_ggml_are_refused() {
        assert_eq!(GgmlOp::from_name("MUL_MAT_NEW"), None);
        assert_eq!(GgmlUnary::from_name("SWISH"), None);
        assert_eq!(GluKind::from_ggml_name("SWIGLU_NEW"), None);
        assert_eq!(Type::from_ggml_name("q9_K"), None);
        // What ggml's own functions answer for an id that their enum has no name for.
        for name in ["", "none", "NONE ", "swiglu"] {
            assert_eq!(GgmlOp::from_name(name), None, "{name}");
            assert_eq!(GgmlUnary::from_name(name), None, "{name}");
            assert_eq!(GluKind::from_ggml_name(name), None, "{name}");
        }
        // The names of ids that every release has.
        assert_eq!(
            GgmlOp::from_name("MUL_MAT"),
            Some(GgmlOp::Op(OpKind::MulMat))
        );
        assert_eq!(GluKind::from_ggml_name("SWIGLU"), Some(GluKind::Swiglu));
        assert_eq!(GgmlUnary::from_name("XIELU"), Some(GgmlUnary::Xielu));
    }

    #[test]
    fn flags_of_no_supported_release_are_unknown() {
        for bit in 0..32 {
            // SAFETY: every field is a number or a pointer that may be null.
            let mut tensor: ggml_tensor = unsafe { std::mem::zeroed() };
            tensor.flags = (1u32 << bit | GGML_TENSOR_FLAG_COMPUTE).cast_signed();
            assert_eq!(has_known_flags(&tensor), bit < 5, "bit {bit}");
        }
    }
}
