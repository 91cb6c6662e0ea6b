//! Builds the graph of a model's step, with the intermediates placed as ggml-alloc places them.

use vgpu_gguf::use_more_bits;
use vgpu_transport::ir::{
    BufferId, GluKind, Graph, Node, Op, Precision, RopeMode, Shape, SortOrder, Sources, Tensor,
    Type,
};

use super::shapes::{Family, Model, StepShape};

/// The buffers of a graph.
pub(super) const WEIGHTS: u32 = 0;
const CACHE: u32 = 1;
pub(super) const COMPUTE: u32 = 2;

/// Minimum size in bytes of the buffer of intermediates.
const COMPUTE_BYTES: u64 = 4 << 20;

/// Alignment of tensors in bytes.
const ALIGN: u64 = 256;

/// A view: the root tensor that owns the memory, a shape, and an offset in bytes.
#[derive(Debug, Clone, Copy)]
struct View {
    root: usize,
    shape: Shape,
    offset: u64,
}

/// A tensor that owns memory.
struct Root {
    shape: Shape,
    /// Buffer and offset, or `None` if the allocator decides.
    fixed: Option<(u32, u64)>,
}

/// Builds a graph.
pub struct ModelBuilder {
    model: Model,
    roots: Vec<Root>,
    nodes: Vec<(Op, View, Vec<Option<View>>)>,
    weights_end: u64,
    cache_end: u64,
    /// Inputs that are written before each run, by name: indices of their roots.
    inputs: Vec<(&'static str, usize)>,
}

/// A graph, its inputs and its result.
#[derive(Clone)]
pub struct Built {
    /// The graph over three buffers: weights, KV cache, intermediates.
    pub graph: Graph,
    /// Sizes of the buffers in bytes.
    pub sizes: [u64; 3],
    pub(super) inputs: Vec<(&'static str, Tensor)>,
    /// The logits.
    pub result: Tensor,
    pub(super) model: Model,
    pub(super) step: StepShape,
}

fn dense(ty: Type, ne: [u64; 4]) -> Shape {
    Shape::contiguous(ty, ne).expect("the sizes of these models fit 64 bits")
}

impl ModelBuilder {
    fn root(&mut self, shape: Shape, fixed: Option<(u32, u64)>) -> View {
        self.roots.push(Root { shape, fixed });
        View {
            root: self.roots.len() - 1,
            shape,
            offset: 0,
        }
    }

    fn weight(&mut self, ty: Type, ne: [u64; 4]) -> View {
        let shape = dense(ty, ne);
        let at = self.weights_end;
        self.weights_end = (at + shape.byte_len().unwrap()).next_multiple_of(ALIGN);
        self.root(shape, Some((WEIGHTS, at)))
    }

    fn matrix(&mut self, columns: u64, rows: u64) -> View {
        self.weight(self.model.weights, [columns, rows, 1, 1])
    }

    /// The type of the matrices of a layer that Q4_K_M quantises with more bits.
    fn finer(&self, layer: u64) -> Type {
        let Model {
            layers,
            weights,
            mixes,
            ..
        } = self.model;
        match mixes && weights == Type::Q4K && use_more_bits(layer, layers) {
            true => Type::Q6K,
            false => weights,
        }
    }

    fn cache(&mut self, ne: [u64; 4]) -> View {
        let shape = dense(self.model.cache, ne);
        let at = self.cache_end;
        self.cache_end = (at + shape.byte_len().unwrap()).next_multiple_of(ALIGN);
        self.root(shape, Some((CACHE, at)))
    }

    fn input(&mut self, name: &'static str, ty: Type, ne: [u64; 4]) -> View {
        let view = self.root(dense(ty, ne), None);
        self.inputs.push((name, view.root));
        view
    }

    fn node(&mut self, op: Op, shape: Shape, src: &[View]) -> View {
        let dst = self.root(shape, None);
        self.node_into(op, dst, src);
        dst
    }

    fn node_into(&mut self, op: Op, dst: View, src: &[View]) {
        let src = src.iter().copied().map(Some).collect();
        self.nodes.push((op, dst, src));
    }

    /// Reshapes a contiguous view.
    fn reshape(view: View, ne: [u64; 4]) -> View {
        assert!(view.shape.is_contiguous());
        View {
            shape: dense(view.shape.ty, ne),
            ..view
        }
    }

    fn norm(&mut self, x: View, rows_of: u64) -> View {
        let normed = self.node(Op::RmsNorm { eps: 1e-5 }, x.shape, &[x]);
        let weight = self.weight(Type::F32, [rows_of, 1, 1, 1]);
        self.node(Op::Mul {}, x.shape, &[normed, weight])
    }

    fn product(&mut self, w: View, x: View) -> View {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        let [_, n, b2, b3] = x.shape.ne;
        let shape = dense(Type::F32, [w.shape.ne[1], n, b2, b3]);
        self.node(op, shape, &[w, x])
    }

    /// A matrix product, plus a bias if there is one.
    fn biased(&mut self, w: View, x: View, has_bias: bool) -> View {
        let y = self.product(w, x);
        if !has_bias {
            return y;
        }
        let bias = self.weight(Type::F32, [w.shape.ne[1], 1, 1, 1]);
        self.node(Op::Add {}, y.shape, &[y, bias])
    }

    /// A product with expert matrices, plus biases if the family has them.
    fn experts_biased(&mut self, w: View, x: View, ids: View) -> View {
        let y = self.experts_product(w, x, ids);
        if self.model.family != Family::GptOss {
            return y;
        }
        let bias = self.weight(Type::F32, [w.shape.ne[1], w.shape.ne[2], 1, 1]);
        self.node(Op::AddId {}, y.shape, &[y, bias, ids])
    }

    fn experts_product(&mut self, w: View, x: View, ids: View) -> View {
        let op = Op::MulMatId {
            accumulator: Precision::Default,
            activation: Precision::Default,
        };
        let [used, tokens, ..] = ids.shape.ne;
        let shape = dense(Type::F32, [w.shape.ne[1], used, tokens, 1]);
        self.node(op, shape, &[w, x, ids])
    }

    fn rope(&mut self, x: View, positions: View) -> View {
        let op = Op::Rope {
            mode: RopeMode::Normal,
            backward: false,
            n_dims: self.model.head as u32,
            n_offs: 0,
            n_ctx_orig: 0,
            freq_base: 10000.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            sections: [0; 4],
        };
        self.node(op, x.shape, &[x, positions])
    }

    fn attention(&mut self, x: View, inputs: &Inputs, step: StepShape, layer: u64) -> View {
        let Model {
            head,
            heads,
            key_heads,
            context,
            width,
            norms_heads,
            ..
        } = self.model;
        let StepShape { tokens, seen } = step;
        let split = |view: View, heads| ModelBuilder::reshape(view, [head, heads, tokens, 1]);
        let wq = self.matrix(width, head * heads);
        let wv = self.weight(self.finer(layer), [width, head * key_heads, 1, 1]);
        let wk = self.matrix(width, head * key_heads);
        let has_biases = self.model.family != Family::Llama;
        let is_oss = self.model.family == Family::GptOss;
        let q = self.biased(wq, x, has_biases);
        let mut q = split(q, heads);
        if norms_heads {
            q = self.norm(q, head);
        }
        let q = self.rope(q, inputs.positions);
        let v = self.biased(wv, x, has_biases);
        let k = self.biased(wk, x, has_biases);
        let mut k = split(k, key_heads);
        if norms_heads {
            k = self.norm(k, head);
        }
        let k = self.rope(k, inputs.positions);
        let row = head * key_heads;
        let mut caches = Vec::new();
        for new in [k, v] {
            let cache = self.cache([row, context, 1, 1]);
            let rows = ModelBuilder::reshape(new, [row, tokens, 1, 1]);
            self.node_into(Op::SetRows {}, cache, &[rows, inputs.places]);
            let mut part = cache;
            let bytes = part.shape.ty.row_bytes(head).expect("whole blocks");
            part.shape.ne = [head, seen, key_heads, 1];
            part.shape.nb = [part.shape.nb[0], part.shape.nb[1], bytes, part.shape.nb[2]];
            caches.push(part);
        }
        let mut turned = q;
        let [b0, b1, b2, b3] = q.shape.nb;
        turned.shape.ne = [head, tokens, heads, 1];
        turned.shape.nb = [b0, b2, b1, b3];
        let op = Op::FlashAttnExt {
            scale: 1.0 / (head as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: 0.0,
            accumulator: Precision::Default,
            n_kv_max: 0,
        };
        let shape = dense(Type::F32, [head, heads, tokens, 1]);
        let mut sources = vec![turned, caches[0], caches[1], inputs.mask];
        if is_oss {
            sources.push(self.weight(Type::F32, [heads, 1, 1, 1]));
        }
        let seen = self.node(op, shape, &sources);
        let seen = ModelBuilder::reshape(seen, [head * heads, tokens, 1, 1]);
        let wo = self.matrix(head * heads, width);
        self.biased(wo, seen, is_oss)
    }

    fn feed_forward(&mut self, x: View, layer: u64) -> View {
        let Model { width, inner, .. } = self.model;
        let gate = self.matrix(width, inner);
        let up = self.matrix(width, inner);
        let down = self.weight(self.finer(layer), [inner, width, 1, 1]);
        let gated = self.product(gate, x);
        let upped = self.product(up, x);
        let y = self.unit(gated, upped);
        self.product(down, y)
    }

    fn unit(&mut self, gate: View, up: View) -> View {
        let (kind, alpha, limit) = match self.model.family {
            Family::GptOss => (GluKind::SwigluOai, 1.702, 7.0),
            _ => (GluKind::Swiglu, 0.0, 0.0),
        };
        let op = Op::Glu {
            kind,
            swapped: false,
            alpha,
            limit,
        };
        self.node(op, gate.shape, &[gate, up])
    }

    /// Weights and ids of the experts of each token: top-k of the softmax over all experts,
    /// normalised.
    fn route(&mut self, logits: View, used: u64) -> (View, View) {
        let [experts, tokens, ..] = logits.shape.ne;
        let op = Op::SoftMax {
            scale: 1.0,
            max_bias: 0.0,
        };
        let probabilities = self.node(op, logits.shape, &[logits]);
        let op = Op::Argsort {
            order: SortOrder::Descending,
        };
        let sorted = self.node(
            op,
            dense(Type::I32, [experts, tokens, 1, 1]),
            &[probabilities],
        );
        let mut ids = sorted;
        ids.shape.ne[0] = used;
        let each = ModelBuilder::reshape(probabilities, [1, experts, tokens, 1]);
        let weights = self.node(
            Op::GetRows {},
            dense(Type::F32, [1, used, tokens, 1]),
            &[each, ids],
        );
        let weights = ModelBuilder::reshape(weights, [used, tokens, 1, 1]);
        let sum = self.node(
            Op::SumRows {},
            dense(Type::F32, [1, tokens, 1, 1]),
            &[weights],
        );
        let op = Op::Clamp {
            min: 6.103_515_6e-5,
            max: f32::INFINITY,
        };
        let sum = self.node(op, sum.shape, &[sum]);
        let weights = self.node(Op::Div {}, weights.shape, &[weights, sum]);
        (weights, ids)
    }

    /// Weights and ids of the experts of each token: softmax over the top-k logits.
    fn route_by_logits(&mut self, logits: View, used: u64) -> (View, View) {
        let [experts, tokens, ..] = logits.shape.ne;
        let op = Op::Argsort {
            order: SortOrder::Descending,
        };
        let sorted = self.node(op, dense(Type::I32, [experts, tokens, 1, 1]), &[logits]);
        let mut ids = sorted;
        ids.shape.ne[0] = used;
        let each = ModelBuilder::reshape(logits, [1, experts, tokens, 1]);
        let shape = dense(Type::F32, [1, used, tokens, 1]);
        let chosen = self.node(Op::GetRows {}, shape, &[each, ids]);
        let chosen = ModelBuilder::reshape(chosen, [used, tokens, 1, 1]);
        let op = Op::SoftMax {
            scale: 1.0,
            max_bias: 0.0,
        };
        (self.node(op, chosen.shape, &[chosen]), ids)
    }

    fn mixture(&mut self, x: View, (experts, used): (u64, u64), layer: u64) -> View {
        let Model { width, inner, .. } = self.model;
        let tokens = x.shape.ne[1];
        let router = self.weight(Type::F32, [width, experts, 1, 1]);
        let of = self.model.expert_weights;
        let gate = self.weight(of.unwrap_or(self.model.weights), [width, inner, experts, 1]);
        let up = self.weight(of.unwrap_or(self.model.weights), [width, inner, experts, 1]);
        let down = self.weight(of.unwrap_or(self.finer(layer)), [inner, width, experts, 1]);
        let is_oss = self.model.family == Family::GptOss;
        let logits = self.biased(router, x, is_oss);
        let (weights, ids) = match is_oss {
            true => self.route_by_logits(logits, used),
            false => self.route(logits, used),
        };
        let weights = ModelBuilder::reshape(weights, [1, used, tokens, 1]);
        let x = ModelBuilder::reshape(x, [width, 1, tokens, 1]);
        let gated = self.experts_biased(gate, x, ids);
        let upped = self.experts_biased(up, x, ids);
        let y = self.unit(gated, upped);
        let y = self.experts_biased(down, y, ids);
        let y = self.node(Op::Mul {}, y.shape, &[y, weights]);
        let part = |slot: u64| View {
            shape: Shape {
                ne: [width, tokens, 1, 1],
                nb: [4, y.shape.nb[2], y.shape.nb[3], y.shape.nb[3]],
                ..y.shape
            },
            offset: slot * y.shape.nb[1],
            ..y
        };
        let mut sum = part(0);
        for slot in 1..used {
            let shape = dense(Type::F32, [width, tokens, 1, 1]);
            sum = self.node(Op::Add {}, shape, &[sum, part(slot)]);
        }
        sum
    }
}

struct Inputs {
    positions: View,
    places: View,
    mask: View,
}

/// Operators of these models that ggml computes in place (`ggml_op_can_inplace`).
fn can_be_in_place(op: &Op) -> bool {
    matches!(
        op,
        Op::Add {}
            | Op::AddId {}
            | Op::Mul {}
            | Op::Div {}
            | Op::Rope { .. }
            | Op::RmsNorm { .. }
            | Op::SoftMax { .. }
    )
}

impl Model {
    /// Builds the graph of a step.
    pub fn graph(self, step: StepShape) -> Built {
        let mut builder = ModelBuilder {
            model: self,
            roots: Vec::new(),
            nodes: Vec::new(),
            weights_end: 0,
            cache_end: 0,
            inputs: Vec::new(),
        };
        let StepShape { tokens, seen } = step;
        let ids = builder.input("tokens", Type::I32, [tokens, 1, 1, 1]);
        let inputs = Inputs {
            positions: builder.input("positions", Type::I32, [tokens, 1, 1, 1]),
            places: builder.input("places", Type::I64, [tokens, 1, 1, 1]),
            mask: builder.input("mask", Type::F16, [seen, tokens, 1, 1]),
        };
        let table = builder.matrix(self.width, self.vocabulary);
        let shape = dense(Type::F32, [self.width, tokens, 1, 1]);
        let mut x = builder.node(Op::GetRows {}, shape, &[table, ids]);
        for layer in 0..self.layers {
            let normed = builder.norm(x, self.width);
            let mut seen = builder.attention(normed, &inputs, step, layer);
            if layer + 1 == self.layers && self.last_only && tokens > 1 {
                let last = builder.input("last", Type::I32, [1; 4]);
                let shape = dense(Type::F32, [self.width, 1, 1, 1]);
                seen = builder.node(Op::GetRows {}, shape, &[seen, last]);
                x = builder.node(Op::GetRows {}, shape, &[x, last]);
            }
            let y = builder.node(Op::Add {}, x.shape, &[seen, x]);
            let normed = builder.norm(y, self.width);
            let z = match self.experts {
                Some(experts) => builder.mixture(normed, experts, layer),
                None => builder.feed_forward(normed, layer),
            };
            x = builder.node(Op::Add {}, y.shape, &[z, y]);
        }
        let normed = builder.norm(x, self.width);
        let finest = match self.mixes && self.weights == Type::Q4K {
            true => Type::Q6K,
            false => self.weights,
        };
        let output = builder.weight(finest, [self.width, self.vocabulary, 1, 1]);
        builder.product(output, normed);
        builder.finish(step)
    }
}

impl ModelBuilder {
    /// Allocates the intermediates by lifetime, as ggml-alloc does.
    fn finish(self, step: StepShape) -> Built {
        let count = self.roots.len();
        let mut last_use = vec![0; count];
        for (at, (_, dst, src)) in self.nodes.iter().enumerate() {
            for view in src.iter().flatten().chain([dst]) {
                last_use[view.root] = at;
            }
        }
        let result_root = self.nodes.last().expect("a model has nodes").1.root;
        last_use[result_root] = usize::MAX;
        for (_, root) in &self.inputs {
            last_use[*root] = usize::MAX; // written before each run
        }
        let mut compute_end = COMPUTE_BYTES;
        let mut places: Vec<Option<(u32, u64)>> = self.roots.iter().map(|r| r.fixed).collect();
        // Allocated ranges of the intermediates: start, end, root.
        let mut taken: Vec<(u64, u64, usize)> = Vec::new();
        let size = |root: usize| {
            self.roots[root]
                .shape
                .byte_len()
                .unwrap()
                .next_multiple_of(ALIGN)
        };
        let mut place = |root: usize, taken: &mut Vec<(u64, u64, usize)>| {
            taken.sort_unstable();
            let mut at = 0;
            for &(start, end, _) in taken.iter() {
                if at + size(root) <= start {
                    break;
                }
                at = at.max(end);
            }
            taken.push((at, at + size(root), root));
            compute_end = compute_end.max(at + size(root));
            (COMPUTE, at)
        };
        for (_, root) in &self.inputs {
            places[*root] = Some(place(*root, &mut taken));
        }
        for (at, (op, dst, src)) in self.nodes.iter().enumerate() {
            if places[dst.root].is_none() {
                let parent = src.iter().flatten().find(|view| {
                    can_be_in_place(op)
                        && last_use[view.root] == at
                        && self.roots[view.root].fixed.is_none()
                        && view.offset == 0
                        && view.shape == dst.shape
                        && size(view.root) == size(dst.root)
                });
                places[dst.root] = match parent {
                    Some(parent) => {
                        let entry = taken.iter_mut().find(|t| t.2 == parent.root);
                        entry.expect("a tensor in use has a range").2 = dst.root;
                        places[parent.root]
                    }
                    None => Some(place(dst.root, &mut taken)),
                };
            }
            taken.retain(|&(.., root)| last_use[root] > at);
        }
        let mut graph = Graph {
            buffers: (1..=3).map(BufferId).collect(),
            ..Graph::default()
        };
        let tensor = |view: &View| {
            let (buffer, offset) = places[view.root].expect("every root was placed");
            Tensor {
                shape: view.shape,
                buffer,
                offset: offset + view.offset,
            }
        };
        for (op, dst, src) in &self.nodes {
            let mut index = |view: &View| {
                graph.tensors.push(tensor(view));
                graph.tensors.len() as u32 - 1
            };
            let dst = index(dst);
            let src: Vec<_> = { src.iter() }.map(|v| v.as_ref().map(&mut index)).collect();
            graph.nodes.push(Node {
                op: *op,
                dst,
                src: Sources::new(src),
            });
        }
        let whole = |root: usize| {
            tensor(&View {
                root,
                shape: self.roots[root].shape,
                offset: 0,
            })
        };
        Built {
            result: whole(result_root),
            inputs: { self.inputs.iter() }
                .map(|&(name, root)| (name, whole(root)))
                .collect(),
            graph,
            sizes: [self.weights_end, self.cache_end.max(ALIGN), compute_end],
            model: self.model,
            step,
        }
    }
}
