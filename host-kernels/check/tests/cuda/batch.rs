//! Plans that run as a batch compute what each computes alone, bit for bit, and read weights once.

use std::sync::Arc;
use std::time::Duration;

use vgpu_check::Random;
use vgpu_check::model::{Model, TINY, TINY_BIASES, TINY_EXPERTS};
use vgpu_cuda::LaunchPolicy;
use vgpu_engine::{Engine, RunError, RunStatus, Turn};
use vgpu_transport::ir::Type;

use crate::guests::{Guest, all, launch, model};
use crate::spy::{Call, Fails, Spy, launched};
use crate::{engine_on, engine_with, graphs_from_the_second_run};

/// A model of one layer.
fn layer(base: Model, weights: Type) -> Model {
    Model {
        layers: 1,
        ..model(base, weights)
    }
}

/// The shared products of a turn: those of a log that are joint launches.
fn joint(log: &[Call]) -> usize {
    let names = launched(log);
    names.iter().filter(|name| name.ends_with("_joint")).count()
}

/// The matrix-vector products of a log that are of one plan alone.
fn apart(log: &[Call]) -> usize {
    let is_apart = |name: &&&str| name.starts_with("vg_mmv_") && !name.ends_with("_joint");
    launched(log).iter().filter(is_apart).count()
}

/// Runs these guests together, once, and compares each with what it computes alone.
fn check(engine: &dyn Engine, guests: &mut [Guest], which: &[usize], expected: &[Vec<u32>]) {
    for guest in guests.iter() {
        guest.write_inputs();
    }
    let outcomes = launch(engine, guests, which, &Turn::new());
    assert_eq!(outcomes, vec![Ok(RunStatus::Done); which.len()]);
    for &i in which {
        assert!(guests[i].result() == expected[i], "guest {i} of {which:?}");
    }
}

fn same_keys(guests: &[Guest]) -> bool {
    let key = guests[0].plan.batch_key();
    key.is_some() && guests.iter().all(|guest| guest.plan.batch_key() == key)
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
        Type::Iq4Nl,
        Type::Q4K,
        Type::Q6K,
        Type::Iq3S,
    ];
    let mut cases: Vec<(Model, u64, bool)> = Vec::new();
    for ty in types {
        cases.push((layer(TINY, ty), 1, true));
    }
    for ty in [Type::Q4_0, Type::Q8_0, Type::Q6K] {
        cases.push((layer(TINY, ty), 2, true));
        cases.push((layer(TINY, ty), 1, false));
    }
    cases.push((layer(TINY_BIASES, Type::Q4K), 1, true));
    cases.push((layer(TINY_BIASES, Type::F16), 3, true));
    cases.push((layer(TINY_EXPERTS, Type::Q4K), 1, true));
    for (model, tokens, repack) in cases {
        let device = Arc::new(Spy::running());
        let policy = LaunchPolicy {
            repack,
            ..graphs_from_the_second_run()
        };
        let engine = engine_with(&device, policy);
        let mut guests = Guest::some(&engine, model, tokens, 5);
        let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
        assert!(same_keys(&guests), "{:?}", model.weights);
        for which in [vec![0, 1], vec![1, 2, 4], all(&guests)] {
            // Launches, then a CUDA graph.
            for _ in 0..3 {
                device.take_log();
                check(&engine, &mut guests, &which, &expected);
                let log = device.take_log();
                let graphs = log.iter().filter(|call| **call == Call::LaunchGraph);
                assert!(joint(&log) > 3 || graphs.count() > 0, "{log:?}");
            }
        }
        // Each goes on alone.
        for (guest, expected) in guests.iter_mut().zip(&expected) {
            assert!(guest.alone() == *expected);
        }
    }
}

#[test]
fn each_weight_is_read_once_for_the_columns_of_all() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let mut guests = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 16);
    let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
    device.take_log();
    guests[0].alone();
    guests[0].alone();
    device.take_log();
    let mut fresh = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 1);
    device.take_log();
    fresh[0].alone();
    let products = apart(&device.take_log());
    assert!(products >= 4, "{products} products");
    for count in [2, 8, 16] {
        let which: Vec<usize> = (0..count).collect();
        device.take_log();
        check(&engine, &mut guests, &which, &expected);
        let log = device.take_log();
        assert_eq!((joint(&log), apart(&log)), (products, 0), "{count} guests");
    }
    // More than a batch has run one after the other.
    let mut guests = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 17);
    let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
    let which = all(&guests);
    check(&engine, &mut guests, &which, &expected);
}

#[test]
fn guests_with_different_numbers_of_tokens_compute_what_each_computes_alone() {
    // More columns together than a launch has, and few.
    let cases: [&[u64]; 2] = [&[7, 8, 5, 8, 7, 6, 8], &[2, 3, 2]];
    let types = [Type::F16, Type::Q8_0, Type::Mxfp4, Type::Q4K, Type::Q6K];
    for (ty, tokens) in { types.into_iter() }.flat_map(|ty| cases.map(|tokens| (ty, tokens))) {
        let device = Arc::new(Spy::running());
        let engine = engine_on(&device);
        let mut guests = Guest::with_tokens(&engine, layer(TINY_BIASES, ty), tokens);
        let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
        let keys: Vec<_> = guests.iter().map(|guest| guest.plan.batch_key()).collect();
        assert!(same_keys(&guests), "{ty:?}, {tokens:?}: {keys:?}");
        let work: Vec<u64> = guests.iter().map(|guest| guest.plan.batch_work()).collect();
        assert!(work[0] < work[1], "{work:?}");
        for first in [0, 2] {
            let which: Vec<usize> = (first..guests.len()).collect();
            check(&engine, &mut guests, &which, &expected);
        }
    }
}

/// Turns end anywhere, and after each turn other guests go on.
#[test]
fn guests_join_and_leave_between_any_two_turns() {
    let mut random = Random::new(7);
    for (ty, tokens) in [(Type::Q4K, 1), (Type::Q8_0, 2), (Type::F16, 1)] {
        let device = Arc::new(Spy::running());
        let policy = LaunchPolicy {
            time_slice: Duration::ZERO,
            ..graphs_from_the_second_run()
        };
        let engine = engine_with(&device, policy);
        let mut guests = Guest::some(&engine, layer(TINY_BIASES, ty), tokens, 6);
        let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
        let (mut rounds, mut together, mut yields) = (vec![0; guests.len()], 0, 0);
        for guest in &guests {
            guest.write_inputs();
        }
        while rounds.iter().any(|&rounds| rounds < 4) {
            // Guests that have got as far as one of them.
            let one = random.below(guests.len() as u64) as usize;
            let key = guests[one].plan.batch_key();
            let which: Vec<usize> = all(&guests)
                .into_iter()
                .filter(|&i| guests[i].plan.batch_key() == key)
                .filter(|&i| i == one || random.below(4) != 0)
                .collect();
            let turn = Turn::new();
            match random.below(4) {
                0 => turn.set_end(Some(Duration::ZERO)),
                1 => turn.set_end(Some(Duration::from_micros(random.below(2000)))),
                2 => turn.set_end(Some(Duration::from_micros(100))),
                _ => {}
            }
            let outcomes = launch(&engine, &mut guests, &which, &turn);
            together += usize::from(which.len() > 1);
            for (&i, outcome) in which.iter().zip(outcomes) {
                match outcome {
                    Ok(RunStatus::Done) => {}
                    Ok(RunStatus::InFlight) => guests[i].plan.wait().expect("it runs"),
                    outcome => {
                        assert_eq!(outcome, Ok(RunStatus::Yielded));
                        yields += 1;
                        continue;
                    }
                }
                assert!(guests[i].result() == expected[i], "{ty:?}, guest {i}");
                guests[i].write_inputs();
                rounds[i] += 1;
            }
            // A guest that is gone changes nothing for those that remain.
            if random.below(16) == 0 {
                let guest = &mut guests[one];
                guest.plan = guest.built.compile(&engine, &guest.loaded);
                guest.write_inputs();
            }
        }
        assert!(together > 10 && yields > 10, "{together}, {yields}");
    }
}

#[test]
fn a_guest_that_fails_changes_nothing_for_the_others() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let mut guests = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 4);
    let expected: Vec<_> = guests.iter_mut().map(Guest::alone).collect();
    for failing in 0..4 {
        for guest in &guests {
            guest.write_inputs();
        }
        let bad = &guests[failing];
        bad.built.write_input(&bad.loaded, "tokens", 1 << 20);
        let which = all(&guests);
        let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
        for (i, outcome) in outcomes.into_iter().enumerate() {
            if i == failing {
                let is_index =
                    matches!(outcome, Err(RunError::Index { index, .. }) if index == 1 << 20);
                assert!(is_index, "{outcome:?}");
            } else {
                assert_eq!(outcome, Ok(RunStatus::Done));
                assert!(guests[i].result() == expected[i]);
            }
        }
        // It runs again, beside the others and alone.
        check(&engine, &mut guests, &which, &expected);
        assert!(guests[failing].alone() == expected[failing]);
    }
}

/// Weights that are written after the plan was compiled are no longer those of the others.
#[test]
fn a_plan_whose_weights_have_moved_is_stale_and_the_others_run() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let mut guests = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 3);
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

#[test]
fn plans_without_shared_products_have_no_key() {
    let key = |device: Spy, tokens: u64, is_shared: bool| {
        let engine = engine_on(&Arc::new(device));
        let model = layer(TINY, Type::Q4K);
        let guests = Guest::some(&engine, model, tokens, 2);
        match is_shared {
            true => guests[0].plan.batch_key(),
            false => {
                let loaded = guests[0].built.load(&engine);
                guests[0].built.compile(&engine, &loaded).batch_key()
            }
        }
    };
    let on = || Spy::running();
    assert!(key(on(), 1, true).is_some() && key(on(), 8, true).is_some());
    // No joint kernel, more tokens than are few, and memory that is not for weights.
    assert_eq!(key(on().without("vg_mmv_q4_k_joint"), 1, true), None);
    assert_eq!(key(on(), 9, true), None);
    assert_eq!(key(on(), 1, false), None);
}

/// What a device without joint kernels, or a lost one, does with a batch.
#[test]
fn a_lost_device_ends_the_runs_of_all() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let mut guests = Guest::some(&engine, layer(TINY, Type::Q4K), 1, 3);
    for guest in &guests {
        guest.write_inputs();
    }
    device.fail(Fails::Launch(7));
    let which = all(&guests);
    let outcomes = launch(&engine, &mut guests, &which, &Turn::new());
    for outcome in outcomes {
        assert!(
            matches!(outcome, Err(RunError::Kernel { .. })),
            "{outcome:?}"
        );
    }
}
