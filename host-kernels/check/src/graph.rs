//! Graphs of a few nodes in one buffer, with random content.

use std::sync::Arc;

use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

use vgpu_cpu::formats::Format;
use vgpu_engine::{Engine, Memory, Plan};

/// Places of tensors are multiples of this.
const ALIGN: u64 = 256;

/// A generator of numbers that are the same on every run.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `n`.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        (self.bits() >> 16) % n.max(1)
    }

    /// Between -1 and 1.
    pub(super) fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What a tensor holds at first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Fill {
    /// Numbers between the two.
    Numbers(f32, f32),
    /// Integers below this.
    Below(u64),
    /// 0, 1, 2, ...
    Count,
    /// 0, with negative infinity wherever an element comes after its row by more than this.
    Mask(i64),
}

/// A tensor that is dense, and what it holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) ty: Type,
    pub(super) ne: [u64; 4],
    pub(super) fill: Fill,
}

/// A graph in the making, and what its buffer holds.
#[derive(Default)]
pub(super) struct Builder {
    graph: Graph,
    bytes: Vec<u8>,
}

impl Builder {
    /// Adds a tensor; returns its index. `None` if it has no size.
    pub(super) fn tensor(&mut self, operand: Operand, random: &mut Random) -> Option<u32> {
        let shape = Shape::contiguous(operand.ty, operand.ne)?;
        let content = content(&operand, shape.elements()?, random);
        let offset = (self.bytes.len() as u64).next_multiple_of(ALIGN);
        self.bytes.resize(offset as usize, 0);
        self.bytes.extend(content);
        Some(self.place(shape, offset))
    }

    /// Adds a tensor in memory that is there.
    pub(super) fn place(&mut self, shape: Shape, offset: u64) -> u32 {
        self.graph.tensors.push(Tensor {
            shape,
            buffer: 0,
            offset,
        });
        self.graph.tensors.len() as u32 - 1
    }

    /// Adds a node.
    pub(super) fn node(&mut self, op: Op, dst: u32, src: &[Option<u32>]) {
        self.graph.nodes.push(Node {
            op,
            dst,
            src: Sources::new(src.iter().copied()),
        });
    }

    /// The graph on an engine.
    pub(super) fn on(&self, engine: &dyn Engine) -> Result<Loaded, String> {
        let loaded = self.prepared(engine, 0, |_| Ok(()))?;
        self.fill(&loaded)?;
        Ok(loaded)
    }

    /// The same with a buffer of at least `size` bytes, as guests have them for weights, to which `more` is written: what of
    /// it is only multiplied by may lie as kernels like it, and nothing of it is written any more.
    pub(super) fn on_weights(
        &self,
        engine: &dyn Engine,
        size: u64,
        more: impl FnOnce(&dyn Memory) -> Result<(), String>,
    ) -> Result<Loaded, String> {
        self.prepared(engine, size, |memory| {
            memory.mark_weights();
            let written = memory.write(0, self.bytes.as_slice().into());
            written.map_err(|error| error.to_string())?;
            more(memory)
        })
    }

    /// The graph on an engine, its buffer at least of `size` bytes, and prepared before it is compiled.
    fn prepared(
        &self,
        engine: &dyn Engine,
        size: u64,
        prepare: impl FnOnce(&dyn Memory) -> Result<(), String>,
    ) -> Result<Loaded, String> {
        let mut graph = self.graph.clone();
        graph.buffers = vec![BufferId(0)];
        let size = size.max(self.bytes.len() as u64);
        let valid = validate(graph, engine.capabilities(), &Limits::default(), |_| {
            Some(size)
        })
        .map_err(|invalid| invalid.to_string())?;
        let memory = engine.alloc(size).map_err(|error| error.to_string())?;
        prepare(&*memory)?;
        let plan = engine
            .compile(&valid, std::slice::from_ref(&memory))
            .map_err(|error| error.to_string())?;
        Ok(Loaded { plan, memory })
    }

    /// Puts into the buffer what it holds at first.
    pub(super) fn fill(&self, loaded: &Loaded) -> Result<(), String> {
        let content = self.bytes.as_slice().into();
        let written = loaded.memory.write(0, content);
        written.map_err(|error| error.to_string())
    }

    /// Where a tensor is.
    pub(super) fn tensor_at(&self, index: u32) -> Tensor {
        self.graph.tensors[index as usize]
    }
}

/// A graph on an engine.
pub(super) struct Loaded {
    pub(super) plan: Box<dyn Plan>,
    pub(super) memory: Arc<dyn Memory>,
}

/// The numbers of a tensor in `memory`.
pub(super) fn numbers(memory: &dyn Memory, tensor: &Tensor) -> Result<Vec<f32>, String> {
    let extent = tensor.shape.extent().ok_or("a tensor without a size")?;
    let mut bytes = vec![0; extent as usize];
    memory
        .read(tensor.offset, bytes.as_mut_slice().into())
        .map_err(|error| error.to_string())?;
    let n = tensor.shape.elements().ok_or("a tensor without a size")? as usize;
    Ok(match tensor.shape.ty {
        Type::I32 => {
            let integers = bytes.chunks_exact(4).filter_map(|b| b.try_into().ok());
            integers.map(|b| i32::from_le_bytes(b) as f32).collect()
        }
        Type::I64 => {
            let integers = bytes.chunks_exact(8).filter_map(|b| b.try_into().ok());
            integers.map(|b| i64::from_le_bytes(b) as f32).collect()
        }
        ty => {
            let format = Format::of(ty).ok_or_else(|| format!("{ty:?} are no real numbers"))?;
            let mut out = vec![0.0; n];
            // SAFETY: `n` elements on either side: the tensor is dense.
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
            let format = Format::of(ty).expect("cases are of integers and real numbers");
            // Searches for the best quants take long: what is large repeats itself.
            let some: Vec<f32> = values.by_ref().take(LARGEST.min(n)).collect();
            let mut bytes = vec![0; format.row_bytes(some.len())];
            // SAFETY: as many elements on either side.
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

/// Elements of a tensor that are random, a whole number of blocks of any type.
const LARGEST: usize = 1 << 18;
