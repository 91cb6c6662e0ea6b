//! Plans that run as a batch compute what each computes alone, bit for bit.

#[path = "common/guests.rs"]
mod guests;

use std::sync::Arc;
use std::time::Duration;

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};
use vgpu_check::Random;
use vgpu_check::model::{Model, TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS};
use vgpu_cpu::CpuEngine;
use vgpu_cpu::formats::Format;
use vgpu_cpu::gemm::MatmulKernel;
use vgpu_engine::{Engine, Memory, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::{
    BufferId, GluKind, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, validate,
};

use guests::{Guest, all, launch, model};

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
    for tokens in [1, 4] {
        cases.push((model(TINY_GPT_OSS, Type::Mxfp4), tokens));
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
        assert!(together > 10, "{together} turns of several guests");
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

/// Products of experts alone, and what the fusion makes of them.
#[derive(Debug, Clone, Copy)]
enum Form {
    One,
    /// Two products of the same columns, with biases.
    Pair,
    /// Two products, their GLU, and a product of it.
    Gated {
        biases: bool,
    },
}

#[derive(Debug, Clone, Copy)]
struct Experts {
    ty: Type,
    form: Form,
    k: u64,
    rows: u64,
    count: u64,
    used: u64,
}

/// A result of a guest: a row for each of its pairs.
const PLACES: u64 = 3;

impl Experts {
    /// A product with few or many experts.
    fn draw(random: &mut Random, ty: Type) -> Experts {
        let form = match random.below(4) {
            0 => Form::One,
            1 => Form::Pair,
            n => Form::Gated { biases: n == 2 },
        };
        let count = random.pick(&[1, 3, 8, 40]);
        Experts {
            ty,
            form,
            k: 256 * (1 + random.below(2)),
            rows: match form {
                Form::Gated { .. } => 256,
                _ => random.pick(&[33, 100, 300]),
            },
            count,
            used: (1 + random.below(4)).min(count),
        }
    }

    /// The shapes of the weights: two matrices for each expert, their biases, and a third matrix.
    fn weights(&self) -> [Shape; 5] {
        let Experts { ty, k, rows, .. } = *self;
        // Rows that are no blocks are of a form without the third matrix.
        let last = if rows % 256 == 0 { rows } else { 256 };
        let shape = |ty, ne: [u64; 2]| {
            Shape::contiguous(ty, [ne[0], ne[1], self.count, 1]).expect("whole blocks")
        };
        let bias = Shape::contiguous(Type::F32, [rows, self.count, 1, 1]).expect("whole rows");
        [
            shape(ty, [k, rows]),
            shape(ty, [k, rows]),
            bias,
            bias,
            shape(ty, [last, rows]),
        ]
    }

    /// The offset of each of them, and the end of all.
    fn places(&self) -> ([u64; 5], u64) {
        let mut end = 0;
        let places = self.weights().map(|shape| {
            let at = end;
            end += shape.byte_len().expect("it fits").next_multiple_of(256);
            at
        });
        (places, end)
    }

    /// Bytes of the results of a product of so many tokens.
    fn result_bytes(&self, tokens: u64) -> u64 {
        (4 * self.rows * self.used * tokens).next_multiple_of(256)
    }

    /// The offset of the ids in the memory of a guest, behind the columns.
    fn ids(&self, tokens: u64) -> u64 {
        (4 * self.k * tokens).next_multiple_of(256)
    }

    /// The offset of the first results in the memory of a guest.
    fn results(&self, tokens: u64) -> u64 {
        self.ids(tokens) + (4 * self.used * tokens).next_multiple_of(256)
    }

    fn own_bytes(&self, tokens: u64) -> u64 {
        self.results(tokens) + PLACES * self.result_bytes(tokens)
    }

    /// The graph over the weights and the memory of a guest.
    fn graph(&self, tokens: u64) -> Graph {
        let mut graph = Graph {
            buffers: vec![BufferId(1), BufferId(2)],
            ..Graph::default()
        };
        let mut tensor = |shape, buffer, offset| {
            graph.tensors.push(Tensor {
                shape,
                buffer,
                offset,
            });
            graph.tensors.len() as u32 - 1
        };
        let of = |ty, ne| Shape::contiguous(ty, ne).expect("whole blocks");
        let (places, _) = self.places();
        let weights = self.weights().into_iter().zip(places);
        let weights: Vec<u32> = weights.map(|(shape, at)| tensor(shape, 0, at)).collect();
        let x = tensor(of(Type::F32, [self.k, 1, tokens, 1]), 1, 0);
        let ids = of(Type::I32, [self.used, tokens, 1, 1]);
        let ids = tensor(ids, 1, self.ids(tokens));
        let result = of(Type::F32, [self.rows, self.used, tokens, 1]);
        let results = [0, 1, 2].map(|i| {
            let at = self.results(tokens) + i * self.result_bytes(tokens);
            tensor(result, 1, at)
        });
        let mut nodes = Vec::new();
        let mut node = |op, dst, src: &[u32]| {
            let src = Sources::new(src.iter().map(|&source| Some(source)));
            nodes.push(Node { op, dst, src });
        };
        let product = Op::MulMatId {
            accumulator: Precision::Default,
            activation: Precision::Default,
        };
        let (products, biases) = match self.form {
            Form::One => (1, false),
            Form::Pair => (2, true),
            Form::Gated { biases } => (2, biases),
        };
        for i in 0..products {
            node(product, results[i], &[weights[i], x, ids]);
            if biases {
                let sources = [results[i], weights[2 + i], ids];
                node(Op::AddId {}, results[i], &sources);
            }
        }
        if let Form::Gated { .. } = self.form {
            let unit = Op::Glu {
                kind: if biases {
                    GluKind::SwigluOai
                } else {
                    GluKind::Swiglu
                },
                swapped: false,
                alpha: 1.702,
                limit: 7.0,
            };
            node(unit, results[2], &results[..2]);
            // The results of both products are overwritten, so they need not be written.
            node(product, results[0], &[weights[4], results[2], ids]);
            let scale = Op::Scale {
                scale: 2.0,
                bias: 0.0,
            };
            node(scale, results[1], &[results[0]]);
        }
        graph.nodes = nodes;
        graph
    }

    /// The weights of guests that share them.
    fn shared(
        &self,
        engine: &CpuEngine,
        random: &mut Random,
        guests: usize,
    ) -> Vec<Arc<dyn Memory>> {
        let (places, end) = self.places();
        let weights = || {
            let memory = engine.alloc(end).expect("memory");
            let weights = engine.alloc_weights(&memory).expect("memory");
            weights.expect("the engine shares weights")
        };
        let first = weights();
        for (shape, at) in self.weights().into_iter().zip(places) {
            let n = shape.elements().expect("it fits") as usize;
            // No matrix of an expert is a multiple of as many elements.
            let some = n.min(193 * 256);
            let values: Vec<f32> = (0..some).map(|_| random.number() / 8.0).collect();
            let format = Format::of(shape.ty).expect("weights are real numbers");
            let mut bytes = vec![0; format.row_bytes(some)];
            // SAFETY: `values` has `some` floats, and `bytes` room for the blocks of as many.
            unsafe { (format.quantize_row)(values.as_ptr(), bytes.as_mut_ptr(), some) };
            let all = { bytes.iter().copied().cycle() }.take(format.row_bytes(n));
            let bytes: Vec<u8> = all.collect();
            first.write(at, bytes.as_slice().into()).expect("its place");
        }
        assert!(first.freeze());
        let extent = first.extent(0, end).expect("all of it");
        let mut all = vec![first];
        for _ in 1..guests {
            let own = weights();
            own.attach(0, &extent, &|| false).expect("the same size");
            assert!(own.freeze());
            all.push(own);
        }
        all
    }
}

/// A guest with products of experts.
struct ExpertGuest {
    plan: Box<dyn Plan>,
    own: Arc<dyn Memory>,
    start: Vec<u8>,
    expected: Result<Vec<u8>, RunError>,
    is_done: bool,
}

impl ExpertGuest {
    /// With random columns and the ids that `id` returns for each slot of each token.
    fn new(
        (engine, weights): (&CpuEngine, Arc<dyn Memory>),
        shape: &Experts,
        tokens: u64,
        random: &mut Random,
        ids: &[i32],
    ) -> ExpertGuest {
        let (_, end) = shape.places();
        let bytes = shape.own_bytes(tokens);
        let own = engine.alloc(bytes).expect("memory");
        let size = |id: BufferId| Some(if id == BufferId(1) { end } else { bytes });
        let limits = Limits::default();
        let graph = validate(shape.graph(tokens), engine.capabilities(), &limits, size);
        let graph = graph.expect("the engine supports the graph");
        let plan = engine.compile(&graph, &[weights, Arc::clone(&own)], &|| false);
        let mut plan = plan.expect("a plan");
        plan.reserve().expect("memory");
        let mut start = vec![0; bytes as usize];
        let columns = start[..(4 * shape.k * tokens) as usize].chunks_exact_mut(4);
        columns.for_each(|to| to.copy_from_slice(&random.number().to_le_bytes()));
        let at = shape.ids(tokens) as usize;
        let to = start[at..][..4 * ids.len()].chunks_exact_mut(4);
        to.zip(ids)
            .for_each(|(to, id)| to.copy_from_slice(&id.to_le_bytes()));
        let mut guest = ExpertGuest {
            plan,
            own,
            start,
            expected: Ok(Vec::new()),
            is_done: false,
        };
        guest.begin();
        guest.expected = guest.plan.run().map(|()| guest.memory());
        guest.begin();
        guest
    }

    /// The ids of so many tokens: of each token different ones, or all the same.
    fn ids(shape: &Experts, tokens: u64, random: &mut Random) -> Vec<i32> {
        let same = random.chance(4);
        let each = (0..tokens).flat_map(|_| {
            let first = random.below(shape.count);
            let step = if same { 0 } else { 1 };
            (0..shape.used).map(move |slot| (first + slot * step) % shape.count)
        });
        each.map(|id| id as i32).collect()
    }

    fn begin(&mut self) {
        let start = self.start.as_slice().into();
        self.own.write(0, start).expect("its size");
        self.is_done = false;
    }

    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.start.len()];
        let read = self.own.read(0, bytes.as_mut_slice().into());
        read.expect("its size");
        bytes
    }

    /// Whether an outcome is that of the guest alone, or that of no end.
    fn is_expected(&mut self, outcome: &Result<RunStatus, RunError>) -> bool {
        self.is_done = outcome != &Ok(RunStatus::Yielded);
        match (outcome, &self.expected) {
            (Ok(RunStatus::Yielded), _) => true,
            (Ok(RunStatus::Done), Ok(expected)) => self.memory() == *expected,
            (Err(error), Err(expected)) => error == expected,
            _ => false,
        }
    }
}

/// Runs guests to their ends: all together, or with others in each turn. Returns the number of
/// turns of several.
fn run_to_the_end(
    engine: &CpuEngine,
    guests: &mut [ExpertGuest],
    cuts: bool,
    random: &mut Random,
) -> usize {
    let mut together = 0;
    while guests.iter().any(|guest| !guest.is_done) {
        let left = (0..guests.len()).filter(|&i| !guests[i].is_done);
        let left: Vec<usize> = left.collect();
        let key = guests[random.pick(&left)].plan.batch_key();
        let mut plans: Vec<&mut dyn Plan> = Vec::new();
        let mut members = Vec::new();
        for (i, guest) in guests.iter_mut().enumerate() {
            let joins = members.is_empty() || !cuts || !random.chance(4);
            if !guest.is_done && guest.plan.batch_key() == key && joins {
                members.push(i);
                plans.push(&mut *guest.plan);
            }
        }
        let turn = Turn::new();
        if cuts && random.chance(2) {
            let most = Duration::from_micros(random.below(150));
            turn.set_end(Some(most));
        }
        let outcomes = match &mut plans[..] {
            [plan] => vec![plan.launch(&turn)],
            plans => engine.launch_batch(plans, &turn),
        };
        together += usize::from(members.len() > 1);
        for (i, outcome) in members.into_iter().zip(outcomes) {
            assert!(guests[i].is_expected(&outcome), "guest {i}: {outcome:?}");
        }
    }
    together
}

/// Guests with random products of experts, one of them with a wrong id in every third case.
fn expert_guests(engine: &CpuEngine, shape: &Experts, random: &mut Random) -> Vec<ExpertGuest> {
    let count = 2 + random.below(7) as usize;
    let bad = if random.chance(3) {
        random.below(count as u64) as usize
    } else {
        count
    };
    let single = random.chance(2);
    let weights = shape.shared(engine, random, count).into_iter().enumerate();
    weights
        .map(|(i, weights)| {
            let tokens = if single { 1 } else { 2 + random.below(3) };
            let mut ids = ExpertGuest::ids(shape, tokens, random);
            if i == bad {
                let at = random.below(ids.len() as u64) as usize;
                ids[at] = random.pick(&[-1, shape.count as i32, i32::MIN]);
            }
            let guest = ExpertGuest::new((engine, weights), shape, tokens, random, &ids);
            assert_eq!(guest.expected.is_err(), i == bad);
            guest
        })
        .collect()
}

const EXPERT_TYPES: [Type; 8] = [
    Type::Mxfp4,
    Type::Q4K,
    Type::Q8_0,
    Type::F16,
    Type::F32,
    Type::Q6K,
    Type::Q4_0,
    Type::Iq3S,
];

#[test]
fn products_of_experts_are_the_same_in_a_batch() {
    let mut together = 0;
    for (threads, seed) in [(1, 1), (2, 2), (5, 3)] {
        let engine = CpuEngine::new(threads, None).expect("an engine");
        let mut random = Random::new(seed);
        for case in 0..32 {
            let shape = Experts::draw(&mut random, EXPERT_TYPES[case % EXPERT_TYPES.len()]);
            let mut guests = expert_guests(&engine, &shape, &mut random);
            for guest in &guests {
                let key = guest.plan.batch_key();
                assert!(
                    key.is_some() && key == guests[0].plan.batch_key(),
                    "{shape:?}"
                );
            }
            for cuts in [false, true, true] {
                guests.iter_mut().for_each(ExpertGuest::begin);
                let turns = run_to_the_end(&engine, &mut guests, cuts, &mut random);
                assert!(cuts || turns == 1, "{turns} turns of {shape:?}");
                together += turns;
            }
        }
    }
    assert!(together > 300, "{together} turns of several guests");
}

/// The comparison of the tests above notices if two columns are exchanged, of two guests or of one.
#[test]
fn exchanged_columns_of_results_are_noticed() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    let mut random = Random::new(9);
    let shape = Experts {
        ty: Type::Mxfp4,
        form: Form::Gated { biases: true },
        k: 256,
        rows: 256,
        count: 8,
        used: 4,
    };
    let weights = shape.shared(&engine, &mut random, 3);
    let mut guests: Vec<ExpertGuest> = { weights.into_iter() }
        .map(|weights| {
            let ids = [0, 1, 2, 3, 3, 2, 1, 0];
            ExpertGuest::new((&engine, weights), &shape, 2, &mut random, &ids)
        })
        .collect();
    run_to_the_end(&engine, &mut guests, false, &mut random);
    let (row, pairs) = (4 * shape.rows, shape.used * 2);
    let place = |pair: u64| shape.results(2) + pair * row;
    let read = |guest: &ExpertGuest, pair| {
        let mut bytes = vec![0; row as usize];
        let read = guest.own.read(place(pair), bytes.as_mut_slice().into());
        read.expect("a result");
        bytes
    };
    let write = |guest: &ExpertGuest, pair, bytes: &[u8]| {
        guest
            .own
            .write(place(pair), bytes.into())
            .expect("a result");
    };
    for (one, other) in [(0, 1), (1, 2), (0, 0)] {
        for pair in 0..pairs {
            // Of the same guest, another column.
            let theirs = if one == other {
                (pair + 1) % pairs
            } else {
                pair
            };
            let columns = [read(&guests[one], pair), read(&guests[other], theirs)];
            write(&guests[one], pair, &columns[1]);
            write(&guests[other], theirs, &columns[0]);
            for i in [one, other] {
                assert!(
                    !guests[i].is_expected(&Ok(RunStatus::Done)),
                    "{one}, {other}"
                );
            }
            write(&guests[one], pair, &columns[0]);
            write(&guests[other], theirs, &columns[1]);
            assert!(guests[one].is_expected(&Ok(RunStatus::Done)));
        }
    }
}

/// A run that has ended its turn in chunks of its own goes on alone, and beside others later.
#[test]
fn guests_join_in_the_middle_of_products_of_experts() {
    let mut together = 0;
    let engine = CpuEngine::new(2, None).expect("an engine");
    let mut random = Random::new(5);
    for ty in [Type::Mxfp4, Type::Q8_0] {
        let shape = Experts {
            ty,
            form: Form::Gated { biases: false },
            k: 512,
            rows: 256,
            count: 40,
            used: 4,
        };
        let weights = shape.shared(&engine, &mut random, 6);
        let mut guests: Vec<ExpertGuest> = { weights.into_iter() }
            .map(|weights| {
                let ids = ExpertGuest::ids(&shape, 1, &mut random);
                ExpertGuest::new((&engine, weights), &shape, 1, &mut random, &ids)
            })
            .collect();
        for _ in 0..100 {
            guests.iter_mut().for_each(ExpertGuest::begin);
            // Half of them begin alone.
            for guest in &mut guests[..3] {
                let turn = Turn::new();
                turn.set_end(Some(Duration::from_micros(random.below(100))));
                let outcome = guest.plan.launch(&turn);
                assert!(guest.is_expected(&outcome), "{outcome:?}");
            }
            together += run_to_the_end(&engine, &mut guests, true, &mut random);
        }
    }
    assert!(together > 100, "{together} turns of several guests");
}
