//! SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET, SOLVE_TRI:
//! operators that process tokens (or rows) in order.
//!
//! Heads and sequences are independent. Each head of a sequence is one unit of work, and one call
//! of a SIMD kernel processes all of its tokens. States are updated in place in the destination.

mod delta_net;
mod linear_attention;
mod rwkv7;
mod solve_tri;
mod ssm_conv;
mod ssm_scan;
mod tokens;

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::kernel::Compiled;
use crate::operands::Operands;
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    let all = |op, sources| Rule::new(op, F32, &vec![F32; sources]);
    vec![
        Rule::new(OpKind::SsmConv, F32, &[FLOATS, FLOATS]),
        all(OpKind::SsmScan, 6),
        all(OpKind::RwkvWkv6, 6),
        all(OpKind::RwkvWkv7, 7),
        all(OpKind::GatedLinearAttn, 5),
        all(OpKind::GatedDeltaNet, 6),
        all(OpKind::SolveTri, 2),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    Some(match o.op() {
        Op::SsmConv {} => ssm_conv::ssm_conv(o),
        Op::SsmScan { .. } => ssm_scan::ssm_scan(o),
        Op::RwkvWkv6 {} => linear_attention::rwkv_wkv6(o),
        Op::RwkvWkv7 {} => rwkv7::rwkv_wkv7(o),
        Op::GatedLinearAttn { .. } => linear_attention::gated_linear_attn(o),
        Op::GatedDeltaNet { .. } => delta_net::gated_delta_net(o),
        Op::SolveTri {} => solve_tri::solve_tri(o),
        _ => return None,
    })
}
