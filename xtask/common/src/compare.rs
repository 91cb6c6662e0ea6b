//! Two greedy generations of the same model, side by side.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::model::Weights;

/// One generated token and the largest log-probabilities it was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token that was chosen.
    pub token: u64,
    /// Log-probabilities of the most probable tokens, by token.
    pub logprobs: HashMap<u64, f64>,
}

impl Choice {
    /// Reads `{"token": id, "logprobs": [[id, logprob], ...]}`.
    ///
    /// # Errors
    /// If a key is missing or has another type.
    pub fn parse(value: &Value) -> Result<Choice> {
        let pair = |pair: &Value| Some((pair.get(0)?.as_u64()?, pair.get(1)?.as_f64()?));
        let pairs = value
            .get("logprobs")
            .and_then(Value::as_array)
            .context("no logprobs")?;
        Ok(Choice {
            token: value
                .get("token")
                .and_then(Value::as_u64)
                .context("no token")?,
            logprobs: pairs
                .iter()
                .map(pair)
                .collect::<Option<_>>()
                .context("odd logprobs")?,
        })
    }
}

/// Where two generations part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parting {
    /// Index of the first token that differs.
    pub at: usize,
    /// By how much the reference preferred its own token; nothing if it did not even consider the
    /// other one.
    pub margin: Option<f64>,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Tokens that were compared.
    pub tokens: usize,
    /// Where the two sides chose different tokens, if they did.
    pub parting: Option<Parting>,
    /// The largest difference between log-probabilities of the same token after the same text.
    pub largest_difference: f64,
}

/// Compares `other` with `reference`. Behind the first different token the two continue different
/// texts, so nothing after it is compared.
pub fn compare(reference: &[Choice], other: &[Choice]) -> Comparison {
    let mut comparison = Comparison {
        tokens: reference.len().min(other.len()),
        parting: (reference.len() != other.len()).then(|| Parting {
            at: reference.len().min(other.len()),
            margin: None,
        }),
        largest_difference: 0.0,
    };
    for (at, (a, b)) in reference.iter().zip(other).enumerate() {
        for (token, logprob) in &a.logprobs {
            if let Some(other) = b.logprobs.get(token) {
                let difference = (logprob - other).abs();
                comparison.largest_difference = comparison.largest_difference.max(difference);
            }
        }
        if a.token != b.token {
            let margin = || Some(a.logprobs.get(&a.token)? - a.logprobs.get(&b.token)?);
            comparison.parting = Some(Parting {
                at,
                margin: margin(),
            });
            break;
        }
    }
    comparison
}

/// The largest difference of logits that rounding explains.
///
/// ggml's CPU backend against itself, with flash attention and without, differs by 0.006 (F16) and
/// 0.12 (Q4_K_M, whose activations are rounded to eight bits before every product) on the demo
/// model; the bounds leave several times that for another order of summation in every op.
pub fn tolerance(weights: Weights) -> f64 {
    match weights {
        Weights::F16 => 0.05,
        // All quantised types round activations to eight bits.
        _ => 0.5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn choice(token: u64, logprobs: &[(u64, f64)]) -> Choice {
        Choice {
            token,
            logprobs: logprobs.iter().copied().collect(),
        }
    }

    #[test]
    fn equal_tokens_compare_all_logprobs() {
        let a = [choice(1, &[(1, -0.5), (2, -3.0)]), choice(4, &[(4, -0.1)])];
        let b = [
            choice(1, &[(1, -0.4), (2, -3.25)]),
            choice(4, &[(4, -0.1), (9, -8.0)]),
        ];
        let comparison = compare(&a, &b);
        assert_eq!(comparison.parting, None);
        assert_eq!(comparison.tokens, 2);
        assert!((comparison.largest_difference - 0.25).abs() < 1e-12);
    }

    #[test]
    fn tokens_after_the_first_difference_are_not_compared() {
        let a = [choice(1, &[(1, -0.5), (2, -0.6)]), choice(3, &[(3, -1.0)])];
        let b = [choice(2, &[(2, -0.5), (1, -0.6)]), choice(3, &[(3, -9.0)])];
        let comparison = compare(&a, &b);
        let parting = comparison.parting.unwrap();
        assert_eq!(parting.at, 0);
        assert!((parting.margin.unwrap() - 0.1).abs() < 1e-12);
        assert!((comparison.largest_difference - 0.1).abs() < 1e-12);
    }

    #[test]
    fn unconsidered_token_and_missing_end_are_differences() {
        let a = [choice(1, &[(1, -0.5)]), choice(2, &[])];
        let far = compare(&a, &[choice(7, &[(7, -0.5)]), choice(2, &[])]);
        assert_eq!(
            far.parting,
            Some(Parting {
                at: 0,
                margin: None
            })
        );
        let short = compare(&a, &a[..1]);
        assert_eq!(
            short.parting,
            Some(Parting {
                at: 1,
                margin: None
            })
        );
    }

    #[test]
    fn output_format_of_the_host_program_is_parsed() {
        let value = json!({"token": 5, "logprobs": [[5, -0.25], [6, -2.0]]});
        assert_eq!(
            Choice::parse(&value).unwrap(),
            choice(5, &[(5, -0.25), (6, -2.0)])
        );
        assert!(Choice::parse(&json!({"token": 5})).is_err());
    }
}
