//! Valid parameters of operators, for the tests that have an operation of every kind: with their
//! own lengths, and with other parameters where a test is about them.

use vgpu_transport::ir::{
    ConvGeometry, GluKind, Op, OpKind, PoolKind, Precision, RopeMode, ScaleMode, SortOrder,
    TriKind, UnaryKind,
};

/// The operator with usual parameters. `None` for operators whose parameters follow from the
/// lengths of a test's operands, and for those of [`slide`].
pub(crate) fn usual(kind: OpKind) -> Option<Op> {
    let (eps, scale, max_bias) = (0.1, 1.0, 0.0);
    let (accumulator, activation) = (Precision::Default, Precision::Default);
    Some(match kind {
        OpKind::Copy => Op::Copy {},
        OpKind::Repeat => Op::Repeat {},
        OpKind::RepeatBack => Op::RepeatBack {},
        OpKind::Concat => Op::Concat { dim: 3 },
        OpKind::GetRows => Op::GetRows {},
        OpKind::GetRowsBack => Op::GetRowsBack {},
        OpKind::SetRows => Op::SetRows {},
        OpKind::Diag => Op::Diag {},
        OpKind::DiagMaskInf => Op::DiagMaskInf { n_past: 1 },
        OpKind::DiagMaskZero => Op::DiagMaskZero { n_past: 1 },
        OpKind::Roll => Op::Roll { shift: [1; 4] },
        OpKind::Tri => Op::Tri {
            kind: TriKind::Lower,
        },
        OpKind::Fill => Op::Fill { value: 1.0 },

        OpKind::Add => Op::Add {},
        OpKind::Sub => Op::Sub {},
        OpKind::Mul => Op::Mul {},
        OpKind::Div => Op::Div {},
        OpKind::AddId => Op::AddId {},
        OpKind::Add1 => Op::Add1 {},
        OpKind::Scale => Op::Scale {
            scale: 2.0,
            bias: 0.0,
        },
        OpKind::Clamp => Op::Clamp { min: 0.0, max: 1.0 },
        OpKind::Sqr => Op::Sqr {},
        OpKind::Sqrt => Op::Sqrt {},
        OpKind::Log => Op::Log {},
        OpKind::Sin => Op::Sin {},
        OpKind::Cos => Op::Cos {},
        OpKind::LeakyRelu => Op::LeakyRelu {
            negative_slope: 0.1,
        },
        OpKind::Unary => Op::Unary {
            kind: UnaryKind::Gelu,
        },
        OpKind::Xielu => Op::Xielu {
            alpha_n: 1.0,
            alpha_p: 1.0,
            beta: 1.0,
            eps,
        },
        OpKind::Glu => Op::Glu {
            kind: GluKind::Swiglu,
            swapped: false,
            alpha: 0.0,
            limit: 0.0,
        },
        OpKind::SiluBack => Op::SiluBack {},

        OpKind::Sum => Op::Sum {},
        OpKind::SumRows => Op::SumRows {},
        OpKind::Mean => Op::Mean {},
        OpKind::Cumsum => Op::Cumsum {},
        OpKind::Argmax => Op::Argmax {},
        OpKind::CountEqual => Op::CountEqual {},
        OpKind::Argsort => Op::Argsort {
            order: SortOrder::Ascending,
        },
        OpKind::TopK => Op::TopK {},

        OpKind::Norm => Op::Norm { eps },
        OpKind::RmsNorm => Op::RmsNorm { eps },
        OpKind::RmsNormBack => Op::RmsNormBack { eps },
        OpKind::GroupNorm => Op::GroupNorm { n_groups: 1, eps },
        OpKind::L2Norm => Op::L2Norm { eps },
        OpKind::SoftMax => Op::SoftMax { scale, max_bias },
        OpKind::SoftMaxBack => Op::SoftMaxBack { scale, max_bias },

        OpKind::MulMat => Op::MulMat {
            accumulator,
            activation,
            hadamard: false,
        },
        OpKind::MulMatId => Op::MulMatId {
            accumulator,
            activation,
        },
        OpKind::OutProd => Op::OutProd {},
        OpKind::SolveTri => Op::SolveTri {},
        OpKind::FlashAttnExt => Op::FlashAttnExt {
            scale,
            max_bias,
            logit_softcap: 0.0,
            accumulator,
            n_kv_max: 0,
        },
        OpKind::FlashAttnBack => Op::FlashAttnBack { masked: false },
        OpKind::LightningIndexer => Op::LightningIndexer {},

        OpKind::SsmConv => Op::SsmConv {},
        OpKind::SsmScan => Op::SsmScan { snapshots: 1 },
        OpKind::RwkvWkv6 => Op::RwkvWkv6 {},
        OpKind::RwkvWkv7 => Op::RwkvWkv7 {},
        OpKind::GatedLinearAttn => Op::GatedLinearAttn { scale },
        OpKind::GatedDeltaNet => Op::GatedDeltaNet { snapshots: 1 },
        OpKind::Dsv4HcPre => Op::Dsv4HcPre {
            scale,
            gated: false,
        },
        OpKind::Dsv4HcPost => Op::Dsv4HcPost {},

        OpKind::Upscale => Op::Upscale {
            mode: ScaleMode::Bilinear,
            align_corners: false,
            antialias: true,
        },
        OpKind::WinUnpart => Op::WinUnpart { w: 2 },
        OpKind::GetRelPos => Op::GetRelPos {},
        OpKind::AddRelPos => Op::AddRelPos {},

        OpKind::CrossEntropyLoss => Op::CrossEntropyLoss {},
        OpKind::CrossEntropyLossBack => Op::CrossEntropyLossBack {},
        OpKind::OptStepAdamw => Op::OptStepAdamw {},
        OpKind::OptStepSgd => Op::OptStepSgd {},

        OpKind::Set
        | OpKind::Acc
        | OpKind::Pad
        | OpKind::PadReflect1d
        | OpKind::Arange
        | OpKind::Rope
        | OpKind::Dsv4HcComb
        | OpKind::TimestepEmbedding
        | OpKind::WinPart => return None,

        OpKind::Im2col
        | OpKind::Im2colBack
        | OpKind::Im2col3d
        | OpKind::Col2im1d
        | OpKind::Conv2d
        | OpKind::Conv2dDw
        | OpKind::Conv3d
        | OpKind::ConvTranspose1d
        | OpKind::ConvTranspose2d
        | OpKind::Pool1d
        | OpKind::Pool2d
        | OpKind::Pool2dBack => return None,
    })
}

/// ROPE over `n_dims` elements of a row, with the usual parameters of models.
pub(crate) fn rope(n_dims: u32) -> Op {
    Op::Rope {
        mode: RopeMode::Neox,
        backward: false,
        n_dims,
        n_offs: 0,
        n_ctx_orig: 0,
        freq_base: 1e4,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        beta_fast: 0.0,
        beta_slow: 0.0,
        sections: [0; 4],
    }
}

/// What [`slide`] moves over an image. An operator ignores what it has no parameter for.
#[derive(Clone, Copy)]
pub(crate) struct Sliding {
    /// The lengths of the window of pooling.
    pub(crate) window: [i32; 2],
    pub(crate) pool: PoolKind,
    /// How the window or the kernel moves.
    pub(crate) geometry: ConvGeometry<3>,
    /// Whether IM2COL has images, or lines.
    pub(crate) is_2d: bool,
    /// The channels of the image, the channels of the result, and the number of images.
    pub(crate) channels: i32,
    pub(crate) results: i32,
    pub(crate) images: i32,
}

impl Default for Sliding {
    /// One element at a time, over one channel of one image.
    fn default() -> Sliding {
        Sliding {
            window: [1; 2],
            pool: PoolKind::Max,
            geometry: ConvGeometry {
                stride: [1; 3],
                padding: [0; 3],
                dilation: [1; 3],
            },
            is_2d: true,
            channels: 1,
            results: 1,
            images: 1,
        }
    }
}

/// The operator that moves a window or a kernel over an image. `None` for operators that do not.
pub(crate) fn slide(kind: OpKind, with: &Sliding) -> Option<Op> {
    let ConvGeometry {
        stride: [s0, s1, s2],
        padding: [p0, p1, p2],
        dilation: [d0, d1, d2],
    } = with.geometry;
    let ([k0, k1], pool, is_2d) = (with.window, with.pool, with.is_2d);
    Some(match kind {
        OpKind::Im2col => Op::Im2col {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        },
        OpKind::Im2colBack => Op::Im2colBack {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            is_2d,
        },
        OpKind::Im2col3d => Op::Im2col3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            ic: with.channels,
        },
        OpKind::Col2im1d => Op::Col2im1d {
            s0,
            oc: with.results,
            p0,
        },
        OpKind::Conv2d => Op::Conv2d {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        },
        OpKind::Conv2dDw => Op::Conv2dDw {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        },
        OpKind::Conv3d => Op::Conv3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            c: with.channels,
            n: with.images,
            oc: with.results,
        },
        OpKind::ConvTranspose1d => Op::ConvTranspose1d { s0, p0, d0 },
        OpKind::ConvTranspose2d => Op::ConvTranspose2d { stride: s0 },
        OpKind::Pool1d => Op::Pool1d {
            kind: pool,
            k0,
            s0,
            p0,
        },
        OpKind::Pool2d => Op::Pool2d {
            kind: pool,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        },
        OpKind::Pool2dBack => Op::Pool2dBack {
            kind: pool,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        },
        _ => return None,
    })
}
