//! ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, CLAMP.

use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use super::f32_rows::{Access, Map, STAGE, apply, map, maps};
use crate::formats::Format;
use crate::kernel::{Compiled, check_index};
use crate::operands::{Operands, parameters};
use crate::simd::{Lanes, Simd};
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    let mut rules = vec![
        Rule::new(OpKind::AddId, F32, &[F32, F32]),
        Rule::new(OpKind::Scale, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Clamp, FLOATS, &[FLOATS]),
    ];
    for op in [
        OpKind::Add,
        OpKind::Sub,
        OpKind::Mul,
        OpKind::Div,
        OpKind::Add1,
    ] {
        rules.push(Rule::new(op, FLOATS, &[FLOATS, FLOATS]));
    }
    // The sum with a quantised tensor is quantised.
    for &ty in Type::ALL {
        if ty.is_quantized() && Format::of(ty).is_some() {
            let set = TypeSet::of(&[ty]);
            rules.push(Rule::new(OpKind::Add, set, &[set, FLOATS]));
            rules.push(Rule::new(OpKind::Add1, set, &[set, FLOATS]));
        }
    }
    rules
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    Some(match *o.op() {
        Op::Add {} | Op::Add1 {} if dst.ty.is_quantized() => add_quantized(o),
        Op::Add {} | Op::Add1 {} => map(dst, o.sources(), Add {}),
        Op::Sub {} => map(dst, o.sources(), Sub {}),
        Op::Mul {} => map(dst, o.sources(), Mul {}),
        Op::Div {} => map(dst, o.sources(), Div {}),
        Op::AddId {} => add_id(o),
        Op::Scale { scale, bias } => map(dst, [o.src(0)], Scale { scale, bias }),
        Op::Clamp { min, max } => map(dst, [o.src(0)], Clamp { min, max }),
        _ => return None,
    })
}

maps! {
    Add |a, b| a + b;
    Sub |a, b| a - b;
    Mul |a, b| a * b;
    Div |a, b| a / b;
    Scale { scale, bias } |x| x.mul_add(x.splat(scale), x.splat(bias));
    Clamp { min, max } |x| x.min(x.splat(max)).max(x.splat(min));
}

/// `dst = a + b`, `dst` and `a` of one quantised type.
fn add_quantized(o: &Operands<'_>) -> Compiled {
    parameters!(o, (Op::Add {} | Op::Add1 {}));
    let (dst, [a, b]) = (o.dst(), o.sources());
    let (out, a_rows) = (Access::rows(&dst), Access::rows(&a));
    let b_element = Access::new(b.ty, b.nb[0]);
    let parts = dst.ne[0].div_ceil(STAGE);
    Compiled::one(move |w| {
        let (mut x, mut y) = ([0.0; STAGE], [0.0; STAGE]);
        for unit in w.range_of(dst.rows() * parts) {
            let (index, start) = (dst.row_index(unit / parts), unit % parts * STAGE);
            let (to, from) = (dst.row_ptr(index), a.row_ptr(index));
            let addend = b.row_ptr(std::array::from_fn(|d| index[d] % b.ne[d + 1]));
            let n = STAGE.min(dst.ne[0] - start);
            // SAFETY: `o` has passed the check of ADD or ADD1: `a` has the lengths of `dst`, and
            // `b` lengths that divide them. So the rows exist, those of `a` and `dst` with `ne[0]`
            // elements. `STAGE` is a multiple of every block, so each part of a row consists of
            // whole blocks. Elements of `b` are read one at a time, since its row can be broadcast.
            unsafe {
                a_rows.load(a_rows.at(from, start), n, x.as_mut_ptr());
                for (i, y) in y[..n].iter_mut().enumerate() {
                    b_element.load(b_element.at(addend, (start + i) % b.ne[0]), 1, y);
                }
                x.iter_mut().zip(&y).for_each(|(x, y)| *x += y);
                out.store(x.as_ptr(), n, out.at(to, start).cast_mut());
            }
        }
        Ok(())
    })
}

/// `dst[:, u, t] = a[:, u, t] + b[:, ids[u, t]]`
fn add_id(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::AddId {});
    let (dst, [a, b, ids]) = (o.dst(), o.sources());
    let (out, a_rows, b_rows) = (Access::rows(&dst), Access::rows(&a), Access::rows(&b));
    Compiled::one(move |w| {
        for row in w.range_of(dst.rows()) {
            let index = dst.row_index(row);
            let id = ids
                .ptr()
                .wrapping_add(index[0] * ids.nb[0] + index[1] * ids.nb[1]);
            // SAFETY: `o` has passed the check of ADD_ID: `ids` has an i32 for each row of the
            // destination. The volatile read happens once: the checked value is the value that is
            // used, even if the destination overlaps the ids.
            let id = unsafe { id.cast::<i32>().read_volatile() };
            let addend = b.row_ptr([check_index(id.into(), b.ne[1])?, 0, 0]);
            let src = [
                (a_rows, a.row_ptr(index).cast_const()),
                (b_rows, addend.cast_const()),
            ];
            // SAFETY: the check of ADD_ID requires rows of `ne[0]` elements of `a`, as many as of
            // `dst`, and of `b`, which has the row of the checked id.
            unsafe { apply(Add {}, (out, dst.row_ptr(index)), src, dst.ne[0]) };
        }
        Ok(())
    })
}
