//! Whether an engine writes the same text as another: small models of each family, the most probable token each time.

use vgpu_transport::ir::Type;

use super::model::{Family, Model, Step, TINY};
use vgpu_engine::Engine;

/// Most tokens of a text.
pub const MOST_TOKENS: u64 = 64;

/// What the two best tokens of the oracle must be apart, beside its logits as a whole, for them to be told apart: activations
/// are rounded to 8 bits in another order, and two experts that are nearly as probable change places.
const APART: f32 = 1e-1;

/// The texts of a model.
#[derive(Debug, Clone)]
pub struct Text {
    /// Which model.
    pub name: String,
    /// Tokens that were compared, and of them those that are the same. Where the oracle itself hardly prefers its token, the
    /// other is as right.
    pub outcome: Result<(u64, u64), String>,
}

impl Text {
    /// Whether all tokens are the same.
    pub fn is_same(&self) -> bool {
        matches!(self.outcome, Ok((all, same)) if all == same)
    }
}

pub(super) fn run(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
    mut seen: impl FnMut(&Text),
) -> Vec<Text> {
    let base = Model {
        width: 256,
        heads: 8,
        key_heads: 2,
        head: 32,
        inner: 512,
        vocabulary: 512,
        context: MOST_TOKENS,
        ..TINY
    };
    let experts = Some((8, 2));
    let models = [
        ("llama, Q4_K", Type::Q4K, Family::Llama, None),
        ("llama, F16", Type::F16, Family::Llama, None),
        ("qwen2, Q8_0", Type::Q8_0, Family::Qwen2, None),
        ("qwen3moe, Q4_K", Type::Q4K, Family::Llama, experts),
        ("gpt-oss, MXFP4", Type::Mxfp4, Family::GptOss, experts),
    ];
    let text = |(name, weights, family, experts): (&str, Type, Family, Option<(u64, u64)>)| {
        let model = Model {
            weights,
            family,
            experts,
            norms_heads: family == Family::Llama && experts.is_some(),
            ..base
        };
        let text = Text {
            name: name.into(),
            outcome: compare(model, engine, oracle, tokens.min(MOST_TOKENS)),
        };
        seen(&text);
        text
    };
    models.into_iter().map(text).collect()
}

fn compare(
    model: Model,
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
) -> Result<(u64, u64), String> {
    let built = model.graph(Step {
        tokens: 1,
        seen: model.context,
    });
    let mut sides = [engine, oracle].map(|engine| {
        let loaded = built.load(engine);
        let plan = built.compile(engine, &loaded);
        (loaded, plan)
    });
    let (mut token, mut all, mut same) = (1, 0, 0);
    for position in 0..tokens {
        let mut logits = Vec::new();
        for (loaded, plan) in &mut sides {
            built.write_inputs(loaded, position);
            built.write_input(loaded, "tokens", token as i64);
            plan.run().map_err(|error| error.to_string())?;
            logits.push(built.read_result(loaded));
        }
        let [got, want] = [best(&logits[0]), best(&logits[1])];
        let size = logits[1].iter().map(|x| x * x).sum::<f32>() / logits[1].len() as f32;
        let is_close = logits[1][want] - logits[1][got] <= APART * size.sqrt();
        all += 1;
        same += u64::from(got == want || is_close);
        token = want;
    }
    Ok((all, same))
}

/// The largest.
fn best(logits: &[f32]) -> usize {
    let all = logits.iter().enumerate();
    all.max_by(|a, b| a.1.total_cmp(b.1))
        .map_or(0, |(at, _)| at)
}
