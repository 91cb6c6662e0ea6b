//! Graphs that are almost valid.
//!
//! Validation refuses a random graph at its first node, so that no later code would be tested.
//! Recipes therefore make valid nodes, with tensors in many layouts. Then a few numbers are
//! changed.

use vgpu_transport::ir::{
    BufferId, Capabilities, Graph, Node, OpKind, Rule, Shape, Sources, Tensor, Type, TypeSet,
};

use super::input::Input;
use super::recipes::recipe;

/// A buffer that graphs may name, and its size.
pub(crate) type BufferOffset = (BufferId, u64);

/// A graph for an engine with these capabilities, on some of these buffers.
pub(crate) fn graph(input: &mut Input<'_>, caps: &Capabilities, places: &[BufferOffset]) -> Graph {
    let mut maker = Maker {
        input,
        places,
        graph: Graph::default(),
        is_dense: false,
        searched: 0,
    };
    for _ in 0..=maker.input.below(4) {
        if places.is_empty() || maker.input.is_empty() {
            break;
        }
        // The input holds the operator's index in the list of all operators. The index stays the
        // same when an engine supports more of them.
        let kind = maker.input.pick(OpKind::ALL);
        maker.node(kind, caps);
    }
    maker.break_something();
    maker.graph
}

/// The image of a graph, sometimes with words changed.
pub(crate) fn image(input: &mut Input<'_>, graph: &Graph) -> Vec<u8> {
    let mut words = graph.encode();
    if input.chance(16) {
        for _ in 0..=input.below(3) {
            let at = input.u64() as usize % words.len();
            words[at] = match input.below(4) {
                0 => words[at] ^ 1 << input.below(32),
                1 => u32::from(input.byte()),
                2 => words[at].wrapping_add(1),
                _ => input.odd_number() as u32,
            };
        }
    }
    if input.chance(100) {
        words.truncate(input.u64() as usize % words.len());
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

struct Maker<'a, 'i> {
    input: &'a mut Input<'i>,
    places: &'a [BufferOffset],
    graph: Graph,
    /// The next tensors are contiguous.
    is_dense: bool,
    /// Elements that the graph so far converts to a type with [`is_searched`].
    searched: u64,
}

/// The most elements that a graph converts to such types: a few blocks. An element takes up to
/// 0.8 µs, so that a session with more would take longer than a hundred others.
const MAX_SEARCHED: u64 = 2048;

/// Whether the conversion to this type looks for the best scales or entries of a codebook.
fn is_searched(ty: Type) -> bool {
    matches!(
        ty,
        Type::Q2K
            | Type::Iq1S
            | Type::Iq1M
            | Type::Iq2Xxs
            | Type::Iq2Xs
            | Type::Iq2S
            | Type::Iq3Xxs
            | Type::Iq3S
            | Type::Iq4Xs
    )
}

impl Maker<'_, '_> {
    /// A node of this operator, if the engine has it and a tensor fits.
    fn node(&mut self, kind: OpKind, caps: &Capabilities) {
        let rules: Vec<&Rule> = caps.rules().iter().filter(|r| r.op == kind).collect();
        if rules.is_empty() {
            return;
        }
        let rule = self.input.pick(&rules);
        let dst_type = self.any_type(rule.dst);
        let types: Vec<Type> = rule
            .src
            .iter()
            .map(|&set| match rule.same_type {
                true => dst_type,
                false => self.any_type(set),
            })
            .collect();
        let block = types
            .iter()
            .chain([&dst_type])
            .map(|ty| ty.block_elements())
            .max()
            .unwrap_or(1);
        let Some(recipe) = recipe(self.input, kind, dst_type, block) else {
            return;
        };
        if is_searched(dst_type) {
            let elements = recipe.dst.iter().fold(1u64, |n, &d| n.saturating_mul(d));
            if self.searched.saturating_add(elements) > MAX_SEARCHED {
                return;
            }
            self.searched += elements;
        }
        self.is_dense = recipe.is_dense || self.input.chance(2);
        let Some(dst) = self.operand(dst_type, recipe.dst) else {
            return;
        };
        let mut src = [None; 10];
        for (i, operand) in recipe.src.iter().enumerate() {
            if let Some((ty, ne)) = *operand {
                let ty = ty.or(types.get(i).copied()).unwrap_or(Type::F32);
                src[i] = self.operand(ty, ne);
                if src[i].is_none() {
                    return;
                }
            }
        }
        // Operations in place, as ggml has them.
        let can_be_in_place = recipe.src.first() == Some(&Some((None, recipe.dst)))
            && types.first() == Some(&dst_type);
        if self.input.chance(5) && can_be_in_place {
            src[0] = Some(dst);
        }
        self.graph.nodes.push(Node {
            op: recipe.op,
            dst,
            src: Sources::new(src),
        });
    }

    fn any_type(&mut self, set: TypeSet) -> Type {
        let all = Type::ALL.iter().copied();
        let types: Vec<Type> = all.filter(|&ty| set.contains(ty)).collect();
        match types.as_slice() {
            [] => Type::F32,
            some => self.input.pick(some),
        }
    }

    /// A tensor of these lengths in some layout, somewhere it fits. `None` when it fits nowhere.
    fn operand(&mut self, ty: Type, ne: [u64; 4]) -> Option<u32> {
        let shape = self.layout(ty, ne);
        // The buffers are small, so random tensors overlap often.
        let byte_len = shape.byte_len().unwrap_or(u64::MAX);
        let fitting: Vec<BufferOffset> = self
            .places
            .iter()
            .copied()
            .filter(|p| p.1 >= byte_len)
            .collect();
        if fitting.is_empty() {
            return None;
        }
        let (buffer, size) = self.input.pick(&fitting);
        let free = size - byte_len;
        let element = match ty.is_quantized() {
            true => 1,
            false => ty.block_bytes(),
        };
        let offset = match free / element {
            0 => 0,
            steps => (u64::from(self.input.byte()) * 7 % (steps + 1)) * element,
        };
        // At the end of the buffer, where an access one element too far is outside.
        let offset = match self.input.chance(3) {
            true => free / element * element,
            false => offset,
        };
        let known = self.graph.buffers.iter().position(|&b| b == buffer);
        let buffer = known.unwrap_or_else(|| {
            self.graph.buffers.push(buffer);
            self.graph.buffers.len() - 1
        });
        self.graph.tensors.push(Tensor {
            shape,
            buffer: buffer as u32,
            offset,
        });
        Some(self.graph.tensors.len() as u32 - 1)
    }

    fn layout(&mut self, ty: Type, ne: [u64; 4]) -> Shape {
        let block = ty.block_bytes();
        let mut order = [0, 1, 2, 3];
        let mut gaps = [0; 4];
        match self.input.below(8) {
            _ if self.is_dense => {}
            0 => order.swap(1, 2),
            1 => order.swap(2, 3),
            2 if !ty.is_quantized() => order.swap(0, 1),
            3 if !ty.is_quantized() => gaps[0] = u64::from(self.input.byte() % 3),
            4 => gaps[1] = u64::from(self.input.byte() % 3),
            5 => gaps[2] = u64::from(self.input.byte() % 3),
            _ => {}
        }
        let mut nb = [block; 4];
        let mut step = block;
        for d in order {
            nb[d] = step;
            let units = if d == 0 {
                ne[0].div_ceil(ty.block_elements())
            } else {
                ne[d]
            };
            step = step.saturating_mul(units + gaps[d]);
        }
        Shape { ty, ne, nb }
    }

    /// Sometimes makes one number of the graph wrong.
    fn break_something(&mut self) {
        if !self.input.chance(12) || self.graph.tensors.is_empty() {
            return;
        }
        let at = self.input.below(self.graph.tensors.len());
        let odd = match self.input.below(3) {
            0 => self.input.odd_number(),
            _ => u64::from(self.input.byte()),
        };
        let dimension = self.input.below(4);
        let tensor = &mut self.graph.tensors[at];
        match self.input.below(8) {
            0 => tensor.offset = odd,
            1 => tensor.buffer = odd as u32 % self.graph.buffers.len() as u32,
            2 => tensor.shape.ty = Type::ALL[odd as usize % Type::ALL.len()],
            3 | 4 => tensor.shape.ne[dimension] = odd,
            _ => tensor.shape.nb[dimension] = odd,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine;
    use vgpu_gguf::Rng;
    use vgpu_transport::ir::{Limits, validate};

    const TRIES: usize = 200;

    /// Ensures that the fuzzer does not silently omit an operator.
    #[test]
    fn every_operator_of_the_engine_is_reached() {
        let engine = CpuEngine::new(1, Some(0)).expect("a thread");
        let caps = engine.capabilities();
        let places = [(BufferId(1), 1 << 16)];
        let mut random = Rng::new(1, 0);
        for rule in caps.rules() {
            let (mut valid, mut refusal) = (0, None);
            for _ in 0..TRIES {
                let bytes: Vec<u8> = (0..300).map(|_| random.next_u64() as u8).collect();
                let mut maker = Maker {
                    input: &mut Input::new(&bytes),
                    places: &places,
                    graph: Graph::default(),
                    is_dense: false,
                    searched: 0,
                };
                maker.node(rule.op, caps);
                if !maker.graph.nodes.is_empty() {
                    let size_of = |_| Some(places[0].1);
                    match validate(maker.graph, caps, &Limits::default(), size_of) {
                        Ok(_) => valid += 1,
                        Err(invalid) => refusal = Some(invalid),
                    }
                }
            }
            let op = rule.op;
            assert!(
                valid > TRIES / 10,
                "{op:?}: {valid} of {TRIES} are valid, {refusal:?}"
            );
        }
    }
}
