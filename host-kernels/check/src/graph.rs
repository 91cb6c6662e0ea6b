//! Graphs of a few nodes in one buffer with random content.

use std::sync::Arc;

use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

use super::CheckError;
use super::random::Random;
use vgpu_cpu::formats::Format;
use vgpu_engine::{Engine, Memory, Plan};

/// Alignment of tensors in bytes.
const ALIGN: u64 = 256;

/// The initial content of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// Uniform random numbers between the lower and the upper bound.
    Numbers(f32, f32),
    /// Random integers below the bound.
    Below(u64),
    /// 0, 1, 2, ...
    Count,
    /// A causal mask: -inf where the column exceeds the row by more than the number, 0 elsewhere.
    Mask(i64),
}

/// A contiguous tensor and its initial content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) ty: Type,
    pub(super) ne: [u64; 4],
    pub(super) fill: Fill,
}

impl Operand {
    /// Bytes of the tensor; 0 if that does not fit 64 bits.
    pub(super) fn bytes(&self) -> u64 {
        let shape = Shape::contiguous(self.ty, self.ne);
        shape.and_then(|shape| shape.byte_len()).unwrap_or(0)
    }
}

/// Builds a graph and the initial content of its buffer.
#[derive(Default)]
pub(super) struct Builder {
    graph: Graph,
    bytes: Vec<u8>,
}

impl Builder {
    /// Adds a tensor with its initial content and returns its index.
    ///
    /// # Errors
    ///
    /// [`CheckError::TensorSize`] if the size overflows.
    pub(super) fn tensor(
        &mut self,
        operand: Operand,
        random: &mut Random,
    ) -> Result<u32, CheckError> {
        let Operand { ty, ne, .. } = operand;
        let shape = Shape::contiguous(ty, ne).ok_or(CheckError::TensorSize { ty, ne })?;
        let elements = shape.elements().ok_or(CheckError::TensorSize { ty, ne })?;
        let content = content(&operand, elements, random);
        let offset = (self.bytes.len() as u64).next_multiple_of(ALIGN);
        self.bytes.resize(offset as usize, 0);
        self.bytes.extend(content);
        Ok(self.place(shape, offset))
    }

    /// Adds a tensor of zero bytes and returns its index.
    ///
    /// # Errors
    ///
    /// [`CheckError::TensorSize`] if the size overflows.
    pub(super) fn zeros(&mut self, operand: Operand) -> Result<u32, CheckError> {
        let Operand { ty, ne, .. } = operand;
        let shape = Shape::contiguous(ty, ne).ok_or(CheckError::TensorSize { ty, ne })?;
        let offset = (self.bytes.len() as u64).next_multiple_of(ALIGN);
        self.bytes.resize((offset + operand.bytes()) as usize, 0);
        Ok(self.place(shape, offset))
    }

    /// Adds a tensor at an offset of the buffer, without content.
    pub(super) fn place(&mut self, shape: Shape, offset: u64) -> u32 {
        self.graph.tensors.push(Tensor {
            shape,
            buffer: 0,
            offset,
        });
        self.graph.tensors.len() as u32 - 1
    }

    /// Adds a tensor with the shape and the memory of another, and returns its index.
    pub(super) fn again(&mut self, tensor: u32) -> u32 {
        let same = self.graph.tensors[tensor as usize];
        self.place(same.shape, same.offset)
    }

    /// Adds a node.
    pub(super) fn node(&mut self, op: Op, dst: u32, src: &[Option<u32>]) {
        self.graph.nodes.push(Node {
            op,
            dst,
            src: Sources::new(src.iter().copied()),
        });
    }

    /// The same graph with its nodes divided into `count` parts, where that is possible without
    /// shares.
    #[cfg(test)]
    pub(super) fn divided(&self, count: u64) -> Builder {
        let mut arrangement = vgpu_engine::fuse::Arrangement::plain(&self.graph);
        let parents = arrangement.divide(|_, _| count, usize::MAX);
        let parents = parents.expect("no limit");
        let first: Vec<bool> = (0..arrangement.graph.nodes.len())
            .map(|at| arrangement.share(at).at == 0)
            .collect();
        let mut graph = arrangement.graph;
        let mut is_first = first.iter();
        graph.nodes.retain(|_| is_first.next() == Some(&true));
        assert_eq!(
            self.graph.tensors.len() + parents.len(),
            graph.tensors.len()
        );
        Builder {
            graph,
            bytes: self.bytes.clone(),
        }
    }

    /// How long the first node takes on an engine by estimate.
    #[cfg(test)]
    pub(super) fn estimate(&self, engine: &dyn Engine) -> std::time::Duration {
        let node = &self.graph.nodes[0];
        let speed = engine.speed_of(&self.graph, node);
        vgpu_engine::work::of(&self.graph, node).time(&speed)
    }

    /// Bytes of the tensors.
    #[cfg(test)]
    pub(super) fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The number of nodes.
    #[cfg(test)]
    pub(super) fn nodes(&self) -> usize {
        self.graph.nodes.len()
    }

    /// Allocates, fills and compiles the graph on an engine.
    ///
    /// # Errors
    ///
    /// If the engine refuses the graph or the memory.
    pub(super) fn on(&self, engine: &dyn Engine) -> Result<LoadedGraph, CheckError> {
        let loaded = self.prepared(engine, 0, |_| Ok(()))?;
        self.fill(&loaded)?;
        Ok(loaded)
    }

    /// [`Builder::on`] with a buffer of at least `size` bytes that is marked as weights, which the
    /// engine may repack. `more` writes further content before the graph is compiled; afterwards
    /// the host writes nothing.
    ///
    /// # Errors
    ///
    /// If the engine refuses the graph or the memory, or `more` fails.
    pub(super) fn on_weights(
        &self,
        engine: &dyn Engine,
        size: u64,
        more: impl FnOnce(&dyn Memory) -> Result<(), CheckError>,
    ) -> Result<LoadedGraph, CheckError> {
        self.prepared(engine, size, |memory| {
            memory.mark_weights();
            memory.write(0, self.bytes.as_slice().into())?;
            more(memory)
        })
    }

    /// Allocates at least `size` bytes, runs `prepare` and compiles the graph.
    fn prepared(
        &self,
        engine: &dyn Engine,
        size: u64,
        prepare: impl FnOnce(&dyn Memory) -> Result<(), CheckError>,
    ) -> Result<LoadedGraph, CheckError> {
        let mut graph = self.graph.clone();
        graph.buffers = vec![BufferId(0)];
        let size = size.max(self.bytes.len() as u64);
        let valid = validate(graph, engine.capabilities(), &Limits::default(), |_| {
            Some(size)
        })?;
        let memory = engine.alloc(size)?;
        prepare(&*memory)?;
        let plan = engine.compile(&valid, std::slice::from_ref(&memory), &|| false)?;
        Ok(LoadedGraph { plan, memory })
    }

    /// Writes the initial content of the buffer.
    ///
    /// # Errors
    ///
    /// If the engine refuses the write.
    pub(super) fn fill(&self, loaded: &LoadedGraph) -> Result<(), CheckError> {
        loaded.memory.write(0, self.bytes.as_slice().into())?;
        Ok(())
    }

    /// Writes ones into all bits of a tensor: NaN, if it has floats.
    ///
    /// # Errors
    ///
    /// If the tensor's size overflows or the engine refuses the write.
    pub(super) fn poison(&self, loaded: &LoadedGraph, tensor: u32) -> Result<(), CheckError> {
        let tensor = self.tensor_at(tensor);
        let Shape { ty, ne, .. } = tensor.shape;
        let bytes = tensor.shape.byte_len();
        let bytes = bytes.ok_or(CheckError::TensorSize { ty, ne })?;
        let ones = vec![0xff; bytes as usize];
        loaded.memory.write(tensor.offset, ones.as_slice().into())?;
        Ok(())
    }

    /// The tensor of this index.
    pub(super) fn tensor_at(&self, index: u32) -> Tensor {
        self.graph.tensors[index as usize]
    }
}

/// A compiled graph and its memory.
pub(super) struct LoadedGraph {
    pub(super) plan: Box<dyn Plan>,
    pub(super) memory: Arc<dyn Memory>,
}

/// Reads a tensor of `memory` as f32.
///
/// # Errors
///
/// If the tensor's size overflows or the engine refuses the read.
pub(super) fn numbers(memory: &dyn Memory, tensor: &Tensor) -> Result<Vec<f32>, CheckError> {
    let Shape { ty, ne, .. } = tensor.shape;
    let size = CheckError::TensorSize { ty, ne };
    let byte_len = tensor.shape.byte_len().ok_or_else(|| size.clone())?;
    let mut bytes = vec![0; byte_len as usize];
    memory.read(tensor.offset, bytes.as_mut_slice().into())?;
    let n = tensor.shape.elements().ok_or(size)? as usize;
    Ok(match ty {
        Type::I32 => {
            let integers = bytes.chunks_exact(4).filter_map(|b| b.try_into().ok());
            integers.map(|b| i32::from_le_bytes(b) as f32).collect()
        }
        Type::I64 => {
            let integers = bytes.chunks_exact(8).filter_map(|b| b.try_into().ok());
            integers.map(|b| i64::from_le_bytes(b) as f32).collect()
        }
        ty => {
            let format = Format::of(ty).expect("results are integers or real numbers");
            let mut out = vec![0.0; n];
            // SAFETY: the tensor is contiguous, so `bytes`, which has the tensor's byte length,
            // holds `n` elements in whole blocks of `format`; `out` has room for `n` floats.
            unsafe { (format.dequantize_row)(bytes.as_ptr(), out.as_mut_ptr(), n) };
            out
        }
    })
}

fn content(operand: &Operand, n: u64, random: &mut Random) -> Vec<u8> {
    let n = n as usize;
    let row = operand.ne[0].max(1);
    let mut values = (0..n as u64).map(|i| match operand.fill {
        Fill::Numbers(low, high) => low + (high - low) * 0.5 * (random.number() + 1.0),
        Fill::Below(limit) => random.below(limit) as f32,
        Fill::Count => i as f32,
        Fill::Mask(beyond) => {
            let column = (i % row) as i64 - (i / row % operand.ne[1]) as i64;
            if column > beyond {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        }
    });
    match operand.ty {
        Type::I32 => values.flat_map(|x| (x as i32).to_le_bytes()).collect(),
        Type::I64 => values.flat_map(|x| (x as i64).to_le_bytes()).collect(),
        ty => {
            let format = Format::of(ty).expect("operands are integers or real numbers");
            // Quantisation is slow: large tensors repeat their first elements.
            let some: Vec<f32> = values.by_ref().take(LARGEST.min(n)).collect();
            let mut bytes = vec![0; format.row_bytes(some.len())];
            // SAFETY: `some` holds `some.len()` floats, and `bytes` has `row_bytes(some.len())`
            // bytes, the blocks of as many elements.
            unsafe { (format.quantize_row)(some.as_ptr(), bytes.as_mut_ptr(), some.len()) };
            bytes
                .iter()
                .copied()
                .cycle()
                .take(format.row_bytes(n))
                .collect()
        }
    }
}

/// Random elements of a tensor: a multiple of the block size of every type.
const LARGEST: usize = 1 << 18;
