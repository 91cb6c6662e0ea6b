//! COPY (ggml's DUP, CPY and CONT): all elements in order, converted to the destination's type.

use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use super::copy_raw::{self, copy_strided};
use super::f32_rows::Access;
use super::gather::real_types;
use super::sequence::Sequence;
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use vgpu_engine::types::{ANY, FLOATS};

/// Elements of a unit of work, which are converted on the stack: a multiple of every block.
const STRIP: usize = 1024;

pub(super) fn rules() -> Vec<Rule> {
    let integers = TypeSet::of(&[Type::I32]);
    vec![
        Rule::uniform(OpKind::Copy, ANY, 1),
        Rule::new(OpKind::Copy, real_types(), &[real_types()]),
        Rule::new(OpKind::Copy, integers, &[FLOATS]),
        Rule::new(OpKind::Copy, FLOATS, &[integers]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let Op::Copy {} = o.op() else {
        return None;
    };
    Some(if o.dst().ty == o.src(0).ty {
        same_type(o)
    } else {
        convert(o)
    })
}

fn same_type(o: &Operands<'_>) -> Compiled {
    let (dst, src) = (o.dst(), o.src(0));
    assert_eq!(dst.ty, src.ty, "a copy converts nothing");
    if dst.ne == src.ne {
        return Compiled {
            kernels: vec![copy_raw::copy(dst, src)],
            scratch_bytes: 0,
        };
    }
    let (to, from) = (Sequence::new(dst), Sequence::new(src));
    let size = dst.ty.block_bytes() as usize;
    let total = dst.elements() / dst.ty.block_elements() as usize;
    Compiled::one(move |w| {
        for strip in w.range_of(total.div_ceil(STRIP)) {
            let start = strip * STRIP;
            to.strips(start, STRIP.min(total - start), |to_start, done, len| {
                from.strips(start + done, len, |from_start, done, len| {
                    let to_start = to_start.wrapping_add(done * to.step());
                    // SAFETY: both sequences return `len` elements that are inside their tensors,
                    // and the elements have the same size.
                    unsafe {
                        copy_strided(to_start, to.step(), from_start, from.step(), len, size)
                    };
                });
            });
        }
        Ok(())
    })
}

fn convert(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::Copy {});
    let (dst, src) = (o.dst(), o.src(0));
    let (to, from) = (Sequence::new(dst), Sequence::new(src));
    let (writer, reader) = (
        Access::new(dst.ty, to.step()),
        Access::new(src.ty, from.step()),
    );
    let (to_block, from_block) = (
        dst.ty.block_elements() as usize,
        src.ty.block_elements() as usize,
    );
    let total = dst.elements();
    Compiled::one(move |w| {
        let mut stage = [0.0; STRIP];
        for strip in w.range_of(total.div_ceil(STRIP)) {
            let start = strip * STRIP;
            let n = STRIP.min(total - start);
            // SAFETY: both sequences return elements that are inside their tensors. Rows consist of
            // whole blocks, and `start` and `STRIP` are multiples of every block, so strips are
            // whole blocks. `done + len` elements fit the `STRIP >= n` floats of the stage, all of
            // which the source fills: COPY has passed its check, so both have `total` elements.
            unsafe {
                from.strips(start / from_block, n / from_block, |src, done, len| {
                    let to = stage.as_mut_ptr().add(done * from_block);
                    reader.load(src, len * from_block, to);
                });
                to.strips(start / to_block, n / to_block, |dst, done, len| {
                    let from = stage.as_ptr().add(done * to_block);
                    writer.store(from, len * to_block, dst);
                });
            }
        }
        Ok(())
    })
}
