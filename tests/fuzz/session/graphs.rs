//! Graphs that are nearly right.
//!
//! A random graph is refused at its first node, and nothing behind validation is ever reached. So each
//! operator has a recipe here that gives operands of the right extents; then a few things are broken.

use vgpu_transport::ir::{
    BufferId, Capabilities, GluKind, Graph, Node, Op, OpKind, Precision, RopeMode, Rule, Shape,
    SortOrder, Sources, Tensor, TriKind, Type, TypeSet, UnaryKind,
};

use super::input::Input;

/// A buffer that graphs may name, and its size.
pub(crate) type Place = (BufferId, u64);

/// A graph for an engine with these capabilities, on some of these buffers.
pub(crate) fn graph(input: &mut Input<'_>, caps: &Capabilities, places: &[Place]) -> Graph {
    let mut maker = Maker {
        input,
        places,
        graph: Graph::default(),
        is_dense: false,
    };
    for _ in 0..=maker.input.below(4) {
        if places.is_empty() || maker.input.is_empty() {
            break;
        }
        maker.any_node(caps);
    }
    maker.break_something();
    maker.graph
}

/// The image of a graph, sometimes with words changed.
pub(crate) fn image(input: &mut Input<'_>, graph: &Graph) -> Vec<u8> {
    let mut words = graph.encode();
    if input.chance(24) {
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
    places: &'a [Place],
    graph: Graph,
    /// The next tensors are laid out in the plain way.
    is_dense: bool,
}

/// Types and extents of the operands of a node to be, sources without some optional ones.
struct Recipe {
    op: Op,
    dst: [u64; 4],
    src: Vec<Option<Operand>>,
}

impl Recipe {
    /// Makes parameters fit that rules connect with each other or with the operands.
    fn mend(&mut self, dst_type: Type) {
        let has_source = |i: usize| self.src.get(i).is_some_and(Option::is_some);
        let no_mask = match &self.op {
            Op::SoftMax { .. } => !has_source(1),
            Op::FlashAttnExt { .. } => !has_source(3),
            _ => false,
        };
        match &mut self.op {
            Op::SoftMax { max_bias, .. } | Op::FlashAttnExt { max_bias, .. } if no_mask => {
                *max_bias = 0.0;
            }
            Op::GroupNorm { n_groups, .. } => *n_groups = (*n_groups).max(1),
            Op::DiagMaskInf { n_past } | Op::DiagMaskZero { n_past } => *n_past = (*n_past).max(0),
            Op::Set {
                nb1,
                nb2,
                nb3,
                offset,
            }
            | Op::Acc {
                nb1,
                nb2,
                nb3,
                offset,
            } => {
                let whole = Shape::contiguous(dst_type, self.dst);
                [_, *nb1, *nb2, *nb3] = whole.map_or([0; 4], |shape| shape.nb);
                *offset = 0;
            }
            _ => {}
        }
    }
}

/// Type (`None`: what the engine's rule says) and extents.
type Operand = (Option<Type>, [u64; 4]);

fn some(ne: [u64; 4]) -> Option<Operand> {
    Some((None, ne))
}

fn typed(ty: Type, ne: [u64; 4]) -> Option<Operand> {
    Some((Some(ty), ne))
}

impl Maker<'_, '_> {
    fn any_node(&mut self, caps: &Capabilities) {
        let rule = &caps.rules()[self.input.u64() as usize % caps.rules().len()];
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
        let Some(mut recipe) = self.recipe(rule, block) else {
            return;
        };
        if !self.input.chance(16) {
            recipe.mend(dst_type);
        }
        self.is_dense = self.input.chance(2) || matches!(rule.op, OpKind::Set | OpKind::Acc);
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
        let can_be_in_place =
            recipe.src.first() == Some(&some(recipe.dst)) && types.first() == Some(&dst_type);
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

    fn extent(&mut self) -> u64 {
        match self.input.byte() {
            0..=99 => 1,
            byte @ 100..=230 => u64::from(byte) % 9 + 1,
            231..=250 => 33,
            _ => 0,
        }
    }

    /// A row of whole blocks of `block` elements.
    fn row(&mut self, block: u64) -> u64 {
        match (block, self.input.byte()) {
            (_, 255) => 0,
            (1, byte) => u64::from(byte) % 70 + 1,
            (_, byte) => block * (u64::from(byte) % 3 + 1),
        }
    }

    fn extents(&mut self, block: u64) -> [u64; 4] {
        [self.row(block), self.extent(), self.extent(), self.extent()]
    }

    /// Extents that repeat into `ne`.
    fn part(&mut self, ne: [u64; 4]) -> [u64; 4] {
        ne.map(|n| match self.input.below(3) {
            0 => 1,
            1 if n % 2 == 0 => n / 2,
            _ => n,
        })
    }

    fn recipe(&mut self, rule: &Rule, block: u64) -> Option<Recipe> {
        let ne = self.extents(block);
        let [n0, n1, n2, n3] = ne;
        let op = self.parameters(rule.op)?;
        let same = |count: usize| (ne, vec![some(ne); count]);
        let (dst, src) = match rule.op {
            OpKind::Add | OpKind::Sub | OpKind::Mul | OpKind::Div => {
                (ne, vec![some(ne), some(self.part(ne))])
            }
            OpKind::Add1 => (ne, vec![some(ne), some([1; 4])]),
            OpKind::AddId => {
                let ne = [n0, n1, n2, 1];
                let rows = [n0, self.extent(), 1, 1];
                let ids = typed(Type::I32, [n1, n2, 1, 1]);
                (ne, vec![some(ne), some(rows), ids])
            }
            OpKind::Glu if self.input.chance(2) => same(2),
            OpKind::Glu => (ne, vec![some([2 * n0, n1, n2, n3])]),
            OpKind::SiluBack | OpKind::RmsNormBack | OpKind::SoftMaxBack => same(2),
            OpKind::CountEqual => ([1; 4], vec![some(ne); 2]),
            OpKind::Sum => ([1; 4], vec![some(ne)]),
            OpKind::SumRows | OpKind::Mean => ([1, n1, n2, n3], vec![some(ne)]),
            OpKind::Argmax => ([n1, 1, 1, 1], vec![some([n0, n1, 1, 1])]),
            OpKind::TopK => ([n0.min(4), n1, n2, n3], vec![some(ne)]),
            OpKind::SoftMax => {
                let [m1, m2, m3] = [n1 + self.extent() / 2, n2, n3];
                let part = self.part([n0, m1, m2, m3]);
                let mask = [n0, m1, part[2], part[3]];
                let float = self.input.pick(&[Type::F32, Type::F16]);
                let sinks = typed(Type::F32, [n2, 1, 1, 1]);
                let mask = self.input.chance(2).then_some((Some(float), mask));
                let sinks = if self.input.chance(3) { sinks } else { None };
                (ne, vec![some(ne), mask, sinks])
            }
            OpKind::MulMat => {
                let b = [n0, self.extent(), n2, n3];
                let part = self.part([n0, n1, n2, n3]);
                let a = [n0, n1, part[2], part[3]];
                ([n1, b[1], n2, n3], vec![some(a), some(b)])
            }
            OpKind::MulMatId => {
                let experts = [n0, n1, n2, 1];
                let (used, tokens) = (self.extent(), self.extent());
                let repeated = if self.input.chance(2) { 1 } else { used };
                let b = [n0, repeated, tokens, 1];
                let ids = typed(Type::I32, [used, tokens, 1, 1]);
                ([n1, used, tokens, 1], vec![some(experts), some(b), ids])
            }
            OpKind::OutProd => {
                let b = [self.extent(), n1, n2, n3];
                let part = self.part(ne);
                let a = [n0, n1, part[2], part[3]];
                ([n0, b[0], n2, n3], vec![some(a), some(b)])
            }
            OpKind::Rope => {
                let ne = [n0 * 2, n1, n2, n3];
                let ids = match op {
                    Op::Rope {
                        mode: RopeMode::Normal | RopeMode::Neox,
                        ..
                    } => n2,
                    _ => 4 * n2,
                };
                let mut src = vec![some(ne), typed(Type::I32, [ids, 1, 1, 1])];
                if self.input.chance(3) {
                    src.push(typed(Type::F32, [2 * n0, 1, 1, 1]));
                }
                return Some(Recipe {
                    op: fit_rope(op, ne[0]),
                    dst: ne,
                    src,
                });
            }
            OpKind::FlashAttnExt => {
                let (keys, width) = (self.extent(), self.row(block));
                let (heads, sequences) = (n2.max(1), n3.max(1));
                let q = [n0, n1, heads, sequences];
                let part = self.part(q);
                let k = [n0, keys, part[2], part[3]];
                let v = [width, keys, part[2], part[3]];
                let part = self.part(q);
                let mask = typed(Type::F16, [keys, n1 + self.extent() / 2, part[2], part[3]]);
                let mut src = vec![some(q), some(k), some(v)];
                src.push(if self.input.chance(2) { mask } else { None });
                if self.input.chance(3) {
                    src.push(typed(Type::F32, [heads, 1, 1, 1]));
                }
                ([width, heads, n1, sequences], src)
            }
            OpKind::Copy => {
                let source = match self.input.below(3) {
                    0 => [n0, n1 * n2, n3, 1],
                    1 => [n0 * n1, n2, 1, n3],
                    _ => ne,
                };
                (ne, vec![some(source)])
            }
            OpKind::Repeat => (ne, vec![some(self.part(ne))]),
            OpKind::RepeatBack => (self.part(ne), vec![some(ne)]),
            OpKind::Concat => {
                let Op::Concat { dim } = op else { return None };
                let mut whole = ne;
                whole[dim as usize % 4] *= 2;
                (whole, vec![some(ne); 2])
            }
            OpKind::GetRows => {
                let count = self.extent();
                let ids = typed(Type::I32, [count, n2, n3, 1]);
                ([n0, count, n2, n3], vec![some(ne), ids])
            }
            OpKind::GetRowsBack => {
                let ids = typed(Type::I32, [n1, 1, 1, 1]);
                let rows = self.extent();
                ([n0, rows, 1, 1], vec![some([n0, n1, 1, 1]), ids])
            }
            OpKind::SetRows => {
                let rows = [n0, self.extent(), n2, n3];
                let part = self.part(ne);
                let ty = self.input.pick(&[Type::I32, Type::I64]);
                let ids = typed(ty, [rows[1], part[2], part[3], 1]);
                (ne, vec![some(rows), ids])
            }
            OpKind::Set | OpKind::Acc => {
                let part = self.part(ne);
                (ne, vec![some(ne), some(part)])
            }
            OpKind::Diag => ([n0, n0, n2, n3], vec![some([n0, 1, n2, n3])]),
            OpKind::Pad => {
                let Op::Pad { left, right, .. } = op else {
                    return None;
                };
                let padding = |d: usize| (left[d].max(0) + right[d].max(0)) as u64;
                let whole = std::array::from_fn(|d| ne[d] + padding(d));
                (whole, vec![some(ne)])
            }
            OpKind::PadReflect1d => {
                let Op::PadReflect1d { p0, p1 } = op else {
                    return None;
                };
                let row = n0 + (p0.max(0) + p1.max(0)) as u64;
                ([row, n1, n2, n3], vec![some(ne)])
            }
            OpKind::Fill => (ne, vec![]),
            OpKind::Arange => {
                let Op::Arange { start, stop, step } = op else {
                    return None;
                };
                let count = ((stop - start) / step).ceil() as u64;
                ([count, 1, 1, 1], vec![])
            }
            // One source of the same extents is what most others take.
            kind => same(kind.sources().0),
        };
        Some(Recipe { op, dst, src })
    }

    /// An operator with parameters that are mostly sensible. `None` for those that no engine of ours
    /// has: when one gets them, this is where to add them.
    fn parameters(&mut self, kind: OpKind) -> Option<Op> {
        let input = &mut *self.input;
        let small = |input: &mut Input<'_>| i32::from(input.byte() % 4);
        Some(match kind {
            OpKind::Copy => Op::Copy {},
            OpKind::Repeat => Op::Repeat {},
            OpKind::RepeatBack => Op::RepeatBack {},
            OpKind::Concat => Op::Concat {
                dim: input.below(4) as u32,
            },
            OpKind::GetRows => Op::GetRows {},
            OpKind::GetRowsBack => Op::GetRowsBack {},
            OpKind::SetRows => Op::SetRows {},
            OpKind::Set | OpKind::Acc => {
                let [nb1, nb2, nb3] = [0; 3].map(|_: u64| 4 * u64::from(input.byte()));
                let offset = 4 * u64::from(input.byte() % 8);
                if kind == OpKind::Set {
                    Op::Set {
                        nb1,
                        nb2,
                        nb3,
                        offset,
                    }
                } else {
                    Op::Acc {
                        nb1,
                        nb2,
                        nb3,
                        offset,
                    }
                }
            }
            OpKind::Diag => Op::Diag {},
            OpKind::DiagMaskInf => Op::DiagMaskInf {
                n_past: input.integer(),
            },
            OpKind::DiagMaskZero => Op::DiagMaskZero {
                n_past: input.integer(),
            },
            OpKind::Pad => Op::Pad {
                left: [0; 4].map(|_: i32| small(input)),
                right: [0; 4].map(|_: i32| small(input)),
                circular: input.chance(2),
            },
            OpKind::PadReflect1d => Op::PadReflect1d {
                p0: small(input),
                p1: small(input),
            },
            OpKind::Roll => Op::Roll {
                shift: [0; 4].map(|_: i32| input.integer()),
            },
            OpKind::Tri => Op::Tri {
                kind: input.pick(TriKind::ALL),
            },
            OpKind::Fill => Op::Fill {
                value: input.float(),
            },
            OpKind::Arange => {
                let start = f32::from(input.byte());
                let stop = start + f32::from(input.byte());
                Op::Arange {
                    start,
                    stop,
                    step: input.pick(&[1.0, 0.5, 3.0]),
                }
            }
            OpKind::Add => Op::Add {},
            OpKind::Sub => Op::Sub {},
            OpKind::Mul => Op::Mul {},
            OpKind::Div => Op::Div {},
            OpKind::AddId => Op::AddId {},
            OpKind::Add1 => Op::Add1 {},
            OpKind::Scale => Op::Scale {
                scale: input.float(),
                bias: input.float(),
            },
            OpKind::Clamp => Op::Clamp {
                min: input.float(),
                max: input.float(),
            },
            OpKind::Sqr => Op::Sqr {},
            OpKind::Sqrt => Op::Sqrt {},
            OpKind::Log => Op::Log {},
            OpKind::Sin => Op::Sin {},
            OpKind::Cos => Op::Cos {},
            OpKind::LeakyRelu => Op::LeakyRelu {
                negative_slope: input.float(),
            },
            OpKind::Unary => Op::Unary {
                kind: input.pick(UnaryKind::ALL),
            },
            OpKind::Xielu => Op::Xielu {
                alpha_n: input.float(),
                alpha_p: input.float(),
                beta: input.float(),
                eps: input.float(),
            },
            OpKind::Glu => Op::Glu {
                kind: input.pick(GluKind::ALL),
                swapped: input.chance(2),
                alpha: input.float(),
                limit: input.float(),
            },
            OpKind::SiluBack => Op::SiluBack {},
            OpKind::Sum => Op::Sum {},
            OpKind::SumRows => Op::SumRows {},
            OpKind::Mean => Op::Mean {},
            OpKind::Cumsum => Op::Cumsum {},
            OpKind::Argmax => Op::Argmax {},
            OpKind::CountEqual => Op::CountEqual {},
            OpKind::Argsort => Op::Argsort {
                order: input.pick(SortOrder::ALL),
            },
            OpKind::TopK => Op::TopK {},
            OpKind::Norm => Op::Norm { eps: input.float() },
            OpKind::RmsNorm => Op::RmsNorm { eps: input.float() },
            OpKind::RmsNormBack => Op::RmsNormBack { eps: input.float() },
            OpKind::GroupNorm => Op::GroupNorm {
                n_groups: input.integer(),
                eps: input.float(),
            },
            OpKind::L2Norm => Op::L2Norm { eps: input.float() },
            OpKind::SoftMax => Op::SoftMax {
                scale: input.float(),
                max_bias: input.pick(&[0.0, 0.0, 8.0, f32::NAN]),
            },
            OpKind::SoftMaxBack => Op::SoftMaxBack {
                scale: input.float(),
                max_bias: 0.0,
            },
            OpKind::MulMat => Op::MulMat {
                accumulator: input.pick(Precision::ALL),
                activation: input.pick(Precision::ALL),
                hadamard: input.chance(8),
            },
            OpKind::MulMatId => Op::MulMatId {
                accumulator: input.pick(Precision::ALL),
                activation: input.pick(Precision::ALL),
            },
            OpKind::OutProd => Op::OutProd {},
            OpKind::Rope => Op::Rope {
                mode: input.pick(RopeMode::ALL),
                backward: input.chance(2),
                n_dims: u32::from(input.byte()),
                n_offs: u32::from(input.byte() % 4),
                n_ctx_orig: input.integer(),
                freq_base: input.pick(&[10_000.0, 1.0, 0.0, f32::NAN]),
                freq_scale: input.float(),
                ext_factor: input.pick(&[0.0, 1.0, f32::INFINITY]),
                attn_factor: input.float(),
                beta_fast: input.float(),
                beta_slow: input.float(),
                sections: [0; 4].map(|_: i32| small(input)),
            },
            OpKind::FlashAttnExt => Op::FlashAttnExt {
                scale: input.float(),
                max_bias: input.pick(&[0.0, 0.0, 8.0, f32::NAN]),
                logit_softcap: input.pick(&[0.0, 0.0, 30.0, f32::NAN]),
                accumulator: input.pick(Precision::ALL),
                n_kv_max: u32::from(input.byte()),
            },
            _ => return None,
        })
    }

    /// A tensor of these extents in some layout, somewhere it fits. `None` when it fits nowhere.
    fn operand(&mut self, ty: Type, ne: [u64; 4]) -> Option<u32> {
        let shape = self.layout(ty, ne);
        // There are few bytes, so tensors overlap often enough by themselves.
        let extent = shape.extent().unwrap_or(u64::MAX);
        let fitting: Vec<Place> = self
            .places
            .iter()
            .copied()
            .filter(|p| p.1 >= extent)
            .collect();
        if fitting.is_empty() {
            return None;
        }
        let (buffer, size) = self.input.pick(&fitting);
        let free = size - extent;
        let element = match ty.is_quantized() {
            true => 1,
            false => ty.block_bytes(),
        };
        let offset = match free / element {
            0 => 0,
            steps => (u64::from(self.input.byte()) * 7 % (steps + 1)) * element,
        };
        // At the very end, where one step too far leaves the buffer.
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
            3 if !ty.is_quantized() => gaps[0] = self.extent(),
            4 => gaps[1] = self.extent(),
            5 => gaps[2] = self.extent(),
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

/// Rotates no more than a row of `row` elements has.
fn fit_rope(mut op: Op, row: u64) -> Op {
    if let Op::Rope {
        mode,
        n_dims,
        n_offs,
        ..
    } = &mut op
    {
        *n_offs &= !1;
        match mode {
            RopeMode::Vision => (*n_dims, *n_offs) = (row as u32 / 2, 0),
            _ => *n_dims = (*n_dims % (row as u32 + 1)).saturating_sub(*n_offs) & !1,
        }
    }
    op
}
