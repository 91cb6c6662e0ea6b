//! Hyperparameters of models, and the shape of a step.

use vgpu_transport::ir::Type;

/// The hyperparameters of a model.
#[derive(Debug, Clone, Copy)]
pub struct Model {
    /// Number of layers.
    pub layers: u64,
    /// Type of the matrices.
    pub weights: Type,
    /// Type of the KV cache.
    pub cache: Type,
    /// Embedding length.
    pub width: u64,
    /// Query heads.
    pub heads: u64,
    /// KV heads.
    pub key_heads: u64,
    /// Head size.
    pub head: u64,
    /// Feed-forward length, of an expert in MoE models.
    pub inner: u64,
    /// Vocabulary size.
    pub vocabulary: u64,
    /// Number of experts, and of experts used for a token; `None` in dense models.
    pub experts: Option<(u64, u64)>,
    /// Type of the expert matrices, if it differs.
    pub expert_weights: Option<Type>,
    /// Whether each head of Q and K is normalised, as in Qwen3.
    pub norms_heads: bool,
    /// Positions of the KV cache.
    pub context: u64,
    /// Whether some matrices are Q6_K instead of Q4_K, as in Q4_K_M of llama.cpp: the output;
    /// attn_v and ffn_down in the first and last eighth of the layers and in every third of the
    /// others.
    pub mixes: bool,
    /// Whether only the last token has logits, as in a prefill.
    pub last_only: bool,
    /// The model family.
    pub family: Family,
}

/// Structural differences between model families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama, Qwen3, and most others.
    Llama,
    /// Qwen2: Q, K and V have biases.
    Qwen2,
    /// gpt-oss: all matrices have biases, experts are selected by logits, attention sinks.
    GptOss,
}

/// About 8 billion parameters: the shape of Llama 3 8B.
pub const DENSE_8B: Model = Model {
    layers: 32,
    weights: Type::Q4K,
    cache: Type::F16,
    width: 4096,
    heads: 32,
    key_heads: 8,
    head: 128,
    inner: 14336,
    vocabulary: 128_256,
    experts: None,
    expert_weights: None,
    norms_heads: false,
    context: 8192,
    mixes: true,
    last_only: true,
    family: Family::Llama,
};

/// About 70 billion parameters.
pub const DENSE_70B: Model = Model {
    layers: 80,
    width: 8192,
    heads: 64,
    inner: 28672,
    ..DENSE_8B
};

/// About 1 billion parameters.
pub const DENSE_1B: Model = Model {
    layers: 16,
    width: 2048,
    heads: 32,
    head: 64,
    inner: 8192,
    ..DENSE_8B
};

/// About 256 million parameters.
pub const DENSE_256M: Model = Model {
    layers: 16,
    width: 1024,
    heads: 16,
    key_heads: 8,
    head: 64,
    inner: 3072,
    vocabulary: 32_000,
    ..DENSE_8B
};

/// 30 billion parameters, 3 billion of them active: the shape of Qwen3-30B-A3B.
pub const EXPERTS_30B: Model = Model {
    layers: 48,
    width: 2048,
    heads: 32,
    key_heads: 4,
    inner: 768,
    vocabulary: 151_936,
    experts: Some((128, 8)),
    norms_heads: true,
    ..DENSE_8B
};

/// The shape of gpt-oss-20b: 32 experts, 4 of them active; without biases, sinks and sliding
/// windows.
pub const EXPERTS_20B: Model = Model {
    layers: 24,
    weights: Type::Q8_0,
    width: 2880,
    heads: 64,
    key_heads: 8,
    head: 64,
    inner: 2880,
    vocabulary: 201_088,
    experts: Some((32, 4)),
    expert_weights: Some(Type::Mxfp4),
    mixes: false,
    ..DENSE_8B
};

/// A small model for tests.
pub const TINY: Model = Model {
    layers: 2,
    weights: Type::Q8_0,
    cache: Type::F16,
    width: 64,
    heads: 2,
    key_heads: 1,
    head: 32,
    inner: 96,
    vocabulary: 40,
    experts: None,
    expert_weights: None,
    norms_heads: false,
    context: 64,
    mixes: false,
    last_only: false,
    family: Family::Llama,
};

/// The smallest model whose decoding uses the tuned kernels.
const SMALL: Model = Model {
    width: 256,
    heads: 8,
    key_heads: 2,
    inner: 512,
    vocabulary: 512,
    ..TINY
};

impl Model {
    /// The smallest model of a family whose decoding uses the tuned kernels, as the checks decode
    /// it.
    pub(crate) fn small(weights: Type, family: Family, experts: Option<(u64, u64)>) -> Model {
        Model {
            weights,
            family,
            experts,
            norms_heads: family == Family::Llama && experts.is_some(),
            ..SMALL
        }
    }
}

/// [`TINY`] with biases.
pub const TINY_BIASES: Model = Model {
    family: Family::Qwen2,
    ..TINY
};

/// [`TINY`] with experts and biases everywhere.
pub const TINY_GPT_OSS: Model = Model {
    experts: Some((4, 2)),
    family: Family::GptOss,
    ..TINY
};

/// [`TINY`] with experts.
pub const TINY_EXPERTS: Model = Model {
    experts: Some((4, 2)),
    norms_heads: true,
    ..TINY
};

/// The lengths of a model step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens that the step computes.
    pub tokens: u64,
    /// KV positions that the attention reads; the mask may hide some.
    pub seen: u64,
}
