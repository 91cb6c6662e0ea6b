//! An operation: a graph of one node, with the content of its tensors.

use vgpu_engine::Engine;
use vgpu_transport::ir::Op;

use crate::CheckError;
use crate::graph::{Builder, LoadedGraph, Operand, numbers};
use crate::random::Random;

/// Limit of the normalised mean square error if activations are quantised to 8 bits, or K and V to
/// 16: that of `test-backend-ops` for MUL_MAT.
pub(super) const ROUNDED: f64 = 5e-4;

/// The limit of all other operators.
pub(super) const EXACT: f64 = 1e-7;

/// The content of an operation's tensors.
#[derive(Clone, Copy)]
enum Content {
    Random,
    /// For a graph that is only compiled: random numbers take longer.
    Zeros,
}

/// An operation to compare.
pub(crate) struct Operation {
    pub(crate) name: String,
    pub(super) op: Op,
    pub(super) dst: Operand,
    pub(super) src: Vec<Option<Operand>>,
    pub(crate) limit: f64,
    /// The source whose memory the result gets, as ggml places some results.
    pub(super) over: Option<usize>,
}

impl Operation {
    /// The graph of the operation, with its content, and its destination.
    pub(super) fn builder(&self) -> Result<(Builder, u32), CheckError> {
        self.filled(Content::Random)
    }

    fn filled(&self, content: Content) -> Result<(Builder, u32), CheckError> {
        let mut random = Random::new(1);
        let mut builder = Builder::default();
        let mut add = |operand: &Operand| match content {
            Content::Random => builder.tensor(*operand, &mut random),
            Content::Zeros => builder.zeros(*operand),
        };
        let mut dst = match self.over {
            None => add(&self.dst)?,
            Some(_) => 0, // a source
        };
        let mut src = Vec::new();
        for source in &self.src {
            src.push(source.as_ref().map(&mut add).transpose()?);
        }
        if let Some(tensor) = self.over.and_then(|at| src[at]) {
            dst = builder.again(tensor);
        }
        builder.node(self.op, dst, &src);
        Ok((builder, dst))
    }

    /// Whether the operation reads weights in the layout of a served model, and writes its result
    /// only.
    fn is_product(&self) -> bool {
        matches!(self.op, Op::MulMat { .. } | Op::MulMatId { .. })
    }

    /// The kernels of the operation on an engine.
    pub(crate) fn kernels(&self, engine: &dyn Engine) -> Result<Vec<&'static str>, CheckError> {
        let (builder, _) = self.filled(Content::Zeros)?;
        Ok(self.on(&builder, engine)?.plan.kernels())
    }

    /// Bytes of the tensors.
    pub(crate) fn bytes(&self) -> u64 {
        let operands = self.src.iter().flatten().chain([&self.dst]);
        operands.map(Operand::bytes).sum()
    }

    /// The results of a few runs of the operation. Calls `compiled` with the kernels of the plan
    /// before the first run.
    ///
    /// # Errors
    ///
    /// If the engine refuses the operation, or a run fails.
    pub(crate) fn results(
        &self,
        engine: &dyn Engine,
        runs: usize,
        compiled: impl FnOnce(&[&'static str]),
    ) -> Result<Vec<Vec<f32>>, CheckError> {
        let (builder, dst) = self.builder()?;
        let mut loaded = self.on(&builder, engine)?;
        compiled(&loaded.plan.kernels());
        let is_product = self.is_product();
        let run = |number| {
            match is_product {
                // A run that writes nothing must not leave the results of the run before.
                true => builder.poison(&loaded, dst)?,
                false => builder.fill(&loaded)?,
            }
            let outcome = loaded.plan.run().map_err(CheckError::from);
            outcome
                .and_then(|()| numbers(&*loaded.memory, &builder.tensor_at(dst)))
                .map_err(|error| CheckError::Repeat {
                    number,
                    error: Box::new(error),
                })
        };
        (1..=runs).map(run).collect()
    }

    /// The compiled graph of the operation.
    fn on(&self, builder: &Builder, engine: &dyn Engine) -> Result<LoadedGraph, CheckError> {
        match self.is_product() {
            true => builder.on_weights(engine, 0, |_| Ok(())),
            false => builder.on(engine),
        }
    }
}
