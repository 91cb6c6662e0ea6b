//! Launches for groups of nodes that fusion has found (`vgpu_engine::fuse`).

use vgpu_transport::ir::{GluKind, Op};

use crate::launch::builder::Builder;
use crate::ops::fused::{self, Norm, RopeRows, Route, WeightedSum};
use crate::ops::mmv::{self, Product, Products};
use crate::ops::rope;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::fuse::FusionKind;

type Added = Option<Result<(), EngineError>>;

/// A node of a group, with the views of its tensors.
#[derive(Clone)]
pub(crate) struct GroupNode {
    pub(crate) op: Op,
    pub(crate) dst: VgView,
    pub(crate) src: Vec<VgView>,
}

impl GroupNode {
    fn src(&self, i: usize) -> VgView {
        self.src.get(i).copied().unwrap_or_default()
    }
}

/// Adds the launch of a group. `None` if there is no kernel for the group; then nothing was added.
/// `needs_q8`: whether the next products quantise a result.
pub(crate) fn add_launch(
    kind: FusionKind,
    nodes: &[GroupNode],
    needs_q8: impl Fn(&VgView) -> bool,
    b: &mut Builder<'_>,
) -> Added {
    match kind {
        FusionKind::Norm => norm(nodes, needs_q8, b),
        FusionKind::Products => products(nodes, b),
        FusionKind::Gated => gated(nodes, b),
        FusionKind::RopeRows => rope_rows(nodes, b),
        FusionKind::Route => route(nodes, b),
        FusionKind::WeightedSum => weighted_sum(nodes, b),
    }
}

fn norm(nodes: &[GroupNode], needs_q8: impl Fn(&VgView) -> bool, b: &mut Builder<'_>) -> Added {
    let (first, last) = (nodes.first()?, nodes.last()?);
    let (add, sum) = match first.op {
        Op::Add {} => (first.src(1), first.dst),
        _ => Default::default(),
    };
    let eps = nodes.iter().find_map(|node| match node.op {
        Op::RmsNorm { eps } => Some(eps),
        _ => None,
    })?;
    let dst = last.dst;
    let mut work = Norm {
        dst,
        a: first.src(0),
        add,
        sum,
        w: match last.op {
            Op::Mul {} => last.src(1),
            _ => VgView::default(),
        },
        eps,
        q8: None,
    };
    if needs_q8(&dst) && dst.ne[0] % 32 == 0 {
        work.q8 = b.reserve_q8(&dst, true);
    }
    let added = fused::norm(b, &work);
    if added.is_none() {
        b.drop_q8(&dst);
    }
    added
}

fn products(nodes: &[GroupNode], b: &mut Builder<'_>) -> Added {
    let all = with_rows(nodes)?;
    let first = nodes.first()?;
    let work = Products {
        x: first.src(1),
        q8: None,
        ids: first.src(2),
        products: &all,
        unit: None,
    };
    mmv::products(b, &work)
}

/// The products of a group, with the biases that later nodes add.
fn with_rows(nodes: &[GroupNode]) -> Option<Vec<Product>> {
    let mut all: Vec<Product> = Vec::new();
    for node in nodes {
        match node.op {
            Op::Add {} | Op::AddId {} => {
                // The last product with this result: memory of intermediates is reused.
                let of = { all.iter_mut().rev() }.find(|it| it.dst.data == node.src(0).data)?;
                (of.add, of.dst) = (node.src(1), node.dst);
            }
            _ => all.push(Product {
                dst: node.dst,
                w: node.src(0),
                add: VgView::default(),
            }),
        }
    }
    Some(all)
}

fn gated(nodes: &[GroupNode], b: &mut Builder<'_>) -> Added {
    let (unit, terms) = nodes.split_last()?;
    let Op::Glu {
        kind, alpha, limit, ..
    } = unit.op
    else {
        return None;
    };
    let map = match kind {
        GluKind::Reglu => VG_OP_REGLU,
        GluKind::Geglu => VG_OP_GEGLU,
        GluKind::Swiglu => VG_OP_SWIGLU,
        GluKind::SwigluOai => VG_OP_SWIGLU_OAI,
        _ => return None,
    };
    let [mut gate, mut up] = with_rows(terms)?.try_into().ok()?;
    if unit.src(0).data != gate.dst.data {
        std::mem::swap(&mut gate, &mut up);
    }
    gate.dst = unit.dst;
    let first = nodes.first()?;
    let work = Products {
        x: first.src(1),
        q8: None,
        ids: first.src(2),
        products: &[gate, up],
        unit: Some((map, [alpha, limit])),
    };
    mmv::products(b, &work)
}

fn rope_rows(nodes: &[GroupNode], b: &mut Builder<'_>) -> Added {
    let [turn, rows] = nodes else {
        return None;
    };
    let sources = [turn.src(0), turn.src(1), turn.src(2)];
    let work = RopeRows {
        rope: rope::params(&turn.op, turn.dst, sources)?,
        cache: rows.dst,
        ids: rows.src(1),
    };
    fused::rope_rows(b, &work)
}

fn route(nodes: &[GroupNode], b: &mut Builder<'_>) -> Added {
    let rows = { nodes.iter() }.find(|node| matches!(node.op, Op::GetRows {}))?;
    let mut weights = rows.dst;
    weights.data = nodes.last()?.dst.data;
    let mut work = Route {
        logits: nodes.first()?.src(0),
        bias: VgView::default(),
        ids: rows.src(1),
        weights,
        op: match nodes.first()?.op {
            Op::SoftMax { .. } => VG_GATING_SOFT_MAX,
            _ => VG_GATING_LOGITS,
        },
        normalized: None,
        scale: 1.0,
    };
    for node in nodes {
        match node.op {
            Op::Clamp { min, .. } => work.normalized = Some(min),
            Op::Scale { scale, .. } => work.scale = scale,
            _ => {}
        }
    }
    fused::route(b, &work)
}

fn weighted_sum(nodes: &[GroupNode], b: &mut Builder<'_>) -> Added {
    let (mul, last) = (nodes.first()?, nodes.last()?);
    let work = WeightedSum {
        dst: last.dst,
        experts: mul.src(0),
        weights: mul.src(1),
    };
    fused::weighted_sum(b, &work)
}
