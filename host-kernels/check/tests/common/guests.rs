//! Guests that decode with the same weights, each with a sequence of its own.

use vgpu_check::model::{Built, Loaded, Model, StepShape};
use vgpu_engine::{Engine, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::Type;

/// Cache positions that a step sees.
pub(crate) const SEEN: u64 = 32;

/// A model whose matrices have whole blocks of every type.
pub(crate) fn model(base: Model, weights: Type) -> Model {
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
pub(crate) struct Guest {
    pub(crate) built: Built,
    pub(crate) loaded: Loaded,
    pub(crate) plan: Box<dyn Plan>,
    pub(crate) position: u64,
}

impl Guest {
    /// Guests that share the weights of a model. Each has got to another position.
    pub(crate) fn some(engine: &dyn Engine, model: Model, tokens: u64, count: usize) -> Vec<Guest> {
        Guest::with_tokens(engine, model, &vec![tokens; count])
    }

    /// Guests that bring as many tokens each.
    pub(crate) fn with_tokens(engine: &dyn Engine, model: Model, tokens: &[u64]) -> Vec<Guest> {
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

    pub(crate) fn write_inputs(&self) {
        self.built.write_inputs(&self.loaded, self.position);
    }

    /// The bits of the logits.
    pub(crate) fn result(&self) -> Vec<u32> {
        let logits = self.built.read_result(&self.loaded);
        assert!(logits.iter().any(|&x| x != 0.0), "nothing was computed");
        logits.into_iter().map(f32::to_bits).collect()
    }

    /// What the guest computes alone.
    pub(crate) fn alone(&mut self) -> Vec<u32> {
        self.write_inputs();
        self.plan.run().expect("it runs");
        self.result()
    }
}

/// Launches plans of these guests together.
pub(crate) fn launch(
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

pub(crate) fn all(guests: &[Guest]) -> Vec<usize> {
    (0..guests.len()).collect()
}
