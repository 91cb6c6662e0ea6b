//! Operators: stable ids, typed parameters, and their encoding.
//!
//! One table (`ops!`) declares all operators. The table generates the [`Op`] enum, the [`OpKind`]
//! ids, ggml's names and the encoding. The guest decodes the parameters from ggml's untyped
//! `op_params`, so a change of their layout in ggml does not affect the host.

use super::codec::{DecodeError, Reader, Word, Writer};

/// The largest number of sources a node can have (`GGML_MAX_SRC`).
pub const MAX_SOURCES: usize = 10;

macro_rules! kinds {
    ($(#[$doc:meta])* $enum:ident { $($id:literal $variant:ident $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $enum {
            $(#[doc = concat!("`", $name, "`")] $variant = $id,)*
        }

        impl $enum {
            /// Every kind, in order of id.
            pub const ALL: &'static [$enum] = &[$($enum::$variant,)*];

            /// The kind with the name `name` in ggml.
            pub fn from_ggml_name(name: &str) -> Option<$enum> {
                match name {
                    $($name => Some($enum::$variant),)*
                    _ => None,
                }
            }

            /// The name in ggml.
            pub const fn ggml_name(self) -> &'static str {
                match self {
                    $($enum::$variant => $name,)*
                }
            }
        }

        impl Word for $enum {
            fn put(&self, out: &mut Writer) {
                out.u32(*self as u32);
            }

            fn get(words: &mut Reader<'_>) -> Result<$enum, DecodeError> {
                match words.u32()? {
                    $($id => Ok($enum::$variant),)*
                    id => Err(DecodeError::UnknownKind { of: stringify!($enum), id }),
                }
            }
        }
    };
}

kinds! {
    /// Element-wise functions of one operand (`enum ggml_unary_op`). XIELU, which has parameters,
    /// is [`Op::Xielu`].
    UnaryKind {
        1  Abs         "ABS",
        2  Sgn         "SGN",
        3  Neg         "NEG",
        4  Step        "STEP",
        5  Tanh        "TANH",
        6  Elu         "ELU",
        7  Relu        "RELU",
        8  Sigmoid     "SIGMOID",
        9  Gelu        "GELU",
        10 GeluQuick   "GELU_QUICK",
        11 Silu        "SILU",
        12 HardSwish   "HARDSWISH",
        13 HardSigmoid "HARDSIGMOID",
        14 Exp         "EXP",
        15 Expm1       "EXPM1",
        16 Softplus    "SOFTPLUS",
        17 GeluErf     "GELU_ERF",
        18 Floor       "FLOOR",
        19 Ceil        "CEIL",
        20 Round       "ROUND",
        21 Trunc       "TRUNC",
    }
}

kinds! {
    /// Gated linear units (`enum ggml_glu_op`).
    GluKind {
        1 Reglu       "REGLU",
        2 Geglu       "GEGLU",
        3 Swiglu      "SWIGLU",
        4 SwigluOai   "SWIGLU_OAI",
        5 GegluErf    "GEGLU_ERF",
        6 GegluQuick  "GEGLU_QUICK",
        7 SwigluClamp "SWIGLU_CLAMP",
    }
}

kinds! {
    /// How rotary position embedding pairs elements and finds positions (`GGML_ROPE_TYPE_*`).
    RopeMode {
        1 Normal "normal",
        2 Neox   "neox",
        3 Mrope  "mrope",
        4 Imrope "imrope",
        5 Vision "vision",
    }
}

kinds! {
    /// The precision of a matrix product's accumulator or activations (`enum ggml_prec`).
    Precision {
        1 Default "default",
        2 F32     "f32",
        3 Bf16    "bf16",
        4 F16     "f16",
        5 Q8      "q8",
        6 Q4      "q4",
    }
}

kinds! {
    /// Pooling function (`enum ggml_op_pool`).
    PoolKind {
        1 Max     "max",
        2 Average "avg",
    }
}

kinds! {
    /// Interpolation of UPSCALE (`enum ggml_scale_mode`).
    ScaleMode {
        1 Nearest  "nearest",
        2 Bilinear "bilinear",
        3 Bicubic  "bicubic",
    }
}

kinds! {
    /// Which triangle TRI keeps (`enum ggml_tri_type`).
    TriKind {
        1 UpperDiag "upper_diag",
        2 Upper     "upper",
        3 LowerDiag "lower_diag",
        4 Lower     "lower",
    }
}

kinds! {
    /// Order of ARGSORT (`enum ggml_sort_order`).
    SortOrder {
        1 Ascending  "asc",
        2 Descending "desc",
    }
}

macro_rules! ops {
    ($(
        $id:literal $variant:ident $name:literal $min:literal..=$max:literal {
            $($field:ident: $ty:ty),* $(,)?
        }
    )*) => {
        /// An operator with its parameters.
        ///
        /// Names and meaning follow `enum ggml_op`, and the sources have ggml's order. Each field
        /// has the name of its argument in `ggml.h`.
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[allow(missing_docs)] // ggml.h documents the fields
        pub enum Op {
            $(#[doc = concat!("ggml `", $name, "`.")]
            $variant { $($field: $ty,)* },)*
        }

        /// An operator without its parameters. The discriminant is the id on the wire, which never
        /// changes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum OpKind {
            $(#[doc = concat!("ggml `", $name, "`.")] $variant = $id,)*
        }

        impl OpKind {
            /// Every operator, in order of id.
            pub const ALL: &'static [OpKind] = &[$(OpKind::$variant,)*];

            /// The operator with this wire id.
            pub const fn from_id(id: u16) -> Option<OpKind> {
                match id {
                    $($id => Some(OpKind::$variant),)*
                    _ => None,
                }
            }

            /// ggml's name for the operator.
            pub const fn ggml_name(self) -> &'static str {
                match self {
                    $(OpKind::$variant => $name,)*
                }
            }

            /// The minimum and the maximum number of sources. Sources behind the minimum may be
            /// absent.
            pub const fn sources(self) -> (usize, usize) {
                match self {
                    $(OpKind::$variant => ($min, $max),)*
                }
            }
        }

        impl Op {
            /// The operator without its parameters.
            pub const fn kind(&self) -> OpKind {
                match self {
                    $(Op::$variant { .. } => OpKind::$variant,)*
                }
            }

            /// Encodes the parameters without the id.
            pub(super) fn put_params(&self, out: &mut Writer) {
                match self {
                    $(Op::$variant { $($field,)* } => {
                        $($field.put(out);)*
                        let _ = out; // operators with no parameters
                    })*
                }
            }

            /// Decodes the parameters of `kind`.
            pub(super) fn get_params(
                kind: OpKind,
                words: &mut Reader<'_>,
            ) -> Result<Op, DecodeError> {
                Ok(match kind {
                    $(OpKind::$variant => {
                        $(let $field = <$ty as Word>::get(words)?;)*
                        Op::$variant { $($field,)* }
                    })*
                })
            }
        }
    };
}

ops! {
    // Movement. Copy stands for ggml's DUP, CPY and CONT: dst has the elements of src 0 in order.
    1  Copy           "CPY"            1..=2 {}
    2  Repeat         "REPEAT"         1..=2 {}
    3  RepeatBack     "REPEAT_BACK"    1..=1 {}
    4  Concat         "CONCAT"         2..=2 { dim: u32 }
    5  GetRows        "GET_ROWS"       2..=2 {}
    6  GetRowsBack    "GET_ROWS_BACK"  2..=3 {}
    7  SetRows        "SET_ROWS"       2..=3 {}
    8  Set            "SET"            2..=2 { nb1: u64, nb2: u64, nb3: u64, offset: u64 }
    9  Acc            "ACC"            2..=2 { nb1: u64, nb2: u64, nb3: u64, offset: u64 }
    10 Diag           "DIAG"           1..=1 {}
    11 DiagMaskInf    "DIAG_MASK_INF"  1..=1 { n_past: i32 }
    12 DiagMaskZero   "DIAG_MASK_ZERO" 1..=1 { n_past: i32 }
    13 Pad            "PAD"            1..=1 { left: [i32; 4], right: [i32; 4], circular: bool }
    14 PadReflect1d   "PAD_REFLECT_1D" 1..=1 { p0: i32, p1: i32 }
    15 Roll           "ROLL"           1..=1 { shift: [i32; 4] }
    16 Tri            "TRI"            1..=1 { kind: TriKind }
    17 Fill           "FILL"           0..=1 { value: f32 }
    18 Arange         "ARANGE"         0..=0 { start: f32, stop: f32, step: f32 }

    // Element-wise.
    20 Add            "ADD"            2..=2 {}
    21 Sub            "SUB"            2..=2 {}
    22 Mul            "MUL"            2..=2 {}
    23 Div            "DIV"            2..=2 {}
    24 AddId          "ADD_ID"         3..=3 {}
    25 Add1           "ADD1"           2..=2 {}
    26 Scale          "SCALE"          1..=1 { scale: f32, bias: f32 }
    27 Clamp          "CLAMP"          1..=1 { min: f32, max: f32 }
    28 Sqr            "SQR"            1..=1 {}
    29 Sqrt           "SQRT"           1..=1 {}
    30 Log            "LOG"            1..=1 {}
    31 Sin            "SIN"            1..=1 {}
    32 Cos            "COS"            1..=1 {}
    33 LeakyRelu      "LEAKY_RELU"     1..=1 { negative_slope: f32 }
    34 Unary          "UNARY"          1..=1 { kind: UnaryKind }
    35 Xielu          "XIELU"          1..=1 { alpha_n: f32, alpha_p: f32, beta: f32, eps: f32 }
    36 Glu            "GLU"            1..=2 {
        kind: GluKind, swapped: bool, alpha: f32, limit: f32
    }
    37 SiluBack       "SILU_BACK"      2..=2 {}

    // Reductions and orderings.
    40 Sum            "SUM"            1..=1 {}
    41 SumRows        "SUM_ROWS"       1..=1 {}
    42 Mean           "MEAN"           1..=1 {}
    43 Cumsum         "CUMSUM"         1..=1 {}
    44 Argmax         "ARGMAX"         1..=1 {}
    45 CountEqual     "COUNT_EQUAL"    2..=2 {}
    46 Argsort        "ARGSORT"        1..=1 { order: SortOrder }
    47 TopK           "TOP_K"          1..=1 {}

    // Normalisation and soft-max.
    50 Norm           "NORM"           1..=1 { eps: f32 }
    51 RmsNorm        "RMS_NORM"       1..=1 { eps: f32 }
    52 RmsNormBack    "RMS_NORM_BACK"  2..=2 { eps: f32 }
    53 GroupNorm      "GROUP_NORM"     1..=1 { n_groups: i32, eps: f32 }
    54 L2Norm         "L2_NORM"        1..=1 { eps: f32 }
    55 SoftMax        "SOFT_MAX"       1..=3 { scale: f32, max_bias: f32 }
    56 SoftMaxBack    "SOFT_MAX_BACK"  2..=2 { scale: f32, max_bias: f32 }

    // Matrix products.
    60 MulMat         "MUL_MAT"        2..=2 {
        accumulator: Precision, activation: Precision, hadamard: bool
    }
    61 MulMatId       "MUL_MAT_ID"     3..=3 { accumulator: Precision, activation: Precision }
    62 OutProd        "OUT_PROD"       2..=2 {}
    63 SolveTri       "SOLVE_TRI"      2..=2 {}

    // Attention.
    70 Rope           "ROPE"           2..=3 {
        mode: RopeMode, backward: bool, n_dims: u32, n_offs: u32, n_ctx_orig: i32,
        freq_base: f32, freq_scale: f32, ext_factor: f32, attn_factor: f32,
        beta_fast: f32, beta_slow: f32, sections: [i32; 4]
    }
    71 FlashAttnExt   "FLASH_ATTN_EXT" 3..=5 {
        scale: f32, max_bias: f32, logit_softcap: f32, accumulator: Precision, n_kv_max: u32
    }
    72 FlashAttnBack  "FLASH_ATTN_BACK" 4..=4 { masked: bool }
    73 LightningIndexer "LIGHTNING_INDEXER" 4..=4 {}

    // State-space and recurrent.
    80 SsmConv        "SSM_CONV"       2..=2 {}
    81 SsmScan        "SSM_SCAN"       7..=7 { snapshots: u32 }
    82 RwkvWkv6       "RWKV_WKV6"      6..=6 {}
    83 RwkvWkv7       "RWKV_WKV7"      7..=7 {}
    84 GatedLinearAttn "GATED_LINEAR_ATTN" 5..=5 { scale: f32 }
    85 GatedDeltaNet  "GATED_DELTA_NET" 6..=6 { snapshots: u32 }
    86 Dsv4HcComb     "DSV4_HC_COMB"   3..=3 { eps: f32, n_iter: u32 }
    87 Dsv4HcPre      "DSV4_HC_PRE"    2..=2 { scale: f32, gated: bool }
    88 Dsv4HcPost     "DSV4_HC_POST"   3..=4 {}

    // Convolution, pooling, images.
    90 Im2col         "IM2COL"         2..=2 {
        s0: i32, s1: i32, p0: i32, p1: i32, d0: i32, d1: i32, is_2d: bool
    }
    91 Im2colBack     "IM2COL_BACK"    2..=2 {
        s0: i32, s1: i32, p0: i32, p1: i32, d0: i32, d1: i32, is_2d: bool
    }
    92 Im2col3d       "IM2COL_3D"      2..=2 {
        s0: i32, s1: i32, s2: i32, p0: i32, p1: i32, p2: i32, d0: i32, d1: i32, d2: i32, ic: i32
    }
    93 Col2im1d       "COL2IM_1D"      1..=1 { s0: i32, oc: i32, p0: i32 }
    94 Conv2d         "CONV_2D"        2..=2 {
        s0: i32, s1: i32, p0: i32, p1: i32, d0: i32, d1: i32
    }
    95 Conv2dDw       "CONV_2D_DW"     2..=2 {
        s0: i32, s1: i32, p0: i32, p1: i32, d0: i32, d1: i32
    }
    96 Conv3d         "CONV_3D"        2..=2 {
        s0: i32, s1: i32, s2: i32, p0: i32, p1: i32, p2: i32, d0: i32, d1: i32, d2: i32,
        c: i32, n: i32, oc: i32
    }
    97 ConvTranspose1d "CONV_TRANSPOSE_1D" 2..=2 { s0: i32, p0: i32, d0: i32 }
    98 ConvTranspose2d "CONV_TRANSPOSE_2D" 2..=2 { stride: i32 }
    99 Pool1d         "POOL_1D"        1..=1 { kind: PoolKind, k0: i32, s0: i32, p0: i32 }
    100 Pool2d        "POOL_2D"        1..=1 {
        kind: PoolKind, k0: i32, k1: i32, s0: i32, s1: i32, p0: i32, p1: i32
    }
    101 Pool2dBack    "POOL_2D_BACK"   2..=2 {
        kind: PoolKind, k0: i32, k1: i32, s0: i32, s1: i32, p0: i32, p1: i32
    }
    102 Upscale       "UPSCALE"        1..=1 {
        mode: ScaleMode, align_corners: bool, antialias: bool
    }
    103 TimestepEmbedding "TIMESTEP_EMBEDDING" 1..=1 { dim: i32, max_period: i32 }
    104 WinPart       "WIN_PART"       1..=1 { npx: i32, npy: i32, w: i32 }
    105 WinUnpart     "WIN_UNPART"     1..=1 { w: i32 }
    106 GetRelPos     "GET_REL_POS"    1..=1 {}
    107 AddRelPos     "ADD_REL_POS"    3..=3 {}

    // Training.
    110 CrossEntropyLoss "CROSS_ENTROPY_LOSS" 2..=2 {}
    111 CrossEntropyLossBack "CROSS_ENTROPY_LOSS_BACK" 3..=3 {}
    112 OptStepAdamw  "OPT_STEP_ADAMW" 5..=5 {}
    113 OptStepSgd    "OPT_STEP_SGD"   3..=3 {}
}

impl Precision {
    /// Whether values must keep the range of F32, which F16 does not have: 65504 is its largest
    /// number. `ggml_prec_set_src` and `ggml_prec_set_acc` name the smallest type that is allowed.
    pub const fn needs_f32_range(self) -> bool {
        matches!(self, Precision::F32 | Precision::Bf16)
    }
}

impl Op {
    /// Whether the operator writes to its sources besides its destination: a training step updates
    /// the weights and its own state there.
    pub const fn updates_sources(&self) -> bool {
        matches!(self, Op::OptStepAdamw {} | Op::OptStepSgd {})
    }

    /// The demand of a product on the type of its activations, `Default` for other operators.
    pub const fn activation_precision(&self) -> Precision {
        match self {
            Op::MulMat { activation, .. } | Op::MulMatId { activation, .. } => *activation,
            _ => Precision::Default,
        }
    }

    /// The number of the operator's variant: the kind of a unary, GLU, rope, pooling or upscale
    /// operator, 0 for every other operator. An engine declares its variants in a mask
    /// ([`Rule::variants`](super::Rule)).
    pub const fn variant(&self) -> u32 {
        match self {
            Op::Unary { kind } => *kind as u32,
            Op::Glu { kind, .. } => *kind as u32,
            Op::Rope { mode, .. } => *mode as u32,
            Op::Pool1d { kind, .. } | Op::Pool2d { kind, .. } | Op::Pool2dBack { kind, .. } => {
                *kind as u32
            }
            Op::Upscale { mode, .. } => *mode as u32,
            _ => 0,
        }
    }
}
