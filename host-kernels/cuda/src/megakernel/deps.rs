//! Dependencies of stages: the fewest waits that keep all stages with common memory in order.

use super::access::{MemoryAccess, overlap};
use crate::params::VG_MAX_WAITS;

/// What a stage waits for, by the numbers of stages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StageDeps {
    pub(crate) waits: Vec<usize>,
    /// 1 plus the number of the stage that a block must have begun before it prefetches weights of
    /// this stage. 0: no restriction.
    pub(crate) from: usize,
}

/// Two stages that are not in order, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OrderError {
    #[error("stage {stage} waits for {wait}, which comes later")]
    WaitsForLater { stage: usize, wait: usize },
    #[error("stage {stage} {what}, but does not wait for {before}")]
    MissingWait {
        stage: usize,
        what: &'static str,
        before: usize,
    },
    #[error("stage {stage} fetches before {before} is done")]
    FetchesEarly { stage: usize, before: usize },
}

/// A set of stages.
#[derive(Clone)]
struct Set(Vec<u64>);

impl Set {
    fn none(count: usize) -> Set {
        Set(vec![0; count.div_ceil(64)])
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 != 0
    }

    fn add(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    fn add_all(&mut self, other: &Set) {
        for (to, from) in self.0.iter_mut().zip(&other.0) {
            *to |= from;
        }
    }

    fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// The dependencies of the first stages, up to a stage that would wait for more than
/// [`VG_MAX_WAITS`].
pub(crate) fn order(stages: &[&MemoryAccess]) -> Vec<StageDeps> {
    let mut all: Vec<StageDeps> = Vec::with_capacity(stages.len());
    // For each stage, all stages that are done before it begins.
    let mut before: Vec<Set> = Vec::with_capacity(stages.len());
    for (at, stage) in stages.iter().enumerate() {
        let mut mine = Set::none(stages.len());
        let mut order = StageDeps::default();
        for other in (0..at).rev() {
            if mine.has(other) || !stages[other].conflicts(stage) {
                continue;
            }
            order.waits.push(other);
            mine.add(other);
            mine.add_all(&before[other]);
            if mine.len() == at {
                break;
            }
        }
        if order.waits.len() > VG_MAX_WAITS as usize {
            break;
        }
        before.push(mine);
        order.from = fetched_from(stages, &before, at);
        all.push(order);
    }
    all
}

/// The stage from which on the weights of stage `at` may be prefetched.
fn fetched_from(stages: &[&MemoryAccess], before: &[Set], at: usize) -> usize {
    let stage = stages[at];
    let mut writers = stages[..at].iter().map(|other| &other.written);
    if writers.any(|written| overlap(written, &stage.ahead)) {
        return at + 1;
    }
    let choosers: Vec<usize> = { 0..at }
        .filter(|&other| overlap(&stages[other].written, &stage.ids))
        .collect();
    if choosers.is_empty() {
        return 0;
    }
    // A block that has begun one of these stages knows that the ids are written.
    let waited = |stage: &usize| choosers.iter().all(|&other| before[*stage].has(other));
    let first = { 0..=at }.rev().take_while(waited).last();
    first.map_or(at + 1, |first| first + 1)
}

/// Checks dependencies: stages with common memory are ordered by a path of waits. Written from the
/// requirement, independently of [`order`].
///
/// # Errors
/// The two stages that are not in order.
pub(crate) fn verify(stages: &[&MemoryAccess], order: &[StageDeps]) -> Result<(), OrderError> {
    let count = stages.len();
    // reaches[b][a]: a block that has begun b knows that a is done.
    let mut reaches = vec![vec![false; count]; count];
    for b in 0..count {
        for &wait in &order[b].waits {
            if wait >= b {
                return Err(OrderError::WaitsForLater { stage: b, wait });
            }
            for a in 0..count {
                if a == wait || reaches[wait][a] {
                    reaches[b][a] = true;
                }
            }
        }
    }
    for b in 0..count {
        let MemoryAccess {
            read,
            written,
            ahead,
            ids,
        } = stages[b];
        for a in 0..b {
            let before = stages[a];
            let shared = [
                (&before.written, read, "reads what it writes"),
                (&before.written, written, "writes what it writes"),
                (&before.read, written, "writes what it reads"),
                (&before.ahead, written, "writes weights that it reads"),
                (&before.written, ahead, "reads weights that it writes"),
            ];
            for (its, mine, what) in shared {
                if overlap(its, mine) && !reaches[b][a] {
                    return Err(OrderError::MissingWait {
                        stage: b,
                        what,
                        before: a,
                    });
                }
            }
            // A block prefetches when it has begun some stage from `from - 1` on.
            if overlap(&before.written, ahead) || overlap(&before.written, ids) {
                let from = order[b].from;
                if from == 0 || (from - 1..=b).any(|begun| !reaches[begun][a]) {
                    return Err(OrderError::FetchesEarly {
                        stage: b,
                        before: a,
                    });
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vgpu_gguf::Rng;

    use super::*;

    fn stage(read: &[u64], written: &[u64]) -> MemoryAccess {
        let bytes = |all: &[u64]| all.iter().map(|&at| at..at + 8).collect();
        MemoryAccess {
            read: bytes(read),
            written: bytes(written),
            ..MemoryAccess::default()
        }
    }

    fn order_of(stages: &[MemoryAccess]) -> Vec<StageDeps> {
        let stages: Vec<&MemoryAccess> = stages.iter().collect();
        let order = order(&stages);
        assert_eq!(order.len(), stages.len());
        verify(&stages, &order).expect("orders are right");
        order
    }

    #[test]
    fn independent_stages_do_not_wait() {
        let all = [
            stage(&[0], &[10, 20]),
            stage(&[10], &[30]),
            stage(&[20], &[40]), // beside the one before
            stage(&[30, 40], &[50]),
            stage(&[50], &[0]), // which the first has read
        ];
        let order = order_of(&all);
        let waits: Vec<_> = order.iter().map(|order| order.waits.clone()).collect();
        assert_eq!(waits, [vec![], vec![0], vec![0], vec![2, 1], vec![3]]);
    }

    #[test]
    fn no_redundant_waits_are_generated() {
        let mut random = Rng::new(1, 0);
        let mut below = |n: u64| random.below(n);
        let mut found = 0;
        for _ in 0..50 {
            let mut all: Vec<MemoryAccess> = (0..20)
                .map(|_| stage(&[below(200), below(200)], &[below(200)]))
                .collect();
            for at in [7, 15] {
                let place = below(200);
                all[at].ahead.push(place..place + 8);
                all[at].ids = vec![all[at].read[0].clone()];
            }
            let order = order_of(&all);
            let stages: Vec<&MemoryAccess> = all.iter().collect();
            for at in 0..order.len() {
                for wait in 0..order[at].waits.len() {
                    let mut less = order.clone();
                    less[at].waits.remove(wait);
                    verify(&stages, &less).expect_err("a wait is missing");
                    found += 1;
                }
                if order[at].from > 0 {
                    let mut early = order.clone();
                    early[at].from = 0;
                    verify(&stages, &early).expect_err("it fetches too early");
                    found += 1;
                }
            }
        }
        assert!(found > 300, "{found}");
    }

    #[test]
    fn expert_weights_are_prefetched_after_routing() {
        let mut all = vec![
            stage(&[0], &[10]),  // chooses
            stage(&[10], &[20]), // gate and up
            stage(&[20], &[30]),
            stage(&[30, 10], &[40]), // down
            stage(&[100], &[110]),   // has nothing to do with it
            stage(&[40, 110, 10], &[50]),
        ];
        for at in [1, 3, 5] {
            all[at].ids.push(10..18);
            all[at].ahead.push(1000..2000);
        }
        let order = order_of(&all);
        let from: Vec<usize> = order.iter().map(|order| order.from).collect();
        // A block that has begun stage 4 need not have waited for the ids.
        assert_eq!(from, [0, 2, 0, 2, 0, 6]);
    }

    #[test]
    fn stage_with_too_many_dependencies_starts_a_new_step() {
        let mut all: Vec<MemoryAccess> = (0..9).map(|i| stage(&[], &[100 * i])).collect();
        let everything: Vec<u64> = (0..9).map(|i| 100 * i).collect();
        all.push(stage(&everything, &[5000]));
        let stages: Vec<&MemoryAccess> = all.iter().collect();
        assert_eq!(order(&stages).len(), 9);
    }
}
