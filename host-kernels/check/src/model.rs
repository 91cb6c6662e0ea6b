//! Graphs of language models as llama.cpp builds them: the same operators in the same order, with
//! intermediates that share memory and are computed in place where ggml does so. This module fills
//! the memory of a graph, compiles the graph and runs it.

mod builder;
mod shapes;

use std::sync::Arc;

use vgpu_transport::ir::{BufferId, Limits, Tensor, ValidGraph, validate};

use super::random::Random;
use builder::{COMPUTE, WEIGHTS};
use vgpu_cpu::formats::Format;
use vgpu_engine::{Engine, Memory, Plan};

pub use builder::{Built, ModelBuilder};
pub use shapes::{
    DENSE_1B, DENSE_8B, DENSE_70B, DENSE_256M, EXPERTS_20B, EXPERTS_30B, Family, Model, StepShape,
    TINY, TINY_BIASES, TINY_EXPERTS, TINY_GPT_OSS,
};

/// Random elements of a tensor, a multiple of the block size of every type. Larger tensors repeat
/// them.
const RANDOM_ELEMENTS: usize = 1 << 18;

/// The memory of a model on an engine. Weights are the same random numbers each time.
pub struct Loaded {
    /// Weights, KV cache, intermediates.
    pub buffers: Vec<Arc<dyn Memory>>,
}

impl Built {
    /// Allocates memory on `engine` and fills it with random weights.
    pub fn load(&self, engine: &dyn Engine) -> Loaded {
        let buffers: Vec<_> = { self.sizes.iter() }
            .map(|&size| {
                engine
                    .alloc(size)
                    .expect("the engine has memory for the model")
            })
            .collect();
        buffers[WEIGHTS as usize].mark_weights();
        let mut random = Random::new(1);
        let mut seen = Vec::new();
        for tensor in &self.graph.tensors {
            if tensor.buffer != WEIGHTS || seen.contains(&tensor.offset) {
                continue;
            }
            seen.push(tensor.offset);
            let n = tensor.shape.elements().unwrap() as usize;
            // Variance 1 / columns: products keep the variance of the activations.
            let [columns, rows, ..] = tensor.shape.ne;
            let size = if rows == 1 {
                1.0
            } else {
                (3.0 / columns as f32).sqrt()
            };
            let values: Vec<f32> = { 0..n.min(RANDOM_ELEMENTS) }
                .map(|_| size * random.number())
                .collect();
            let format = Format::of(tensor.shape.ty).expect("weights are real numbers");
            let mut bytes = vec![0; format.row_bytes(values.len())];
            // SAFETY: `values` holds `values.len()` floats, and `bytes` has room for the blocks of
            // as many elements.
            unsafe { (format.quantize_row)(values.as_ptr(), bytes.as_mut_ptr(), values.len()) };
            let all = format.row_bytes(n);
            for start in (0..all).step_by(bytes.len()) {
                let part = &bytes[..bytes.len().min(all - start)];
                let written =
                    buffers[WEIGHTS as usize].write(tensor.offset + start as u64, part.into());
                written.expect("weights lie in their buffer");
            }
        }
        Loaded { buffers }
    }

    /// Memory of several guests that share the weights of this model: one buffer of frozen weights
    /// for each, all at the same addresses.
    ///
    /// # Panics
    /// If the engine cannot share weights, or has not the memory.
    pub fn load_shared(&self, engine: &dyn Engine, guests: usize) -> Vec<Loaded> {
        let weights = WEIGHTS as usize;
        let mut first = self.load(engine);
        let shared = engine.alloc_weights(&first.buffers[weights]);
        let shared = shared.ok().flatten().expect("the engine shares weights");
        let mut part = vec![0; 1 << 20];
        for offset in (0..self.sizes[weights]).step_by(part.len()) {
            let len = part.len().min((self.sizes[weights] - offset) as usize);
            let part = &mut part[..len];
            let read = first.buffers[weights].read(offset, (&mut *part).into());
            read.expect("weights lie in their buffer");
            let written = shared.write(offset, (&*part).into());
            written.expect("weights lie in their buffer");
        }
        assert!(shared.freeze(), "the engine shares weights");
        first.buffers[weights] = shared;
        let extent = first.buffers[weights].extent(0, self.sizes[weights]);
        let extent = extent.expect("all of the weights");
        let mut all = vec![first];
        for _ in 1..guests {
            let mut buffers: Vec<_> = { self.sizes.iter() }
                .map(|&size| engine.alloc(size).expect("the engine has memory"))
                .collect();
            let own = engine.alloc_weights(&buffers[weights]);
            let own = own.ok().flatten().expect("the engine shares weights");
            own.attach(0, &extent, &|| false)
                .expect("weights of the same size");
            assert!(own.freeze(), "the engine shares weights");
            buffers[weights] = own;
            all.push(Loaded { buffers });
        }
        all
    }

    /// The graph, validated for an engine that supports all of it.
    pub fn valid(&self, engine: &dyn Engine) -> ValidGraph {
        let size = |id: BufferId| Some(self.sizes[id.0 as usize - 1]);
        validate(
            self.graph.clone(),
            engine.capabilities(),
            &Limits::default(),
            size,
        )
        .expect("the engine supports the operators of these models")
    }

    /// Compiles the graph over the memory of [`Built::load`].
    pub fn compile(&self, engine: &dyn Engine, loaded: &Loaded) -> Box<dyn Plan> {
        let plan = engine.compile(&self.valid(engine), &loaded.buffers, &|| false);
        let mut plan = plan.expect("the engine compiles a valid graph");
        plan.reserve().expect("the device has memory");
        plan
    }

    /// Writes the inputs of the step at `position` of a sequence.
    pub fn write_inputs(&self, loaded: &Loaded, position: u64) {
        let StepShape { tokens, seen } = self.step;
        for (name, tensor) in &self.inputs {
            let each = position..position + tokens;
            let bytes: Vec<u8> = match *name {
                "tokens" => each
                    .flat_map(|p| ((p * 7 % self.model.vocabulary) as i32).to_le_bytes())
                    .collect(),
                "positions" => each.flat_map(|p| (p as i32).to_le_bytes()).collect(),
                "last" => (tokens as i32 - 1).to_le_bytes().to_vec(),
                "places" => each.flat_map(|p| (p as i64).to_le_bytes()).collect(),
                _ => each
                    .flat_map(|p| (0..seen).map(move |k| if k <= p { 0u16 } else { 0xfc00 }))
                    .flat_map(u16::to_le_bytes)
                    .collect(),
            };
            let written =
                loaded.buffers[COMPUTE as usize].write(tensor.offset, bytes.as_slice().into());
            written.expect("inputs lie in their buffer");
        }
    }

    /// Whether a tensor is at the offset of an input.
    pub fn is_input(&self, tensor: &Tensor) -> bool {
        let mut inputs = self.inputs.iter();
        inputs.any(|(_, input)| (input.buffer, input.offset) == (tensor.buffer, tensor.offset))
    }

    /// Writes the first integer of an input.
    pub fn write_input(&self, loaded: &Loaded, name: &str, value: i64) {
        let (_, tensor) = { self.inputs.iter() }
            .find(|(known, _)| *known == name)
            .unwrap();
        let bytes = value.to_le_bytes();
        let bytes = &bytes[..tensor.shape.ty.block_bytes() as usize];
        let written = loaded.buffers[COMPUTE as usize].write(tensor.offset, bytes.into());
        written.expect("inputs lie in their buffer");
    }

    /// Reads the logits of the last run.
    pub fn read_result(&self, loaded: &Loaded) -> Vec<f32> {
        let mut bytes = vec![0; self.result.shape.byte_len().unwrap() as usize];
        let read =
            loaded.buffers[COMPUTE as usize].read(self.result.offset, bytes.as_mut_slice().into());
        read.expect("the result lies in its buffer");
        { bytes.chunks_exact(4) }
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }
}
