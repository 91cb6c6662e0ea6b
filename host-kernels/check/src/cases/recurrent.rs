//! Operators of recurrent models.

use vgpu_transport::ir::{Op, Type};

use super::list::{List, between, f32s, indices};
use super::operation::EXACT;
use crate::graph::Fill;

pub(super) fn all(list: &mut List) {
    let (size, heads, tokens, seqs) = (64, 3, 5, 2);
    let per_token = f32s([size, heads, tokens * seqs, 1]);
    let state = f32s([size * size * heads, seqs, 1, 1]);
    let dst = f32s([size * heads, tokens * seqs + size * seqs, 1, 1]);
    let decay = between(0.1, 0.9, per_token.ne);
    let bonus = f32s([size, heads, 1, 1]);
    list.add(
        Op::RwkvWkv6 {},
        EXACT,
        dst,
        &[per_token, per_token, per_token, bonus, decay, state],
    );
    let small = between(-0.1, 0.1, per_token.ne);
    list.add(
        Op::RwkvWkv7 {},
        EXACT,
        dst,
        &[per_token, decay, small, per_token, small, small, state],
    );
    let x = f32s([16, heads, tokens, seqs]);
    let ids = indices(Type::I32, Fill::Count, [seqs, 1, 1, 1]);
    let b = f32s([128, 1, tokens, seqs]);
    let total = 16 * heads * seqs * (tokens + 128);
    list.add(
        Op::SsmScan { snapshots: 1 },
        EXACT,
        f32s([total, 1, 1, 1]),
        &[
            f32s([128, 16, heads, seqs]),
            x,
            f32s([heads, tokens, seqs, 1]),
            between(-1.0, 0.0, [1, heads, 1, 1]),
            b,
            b,
            ids,
        ],
    );
    let v = f32s([size, heads, tokens, seqs]);
    let k = between(-0.1, 0.1, v.ne);
    list.add(
        Op::GatedDeltaNet { snapshots: 1 },
        EXACT,
        f32s([size * heads, tokens * seqs + size * seqs, 1, 1]),
        &[
            k,
            k,
            v,
            between(-1.0, 0.0, [1, heads, tokens, seqs]),
            between(0.0, 1.0, [1, heads, tokens, seqs]),
            f32s([size, size, heads, seqs]),
        ],
    );
    // The streams of DeepSeek-V4, with factors of their own and without.
    let streams = f32s([300, 4, tokens, 1]);
    let (input, post) = (f32s([300, tokens, 1, 1]), f32s([4, tokens, 1, 1]));
    for comb in [Some(f32s([4, 4, tokens, 1])), None] {
        let sources = [Some(input), Some(streams), Some(post), comb];
        list.with(Op::Dsv4HcPost {}, EXACT, streams, &sources);
    }
}
