//! ROPE.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, RopeMode, Type};

use crate::common::*;

/// Frequencies are products in f32: the error of an angle grows with the position.
const TOLERANCE: f64 = 5e-4;

/// An operation with common values for the parameters that the test does not set.
fn rope(mode: RopeMode, backward: bool, n_dims: u32, n_offs: u32, yarn: bool) -> Op {
    let part = n_dims as i32;
    Op::Rope {
        mode,
        backward,
        n_dims,
        n_offs,
        n_ctx_orig: if yarn { 512 } else { 0 },
        freq_base: 10000.0,
        freq_scale: if yarn { 0.7 } else { 1.0 },
        ext_factor: if yarn { 0.6 } else { 0.0 },
        attn_factor: if yarn { 1.3 } else { 1.0 },
        beta_fast: 32.0,
        beta_slow: 1.0,
        // Small sections: pairs lie within and beyond every section, and the sections repeat.
        sections: [part / 8, part / 12, part / 16, 2].map(|section| section.max(1)),
    }
}

/// A row by the definition of the paper: each pair is a complex number, multiplied by another.
fn turned(op: &Op, row: &[f64], positions: &[f64], factors: Option<&[f64]>) -> Vec<f64> {
    let &Op::Rope {
        mode,
        backward,
        n_dims,
        n_offs,
        n_ctx_orig,
        freq_base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
        sections,
    } = op
    else {
        panic!("not a ROPE")
    };
    let (n, base) = (f64::from(n_dims), f64::from(freq_base));
    let (scale, ext) = (f64::from(freq_scale), f64::from(ext_factor));
    let (start, n_dims) = (n_offs as usize, n_dims as usize);
    let pair_of = |rotations: f32| {
        let turns = f64::from(n_ctx_orig) / (f64::from(rotations) * std::f64::consts::TAU);
        n * turns.ln() / (2.0 * base.ln())
    };
    let low = pair_of(beta_fast).floor().max(0.0);
    let high = pair_of(beta_slow).ceil().min(n - 1.0);
    let sections = sections.map(|section| section as usize);
    let mut ends = sections;
    (1..4).for_each(|i| ends[i] += ends[i - 1]);
    let mut out = row.to_vec();
    let pairs = if mode == RopeMode::Vision {
        n_dims
    } else {
        n_dims / 2
    };
    for i in 0..pairs {
        // The axis of the pair, and the exponent of its frequency.
        let sector = i % ends[3];
        let section = ends
            .iter()
            .position(|&end| sector < end)
            .expect("an end is beyond");
        let (axis, exponent) = match mode {
            RopeMode::Normal | RopeMode::Neox => (0, i),
            RopeMode::Mrope => (section, i),
            RopeMode::Imrope => {
                let axis = sector % 3;
                let inside = sector < 3 * sections[axis];
                (if inside { axis } else { 3 }, i)
            }
            RopeMode::Vision => (section, sector + sections[section] - ends[section]),
        };
        let factor = factors.map_or(1.0, |factors| factors[i]);
        let theta = positions[axis] * base.powf(-2.0 * exponent as f64 / n) / factor;
        let (mut angle, mut length) = (scale * theta, f64::from(attn_factor));
        if ext != 0.0 {
            let along = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let mix = (1.0 - along) * ext;
            angle = scale * theta * (1.0 - mix) + theta * mix;
            length *= 1.0 + 0.1 * (1.0 / scale).ln();
        }
        if backward {
            angle = -angle;
        }
        let (a, b) = match mode {
            RopeMode::Normal => (start + 2 * i, start + 2 * i + 1),
            RopeMode::Vision => (i, i + n_dims),
            _ => (start + i, start + i + n_dims / 2),
        };
        let (x, y) = (out[a], out[b]);
        out[a] = length * (x * angle.cos() - y * angle.sin());
        out[b] = length * (x * angle.sin() + y * angle.cos());
    }
    out
}

pub(crate) fn modes_types_and_strides(engine: &dyn Engine) {
    property(250, |random| {
        let mode = random.pick(RopeMode::ALL);
        let ty = random.pick(&[Type::F32, Type::F16, Type::Bf16]);
        let half = 2 * (2 + random.below(20));
        let vision = mode == RopeMode::Vision;
        let [before, after] = if vision {
            [0; 2]
        } else {
            [0; 2].map(|_| 2 * random.below(4))
        };
        let n_dims = if vision { half } else { 2 * half };
        let [tokens, heads, batch] = [random.below(7), random.below(6), random.below(3)];
        let ne = [2 * half + before + after, heads, tokens, batch];
        let axes = if matches!(mode, RopeMode::Normal | RopeMode::Neox) {
            1
        } else {
            4
        };
        let backward = random.chance(3);
        let op = rope(
            mode,
            backward,
            n_dims as u32,
            before as u32,
            random.chance(2),
        );
        let x = Data::random(ty, ne, random).fill(|| random.between(-2.0, 2.0));
        let positions = Data::dense(Type::I32, [tokens * axes, 1, 1, 1]);
        let positions = positions.fill(|| random.below(600) as f64);
        let factors = Data::dense(Type::F32, [n_dims, 1, 1, 1]);
        let factors = factors.fill(|| random.between(0.9, 1.1));
        let factors = random.chance(2).then_some(&factors);
        let dst = Data::random(ty, ne, random);
        let got = run(engine, op, &dst, &[Some(&x), Some(&positions), factors]);
        let factors = factors.map(Data::values);
        let want: Vec<f64> = got
            .row_indices()
            .flat_map(|row| {
                let at = |axis| positions.get([axis * tokens + row[1], 0, 0, 0]);
                let at: Vec<f64> = (0..axes).map(at).collect();
                turned(&op, x.row_values(row), &at, factors.as_deref())
            })
            .collect();
        compare(&format!("{op:?}"), &got, TOLERANCE, |[i0, i1, i2, i3]| {
            want[(((i3 * tokens + i2) * heads + i1) * ne[0] + i0) as usize]
        });
    });
}

pub(crate) fn forth_and_back_in_place(engine: &dyn Engine) {
    let random = &mut Random::new(9);
    let x = Data::dense(Type::F32, [64, 3, 5, 2]).fill(|| random.between(-2.0, 2.0));
    let positions = Data::dense(Type::I32, [5, 1, 1, 1]).fill(|| 1.0 + random.below(100) as f64);
    for mode in [RopeMode::Normal, RopeMode::Neox] {
        let op = |backward| rope(mode, backward, 64, 0, false);
        let turned = run_in_place(engine, op(false), &[Some(&x), Some(&positions)]);
        assert!(
            turned
                .row_indices()
                .all(|row| turned.row_values(row) != x.row_values(row))
        );
        let back = run_in_place(engine, op(true), &[Some(&turned), Some(&positions)]);
        compare("back", &back, 1e-6, |index| x.get(index));
    }
}
