//! Plans that run as a batch compute what each computes alone, bit for bit.

use std::sync::Arc;
use std::time::Duration;

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};
use vgpu_check::model::{Built, Loaded, Model, StepShape, TINY, TINY_BIASES, TINY_EXPERTS};
use vgpu_cpu::CpuEngine;
use vgpu_cpu::gemm::MatmulKernel;
use vgpu_engine::{Engine, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::Type;

/// Cache positions that a step sees.
const SEEN: u64 = 32;

/// A model whose matrices have whole blocks of every type.
fn model(base: Model, weights: Type) -> Model {
    Model {
        weights,
        width: 256,
        inner: 512,
        vocabulary: 320,
        heads: 4,
        key_heads: 2,
        head: 64,
        ..base
    }
}

/// A guest with a sequence of its own.
struct Guest {
    built: Built,
    loaded: Loaded,
    plan: Box<dyn Plan>,
    position: u64,
}

impl Guest {
    /// Guests that share the weights of a model. Each has got to another position.
    fn some(engine: &dyn Engine, model: Model, tokens: u64, count: usize) -> Vec<Guest> {
        Guest::with_tokens(engine, model, &vec![tokens; count])
    }

    /// Guests that bring as many tokens each.
    fn with_tokens(engine: &dyn Engine, model: Model, tokens: &[u64]) -> Vec<Guest> {
        let step = |i: usize| StepShape {
            tokens: tokens[i],
            // Caches of other lengths have graphs of their own.
            seen: if i % 3 == 2 { SEEN } else { SEEN - 8 },
        };
        let largest = StepShape {
            tokens: tokens.iter().copied().max().unwrap_or(1),
            seen: SEEN,
        };
        let loaded = model.graph(largest).load_shared(engine, tokens.len());
        let guests = loaded.into_iter().enumerate();
        guests
            .map(|(i, loaded)| {
                let built = model.graph(step(i));
                let plan = built.compile(engine, &loaded);
                Guest {
                    built,
                    loaded,
                    plan,
                    position: i as u64 % 5,
                }
            })
            .collect()
    }

    fn write_inputs(&self) {
        self.built.write_inputs(&self.loaded, self.position);
    }

    /// The bits of the logits.
    fn result(&self) -> Vec<u32> {
        let logits = self.built.read_result(&self.loaded);
        assert!(logits.iter().any(|&x| x != 0.0), "nothing was computed");
        logits.into_iter().map(f32::to_bits).collect()
    }

    /// What the guest computes alone.
    fn alone(&mut self) -> Vec<u32> {
        self.write_inputs();
        self.plan.run().expect("it runs");
        self.result()
    }
}

/// Launches plans of these guests together.
fn launch(
    engine: &dyn Engine,
    guests: &mut [Guest],
    which: &[usize],
    turn: &Turn,
) -> Vec<Result<RunStatus, RunError>> {
    let mut plans: Vec<&mut dyn Plan> = Vec::new();
    for (i, guest) in guests.iter_mut().enumerate() {
        if which.contains(&i) {
            plans.push(&mut *guest.plan);
        }
    }
    engine.launch_batch(&mut plans, turn)
}

fn all(guests: &[Guest]) -> Vec<usize> {
    (0..guests.len()).collect()
}

#[test]
fn guests_compute_together_what_each_computes_alone() {
    let types = [
        Type::F32,
        Type::F16,
        Type::Bf16,
        Type::Q8_0,
        Type::Q4_0,
        Type::Q5_1,
        Type::Q4K,
        Type::Q6K,
        Type::Iq3S,
    ];
    let mut cases: Vec<(Model, u64)> = types.iter().map(|&ty| (model(TINY, ty), 1)).collect();
    for base in [TINY_BIASES, TINY_EXPERTS] {
        cases.push((model(base, Type::Q4K), 1));
        cases.push((model(base, Type::F16), 3));
    }
    // More columns than are multiplied row by row.
    for (ty, tokens) in [(Type::Q8_0, 9), (Type::Q4K, 7), (Type::Q6K, 31)] {
        if MatmulKernel::of(ty).is_some_and(|kernel| kernel.one_order) {
            cases.push((model(TINY, ty), tokens));
        }
    }
    let mut batched = 0;
    for threads in [1, 2, 5] {
        let engine = CpuEngine::new(threads, None).expect("an engine");
        for &(model, tokens) in &cases {
            let mut guests = Guest::some(&engine, model, tokens, 5);
            let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
            let keys: Vec<_> = guests.iter().map(|guest| guest.plan.batch_key()).collect();
            assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
            // The dot product of bfloat16 pairs takes no tables.
            batched += usize::from(keys[0].is_some());
            assert!(keys[0].is_some() || model.weights == Type::Bf16);
            for count in 1..=guests.len() {
                for guest in &guests {
                    guest.write_inputs();
                }
                let which: Vec<usize> = (guests.len() - count..guests.len()).collect();
                let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
                assert_eq!(outcomes, vec![Ok(RunStatus::Done); count]);
                for &i in &which {
                    assert!(
                        guests[i].result() == expected[i],
                        "{:?}, {tokens} tokens, {threads} threads, guest {i} of {count}",
                        model.weights
                    );
                }
            }
        }
    }
    assert!(batched >= 30, "{batched} batches");
}

/// A decoder with drafts, parallel sequences of one program, and a chunk of a prompt.
#[test]
fn guests_with_different_numbers_of_tokens_compute_what_each_computes_alone() {
    // More columns together than a table has.
    const TOKENS: [u64; 8] = [2, 3, 7, 6, 5, 7, 2, 6];
    for ty in [Type::F16, Type::Q4_0, Type::Q8_0, Type::Q4K, Type::Q6K] {
        let panels = MatmulKernel::of(ty).is_some_and(|kernel| kernel.one_order);
        let tokens: Vec<u64> = { TOKENS.into_iter() }
            .filter(|&tokens| panels || tokens < 5)
            .collect();
        for (threads, base) in [(1, TINY), (3, TINY_BIASES)] {
            let engine = CpuEngine::new(threads, None).expect("an engine");
            let mut guests = Guest::with_tokens(&engine, model(base, ty), &tokens);
            let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
            let keys: Vec<_> = guests.iter().map(|guest| guest.plan.batch_key()).collect();
            assert!(keys[0].is_some() && keys.iter().all(|key| *key == keys[0]));
            let work: Vec<u64> = guests.iter().map(|guest| guest.plan.batch_work()).collect();
            for (one, other) in (0..tokens.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let by_tokens = tokens[one].cmp(&tokens[other]);
                // Caches of two lengths differ a little, too.
                assert!(
                    by_tokens.is_eq() || work[one].cmp(&work[other]) == by_tokens,
                    "{work:?}"
                );
            }
            for first in 0..guests.len() {
                for guest in &guests {
                    guest.write_inputs();
                }
                let which: Vec<usize> = (first..guests.len()).collect();
                let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
                assert_eq!(outcomes, vec![Ok(RunStatus::Done); which.len()]);
                for &i in &which {
                    assert!(
                        guests[i].result() == expected[i],
                        "{ty:?}, guest {i} of {which:?}"
                    );
                }
            }
        }
    }
}

/// Turns end anywhere, and after each turn other guests go on.
#[test]
fn guests_join_and_leave_between_any_two_turns() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
    for (ty, tokens) in [(Type::Q4K, 1), (Type::Q8_0, 2), (Type::F16, 1)] {
        let mut guests = Guest::some(&engine, model(TINY_BIASES, ty), tokens, 6);
        let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
        let (mut rounds, mut together) = (vec![0; guests.len()], 0);
        for guest in &guests {
            guest.write_inputs();
        }
        while rounds.iter().any(|&rounds| rounds < 6) {
            // Guests that have got as far as one of them.
            let one = (random.next_u64() % guests.len() as u64) as usize;
            let key = guests[one].plan.batch_key();
            let which: Vec<usize> = all(&guests)
                .into_iter()
                .filter(|&i| guests[i].plan.batch_key() == key)
                .filter(|&i| i == one || random.next_u64() % 4 != 0)
                .collect();
            let turn = Turn::new();
            match random.next_u64() % 4 {
                0 => turn.set_end(Some(Duration::ZERO)),
                1 => turn.set_end(Some(Duration::from_micros(random.next_u64() % 300))),
                2 => turn.set_end(Some(Duration::from_micros(20))),
                _ => {}
            }
            let outcomes = launch(&engine, &mut guests, &which, &turn);
            together += usize::from(which.len() > 1);
            for (&i, outcome) in which.iter().zip(outcomes) {
                if outcome == Ok(RunStatus::Done) {
                    assert!(guests[i].result() == expected[i], "{ty:?}, guest {i}");
                    guests[i].write_inputs();
                    rounds[i] += 1;
                } else {
                    assert_eq!(outcome, Ok(RunStatus::Yielded));
                }
            }
        }
        assert!(together > 20, "{together} turns of several guests");
    }
}

#[test]
fn a_guest_that_fails_changes_nothing_for_the_others() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    for failing in 0..4 {
        let mut guests = Guest::some(&engine, model(TINY, Type::Q4K), 1, 4);
        let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
        for guest in &guests {
            guest.write_inputs();
        }
        let bad = &guests[failing];
        bad.built.write_input(&bad.loaded, "tokens", 1 << 20);
        let which = all(&guests);
        let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
        for (i, outcome) in outcomes.into_iter().enumerate() {
            if i == failing {
                assert!(
                    matches!(outcome, Err(RunError::Index { .. })),
                    "{outcome:?}"
                );
            } else {
                assert_eq!(outcome, Ok(RunStatus::Done));
                assert!(guests[i].result() == expected[i]);
            }
        }
        // It runs again, beside the others.
        assert!(guests[failing].alone() == expected[failing]);
    }
}

#[test]
fn plans_with_other_weights_or_lengths_have_other_keys() {
    let engine = CpuEngine::new(1, None).expect("an engine");
    let other = CpuEngine::new(1, None).expect("an engine");
    let mut guests = Guest::some(&engine, model(TINY, Type::Q4K), 1, 2);
    let key = guests[0].plan.batch_key();
    assert!(key.is_some() && key == guests[1].plan.batch_key());
    // The same bytes at other addresses, another number of tokens, and another model.
    guests.extend(Guest::some(&engine, model(TINY, Type::Q4K), 1, 1));
    guests.extend(Guest::some(&engine, model(TINY, Type::Q4K), 2, 1));
    guests.extend(Guest::some(&engine, model(TINY, Type::Q6K), 1, 1));
    for guest in &guests[2..] {
        assert!(guest.plan.batch_key() != key);
    }
    // Of another engine, whose numbers are its own.
    guests.extend(Guest::some(&other, model(TINY, Type::Q4K), 1, 1));
    let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
    // The engine runs what is no batch one after the other.
    for guest in &guests {
        guest.write_inputs();
    }
    let which = all(&guests);
    let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
    assert_eq!(outcomes, vec![Ok(RunStatus::Done); guests.len()]);
    for (guest, expected) in guests.iter().zip(&expected) {
        assert!(guest.result() == *expected);
    }
}

/// Weights that are written after the plan was compiled are no longer those of the others.
#[test]
fn a_plan_whose_weights_have_moved_is_stale_and_the_others_run() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    let mut guests = Guest::some(&engine, model(TINY, Type::Q4K), 1, 3);
    let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
    for guest in &guests {
        guest.write_inputs();
    }
    let weights = Arc::clone(&guests[1].loaded.buffers[0]);
    weights.write(0, [1; 64].as_slice().into()).expect("memory");
    let which = all(&guests);
    let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
    let stale = Err(RunError::Stale);
    assert_eq!(outcomes, [Ok(RunStatus::Done), stale, Ok(RunStatus::Done)]);
    for i in [0, 2] {
        assert!(guests[i].result() == expected[i]);
    }
    // Compiled again, it has weights of its own.
    let guest = &mut guests[1];
    guest.plan = guest.built.compile(&engine, &guest.loaded);
    assert!(guest.plan.batch_key() != guests[0].plan.batch_key());
}
