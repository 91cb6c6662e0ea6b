//! Greedy decoding on two engines with small models of each family: how many tokens are equal.

use vgpu_transport::ir::Type;

use super::CheckError;
use super::model::{Family, Model, StepShape};
use super::steps::{Selection, Step};
use vgpu_engine::Engine;

/// The largest number of tokens to decode.
pub const MAX_TOKENS: u64 = 64;

/// Tolerance of a logit, relative to the root mean square of the logits. The engines add in another
/// order before they quantise activations, and MoE experts of nearly equal probability may swap.
const TOLERANCE: f32 = 1e-1;

/// The outcome of decoding with a model.
#[derive(Debug, Clone)]
pub struct Decoding {
    /// Family and weight type of the model.
    pub name: String,
    /// Tokens compared, and how many agree. A token also agrees if the reference gives it nearly
    /// the logit of its own choice.
    pub outcome: Result<(u64, u64), CheckError>,
}

impl Decoding {
    /// Whether all tokens agree.
    pub fn is_same(&self) -> bool {
        matches!(self.outcome, Ok((all, same)) if all == same)
    }
}

/// Place, name, type of weights, family and experts of a model.
type Entry<'a> = (usize, (&'a str, Type, Family, Option<(u64, u64)>));

pub(super) fn run(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
    selection: &Selection<'_>,
    mut seen: impl FnMut(Step<'_, Decoding>),
) -> Vec<Decoding> {
    let experts = Some((8, 2));
    let models = [
        ("llama, Q4_K", Type::Q4K, Family::Llama, None),
        ("llama, F16", Type::F16, Family::Llama, None),
        ("qwen2, Q8_0", Type::Q8_0, Family::Qwen2, None),
        ("qwen3moe, Q4_K", Type::Q4K, Family::Llama, experts),
        ("gpt-oss, MXFP4", Type::Mxfp4, Family::GptOss, experts),
    ];
    let decode = |(index, (name, weights, family, experts)): Entry<'_>| {
        seen(Step::Begins { index, name });
        let model = Model {
            context: MAX_TOKENS,
            ..Model::small(weights, family, experts)
        };
        let decoding = Decoding {
            name: name.into(),
            outcome: compare(model, engine, oracle, tokens.min(MAX_TOKENS)),
        };
        seen(Step::Ends(&decoding));
        decoding
    };
    let selected =
        { models.into_iter().enumerate() }.filter(|(at, model)| selection.has(*at, model.0));
    selected.map(decode).collect()
}

fn compare(
    model: Model,
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
) -> Result<(u64, u64), CheckError> {
    let built = model.graph(StepShape {
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
            plan.run()?;
            logits.push(built.read_result(loaded));
        }
        let [got, want] = [best(&logits[0]), best(&logits[1])];
        let size = logits[1].iter().map(|x| x * x).sum::<f32>() / logits[1].len() as f32;
        let is_close = logits[1][want] - logits[1][got] <= TOLERANCE * size.sqrt();
        all += 1;
        same += u64::from(got == want || is_close);
        token = want;
    }
    Ok((all, same))
}

/// Index of the largest logit.
fn best(logits: &[f32]) -> usize {
    let all = logits.iter().enumerate();
    all.max_by(|a, b| a.1.total_cmp(b.1))
        .map_or(0, |(at, _)| at)
}
