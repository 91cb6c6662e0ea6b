//! The operators of the IR with their parameters, from the `op_params` of a ggml node.
//!
//! The layout of the parameters is that of `ggml.c` in the newest release that the plugin supports.
//! What older releases write differently is in [`releases`](super::releases).

use vgpu_transport::ir::{Op, OpKind, RopeMode, ScaleMode, SortOrder, TriKind};

use super::params::Params;

/// The word of SET and ACC that says whether the result is the first source. The place of the
/// result says so too.
const IN_PLACE: usize = 4;

/// The operator `kind` with its parameters. `None` if a parameter has a value that the IR does not
/// know, and for the operators whose parameters contain an id.
pub(super) fn with_params(kind: OpKind, p: &Params<'_>) -> Option<Op> {
    Some(match kind {
        OpKind::Copy => Op::Copy {},
        OpKind::Repeat => Op::Repeat {},
        OpKind::RepeatBack => Op::RepeatBack {},
        OpKind::Concat => Op::Concat { dim: p.u32(0)? },
        OpKind::GetRows => Op::GetRows {},
        OpKind::GetRowsBack => Op::GetRowsBack {},
        OpKind::SetRows => Op::SetRows {},
        OpKind::Set => {
            p.ignore(IN_PLACE);
            Op::Set {
                nb1: p.bytes(0)?,
                nb2: p.bytes(1)?,
                nb3: p.bytes(2)?,
                offset: p.bytes(3)?,
            }
        }
        OpKind::Acc => {
            p.ignore(IN_PLACE);
            Op::Acc {
                nb1: p.bytes(0)?,
                nb2: p.bytes(1)?,
                nb3: p.bytes(2)?,
                offset: p.bytes(3)?,
            }
        }
        OpKind::Diag => Op::Diag {},
        OpKind::DiagMaskInf => Op::DiagMaskInf { n_past: p.i32(0) },
        OpKind::DiagMaskZero => Op::DiagMaskZero { n_past: p.i32(0) },
        OpKind::Pad => Op::Pad {
            left: [p.i32(0), p.i32(2), p.i32(4), p.i32(6)],
            right: [p.i32(1), p.i32(3), p.i32(5), p.i32(7)],
            circular: p.flag(8),
        },
        OpKind::PadReflect1d => Op::PadReflect1d {
            p0: p.i32(0),
            p1: p.i32(1),
        },
        OpKind::Roll => Op::Roll {
            shift: [p.i32(0), p.i32(1), p.i32(2), p.i32(3)],
        },
        OpKind::Tri => Op::Tri {
            kind: match p.i32(0) {
                0 => TriKind::UpperDiag,
                1 => TriKind::Upper,
                2 => TriKind::LowerDiag,
                3 => TriKind::Lower,
                _ => return None,
            },
        },
        OpKind::Fill => Op::Fill { value: p.f32(0) },
        OpKind::Arange => Op::Arange {
            start: p.f32(0),
            stop: p.f32(1),
            step: p.f32(2),
        },

        OpKind::Add => Op::Add {},
        OpKind::Sub => Op::Sub {},
        OpKind::Mul => Op::Mul {},
        OpKind::Div => Op::Div {},
        OpKind::AddId => Op::AddId {},
        OpKind::Add1 => Op::Add1 {},
        OpKind::Scale => Op::Scale {
            scale: p.f32(0),
            bias: p.f32(1),
        },
        OpKind::Clamp => Op::Clamp {
            min: p.f32(0),
            max: p.f32(1),
        },
        OpKind::Sqr => Op::Sqr {},
        OpKind::Sqrt => Op::Sqrt {},
        OpKind::Log => Op::Log {},
        OpKind::Sin => Op::Sin {},
        OpKind::Cos => Op::Cos {},
        OpKind::LeakyRelu => Op::LeakyRelu {
            negative_slope: p.f32(0),
        },
        // The first parameter of these is an id.
        OpKind::Unary | OpKind::Glu | OpKind::Xielu => return None,
        OpKind::SiluBack => Op::SiluBack {},

        OpKind::Sum => Op::Sum {},
        OpKind::SumRows => Op::SumRows {},
        OpKind::Mean => Op::Mean {},
        OpKind::Cumsum => Op::Cumsum {},
        OpKind::Argmax => Op::Argmax {},
        OpKind::CountEqual => Op::CountEqual {},
        OpKind::Argsort => Op::Argsort {
            order: match p.i32(0) {
                0 => SortOrder::Ascending,
                1 => SortOrder::Descending,
                _ => return None,
            },
        },
        OpKind::TopK => Op::TopK {},

        OpKind::Norm => Op::Norm { eps: p.f32(0) },
        OpKind::RmsNorm => Op::RmsNorm { eps: p.f32(0) },
        OpKind::RmsNormBack => Op::RmsNormBack { eps: p.f32(0) },
        OpKind::GroupNorm => Op::GroupNorm {
            n_groups: p.i32(0),
            eps: p.f32(1),
        },
        OpKind::L2Norm => Op::L2Norm { eps: p.f32(0) },
        OpKind::SoftMax => Op::SoftMax {
            scale: p.f32(0),
            max_bias: p.f32(1),
        },
        OpKind::SoftMaxBack => Op::SoftMaxBack {
            scale: p.f32(0),
            max_bias: p.f32(1),
        },

        OpKind::MulMat => Op::MulMat {
            accumulator: p.precision(0)?,
            activation: p.precision(3)?,
            hadamard: match p.i32(1) {
                0 => false,
                1 => true, // GGML_HINT_SRC0_IS_HADAMARD
                _ => return None,
            },
        },
        OpKind::MulMatId => Op::MulMatId {
            accumulator: p.precision(0)?,
            activation: p.precision(3)?,
        },
        OpKind::OutProd => Op::OutProd {},
        OpKind::SolveTri => Op::SolveTri {},

        OpKind::Rope => rope(p, false)?,
        OpKind::FlashAttnExt => Op::FlashAttnExt {
            scale: p.f32(0),
            max_bias: p.f32(1),
            logit_softcap: p.f32(2),
            accumulator: p.precision(3)?,
            n_kv_max: p.u32(4)?,
        },
        OpKind::FlashAttnBack => Op::FlashAttnBack { masked: p.flag(0) },
        OpKind::LightningIndexer => Op::LightningIndexer {},

        OpKind::SsmConv => Op::SsmConv {},
        OpKind::SsmScan => Op::SsmScan {
            snapshots: p.positive(0)?,
        },
        OpKind::RwkvWkv6 => Op::RwkvWkv6 {},
        OpKind::RwkvWkv7 => Op::RwkvWkv7 {},
        OpKind::GatedLinearAttn => Op::GatedLinearAttn { scale: p.f32(0) },
        OpKind::GatedDeltaNet => Op::GatedDeltaNet {
            snapshots: p.positive(0)?,
        },
        OpKind::Dsv4HcComb => Op::Dsv4HcComb {
            eps: p.f32(0),
            n_iter: p.u32(1)?,
        },
        OpKind::Dsv4HcPre => {
            let (scale, gated) = (p.f32(0), p.flag(1));
            let scale = match scale.to_bits() {
                0 if !gated => p.release().hc_pre_scale()?,
                _ => scale,
            };
            Op::Dsv4HcPre { scale, gated }
        }
        OpKind::Dsv4HcPost => Op::Dsv4HcPost {},

        OpKind::Im2col => Op::Im2col {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
            is_2d: p.flag(6),
        },
        OpKind::Im2colBack => Op::Im2colBack {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
            is_2d: p.flag(6),
        },
        OpKind::Im2col3d => Op::Im2col3d {
            s0: p.i32(0),
            s1: p.i32(1),
            s2: p.i32(2),
            p0: p.i32(3),
            p1: p.i32(4),
            p2: p.i32(5),
            d0: p.i32(6),
            d1: p.i32(7),
            d2: p.i32(8),
            ic: p.i32(9),
        },
        OpKind::Col2im1d => Op::Col2im1d {
            s0: p.i32(0),
            oc: p.i32(1),
            p0: p.i32(2),
        },
        OpKind::Conv2d => Op::Conv2d {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
        },
        OpKind::Conv2dDw => Op::Conv2dDw {
            s0: p.i32(0),
            s1: p.i32(1),
            p0: p.i32(2),
            p1: p.i32(3),
            d0: p.i32(4),
            d1: p.i32(5),
        },
        OpKind::Conv3d => Op::Conv3d {
            s0: p.i32(0),
            s1: p.i32(1),
            s2: p.i32(2),
            p0: p.i32(3),
            p1: p.i32(4),
            p2: p.i32(5),
            d0: p.i32(6),
            d1: p.i32(7),
            d2: p.i32(8),
            c: p.i32(9),
            n: p.i32(10),
            oc: p.i32(11),
        },
        OpKind::ConvTranspose1d => Op::ConvTranspose1d {
            s0: p.i32(0),
            p0: p.i32(1),
            d0: p.i32(2),
        },
        OpKind::ConvTranspose2d => Op::ConvTranspose2d { stride: p.i32(0) },
        OpKind::Pool1d => Op::Pool1d {
            kind: p.pool(0)?,
            k0: p.i32(1),
            s0: p.i32(2),
            p0: p.i32(3),
        },
        OpKind::Pool2d => Op::Pool2d {
            kind: p.pool(0)?,
            k0: p.i32(1),
            k1: p.i32(2),
            s0: p.i32(3),
            s1: p.i32(4),
            p0: p.i32(5),
            p1: p.i32(6),
        },
        OpKind::Pool2dBack => Op::Pool2dBack {
            kind: p.pool(0)?,
            k0: p.i32(1),
            k1: p.i32(2),
            s0: p.i32(3),
            s1: p.i32(4),
            p0: p.i32(5),
            p1: p.i32(6),
        },
        OpKind::Upscale => Op::Upscale {
            // The low byte is the mode. Two bits above are flags (GGML_SCALE_FLAG_*).
            mode: match p.i32(0) & !(3 << 8) {
                0 => ScaleMode::Nearest,
                1 => ScaleMode::Bilinear,
                2 => ScaleMode::Bicubic,
                _ => return None,
            },
            align_corners: p.i32(0) & 1 << 8 != 0,
            antialias: p.i32(0) & 1 << 9 != 0,
        },
        OpKind::TimestepEmbedding => Op::TimestepEmbedding {
            dim: p.i32(0),
            max_period: p.i32(1),
        },
        OpKind::WinPart => Op::WinPart {
            npx: p.i32(0),
            npy: p.i32(1),
            w: p.i32(2),
        },
        OpKind::WinUnpart => Op::WinUnpart { w: p.i32(0) },
        OpKind::GetRelPos => Op::GetRelPos {},
        OpKind::AddRelPos => {
            p.ignore(0); // whether the result is the first source
            Op::AddRelPos {}
        }

        OpKind::CrossEntropyLoss => Op::CrossEntropyLoss {},
        OpKind::CrossEntropyLossBack => Op::CrossEntropyLossBack {},
        OpKind::OptStepAdamw => Op::OptStepAdamw {},
        OpKind::OptStepSgd => Op::OptStepSgd {},
    })
}

/// ROPE, or ROPE_BACK if `backward`. The words 0 and 3 were n_past and n_ctx, and every supported
/// release writes 0 there.
pub(super) fn rope(p: &Params<'_>, backward: bool) -> Option<Op> {
    Some(Op::Rope {
        // GGML_ROPE_TYPE_*: bits, with these combinations only
        mode: match p.i32(2) {
            0 => RopeMode::Normal,
            2 => RopeMode::Neox,
            8 => RopeMode::Mrope,
            24 => RopeMode::Vision,
            40 => RopeMode::Imrope,
            _ => return None,
        },
        backward,
        n_dims: p.u32(1)?,
        n_offs: p.u32(15)?,
        n_ctx_orig: p.i32(4),
        freq_base: p.f32(5),
        freq_scale: p.f32(6),
        ext_factor: p.f32(7),
        attn_factor: p.f32(8),
        beta_fast: p.f32(9),
        beta_slow: p.f32(10),
        sections: [p.i32(11), p.i32(12), p.i32(13), p.i32(14)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::ggml_tensor;
    use crate::ggml::Version;
    use crate::translate::releases::{Added, Optional, Release, TABLE, Table};

    /// The operator of a node that `release` made with these words of `op_params`, from the first.
    fn decode(release: Release<'_>, kind: OpKind, words: &[i32]) -> Option<Op> {
        // SAFETY: every field is a number or a pointer that may be null.
        let mut tensor: ggml_tensor = unsafe { std::mem::zeroed() };
        tensor.op_params[..words.len()].copy_from_slice(words);
        let p = Params::of(&tensor, kind, release);
        with_params(kind, &p).filter(|_| p.is_rest_zero())
    }

    fn number(minor: u32) -> Version {
        Version::new(0, minor)
    }

    fn oldest() -> Release<'static> {
        Release::of(number(20))
    }

    fn newest() -> Release<'static> {
        Release::of(number(26))
    }

    fn bits(value: f32) -> i32 {
        value.to_bits().cast_signed()
    }

    /// Which number an example has, the operator and its words, and the meaning of the node. `None`
    /// if the node must be refused.
    type Example = (u32, OpKind, Vec<i32>, Option<Op>);

    /// Nodes as the builds of a number write them, and nodes that no build of the number writes.
    fn examples() -> Vec<Example> {
        use vgpu_transport::ir::Precision::{self, Default, F32, Q8};
        let mut all = Vec::new();
        let mut add = |minor, kind, words: &[i32], op| all.push((minor, kind, words.to_vec(), op));

        // Builds on the way from 0.24.0 to 0.25.0 call themselves 0.24.0.
        let pre = |scale, gated| Some(Op::Dsv4HcPre { scale, gated });
        for minor in 20..=26 {
            let without = (minor < 25).then(|| pre(1.0, false)).flatten();
            add(minor, OpKind::Dsv4HcPre, &[], without);
            let with = |op: Option<Op>| op.filter(|_| minor >= 24);
            add(
                minor,
                OpKind::Dsv4HcPre,
                &[bits(1.0)],
                with(pre(1.0, false)),
            );
            for scale in [0.5, 0.0] {
                let op = with(pre(scale, true));
                add(minor, OpKind::Dsv4HcPre, &[bits(scale), 1], op);
            }
        }

        type Product = fn(Precision, Precision) -> Op;
        let products: [(OpKind, Product); 2] = [
            (OpKind::MulMat, |accumulator, activation| Op::MulMat {
                accumulator,
                activation,
                hadamard: false,
            }),
            (OpKind::MulMatId, |accumulator, activation| Op::MulMatId {
                accumulator,
                activation,
            }),
        ];
        for (kind, op) in products {
            // No build before 0.23.0 sets a precision of MUL_MAT_ID.
            let has_accumulator = kind == OpKind::MulMat;
            let before = has_accumulator.then(|| op(F32, Default));
            add(22, kind, &[10], before);
            add(23, kind, &[10], Some(op(F32, Default)));
            // A value that every number knows, in a word that builds of 0.22 do not write.
            add(22, kind, &[0, 0, 0, 10], None);
            add(23, kind, &[0, 0, 0, 10], Some(op(Default, F32)));
            add(23, kind, &[10, 0, 0, 30], Some(op(F32, Q8)));
            // The accumulator of F16 has a value since builds after 0.23.0.
            add(22, kind, &[20], None);
            add(23, kind, &[20], Some(op(Precision::F16, Default)));
        }

        let attention = |n_kv_max| Op::FlashAttnExt {
            scale: 1.0,
            max_bias: 0.0,
            logit_softcap: 0.0,
            accumulator: Default,
            n_kv_max,
        };
        let words = [bits(1.0), 0, 0, 0, 64];
        add(20, OpKind::FlashAttnExt, &words[..4], Some(attention(0)));
        add(21, OpKind::FlashAttnExt, &words, None);
        add(22, OpKind::FlashAttnExt, &words, Some(attention(64)));

        // The offset has been written under every supported number.
        let mut words = [0; 16];
        words[15] = 8;
        let rope = Op::Rope {
            mode: RopeMode::Normal,
            backward: false,
            n_dims: 0,
            n_offs: 8,
            n_ctx_orig: 0,
            freq_base: 0.0,
            freq_scale: 0.0,
            ext_factor: 0.0,
            attn_factor: 0.0,
            beta_fast: 0.0,
            beta_slow: 0.0,
            sections: [0; 4],
        };
        add(20, OpKind::Rope, &words, Some(rope));
        all
    }

    /// The examples that `table` does not explain.
    fn wrong(table: &Table<'_>) -> Vec<String> {
        let mut wrong = Vec::new();
        for (minor, kind, words, expected) in examples() {
            let found = decode(Release::by(table, number(minor)), kind, &words);
            if found != expected {
                wrong.push(format!("0.{minor} {words:?}: {found:?}, not {expected:?}"));
            }
        }
        for (minor, kind, source, expected) in [
            (23, OpKind::Dsv4HcPost, 3, false),
            (24, OpKind::Dsv4HcPost, 3, true),
            (20, OpKind::SoftMax, 1, true),
        ] {
            let found = Release::by(table, number(minor)).is_optional(kind, source);
            if found != expected {
                wrong.push(format!("0.{minor} {kind:?}, source {source} null: {found}"));
            }
        }
        wrong
    }

    #[test]
    fn nodes_of_every_release_have_their_meaning() {
        assert_eq!(wrong(&TABLE), [""; 0]);
    }

    #[test]
    fn every_change_of_the_table_is_detected() {
        let others = |than: Version| (20..=27).map(number).filter(move |&one| one != than);
        let mut changes = 0;
        let mut detect = |what: String, table: &Table<'_>| {
            changes += 1;
            assert!(!wrong(table).is_empty(), "{what} is not detected");
        };
        for (i, entry) in TABLE.added.iter().enumerate() {
            let mut change = |entry: Option<Added>| {
                let mut added = TABLE.added.to_vec();
                match entry {
                    Some(entry) => added[i] = entry,
                    None => drop(added.remove(i)),
                }
                let what = format!("entry {i} as {entry:?}");
                let table = Table {
                    added: &added,
                    ..TABLE
                };
                detect(what, &table);
            };
            change(None);
            for word in (0..16).filter(|&word| word != entry.word) {
                change(Some(Added { word, ..*entry }));
            }
            for from in others(entry.from) {
                change(Some(Added { from, ..*entry }));
            }
            for skipped in 0..entry.ops.len() {
                let ops = [&entry.ops[..skipped], &entry.ops[skipped + 1..]].concat();
                change(Some(Added {
                    ops: Box::leak(ops.into_boxed_slice()),
                    ..*entry
                }));
            }
        }
        for (i, entry) in TABLE.optional.iter().enumerate() {
            let sources = (0..10).filter(|&source| source != entry.source);
            let sources = sources.map(|source| Optional { source, ..*entry });
            let numbers = others(entry.from).map(|from| Optional { from, ..*entry });
            for changed in sources.chain(numbers) {
                let mut optional = TABLE.optional.to_vec();
                optional[i] = changed;
                let table = Table {
                    optional: &optional,
                    ..TABLE
                };
                detect(format!("{changed:?}"), &table);
            }
        }
        for precisions in others(TABLE.precisions) {
            let what = format!("precisions from {precisions}");
            detect(
                what,
                &Table {
                    precisions,
                    ..TABLE
                },
            );
        }
        for hc_pre_has_parameters in others(TABLE.hc_pre_has_parameters) {
            let table = Table {
                hc_pre_has_parameters,
                ..TABLE
            };
            detect(format!("parameters from {hc_pre_has_parameters}"), &table);
        }
        assert!(changes > 100, "{changes} changes");
    }

    #[test]
    fn nodes_with_words_of_unknown_meaning_are_refused() {
        // The last word has a meaning for ROPE only.
        for &kind in OpKind::ALL {
            for minor in [20, 26] {
                let release = Release::of(number(minor));
                let mut words = [0; 16];
                // Parameters that 0 is not valid for.
                if matches!(kind, OpKind::SsmScan | OpKind::GatedDeltaNet) {
                    words[0] = 1;
                }
                if kind == OpKind::Dsv4HcPre && minor == 26 {
                    words[0] = bits(1.0);
                }
                let known = decode(release, kind, &words);
                let has_id = matches!(kind, OpKind::Unary | OpKind::Glu | OpKind::Xielu);
                assert_eq!(known.is_none(), has_id, "{kind:?}");
                words[15] = 1;
                let is_known = kind == OpKind::Rope;
                let unknown = decode(release, kind, &words);
                assert_eq!(unknown.is_some(), is_known, "{kind:?} 0.{minor}");
            }
        }
        // A flag of UPSCALE, a hint and a precision of MUL_MAT, a kind of TRI, and the words of
        // ROPE that had a meaning once.
        assert_eq!(decode(newest(), OpKind::Upscale, &[1 << 10]), None);
        assert_eq!(decode(newest(), OpKind::MulMat, &[0, 2]), None);
        assert_eq!(decode(newest(), OpKind::MulMat, &[0, -1]), None);
        assert_eq!(decode(newest(), OpKind::MulMat, &[0, 0, 1]), None);
        assert_eq!(decode(newest(), OpKind::Tri, &[4]), None);
        for release in [oldest(), newest()] {
            assert_eq!(decode(release, OpKind::Rope, &[7]), None);
            assert_eq!(decode(release, OpKind::Rope, &[0, 0, 0, 512]), None);
        }
    }

    #[test]
    fn words_that_do_not_change_the_result_are_ignored() {
        let in_place = [4, 8, 16, 0, 1];
        assert!(decode(oldest(), OpKind::Set, &in_place).is_some());
        assert!(decode(oldest(), OpKind::Acc, &in_place).is_some());
        assert!(decode(oldest(), OpKind::AddRelPos, &[1]).is_some());
    }
}
