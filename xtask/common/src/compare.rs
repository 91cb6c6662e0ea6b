//! Two greedy generations of the same model, side by side.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::model::FileType;

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

/// The first difference of two generations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// Index of the first token that differs.
    pub at: usize,
    /// The reference's log-probability of its own token minus that of the other token. `None` if
    /// the reference does not list the other token.
    pub log_probability_gap: Option<f64>,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Tokens that were compared.
    pub tokens: usize,
    /// Where the two sides chose different tokens, if they did.
    pub divergence: Option<Divergence>,
    /// The largest difference between log-probabilities of the same token after the same text.
    pub largest_difference: f64,
}

/// Compares `other` with `reference`. Behind the first different token the two continue different
/// texts, so nothing after it is compared.
pub fn compare(reference: &[Choice], other: &[Choice]) -> Comparison {
    let mut comparison = Comparison {
        tokens: reference.len().min(other.len()),
        divergence: (reference.len() != other.len()).then(|| Divergence {
            at: reference.len().min(other.len()),
            log_probability_gap: None,
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
            let log_probability_gap =
                || Some(a.logprobs.get(&a.token)? - a.logprobs.get(&b.token)?);
            comparison.divergence = Some(Divergence {
                at,
                log_probability_gap: log_probability_gap(),
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
pub fn tolerance(file_type: FileType) -> f64 {
    match file_type {
        FileType::F16 => 0.05,
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
        assert_eq!(comparison.divergence, None);
        assert_eq!(comparison.tokens, 2);
        assert!((comparison.largest_difference - 0.25).abs() < 1e-12);
    }

    #[test]
    fn tokens_after_the_first_difference_are_not_compared() {
        let a = [choice(1, &[(1, -0.5), (2, -0.6)]), choice(3, &[(3, -1.0)])];
        let b = [choice(2, &[(2, -0.5), (1, -0.6)]), choice(3, &[(3, -9.0)])];
        let comparison = compare(&a, &b);
        let divergence = comparison.divergence.unwrap();
        assert_eq!(divergence.at, 0);
        assert!((divergence.log_probability_gap.unwrap() - 0.1).abs() < 1e-12);
        assert!((comparison.largest_difference - 0.1).abs() < 1e-12);
    }

    #[test]
    fn unconsidered_token_and_missing_end_are_differences() {
        let a = [choice(1, &[(1, -0.5)]), choice(2, &[])];
        let far = compare(&a, &[choice(7, &[(7, -0.5)]), choice(2, &[])]);
        assert_eq!(
            far.divergence,
            Some(Divergence {
                at: 0,
                log_probability_gap: None
            })
        );
        let short = compare(&a, &a[..1]);
        assert_eq!(
            short.divergence,
            Some(Divergence {
                at: 1,
                log_probability_gap: None
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
