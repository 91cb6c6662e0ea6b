//! A language model with random weights at a real shape, and a real tokenizer.
//!
//! No weights can be fetched here, and none are needed: what moves over the boundary, which ops run
//! and how long they take depend on shapes and types alone.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use vgpu_gguf::{
    Metadata, RandomModel, RandomTensor, Rng, Tensor, TensorType, Value, use_more_bits,
};

pub use vgpu_gguf::FileType;

use crate::cache::Cache;
use crate::llama;
use crate::progress::Progress;

/// The vocabulary-only file in llama.cpp's sources whose tokenizer the models get.
const VOCABULARY: &str = "models/ggml-vocab-llama-spm.gguf";
/// Any number; the same one gives the same model, and the same text.
const SEED: u64 = 1;
/// Changes whenever the same arguments would give another file, so that an old cached one is not
/// taken for it.
const REVISION: u32 = 2;
/// Standard deviation of the embedding; the layers add about 2.
const EMBEDDING_SD: f32 = 0.8;

/// The type of one matrix of a model whose output matrix has the numbers of its embedding.
fn matrix_type(file_type: FileType, role: Role, layer: u32, layers: u32) -> TensorType {
    match role {
        Role::Vocabulary => file_type.output(),
        Role::Value | Role::Down if use_more_bits(layer.into(), layers.into()) => {
            file_type.more_bits()
        }
        Role::Value | Role::Down | Role::Other => file_type.base(),
    }
}

/// Parses the name of a [`FileType`] on a command line.
pub fn file_type_parser() -> impl TypedValueParser<Value = FileType> {
    let names = FileType::ALL.map(FileType::name);
    PossibleValuesParser::new(names).map(|name| {
        let named = FileType::ALL.into_iter().find(|one| one.name() == name);
        named.expect("the parser accepts these names only")
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Vocabulary,
    Value,
    Down,
    Other,
}

/// The hyper-parameters of a llama model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The name on command lines and in file names; for a shape, the model's name.
    pub name: &'static str,
    /// Width of the embedding.
    pub embedding: u64,
    /// Width of the feed-forward layers.
    pub feed_forward: u64,
    /// Number of layers.
    pub layers: u32,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values: fewer than `heads` with grouped-query attention.
    pub kv_heads: u64,
    /// Context length in tokens.
    pub context: u32,
}

/// The shape of the small published llama of 160 million parameters (width 768, 12 layers, 12
/// heads of 64, feed-forward 3072), with grouped-query attention as larger llamas have it.
pub const DEMO: Shape = Shape {
    name: "vgpu-llama-153m",
    embedding: 768,
    feed_forward: 3072,
    layers: 12,
    heads: 12,
    kv_heads: 4,
    context: 2048,
};

/// 256 million parameters in 30 narrow layers: what crosses the boundary, and what it costs to say
/// so, grows with the layers.
pub const BENCH: Shape = Shape {
    name: "vgpu-llama-256m",
    embedding: 768,
    feed_forward: 2304,
    layers: 30,
    heads: 12,
    kv_heads: 4,
    context: 2048,
};

/// The shape of the published llama of 1.1 billion parameters: weights that no cache holds.
pub const LARGE: Shape = Shape {
    name: "vgpu-llama-1b",
    embedding: 2048,
    feed_forward: 5632,
    layers: 22,
    heads: 32,
    kv_heads: 4,
    context: 2048,
};

/// For an emulated guest: the smallest shape with everything in it.
pub const TINY: Shape = Shape {
    name: "vgpu-llama-tiny",
    embedding: 256,
    feed_forward: 512,
    layers: 4,
    heads: 4,
    kv_heads: 2,
    context: 512,
};

impl Shape {
    /// Bytes of the cached keys and values of so many tokens, in halves.
    pub fn cache_bytes(&self, tokens: u64) -> u64 {
        let head = self.embedding / self.heads;
        2 * 2 * u64::from(self.layers) * self.kv_heads * head * tokens
    }

    fn head_dim(&self) -> u64 {
        self.embedding / self.heads
    }

    /// All tensors, by the names llama.cpp looks for.
    ///
    /// The output matrix is the embedding with its rows shuffled, and otherwise random: every
    /// token has a successor that the model is fairly sure of. Trained models are; the logits of a
    /// purely random one lie so close together that rounding alone, which no two implementations
    /// share, would decide between the first two every few tokens.
    fn tensors(&self, file_type: FileType, vocabulary: u32, seed: u64) -> Vec<RandomTensor> {
        let (d, ff, kv) = (
            self.embedding,
            self.feed_forward,
            self.kv_heads * self.head_dim(),
        );
        let matrix = |name: String, inputs: u64, outputs: u64, role, layer| RandomTensor {
            tensor: Tensor {
                name,
                dims: vec![inputs, outputs],
                kind: matrix_type(file_type, role, layer, self.layers),
            },
            mean: 0.0,
            // Keeps the deviation of the activations, as a trained model roughly does.
            sd: (inputs as f32).sqrt().recip(),
            stream: 0,
            order: None,
        };
        let norm = |name: String| RandomTensor {
            tensor: Tensor {
                name,
                dims: vec![d],
                kind: TensorType::F32,
            },
            mean: 1.0,
            sd: 0.05,
            stream: 0,
            order: None,
        };

        let words = u64::from(vocabulary);
        let mut all = Vec::new();
        all.push(RandomTensor {
            sd: EMBEDDING_SD,
            ..matrix("token_embd.weight".into(), d, words, Role::Vocabulary, 0)
        });
        for layer in 0..self.layers {
            let named = |what: &str| format!("blk.{layer}.{what}.weight");
            all.extend([
                norm(named("attn_norm")),
                matrix(named("attn_q"), d, d, Role::Other, layer),
                matrix(named("attn_k"), d, kv, Role::Other, layer),
                matrix(named("attn_v"), d, kv, Role::Value, layer),
                matrix(named("attn_output"), d, d, Role::Other, layer),
                norm(named("ffn_norm")),
                matrix(named("ffn_gate"), d, ff, Role::Other, layer),
                matrix(named("ffn_up"), d, ff, Role::Other, layer),
                matrix(named("ffn_down"), ff, d, Role::Down, layer),
            ]);
        }
        all.push(norm("output_norm.weight".into()));
        (0..)
            .zip(&mut all)
            .for_each(|(stream, plan)| plan.stream = stream);

        let embedding = all[0].stream;
        all.push(RandomTensor {
            stream: embedding,
            order: Some(shuffled(vocabulary, &mut Rng::new(seed, u64::MAX))),
            ..matrix("output.weight".into(), d, words, Role::Vocabulary, 0)
        });
        all
    }

    fn metadata(&self, file_type: FileType, vocabulary: u32, tokenizer: Metadata) -> Metadata {
        let mut m = Metadata::default();
        m.set("general.architecture", "llama");
        m.set("general.name", self.name);
        m.set("general.file_type", file_type.id());
        m.set("llama.vocab_size", vocabulary);
        m.set("llama.context_length", self.context);
        m.set("llama.embedding_length", self.embedding as u32);
        m.set("llama.block_count", self.layers);
        m.set("llama.feed_forward_length", self.feed_forward as u32);
        m.set("llama.attention.head_count", self.heads as u32);
        m.set("llama.attention.head_count_kv", self.kv_heads as u32);
        m.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
        m.set("llama.rope.dimension_count", self.head_dim() as u32);
        m.extend(tokenizer);
        m
    }
}

/// The path of the model in the cache. Writes the model if the cache has none.
///
/// # Errors
/// If the vocabulary cannot be fetched or read, or the file system refuses.
pub fn ensure(cache: &Cache, shape: &Shape, file_type: FileType) -> Result<PathBuf> {
    let name = format!(
        "{}-{}-seed{SEED}-r{REVISION}.gguf",
        shape.name,
        file_type.name()
    );
    let vocabulary = llama::source(cache)?.join(VOCABULARY);
    cache.file(&name, |path| {
        write(path, shape, file_type, &vocabulary, SEED)
    })
}

/// A folder of the cache with the model of [`ensure`] in two files, named as `llama-gguf-split`
/// names them.
///
/// # Errors
/// As [`ensure`].
pub fn ensure_split(cache: &Cache, shape: &Shape, file_type: FileType) -> Result<PathBuf> {
    let name = format!(
        "{}-{}-seed{SEED}-r{REVISION}-split",
        shape.name,
        file_type.name()
    );
    let vocabulary = llama::source(cache)?.join(VOCABULARY);
    cache.folder(&name, |dir| {
        let (metadata, tensors) = contents(shape, file_type, &vocabulary, SEED)?;
        for (number, (metadata, tensors)) in split(metadata, tensors)?.into_iter().enumerate() {
            let file = dir.join(format!("model-{:05}-of-00002.gguf", number + 1));
            write_file(&file, shape.name, &metadata, tensors, SEED)?;
        }
        Ok(())
    })
}

/// The metadata and the tensors of the two files of a model. Only the first file has metadata of
/// the model.
fn split(
    mut metadata: Metadata,
    mut tensors: Vec<RandomTensor>,
) -> Result<[(Metadata, Vec<RandomTensor>); 2]> {
    let count = i32::try_from(tensors.len()).context("counting the tensors")?;
    let rest = tensors.split_off(tensors.len() / 2);
    let mut second = Metadata::default();
    for (number, metadata) in [(0, &mut metadata), (1, &mut second)] {
        metadata.set("split.no", Value::U16(number));
        metadata.set("split.count", Value::U16(2));
        metadata.set("split.tensors.count", Value::I32(count));
    }
    Ok([(metadata, tensors), (second, rest)])
}

/// Writes the model to `path`; `vocabulary` is a GGUF file whose tokenizer it takes over.
fn write(
    path: &Path,
    shape: &Shape,
    file_type: FileType,
    vocabulary: &Path,
    seed: u64,
) -> Result<()> {
    let (metadata, tensors) = contents(shape, file_type, vocabulary, seed)?;
    let name = format!("{} {}", shape.name, file_type.name());
    write_file(path, &name, &metadata, tensors, seed)
}

/// What a model consists of.
fn contents(
    shape: &Shape,
    file_type: FileType,
    vocabulary: &Path,
    seed: u64,
) -> Result<(Metadata, Vec<RandomTensor>)> {
    let source = File::open(vocabulary)
        .with_context(|| format!("opening the vocabulary {}", vocabulary.display()))?;
    let tokenizer = Metadata::read(&mut BufReader::new(source))
        .with_context(|| format!("reading the vocabulary {}", vocabulary.display()))?
        .with_prefix("tokenizer.");
    let Some(Value::Array(_, tokens)) = tokenizer.get("tokenizer.ggml.tokens") else {
        anyhow::bail!("{} has no tokenizer.ggml.tokens", vocabulary.display());
    };
    let tokens = u32::try_from(tokens.len()).context("counting the tokens")?;

    Ok((
        shape.metadata(file_type, tokens, tokenizer),
        shape.tensors(file_type, tokens, seed),
    ))
}

/// Writes one file of the model `name`.
fn write_file(
    path: &Path,
    name: &str,
    metadata: &Metadata,
    tensors: Vec<RandomTensor>,
    seed: u64,
) -> Result<()> {
    let count = tensors.len();
    let model =
        RandomModel::new(metadata, tensors, seed).with_context(|| format!("laying out {name}"))?;

    let progress = Progress::with_total(
        &format!(
            "writing {name}: {:.0} M random parameters, {count} tensors",
            model.parameters() as f64 / 1e6,
        ),
        model.file_bytes(),
    );
    let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
    model
        .write(&file, |bytes| progress.advance(bytes))
        .with_context(|| format!("writing {}", path.display()))?;
    file.sync_all().context("flushing the model")?;
    progress.done(&format!("{} MiB", model.file_bytes() >> 20));
    Ok(())
}

/// The numbers below `count` in random order (Fisher and Yates).
fn shuffled(count: u32, rng: &mut Rng) -> Arc<[u32]> {
    let mut order: Vec<_> = (0..count).collect();
    for last in (1..order.len()).rev() {
        // The remainder's bias is one in 2^64 / count.
        order.swap(last, (rng.next_u64() % (last as u64 + 1)) as usize);
    }
    order.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const TINY: Shape = Shape {
        name: "tiny",
        embedding: 256,
        feed_forward: 512,
        layers: 8,
        heads: 4,
        kv_heads: 2,
        context: 64,
    };

    fn vocabulary(dir: &Path) -> PathBuf {
        let mut m = Metadata::default();
        m.set("general.architecture", "llama");
        m.set("tokenizer.ggml.model", "llama");
        m.set(
            "tokenizer.ggml.tokens",
            Value::Array(8, vec!["<unk>".into(), "a".into()]),
        );
        let path = dir.join("vocabulary.gguf");
        std::fs::write(&path, vgpu_gguf::lay_out(&m, &[]).unwrap().head).unwrap();
        path
    }

    #[test]
    fn model_copies_the_tokenizer_and_is_reproducible() {
        let scratch = Scratch::new().unwrap();
        let vocabulary = vocabulary(scratch.path());
        let made = |name: &str, seed| {
            let path = scratch.path().join(name);
            write(&path, &TINY, FileType::Q4KM, &vocabulary, seed).unwrap();
            std::fs::read(path).unwrap()
        };
        let (first, again, other) = (made("a", 1), made("b", 1), made("c", 2));

        assert!(first == again, "the same seed gave another file");
        assert!(first != other, "another seed gave the same file");
        let metadata = Metadata::read(&mut first.as_slice()).unwrap();
        assert_eq!(metadata.get("general.name"), Some(&"tiny".into()));
        assert_eq!(metadata.get("tokenizer.ggml.model"), Some(&"llama".into()));
        assert_eq!(metadata.get("llama.vocab_size"), Some(&Value::U32(2)));
    }

    #[test]
    fn the_q4_k_m_mix_is_that_of_llama_quantize() {
        let six_bits = |role| {
            (0..12)
                .filter(|&l| matrix_type(FileType::Q4KM, role, l, 12) == TensorType::Q6K)
                .collect::<Vec<_>>()
        };
        // Of twelve layers: the first eighth, the last eighth, and every third between.
        assert_eq!(six_bits(Role::Down), [0, 3, 6, 9, 10, 11]);
        assert_eq!(six_bits(Role::Value), six_bits(Role::Down));
        assert!(six_bits(Role::Other).is_empty());
        assert_eq!(
            matrix_type(FileType::Q4KM, Role::Vocabulary, 0, 12),
            TensorType::Q6K
        );
        assert_eq!(
            matrix_type(FileType::F16, Role::Vocabulary, 0, 12),
            TensorType::F16
        );
    }

    #[test]
    fn output_rows_are_permuted_embedding_rows() {
        let all = TINY.tensors(FileType::F16, 100, 1);
        let (embedding, output) = (&all[0], all.last().unwrap());
        let order = output.order.as_ref().unwrap();
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_ne!(sorted[..], order[..]);
        let source = u64::from(order[5]);
        assert_eq!(
            output.rng(1, 5).next_u64(),
            embedding.rng(1, source).next_u64()
        );
        // All other tensors have numbers of their own.
        let streams: std::collections::HashSet<_> = all.iter().map(|p| p.stream).collect();
        assert_eq!(streams.len(), all.len() - 1);
    }

    #[test]
    fn model_sizes_match_their_names() {
        for (shape, millions) in [(DEMO, 153.0), (BENCH, 256.0), (LARGE, 1100.0)] {
            let tensors = shape.tensors(FileType::F16, 32_000, 1);
            let parameters: u64 = tensors.iter().map(|p| p.tensor.elements()).sum();
            assert_eq!((parameters as f64 / 1e6).round(), millions);
        }
    }
    /// Cached files are named by shape, weights, seed and [`REVISION`]: their bytes must not change
    /// without a new revision.
    #[test]
    fn bytes_of_a_seed_are_fixed() {
        let scratch = Scratch::new().unwrap();
        let vocabulary = vocabulary(scratch.path());
        let sums = [
            (
                FileType::F16,
                "9ce279584871324ab0a899079b0ac04064f4fe2f6c8ad2746de592a125ee73a0",
            ),
            (
                FileType::Q8_0,
                "36faa27df8b035bb5a012644bda881be4acd73f514453397fdd89ba54b85f884",
            ),
            (
                FileType::Q4_0,
                "293356b8302fc2157ee4bf9ee543163804b4142a3226f2a0ccef883597754820",
            ),
            (
                FileType::Q4KM,
                "47b3da0639c23f3fbe0b9daccc6ae879e440c49529b1397151f31c901cd226a5",
            ),
            (
                FileType::Q6K,
                "80de38ccaf93a230ecbf025722e981ef9a6d3fe1918166eb9891fe5547be2073",
            ),
            (
                FileType::Iq4Nl,
                "c011bcbc5aa645948e271a695999b4980b5de72113acedd3721d39f7a5f93be5",
            ),
            (
                FileType::Mxfp4,
                "6f1f0b53d46db562901ab674e751347fa610a9306728e5b2954467922ccd7444",
            ),
        ];
        for (file_type, sum) in sums {
            let path = scratch.path().join(file_type.name());
            write(&path, &TINY, file_type, &vocabulary, SEED).unwrap();
            let hash = blake3::hash(&std::fs::read(path).unwrap()).to_hex();
            assert_eq!((REVISION, hash.as_str()), (2, sum), "{file_type:?}");
        }
    }
}
