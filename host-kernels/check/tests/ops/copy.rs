//! COPY between all types.

use vgpu_cpu::formats::Format;
use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

fn quantised() -> Vec<Type> {
    Type::ALL
        .iter()
        .copied()
        .filter(|ty| ty.is_quantized() && Format::of(*ty).is_some())
        .collect()
}

/// Lengths with as many elements as `ne`, whose rows are whole blocks.
fn reshaped(ne: [u64; 4], block: u64, random: &mut Random) -> [u64; 4] {
    let mut rest: u64 = ne.iter().product::<u64>() / block;
    if rest == 0 {
        return [0, ne[1], ne[2], ne[3]];
    }
    let mut out = [1; 4];
    for length in &mut out[..3] {
        let divisors: Vec<u64> = (1..=rest).filter(|d| rest.is_multiple_of(*d)).collect();
        *length = random.pick(&divisors);
        rest /= *length;
    }
    out[3] = rest;
    out[0] *= block;
    out
}

fn blocks_of(mut ne: [u64; 4], block: u64) -> [u64; 4] {
    ne[0] = if block > 1 {
        ne[0].min(4) * block
    } else {
        ne[0]
    };
    ne
}

/// Every type to itself, bit by bit, with the same or with other lengths.
pub(crate) fn same_type(engine: &dyn Engine) {
    for &ty in Type::ALL {
        let block = ty.block_elements();
        property(20, |random| {
            let ne = blocks_of(lengths(random), block);
            let to = if random.chance(2) {
                ne
            } else {
                reshaped(ne, block, random)
            };
            let mut src = Data::random(ty, ne, random);
            src.scribble(random);
            let dst = Data::random(ty, to, random);
            let got = run(engine, Op::Copy {}, &dst, &[Some(&src)]);
            assert!(got.bytes() == src.bytes(), "{ty:?} {ne:?} to {to:?}");
        });
    }
}

/// Matrices of many tiles, with any two dimensions exchanged.
pub(crate) fn transpositions(engine: &dyn Engine) {
    property(40, |random| {
        let ty = random.pick(&[Type::I8, Type::F16, Type::F32, Type::I64]);
        let ne = std::array::from_fn(|d| {
            if d < 2 {
                30 + random.below(60)
            } else {
                1 + random.below(3)
            }
        });
        let mut order = [0, 1, 2, 3];
        order.swap(random.below(4) as usize, random.below(4) as usize);
        let mut src = Data::strided(ty, ne, order, [0; 4]);
        src.scribble(random);
        let dst = if random.chance(2) {
            Data::dense(ty, ne)
        } else {
            Data::strided(ty, ne, [1, 0, 2, 3], [0, 1, 0, 0])
        };
        let got = run(engine, Op::Copy {}, &dst, &[Some(&src)]);
        assert!(got.bytes() == src.bytes(), "{ty:?} {ne:?} {order:?}");
    });
}

/// Lengths small enough for types that are slow to quantise: those with codebooks, which are
/// searched.
fn most(ty: Type) -> u64 {
    match ty {
        Type::Iq1S
        | Type::Iq1M
        | Type::Iq2Xxs
        | Type::Iq2Xs
        | Type::Iq2S
        | Type::Iq3Xxs
        | Type::Iq3S => 2,
        _ => u64::MAX,
    }
}

/// Between all types that hold real numbers.
pub(crate) fn conversions(engine: &dyn Engine) {
    let all = [FLOATS.to_vec(), quantised()].concat();
    for &from in &all {
        property(60, |random| {
            let to = random.pick(&all);
            if to == from {
                return;
            }
            let block = from.block_elements().max(to.block_elements());
            let ne = blocks_of(lengths(random).map(|n| n.min(most(to))), block);
            let shape = if random.chance(2) {
                ne
            } else {
                reshaped(ne, block, random)
            };
            let src = Data::random(from, ne, random).fill(|| random.between(-3.0, 3.0));
            let dst = Data::random(to, shape, random);
            let got = run(engine, Op::Copy {}, &dst, &[Some(&src)]);
            let values = src.values();
            let mut values = values.iter().copied();
            let want = dst.clone().fill(|| values.next().unwrap());
            assert!(
                got.bytes() == want.bytes(),
                "{from:?} to {to:?}, {ne:?} to {shape:?}"
            );
        });
    }
}

/// Floats are truncated to integers, integers are rounded to floats.
pub(crate) fn integers(engine: &dyn Engine) {
    property(60, |random| {
        let ne = lengths(random);
        let float = random.pick(&FLOATS);
        let src = Data::random(float, ne, random).fill(|| random.between(-300.0, 300.0));
        let dst = Data::random(Type::I32, reshaped(ne, 1, random), random);
        let got = run(engine, Op::Copy {}, &dst, &[Some(&src)]);
        let want: Vec<f64> = src.values().iter().map(|x| x.trunc()).collect();
        assert_eq!(got.values(), want);
        let src = Data::random(Type::I32, ne, random).fill(|| random.below(1 << 24) as f64);
        let dst = Data::random(float, ne, random);
        let got = run(engine, Op::Copy {}, &dst, &[Some(&src)]);
        compare("COPY", &got, 0.0, |i| src.get(i));
    });
}
