//! GGUF files with the shapes of published models and random weights, for measurements on machines
//! without model files.

use std::fs::File;

use vgpu_gguf::{
    FileType, GgufError, Metadata, RandomModel, RandomTensor, Tensor, TensorType, use_more_bits,
};

/// The shape of a model whose weights are random.
#[derive(Debug, Clone, Copy)]
pub struct SyntheticModel {
    /// Name, as given on the command line.
    pub name: &'static str,
    architecture: Architecture,
    file_type: FileType,
    layers: u32,
    width: u64,
    heads: u64,
    key_heads: u64,
    head: u64,
    /// Feed-forward length, of an expert in MoE models.
    inner: u64,
    /// Number of experts, and of experts used for a token.
    experts: Option<(u64, u64)>,
    vocabulary: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Architecture {
    Llama,
    Qwen3Moe,
    GptOss,
}

/// The models of measurements, the most informative first and the largest last.
pub const SHAPES: [SyntheticModel; 5] = [
    LLAMA_8B,
    SyntheticModel {
        name: "gpt-oss-20b-mxfp4",
        architecture: Architecture::GptOss,
        file_type: FileType::Mxfp4,
        layers: 24,
        width: 2880,
        heads: 64,
        key_heads: 8,
        head: 64,
        inner: 2880,
        experts: Some((32, 4)),
        vocabulary: 201_088,
    },
    SyntheticModel {
        name: "30b-a3b-q4_k_m",
        architecture: Architecture::Qwen3Moe,
        file_type: FileType::Q4KM,
        layers: 48,
        width: 2048,
        heads: 32,
        key_heads: 4,
        head: 128,
        inner: 768,
        experts: Some((128, 8)),
        vocabulary: 151_936,
    },
    SyntheticModel {
        name: "8b-f16",
        file_type: FileType::F16,
        ..LLAMA_8B
    },
    SyntheticModel {
        name: "70b-q4_k_m",
        layers: 80,
        width: 8192,
        heads: 64,
        inner: 28672,
        ..LLAMA_8B
    },
];

const LLAMA_8B: SyntheticModel = SyntheticModel {
    name: "8b-q4_k_m",
    architecture: Architecture::Llama,
    file_type: FileType::Q4KM,
    layers: 32,
    width: 4096,
    heads: 32,
    key_heads: 8,
    head: 128,
    inner: 14336,
    experts: None,
    vocabulary: 128_256,
};

/// Any number; the same one gives the same file.
const SEED: u64 = 11;

/// Tensors of which a token reads one row, or which only the last token reads.
const TABLE: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// The part of a tensor that a token reads.
enum Use {
    Row,
    Whole,
    /// The first number of experts out of the second.
    Share(u64, u64),
}

impl SyntheticModel {
    /// A small model of the same architecture.
    #[must_use]
    pub fn small(self) -> SyntheticModel {
        SyntheticModel {
            layers: 2,
            width: 512,
            heads: 512 / self.head,
            key_heads: 2,
            inner: 512,
            experts: self.experts.map(|(_, used)| (2 * used, used)),
            vocabulary: 1024,
            ..self
        }
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> u64 {
        let bytes = |entry: &RandomTensor| entry.tensor.bytes();
        self.tensors().iter().map(bytes).sum()
    }

    /// Bytes of weights that a decoded token reads: one row of the embedding table, and the experts
    /// that the token uses.
    pub fn bytes_of_token(&self) -> u64 {
        let share = |RandomTensor { tensor, .. }: &RandomTensor| match self.use_of(tensor) {
            Use::Row => tensor.bytes() / tensor.dims[1],
            Use::Whole => tensor.bytes(),
            Use::Share(used, all) => tensor.bytes() / all * used,
        };
        self.tensors().iter().map(share).sum()
    }

    /// Floating-point operations per token of a prefill of `tokens`: matrix products without the
    /// output, which only the last token needs, and causal attention.
    pub fn operations_of_token(&self, tokens: u64) -> u64 {
        let of = |RandomTensor { tensor, .. }: &RandomTensor| match self.use_of(tensor) {
            _ if tensor.dims.len() < 2 || tensor.name == OUTPUT => 0,
            Use::Row => 0,
            Use::Whole => 2 * tensor.elements(),
            Use::Share(used, all) => 2 * tensor.elements() / all * used,
        };
        let products: u64 = self.tensors().iter().map(of).sum();
        // Q * K^T and P * V, each over half of the tokens on average.
        products + u64::from(self.layers) * 4 * self.heads * self.head * tokens / 2
    }

    /// The part of a tensor that a token reads.
    fn use_of(&self, tensor: &Tensor) -> Use {
        match (tensor.dims.len(), self.experts) {
            _ if tensor.name == TABLE => Use::Row,
            (3, Some((all, used))) => Use::Share(used, all),
            _ => Use::Whole,
        }
    }

    /// Writes a GGUF file, on all cores. `to` must be a regular file. Every call writes the same
    /// bytes.
    ///
    /// # Errors
    ///
    /// If the system refuses to write, for example because the disk is full.
    pub fn write(&self, to: &File) -> Result<(), GgufError> {
        RandomModel::new(&self.metadata(), self.tensors(), SEED)?.write(to, |_| ())
    }

    fn metadata(&self) -> Metadata {
        let arch = match self.architecture {
            Architecture::Llama => "llama",
            Architecture::Qwen3Moe => "qwen3moe",
            Architecture::GptOss => "gpt-oss",
        };
        let mut all = Metadata::default();
        all.set("general.architecture", arch);
        all.set("general.name", self.name);
        all.set("tokenizer.ggml.model", "no_vocab");
        let mut number = |key: &str, n: u64| all.set(format!("{arch}.{key}"), n as u32);
        number("vocab_size", self.vocabulary);
        number("context_length", 32768);
        number("embedding_length", self.width);
        number("block_count", self.layers.into());
        number("feed_forward_length", self.inner);
        number("attention.head_count", self.heads);
        number("attention.head_count_kv", self.key_heads);
        number("attention.key_length", self.head);
        number("attention.value_length", self.head);
        number("rope.dimension_count", self.head);
        if let Some((experts, used)) = self.experts {
            number("expert_count", experts);
            number("expert_used_count", used);
            number("expert_feed_forward_length", self.inner);
        }
        if self.architecture == Architecture::GptOss {
            number("attention.sliding_window", 128);
        }
        let epsilon = format!("{arch}.attention.layer_norm_rms_epsilon");
        all.set(epsilon, 1e-5f32);
        all.set(format!("{arch}.rope.freq_base"), 500_000.0f32);
        all
    }

    fn tensors(&self) -> Vec<RandomTensor> {
        let SyntheticModel {
            width,
            heads,
            key_heads,
            head,
            inner,
            vocabulary,
            ..
        } = *self;
        let is_oss = self.architecture == Architecture::GptOss;
        let (output, of_experts) = (self.file_type.output(), self.file_type.base());
        let (plain, more) = match self.file_type {
            // Only experts are MXFP4.
            FileType::Mxfp4 => (output, output),
            other => (other.base(), other.more_bits()),
        };
        let mut all = Vec::new();
        let mut matrix = |name: String, kind: TensorType, ne: &[u64]| {
            // Vectors are norms and biases, which are 1. Matrices have variance 1 / columns:
            // products keep the variance of the activations.
            let (mean, sd) = match ne.len() {
                1 => (1.0, 0.0),
                _ => (0.0, (ne[0] as f32).sqrt().recip()),
            };
            let stream = all.len() as u32;
            let dims = ne.to_vec();
            all.push(RandomTensor {
                tensor: Tensor { name, dims, kind },
                mean,
                sd,
                stream,
                order: None,
            });
        };
        matrix(TABLE.into(), plain, &[width, vocabulary]);
        for layer in 0..self.layers {
            let at = |what: &str| format!("blk.{layer}.{what}");
            let richer = match use_more_bits(layer.into(), self.layers.into()) {
                true => more,
                false => plain,
            };
            matrix(at("attn_norm.weight"), TensorType::F32, &[width]);
            for (what, rows, ty) in [
                ("attn_q", head * heads, plain),
                ("attn_k", head * key_heads, plain),
                ("attn_v", head * key_heads, richer),
            ] {
                matrix(at(&format!("{what}.weight")), ty, &[width, rows]);
                if is_oss {
                    matrix(at(&format!("{what}.bias")), TensorType::F32, &[rows]);
                }
            }
            matrix(at("attn_output.weight"), plain, &[head * heads, width]);
            match self.architecture {
                Architecture::Llama => {}
                Architecture::Qwen3Moe => {
                    matrix(at("attn_q_norm.weight"), TensorType::F32, &[head]);
                    matrix(at("attn_k_norm.weight"), TensorType::F32, &[head]);
                }
                Architecture::GptOss => {
                    matrix(at("attn_output.bias"), TensorType::F32, &[width]);
                    matrix(at("attn_sinks.weight"), TensorType::F32, &[heads]);
                }
            }
            let norm = match is_oss {
                true => "post_attention_norm.weight",
                false => "ffn_norm.weight",
            };
            matrix(at(norm), TensorType::F32, &[width]);
            let units = [
                ("gate", [width, inner], of_experts),
                ("up", [width, inner], of_experts),
                (
                    "down",
                    [inner, width],
                    if is_oss { of_experts } else { richer },
                ),
            ];
            let Some((experts, _)) = self.experts else {
                for (what, ne, ty) in units {
                    matrix(at(&format!("ffn_{what}.weight")), ty, &ne);
                }
                continue;
            };
            matrix(
                at("ffn_gate_inp.weight"),
                TensorType::F32,
                &[width, experts],
            );
            if is_oss {
                matrix(at("ffn_gate_inp.bias"), TensorType::F32, &[experts]);
            }
            for (what, [columns, rows], ty) in units {
                matrix(
                    at(&format!("ffn_{what}_exps.weight")),
                    ty,
                    &[columns, rows, experts],
                );
                if is_oss {
                    matrix(
                        at(&format!("ffn_{what}_exps.bias")),
                        TensorType::F32,
                        &[rows, experts],
                    );
                }
            }
        }
        matrix("output_norm.weight".into(), TensorType::F32, &[width]);
        matrix(OUTPUT.into(), output, &[width, vocabulary]);
        all
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// `GGUF_DEFAULT_ALIGNMENT`.
    const ALIGN: u64 = 32;

    #[test]
    fn synthetic_models_have_the_sizes_of_the_published_models() {
        let gigabytes = SHAPES.map(|model| model.bytes() as f64 / 1e9);
        for (got, want) in gigabytes.into_iter().zip([4.9, 12.1, 18.5, 16.1, 42.5]) {
            assert!((got / want - 1.0).abs() < 0.06, "{gigabytes:?}");
        }
    }

    #[test]
    fn bytes_per_token_are_the_multiplied_weights() {
        let of = |name: &str| SHAPES.into_iter().find(|model| model.name == name);
        let of = |name| of(name).expect("a model of this name");
        // By hand: 32 layers of two square matrices, two of keys and values, three of the
        // feed-forward unit; the output.
        let layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336u64;
        let norms = 65 * 4096 * 4;
        let f16 = of("8b-f16");
        let (table_row, output) = (2 * 4096, 2 * 4096 * 128_256);
        let bytes = 2 * 32 * layer + output + table_row + norms;
        assert_eq!(f16.bytes_of_token(), bytes);
        assert_eq!(
            f16.operations_of_token(2048),
            2 * 32 * layer + 32 * 4 * 4096 * 1024
        );
        // Of 128 experts 8.
        let experts = of("30b-a3b-q4_k_m");
        let all = experts.bytes() as f64;
        assert!((experts.bytes_of_token() as f64) < 0.12 * all);
        assert!((experts.bytes_of_token() as f64) > 0.08 * all);
    }

    #[test]
    fn file_length_matches_its_header() {
        for model in SHAPES {
            let small = model.small();
            let written = || {
                let mut file = tempfile::tempfile().unwrap();
                small.write(&file).unwrap();
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes).unwrap();
                bytes
            };
            let file = written();
            assert_eq!(&file[..4], b"GGUF");
            let tensors = small.tensors();
            let data: u64 = { tensors.iter() }
                .map(|entry| entry.tensor.bytes().next_multiple_of(ALIGN))
                .sum();
            assert_eq!(file.len() as u64 % ALIGN, 0);
            let head = file.len() as u64 - data;
            assert!((1000..100_000).contains(&head), "{head}");
            assert!(file == written());
        }
    }
}
