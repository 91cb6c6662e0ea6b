//! GGUF files with the shapes of published models and random weights, for measurements on machines without model files.

use std::io::{self, Write};

use vgpu_transport::ir::Type;

use super::graph::Random;
use vgpu_cpu::formats::Format;

/// The shape of a model whose weights are random.
#[derive(Debug, Clone, Copy)]
pub struct SyntheticModel {
    /// Name, as given on the command line.
    pub name: &'static str,
    family: Family,
    weights: Weights,
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
enum Family {
    Llama,
    Qwen3Moe,
    GptOss,
}

/// Types of the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    F16,
    /// Q4_K; Q6_K for the output, and for attn_v and ffn_down in half of the layers.
    Q4KM,
    /// MXFP4 for experts, Q8_0 otherwise.
    Mxfp4,
}

/// The models of measurements, the most informative first and the largest last.
pub const SHAPES: [SyntheticModel; 5] = [
    LLAMA_8B,
    SyntheticModel {
        name: "gpt-oss-20b-mxfp4",
        family: Family::GptOss,
        weights: Weights::Mxfp4,
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
        family: Family::Qwen3Moe,
        weights: Weights::Q4KM,
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
        weights: Weights::F16,
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
    family: Family::Llama,
    weights: Weights::Q4KM,
    layers: 32,
    width: 4096,
    heads: 32,
    key_heads: 8,
    head: 128,
    inner: 14336,
    experts: None,
    vocabulary: 128_256,
};

/// Alignment of tensor data in bytes (`general.alignment`).
const ALIGN: u64 = 32;

/// A tensor of a file.
struct Entry {
    name: String,
    ty: Type,
    ne: Vec<u64>,
    /// Random values lie in [-amplitude, amplitude]; without it all are 1.
    amplitude: Option<f32>,
}

impl Entry {
    fn elements(&self) -> u64 {
        self.ne.iter().product()
    }

    fn bytes(&self) -> u64 {
        let rows = self.elements() / self.ne[0];
        rows * { self.ty.row_bytes(self.ne[0]) }.expect("rows of published models are whole blocks")
    }
}

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

/// A metadata value.
enum Value {
    Number(u32),
    Float(f32),
    Text(&'static str),
}

impl SyntheticModel {
    /// A small model of the same family.
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
        self.entries().iter().map(Entry::bytes).sum()
    }

    /// Bytes of weights that a decoded token reads: one row of the embedding table, and the experts that it uses.
    pub fn bytes_of_token(&self) -> u64 {
        let share = |entry: &Entry| match self.use_of(entry) {
            Use::Row => entry.bytes() / entry.ne[1],
            Use::Whole => entry.bytes(),
            Use::Share(used, all) => entry.bytes() / all * used,
        };
        self.entries().iter().map(share).sum()
    }

    /// Floating-point operations per token of a prefill of `tokens`: matrix products without the output, which only the last
    /// token needs, and causal attention.
    pub fn operations_of_token(&self, tokens: u64) -> u64 {
        let of = |entry: &Entry| match self.use_of(entry) {
            _ if entry.ne.len() < 2 || entry.name == OUTPUT => 0,
            Use::Row => 0,
            Use::Whole => 2 * entry.elements(),
            Use::Share(used, all) => 2 * entry.elements() / all * used,
        };
        let products: u64 = self.entries().iter().map(of).sum();
        // Q * K^T and P * V, each over half of the tokens on average.
        products + u64::from(self.layers) * 4 * self.heads * self.head * tokens / 2
    }

    /// The part of a tensor that a token reads.
    fn use_of(&self, entry: &Entry) -> Use {
        match (entry.ne.len(), self.experts) {
            _ if entry.name == TABLE => Use::Row,
            (3, Some((all, used))) => Use::Share(used, all),
            _ => Use::Whole,
        }
    }

    /// Writes a GGUF file (version 3, ggml's docs/gguf.md). Every call writes the same bytes.
    ///
    /// # Errors
    ///
    /// If `to` fails.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let entries = self.entries();
        let metadata = self.metadata();
        let mut head = Vec::new();
        head.extend(b"GGUF");
        head.extend(3u32.to_le_bytes());
        head.extend((entries.len() as u64).to_le_bytes());
        head.extend((metadata.len() as u64).to_le_bytes());
        for (key, value_of_key) in &metadata {
            text(&mut head, key);
            match value_of_key {
                Value::Number(value) => {
                    head.extend(4u32.to_le_bytes());
                    head.extend(value.to_le_bytes());
                }
                Value::Float(value) => {
                    head.extend(6u32.to_le_bytes());
                    head.extend(value.to_le_bytes());
                }
                Value::Text(value) => {
                    head.extend(8u32.to_le_bytes());
                    text(&mut head, value);
                }
            }
        }
        let mut offset = 0u64;
        for entry in &entries {
            text(&mut head, &entry.name);
            head.extend((entry.ne.len() as u32).to_le_bytes());
            for n in &entry.ne {
                head.extend(n.to_le_bytes());
            }
            head.extend((entry.ty as u32).to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += entry.bytes().next_multiple_of(ALIGN);
        }
        head.resize(head.len().next_multiple_of(ALIGN as usize), 0);
        to.write_all(&head)?;
        let mut random = Random::new(11);
        for entry in &entries {
            let some = content(entry, &mut random);
            let mut left = entry.bytes();
            while left > 0 {
                let part = &some[..some.len().min(left as usize)];
                to.write_all(part)?;
                left -= part.len() as u64;
            }
            let end = entry.bytes();
            let pad = end.next_multiple_of(ALIGN) - end;
            to.write_all(&[0; ALIGN as usize][..pad as usize])?;
        }
        to.flush()
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let arch = match self.family {
            Family::Llama => "llama",
            Family::Qwen3Moe => "qwen3moe",
            Family::GptOss => "gpt-oss",
        };
        let mut all = vec![
            ("general.architecture".into(), Value::Text(arch)),
            ("general.name".into(), Value::Text(self.name)),
            ("tokenizer.ggml.model".into(), Value::Text("no_vocab")),
        ];
        let mut add = |key: &str, value_of_key| all.push((format!("{arch}.{key}"), value_of_key));
        let number = |n: u64| Value::Number(n as u32);
        add("vocab_size", number(self.vocabulary));
        add("context_length", Value::Number(32768));
        add("embedding_length", number(self.width));
        add("block_count", Value::Number(self.layers));
        add("feed_forward_length", number(self.inner));
        add("attention.head_count", number(self.heads));
        add("attention.head_count_kv", number(self.key_heads));
        add("attention.key_length", number(self.head));
        add("attention.value_length", number(self.head));
        add("attention.layer_norm_rms_epsilon", Value::Float(1e-5));
        add("rope.dimension_count", number(self.head));
        add("rope.freq_base", Value::Float(500_000.0));
        if let Some((experts, used)) = self.experts {
            add("expert_count", number(experts));
            add("expert_used_count", number(used));
            add("expert_feed_forward_length", number(self.inner));
        }
        if self.family == Family::GptOss {
            add("attention.sliding_window", Value::Number(128));
        }
        all
    }

    fn entries(&self) -> Vec<Entry> {
        let SyntheticModel {
            width,
            heads,
            key_heads,
            head,
            inner,
            vocabulary,
            ..
        } = *self;
        let is_oss = self.family == Family::GptOss;
        let (plain, more, of_experts) = match self.weights {
            Weights::F16 => (Type::F16, Type::F16, Type::F16),
            Weights::Q4KM => (Type::Q4K, Type::Q6K, Type::Q4K),
            Weights::Mxfp4 => (Type::Q8_0, Type::Q8_0, Type::Mxfp4),
        };
        let mut all = Vec::new();
        let mut matrix = |name: String, ty: Type, ne: &[u64]| {
            all.push(Entry {
                name,
                ty,
                ne: ne.to_vec(),
                // Variance 1 / columns: products keep the variance of the activations.
                amplitude: (ne.len() > 1).then(|| (3.0 / ne[0] as f32).sqrt()),
            });
        };
        matrix(TABLE.into(), plain, &[width, vocabulary]);
        for layer in 0..self.layers {
            let at = |what: &str| format!("blk.{layer}.{what}");
            // Approximates llama-quantize: every other layer.
            let richer = if layer % 2 == 0 { more } else { plain };
            matrix(at("attn_norm.weight"), Type::F32, &[width]);
            for (what, rows, ty) in [
                ("attn_q", head * heads, plain),
                ("attn_k", head * key_heads, plain),
                ("attn_v", head * key_heads, richer),
            ] {
                matrix(at(&format!("{what}.weight")), ty, &[width, rows]);
                if is_oss {
                    matrix(at(&format!("{what}.bias")), Type::F32, &[rows]);
                }
            }
            matrix(at("attn_output.weight"), plain, &[head * heads, width]);
            match self.family {
                Family::Llama => {}
                Family::Qwen3Moe => {
                    matrix(at("attn_q_norm.weight"), Type::F32, &[head]);
                    matrix(at("attn_k_norm.weight"), Type::F32, &[head]);
                }
                Family::GptOss => {
                    matrix(at("attn_output.bias"), Type::F32, &[width]);
                    matrix(at("attn_sinks.weight"), Type::F32, &[heads]);
                }
            }
            let norm = match is_oss {
                true => "post_attention_norm.weight",
                false => "ffn_norm.weight",
            };
            matrix(at(norm), Type::F32, &[width]);
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
            matrix(at("ffn_gate_inp.weight"), Type::F32, &[width, experts]);
            if is_oss {
                matrix(at("ffn_gate_inp.bias"), Type::F32, &[experts]);
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
                        Type::F32,
                        &[rows, experts],
                    );
                }
            }
        }
        matrix("output_norm.weight".into(), Type::F32, &[width]);
        matrix(OUTPUT.into(), more, &[width, vocabulary]);
        all
    }
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// Elements of a tensor that are random; its rows repeat after them.
const ELEMENTS: u64 = 1 << 18;

/// The random rows of a tensor.
fn content(entry: &Entry, random: &mut Random) -> Vec<u8> {
    let columns = entry.ne[0];
    let rows = (ELEMENTS / columns).clamp(1, entry.elements() / columns);
    let n = (rows * columns) as usize;
    let values: Vec<f32> = { 0..n }
        .map(|_| {
            entry
                .amplitude
                .map_or(1.0, |amplitude| amplitude * random.number())
        })
        .collect();
    let format = Format::of(entry.ty).expect("weights are real numbers");
    let mut bytes = vec![0; format.row_bytes(n)];
    // SAFETY: `values` has `n` elements in whole blocks, and `bytes` has room for them.
    unsafe { (format.quantize_row)(values.as_ptr(), bytes.as_mut_ptr(), n) };
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_published_models() {
        let gigabytes = SHAPES.map(|model| model.bytes() as f64 / 1e9);
        for (got, want) in gigabytes.into_iter().zip([4.9, 12.1, 18.5, 16.1, 42.5]) {
            assert!((got / want - 1.0).abs() < 0.06, "{gigabytes:?}");
        }
    }

    #[test]
    fn a_token_needs_what_it_multiplies() {
        let of = |name: &str| SHAPES.into_iter().find(|model| model.name == name);
        let of = |name| of(name).expect("a model of this name");
        // By hand: 32 layers of two square matrices, two of keys and values, three of the feed-forward unit; the output.
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
    fn a_file_has_what_its_head_says() {
        for model in SHAPES {
            let small = model.small();
            let mut file = Vec::new();
            small.write(&mut file).unwrap();
            assert_eq!(&file[..4], b"GGUF");
            let entries = small.entries();
            let data: u64 = { entries.iter() }
                .map(|entry| entry.bytes().next_multiple_of(ALIGN))
                .sum();
            assert_eq!(file.len() as u64 % ALIGN, 0);
            let head = file.len() as u64 - data;
            assert!((1000..100_000).contains(&head), "{head}");
            let mut again = Vec::new();
            small.write(&mut again).unwrap();
            assert!(file == again);
        }
    }
}
