//! From ggml's ids and untyped parameters to the IR's.
//!
//! ids are translated by name, see [`Ids`]. `op_params` are decoded here and nowhere else; the layouts
//! are those that `ggml.c` gives them in every version the plugin knows.

use vgpu_transport::ir::{
    GluKind, Op, OpKind, PoolKind, Precision, RopeMode, ScaleMode, Shape, SortOrder, TriKind, Type,
    UnaryKind,
};

use crate::abi::ggml_tensor;
use crate::host::{Host, Ids};

/// The ids of the ggml in this process.
#[derive(Debug)]
pub(crate) struct Translator {
    ops: Ids<HostOp>,
    unary: Ids<HostUnary>,
    glu: Ids<GluKind>,
    types: Ids<Type>,
}

/// What an operator of ggml is to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostOp {
    /// Computes nothing: the result is its source, looked at in another way.
    View,
    /// The gradient of ROPE, which the IR has as a parameter.
    RopeBack,
    /// Calls a function of this process by its address: refused by design.
    Callback,
    /// One of the IR's, with parameters in the layout of ggml's operator.
    Op(OpKind),
}

impl HostOp {
    fn from_name(name: &str) -> Option<HostOp> {
        match name {
            "NONE" | "RESHAPE" | "VIEW" | "PERMUTE" | "TRANSPOSE" => Some(HostOp::View),
            "DUP" | "CPY" | "CONT" => Some(HostOp::Op(OpKind::Copy)),
            "ROPE_BACK" => Some(HostOp::RopeBack),
            "MAP_CUSTOM1" | "MAP_CUSTOM2" | "MAP_CUSTOM3" | "CUSTOM" => Some(HostOp::Callback),
            name => OpKind::ALL
                .iter()
                .copied()
                .find(|op| op.ggml_name() == name)
                .map(HostOp::Op),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostUnary {
    Kind(UnaryKind),
    Xielu,
}

impl HostUnary {
    fn from_name(name: &str) -> Option<HostUnary> {
        match name {
            "XIELU" => Some(HostUnary::Xielu),
            name => UnaryKind::from_ggml_name(name).map(HostUnary::Kind),
        }
    }
}

/// A ggml operation in the IR's terms, before its operands are placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Meaning {
    /// Nothing to compute.
    Nothing,
    /// The operator, and how many of ggml's sources it reads.
    Compute {
        /// The operator with its parameters.
        op: Op,
        /// Sources to look at; ggml keeps more in some nodes, only to order them.
        sources: usize,
    },
}

impl Translator {
    /// For the tensors of `host`.
    pub(crate) fn new(host: &Host) -> Translator {
        Translator {
            ops: host.ops(HostOp::from_name),
            unary: host.unary_ops(HostUnary::from_name),
            glu: host.glu_ops(GluKind::from_ggml_name),
            types: host.types(Type::from_ggml_name),
        }
    }

    /// The shape of a tensor; `None` when its type is not one of the IR's or a number makes no sense.
    ///
    /// # Safety
    ///
    /// The tensor must have been made by the host this translator is for.
    pub(crate) unsafe fn shape(&self, tensor: &ggml_tensor) -> Option<Shape> {
        let mut ne = [0; 4];
        for (ne, &host) in ne.iter_mut().zip(&tensor.ne) {
            *ne = u64::try_from(host).ok()?;
        }
        // SAFETY: the id is the type of a tensor that the host made.
        let ty = unsafe { self.types.get(tensor.type_) }?;
        Some(Shape {
            ty,
            ne,
            nb: tensor.nb.map(|nb| nb as u64),
        })
    }

    /// Whether the operation calls a function of this process, which no host has.
    ///
    /// # Safety
    ///
    /// As for [`shape`](Translator::shape).
    pub(crate) unsafe fn calls_back(&self, tensor: &ggml_tensor) -> bool {
        // SAFETY: the id is the operator of a tensor that the host made.
        unsafe { self.ops.get(tensor.op) == Some(HostOp::Callback) }
    }

    /// What the operation that produces `tensor` is; `None` when it has no meaning in the IR.
    ///
    /// # Safety
    ///
    /// As for [`shape`](Translator::shape).
    pub(crate) unsafe fn meaning(&self, tensor: &ggml_tensor) -> Option<Meaning> {
        let p = Params(tensor);
        // SAFETY: the id is the operator of a tensor that the host made.
        let op = match unsafe { self.ops.get(tensor.op) }? {
            HostOp::View => return Some(Meaning::Nothing),
            HostOp::Callback => return None,
            HostOp::RopeBack => rope(&p, true)?,
            // SAFETY: ggml keeps the kind of both operators in the first parameter.
            HostOp::Op(OpKind::Unary) => match unsafe { self.unary.get(p.i32(0)) }? {
                HostUnary::Kind(kind) => Op::Unary { kind },
                HostUnary::Xielu => Op::Xielu {
                    alpha_n: p.f32(1),
                    alpha_p: p.f32(2),
                    beta: p.f32(3),
                    eps: p.f32(4),
                },
            },
            HostOp::Op(OpKind::Glu) => Op::Glu {
                // SAFETY: as above.
                kind: unsafe { self.glu.get(p.i32(0)) }?,
                swapped: p.flag(1),
                alpha: p.f32(2),
                limit: p.f32(3),
            },
            HostOp::Op(kind) => plain(kind, &p)?,
        };
        let kind = op.kind();
        // Sources behind these are the tensors that the result is a view of, or give only an extent.
        let sources = match kind {
            OpKind::Copy | OpKind::Repeat => 1,
            OpKind::SetRows | OpKind::GetRowsBack => 2,
            _ => kind.sources().1,
        };
        // A source that we know nothing of could change the meaning: let somebody else compute it.
        let stray = tensor
            .src
            .iter()
            .skip(kind.sources().1)
            .any(|source| !source.is_null());
        (!stray).then_some(Meaning::Compute { op, sources })
    }
}

/// The operators whose parameters are numbers alone.
fn plain(kind: OpKind, p: &Params<'_>) -> Option<Op> {
    Some(match kind {
        OpKind::Copy => Op::Copy {},
        OpKind::Repeat => Op::Repeat {},
        OpKind::RepeatBack => Op::RepeatBack {},
        OpKind::Concat => Op::Concat { dim: p.u32(0)? },
        OpKind::GetRows => Op::GetRows {},
        OpKind::GetRowsBack => Op::GetRowsBack {},
        OpKind::SetRows => Op::SetRows {},
        OpKind::Set => Op::Set {
            nb1: p.bytes(0)?,
            nb2: p.bytes(1)?,
            nb3: p.bytes(2)?,
            offset: p.bytes(3)?,
        },
        OpKind::Acc => Op::Acc {
            nb1: p.bytes(0)?,
            nb2: p.bytes(1)?,
            nb3: p.bytes(2)?,
            offset: p.bytes(3)?,
        },
        OpKind::Diag => Op::Diag {},
        OpKind::DiagMaskInf => Op::DiagMaskInf { n_past: p.i32(0) },
        OpKind::DiagMaskZero => Op::DiagMaskZero { n_past: p.i32(0) },
        OpKind::Pad => Op::Pad {
            left: [p.i32(0), p.i32(2), p.i32(4), p.i32(6)],
            right: [p.i32(1), p.i32(3), p.i32(5), p.i32(7)],
            circular: p.flag(8),
        },
        OpKind::PadReflect1d => Op::PadReflect1d {
            p0: p.i32(0),
            p1: p.i32(1),
        },
        OpKind::Roll => Op::Roll {
            shift: [p.i32(0), p.i32(1), p.i32(2), p.i32(3)],
        },
        OpKind::Tri => Op::Tri {
            kind: match p.i32(0) {
                0 => TriKind::UpperDiag,
                1 => TriKind::Upper,
                2 => TriKind::LowerDiag,
                3 => TriKind::Lower,
                _ => return None,
            },
        },
        OpKind::Fill => Op::Fill { value: p.f32(0) },
        OpKind::Arange => Op::Arange {
            start: p.f32(0),
            stop: p.f32(1),
            step: p.f32(2),
        },

        OpKind::Add => Op::Add {},
        OpKind::Sub => Op::Sub {},
        OpKind::Mul => Op::Mul {},
        OpKind::Div => Op::Div {},
        OpKind::AddId => Op::AddId {},
        OpKind::Add1 => Op::Add1 {},
        OpKind::Scale => Op::Scale {
            scale: p.f32(0),
            bias: p.f32(1),
        },
        OpKind::Clamp => Op::Clamp {
            min: p.f32(0),
            max: p.f32(1),
        },
        OpKind::Sqr => Op::Sqr {},
        OpKind::Sqrt => Op::Sqrt {},
        OpKind::Log => Op::Log {},
        OpKind::Sin => Op::Sin {},
        OpKind::Cos => Op::Cos {},
        OpKind::LeakyRelu => Op::LeakyRelu {
            negative_slope: p.f32(0),
        },
        // Kinds of UNARY and GLU are ids of their own; XIELU is a kind of UNARY.
        OpKind::Unary | OpKind::Glu | OpKind::Xielu => return None,
        OpKind::SiluBack => Op::SiluBack {},

        OpKind::Sum => Op::Sum {},
        OpKind::SumRows => Op::SumRows {},
        OpKind::Mean => Op::Mean {},
        OpKind::Cumsum => Op::Cumsum {},
        OpKind::Argmax => Op::Argmax {},
        OpKind::CountEqual => Op::CountEqual {},
        OpKind::Argsort => Op::Argsort {
            order: match p.i32(0) {
                0 => SortOrder::Ascending,
                1 => SortOrder::Descending,
                _ => return None,
            },
        },
        OpKind::TopK => Op::TopK {},

        OpKind::Norm => Op::Norm { eps: p.f32(0) },
        OpKind::RmsNorm => Op::RmsNorm { eps: p.f32(0) },
        OpKind::RmsNormBack => Op::RmsNormBack { eps: p.f32(0) },
        OpKind::GroupNorm => Op::GroupNorm {
            n_groups: p.i32(0),
            eps: p.f32(1),
        },
        OpKind::L2Norm => Op::L2Norm { eps: p.f32(0) },
        OpKind::SoftMax => Op::SoftMax {
            scale: p.f32(0),
            max_bias: p.f32(1),
        },
        OpKind::SoftMaxBack => Op::SoftMaxBack {
            scale: p.f32(0),
            max_bias: p.f32(1),
        },

        OpKind::MulMat => Op::MulMat {
            accumulator: p.precision(0)?,
            activation: p.precision(3)?,
            // GGML_HINT_SRC0_IS_HADAMARD; an unknown hint may be ignored, that is what a hint is
            hadamard: p.i32(1) == 1,
        },
        OpKind::MulMatId => Op::MulMatId {
            accumulator: p.precision(0)?,
            activation: p.precision(3)?,
        },
        OpKind::OutProd => Op::OutProd {},
        OpKind::SolveTri => Op::SolveTri {},

        OpKind::Rope => rope(p, false)?,
        OpKind::FlashAttnExt => Op::FlashAttnExt {
            scale: p.f32(0),
            max_bias: p.f32(1),
            logit_softcap: p.f32(2),
            accumulator: p.precision(3)?,
            n_kv_max: p.u32(4)?,
        },
        OpKind::FlashAttnBack => Op::FlashAttnBack { masked: p.flag(0) },
        OpKind::LightningIndexer => Op::LightningIndexer {},

        OpKind::SsmConv => Op::SsmConv {},
        // Versions without snapshots leave the parameter 0 and keep one state.
        OpKind::SsmScan => Op::SsmScan {
            snapshots: p.u32(0)?.max(1),
        },
        OpKind::RwkvWkv6 => Op::RwkvWkv6 {},
        OpKind::RwkvWkv7 => Op::RwkvWkv7 {},
        OpKind::GatedLinearAttn => Op::GatedLinearAttn { scale: p.f32(0) },
        OpKind::GatedDeltaNet => Op::GatedDeltaNet {
            snapshots: p.u32(0)?.max(1),
        },
        OpKind::Dsv4HcComb => Op::Dsv4HcComb {
            eps: p.f32(0),
            n_iter: p.u32(1)?,
        },
        OpKind::Dsv4HcPre => Op::Dsv4HcPre {
            scale: p.f32(0),
            gated: p.flag(1),
        },
        OpKind::Dsv4HcPost => Op::Dsv4HcPost {},

        OpKind::Im2col => Op::Im2col {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
            is_2d: p.flag(6),
        },
        OpKind::Im2colBack => Op::Im2colBack {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
            is_2d: p.flag(6),
        },
        OpKind::Im2col3d => Op::Im2col3d {
            s0: p.i32(0),
            s1: p.i32(1),
            s2: p.i32(2),
            p0: p.i32(3),
            p1: p.i32(4),
            p2: p.i32(5),
            d0: p.i32(6),
            d1: p.i32(7),
            d2: p.i32(8),
            ic: p.i32(9),
        },
        OpKind::Col2im1d => Op::Col2im1d {
            s0: p.i32(0),
            oc: p.i32(1),
            p0: p.i32(2),
        },
        OpKind::Conv2d => Op::Conv2d {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
        },
        OpKind::Conv2dDw => Op::Conv2dDw {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
        },
        OpKind::Conv3d => Op::Conv3d {
            s0: p.i32(0),
            s1: p.i32(1),
            s2: p.i32(2),
            p0: p.i32(3),
            p1: p.i32(4),
            p2: p.i32(5),
            d0: p.i32(6),
            d1: p.i32(7),
            d2: p.i32(8),
            c: p.i32(9),
            n: p.i32(10),
            oc: p.i32(11),
        },
        OpKind::ConvTranspose1d => Op::ConvTranspose1d {
            s0: p.i32(0),
            p0: p.i32(1),
            d0: p.i32(2),
        },
        OpKind::ConvTranspose2d => Op::ConvTranspose2d { stride: p.i32(0) },
        OpKind::Pool1d => Op::Pool1d {
            kind: p.pool(0)?,
            k0: p.i32(1),
            s0: p.i32(2),
            p0: p.i32(3),
        },
        OpKind::Pool2d => Op::Pool2d {
            kind: p.pool(0)?,
            k0: p.i32(1),
            k1: p.i32(2),
            s0: p.i32(3),
            s1: p.i32(4),
            p0: p.i32(5),
            p1: p.i32(6),
        },
        OpKind::Pool2dBack => Op::Pool2dBack {
            kind: p.pool(0)?,
            k0: p.i32(1),
            k1: p.i32(2),
            s0: p.i32(3),
            s1: p.i32(4),
            p0: p.i32(5),
            p1: p.i32(6),
        },
        OpKind::Upscale => Op::Upscale {
            // The low byte is the mode, the bits above it are flags (GGML_SCALE_FLAG_*).
            mode: match p.i32(0) & 0xff {
                0 => ScaleMode::Nearest,
                1 => ScaleMode::Bilinear,
                2 => ScaleMode::Bicubic,
                _ => return None,
            },
            align_corners: p.i32(0) & 1 << 8 != 0,
            antialias: p.i32(0) & 1 << 9 != 0,
        },
        OpKind::TimestepEmbedding => Op::TimestepEmbedding {
            dim: p.i32(0),
            max_period: p.i32(1),
        },
        OpKind::WinPart => Op::WinPart {
            npx: p.i32(0),
            npy: p.i32(1),
            w: p.i32(2),
        },
        OpKind::WinUnpart => Op::WinUnpart { w: p.i32(0) },
        OpKind::GetRelPos => Op::GetRelPos {},
        OpKind::AddRelPos => Op::AddRelPos {},

        OpKind::CrossEntropyLoss => Op::CrossEntropyLoss {},
        OpKind::CrossEntropyLossBack => Op::CrossEntropyLossBack {},
        OpKind::OptStepAdamw => Op::OptStepAdamw {},
        OpKind::OptStepSgd => Op::OptStepSgd {},
    })
}

/// ROPE and ROPE_BACK. 0 and 3, once n_past and n_ctx, mean nothing any more.
fn rope(p: &Params<'_>, backward: bool) -> Option<Op> {
    Some(Op::Rope {
        // GGML_ROPE_TYPE_*: bits, of which only these combinations exist
        mode: match p.i32(2) {
            0 => RopeMode::Normal,
            2 => RopeMode::Neox,
            8 => RopeMode::Mrope,
            24 => RopeMode::Vision,
            40 => RopeMode::Imrope,
            _ => return None,
        },
        backward,
        n_dims: p.u32(1)?,
        n_offs: p.u32(15)?,
        n_ctx_orig: p.i32(4),
        freq_base: p.f32(5),
        freq_scale: p.f32(6),
        ext_factor: p.f32(7),
        attn_factor: p.f32(8),
        beta_fast: p.f32(9),
        beta_slow: p.f32(10),
        sections: [p.i32(11), p.i32(12), p.i32(13), p.i32(14)],
    })
}

/// The untyped parameters of a node.
struct Params<'a>(&'a ggml_tensor);

impl Params<'_> {
    fn i32(&self, i: usize) -> i32 {
        self.0.op_params[i]
    }

    fn u32(&self, i: usize) -> Option<u32> {
        u32::try_from(self.i32(i)).ok()
    }

    fn bytes(&self, i: usize) -> Option<u64> {
        u64::try_from(self.i32(i)).ok()
    }

    fn f32(&self, i: usize) -> f32 {
        f32::from_bits(self.i32(i).cast_unsigned())
    }

    fn flag(&self, i: usize) -> bool {
        self.i32(i) != 0
    }

    /// `enum ggml_prec`.
    fn precision(&self, i: usize) -> Option<Precision> {
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
    fn pool(&self, i: usize) -> Option<PoolKind> {
        match self.i32(i) {
            0 => Some(PoolKind::Max),
            1 => Some(PoolKind::Average),
            _ => None,
        }
    }
}
