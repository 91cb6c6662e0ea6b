//! SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL, ARGSORT, TOP_K.

use vgpu_transport::ir::{Op, OpKind, Rule, SortOrder, Type, TypeSet};

use super::copy_raw::each_row;
use super::f32_rows::{Access, Identity, STAGE, sum};
use super::scratch::ScratchLayout;
use super::sequence::Sequence;
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::operands::{Operands, parameters};
use vgpu_engine::types::FLOATS;

/// Elements whose sum is one partial result.
const STRIP: usize = 1 << 14;

pub(super) fn rules() -> Vec<Rule> {
    let (i32s, i64s) = (TypeSet::of(&[Type::I32]), TypeSet::of(&[Type::I64]));
    vec![
        Rule::new(OpKind::Sum, FLOATS, &[FLOATS]),
        Rule::new(OpKind::SumRows, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Mean, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Cumsum, FLOATS, &[FLOATS]),
        Rule::new(OpKind::Argmax, i32s, &[FLOATS]),
        Rule::new(OpKind::CountEqual, i64s, &[i32s, i32s]),
        Rule::new(OpKind::Argsort, i32s, &[FLOATS]),
        Rule::new(OpKind::TopK, i32s, &[FLOATS]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let kernel = match *o.op() {
        Op::Sum {} => return Some(sum_all(o)),
        Op::CountEqual {} => return Some(count_equal(o)),
        Op::Argsort { order } => return Some(argsort(o, order)),
        Op::TopK {} => return Some(argsort(o, SortOrder::Descending)),
        Op::SumRows {} => sum_rows(o, 1.0),
        Op::Mean {} => sum_rows(o, o.src(0).ne[0] as f64),
        Op::Cumsum {} => cumsum(o),
        Op::Argmax {} => argmax(o),
        _ => return None,
    };
    Some(Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    })
}

/// A reduction of a whole tensor to one value: partial results of `strip` elements (or rows) each,
/// and then their sum in order. The result does not depend on the number of threads.
pub(super) fn total<T: Copy + std::iter::Sum<T> + 'static>(
    elements: usize,
    strip: usize,
    partial: impl Fn(usize, usize) -> T + Send + Sync + 'static,
    finish: impl Fn(T) + Send + Sync + 'static,
) -> Compiled {
    let strips = elements.div_ceil(strip);
    let partials: Kernel = Box::new(move |w| {
        for i in w.range_of(strips) {
            let start = i * strip;
            let value = partial(start, strip.min(elements - start));
            // SAFETY: the scratch memory is aligned to 64 bytes and has `strips > i` values of `T`.
            // Only this worker has strip `i`.
            unsafe { w.scratch().cast::<T>().add(i).write(value) };
        }
        Ok(())
    });
    let sum: Kernel = Box::new(move |w| {
        if w.index() == 0 {
            let scratch = w.scratch().cast::<T>();
            // SAFETY: the first kernel has written all `strips` values before the barrier.
            finish((0..strips).map(|i| unsafe { scratch.add(i).read() }).sum());
        }
        Ok(())
    });
    Compiled {
        kernels: vec![partials, sum],
        scratch_bytes: strips * size_of::<T>(),
    }
}

/// The sum of all elements. ggml defines SUM for dense rows. For other rows, its CPU backend sums
/// the memory from the first element of each row on. This kernel does the same, so that a program
/// gets the same result.
fn sum_all(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::Sum {});
    let (dst, mut src) = (o.dst(), o.src(0));
    src.nb[0] = src.nb[0].min(src.ty.block_bytes() as usize);
    let sequence = Sequence::new(src);
    let access = Access::new(src.ty, sequence.step());
    let out = Access::rows(&dst);
    let partial = move |start, n| {
        let mut total = 0.0;
        sequence.strips(start, n, |src, _, len| {
            // SAFETY: the sequence returns `len` elements that are inside the tensor: the stride
            // of its elements is that of the tensor or smaller.
            total += unsafe { sum(Identity {}, [(access, src.cast_const())], len) };
        });
        total
    };
    // SAFETY: `o` has passed the check of SUM, so the destination is a single element.
    let finish = move |total: f64| unsafe { out.store(&(total as f32), 1, dst.ptr()) };
    total(src.elements(), STRIP, partial, finish)
}

fn count_equal(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::CountEqual {});
    let (dst, [a, b]) = (o.dst(), o.sources());
    let (a_elements, b_elements) = (Sequence::new(a), Sequence::new(b));
    let elements = a.elements();
    let partial = move |start, n| {
        let mut count = 0i64;
        a_elements.strips(start, n, |a_start, done, len| {
            b_elements.strips(start + done, len, |b_start, done, len| {
                for i in 0..len {
                    let a = a_start
                        .wrapping_add((done + i) * a_elements.step())
                        .cast::<i32>();
                    let b = b_start.wrapping_add(i * b_elements.step()).cast::<i32>();
                    // SAFETY: both sequences return `len > i` elements that are inside their
                    // tensors, which are of i32 by the rule of COUNT_EQUAL.
                    count += i64::from(unsafe { a.read() == b.read() });
                }
            });
        });
        count
    };
    // SAFETY: `o` has passed the check of COUNT_EQUAL, so the destination is a single i64.
    total(elements, STRIP, partial, move |count| unsafe {
        dst.ptr().cast::<i64>().write(count)
    })
}

/// The sum of each row, divided by `by`.
fn sum_rows(o: &Operands<'_>, by: f64) -> Kernel {
    parameters!(o, (Op::SumRows {} | Op::Mean {}));
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x, n) = (Access::rows(&dst), Access::rows(&src), src.ne[0]);
    each_row(dst, move |index, row| {
        // SAFETY: `o` has passed the check of SUM_ROWS and MEAN: the source has as many rows as the
        // destination. A row of the source has `n` elements, and a row of the destination has one.
        unsafe {
            let sum = sum(Identity {}, [(x, src.row_ptr(index).cast_const())], n);
            out.store(&((sum / by) as f32), 1, row);
        }
    })
}

/// The sums of the first, the first two, the first three ... elements of each row.
fn cumsum(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Cumsum {});
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x, n) = (Access::rows(&dst), Access::rows(&src), dst.ne[0]);
    each_row(dst, move |index, row| {
        let src_row = src.row_ptr(index).cast_const();
        let mut sum = 0.0;
        let mut stage = [0.0; STAGE];
        for start in (0..n).step_by(STAGE) {
            let len = STAGE.min(n - start);
            // SAFETY: `o` has passed the check of CUMSUM: source and destination have the same
            // rows, of `n >= start + len` elements. `len <= STAGE`.
            unsafe {
                x.load(x.at(src_row, start), len, stage.as_mut_ptr());
                for value in &mut stage[..len] {
                    sum += f64::from(*value);
                    *value = sum as f32;
                }
                out.store(stage.as_ptr(), len, out.at(row, start).cast_mut());
            }
        }
    })
}

/// Calls `body` with each value of a row and its index.
///
/// # Safety
/// [`Access::load`] may read `n` elements of the row.
unsafe fn each_value(access: Access, row: *const u8, n: usize, mut body: impl FnMut(usize, f32)) {
    let mut stage = [0.0; STAGE];
    for start in (0..n).step_by(STAGE) {
        let len = STAGE.min(n - start);
        // SAFETY: the caller guarantees `n >= start + len` elements, and `len <= STAGE`.
        unsafe { access.load(access.at(row, start), len, stage.as_mut_ptr()) };
        for (i, &value) in stage[..len].iter().enumerate() {
            body(start + i, value);
        }
    }
}

/// The index of the largest element of each row, the last one of equal elements; 0 for an empty
/// row.
fn argmax(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Argmax {});
    let (dst, src) = (o.dst(), o.src(0));
    let x = Access::rows(&src);
    Box::new(move |w| {
        for row in w.range_of(src.ne[1]) {
            let (mut largest, mut at) = (f32::NEG_INFINITY, 0);
            // SAFETY: a row of the source has `ne[0]` elements. `o` has passed the check of ARGMAX:
            // the destination has an i32 for each row.
            unsafe {
                each_value(x, src.row_ptr([row, 0, 0]), src.ne[0], |i, value| {
                    if value >= largest {
                        (largest, at) = (value, i);
                    }
                });
                dst.ptr()
                    .wrapping_add(row * dst.nb[0])
                    .cast::<i32>()
                    .write(at as i32);
            }
        }
        Ok(())
    })
}

/// An integer with the same order as the float. Both zeros have the same key.
fn sort_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits(); // -0 + 0 = 0
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// A key with the order of the value, then of its index.
fn ordered(order: SortOrder, value: f32, index: usize) -> u64 {
    let key = match order {
        _ if value.is_nan() => u32::MAX, // last in either order
        SortOrder::Ascending => sort_key(value),
        SortOrder::Descending => !sort_key(value),
    };
    u64::from(key) << 32 | index as u64
}

/// Longer rows are sorted in several units of work.
const LONG_ROW: usize = 1 << 18;

/// Elements of a long row in a unit of work.
const SORT_STRIP: usize = 1 << 16;

/// As [`argsort`], with a radix sort: for each of the four bytes of a value's key, the elements are
/// counted and then moved in order.
fn argsort_long(o: &Operands<'_>, order: SortOrder) -> Compiled {
    const DIGITS: usize = 256;
    const PASSES: usize = 4;
    parameters!(o, (Op::Argsort { .. } | Op::TopK {}));
    let (dst, src) = (o.dst(), o.src(0));
    let x = Access::rows(&src);
    let (n, wanted) = (src.ne[0], dst.ne[0]);
    let busy = o.workers().min(dst.rows());
    let parts = n.div_ceil(SORT_STRIP);
    // The keys, the counts and moves of each byte, and the indices.
    let writes = 1 + 2 * PASSES;
    let steps = writes * parts + wanted.div_ceil(SORT_STRIP);
    let mut scratch = ScratchLayout::default();
    let keys_at = scratch.room(2 * busy, n * size_of::<u64>());
    let counts_at = scratch.room(busy, DIGITS * size_of::<usize>());
    let kernel: Kernel = Box::new(move |w| {
        for unit in w
            .range_of_groups(dst.rows(), steps)
            .each(Estimate::steps(SORT_STRIP))
        {
            let (row, step) = (unit / steps, unit % steps);
            let (pass, part) = ((step / parts).min(writes), step % parts);
            let index = dst.row_index(row);
            let range = part * SORT_STRIP..n.min((part + 1) * SORT_STRIP);
            // SAFETY: the first `busy` workers have rows, and the scratch memory has `2 * n` keys
            // and `DIGITS` counts for each, aligned to 64 bytes. One worker does all steps of a
            // row. Any bytes are valid integers, and the memory was initialised when it was
            // allocated.
            let (mut from, mut to, counts) = unsafe {
                let keys = w
                    .scratch()
                    .add(keys_at)
                    .cast::<u64>()
                    .add(w.index() * 2 * n);
                let counts = w.scratch().add(counts_at).cast::<usize>();
                (
                    std::slice::from_raw_parts_mut(keys, n),
                    std::slice::from_raw_parts_mut(keys.add(n), n),
                    std::slice::from_raw_parts_mut(counts.add(w.index() * DIGITS), DIGITS),
                )
            };
            if pass == 0 {
                let src_row = x.at(src.row_ptr(index).cast_const(), range.start);
                // SAFETY: `o` has passed the check of ARGSORT or TOP_K: the source has the rows of
                // the destination. A row of the source has `n >= range.end` elements.
                unsafe {
                    each_value(x, src_row, range.len(), |i, value| {
                        let i = range.start + i;
                        from[i] = ordered(order, value, i);
                    });
                }
                continue;
            }
            if pass == writes {
                let dst_row = dst.row_ptr(index);
                for (i, key) in from[..wanted]
                    .iter()
                    .enumerate()
                    .take(range.end)
                    .skip(range.start)
                {
                    let to = dst_row.wrapping_add(i * dst.nb[0]).cast::<i32>();
                    // SAFETY: `i < wanted = dst.ne[0]`, the length of a row, which is of i32 by the
                    // check of ARGSORT and TOP_K. The low half of a key is an index.
                    unsafe { to.write(*key as u32 as i32) };
                }
                continue;
            }
            let byte = (pass - 1) / 2;
            if byte % 2 == 1 {
                std::mem::swap(&mut from, &mut to);
            }
            let digit = |key: u64| (key >> (32 + 8 * byte)) as usize % DIGITS;
            if pass % 2 == 1 {
                if part == 0 {
                    counts.fill(0);
                }
                from[range].iter().for_each(|&key| counts[digit(key)] += 1);
                continue;
            }
            if part == 0 {
                // The place of the first element with each byte.
                let mut sum = 0;
                for count in counts.iter_mut() {
                    sum += std::mem::replace(count, sum);
                }
            }
            for &key in &from[range] {
                let place = &mut counts[digit(key)];
                to[*place] = key;
                *place += 1;
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: scratch.bytes(),
    }
}

/// The indices of the first `dst.ne[0]` elements of each row in sorted order. Equal elements are in
/// the order of their indices.
fn argsort(o: &Operands<'_>, order: SortOrder) -> Compiled {
    parameters!(o, (Op::Argsort { .. } | Op::TopK {}));
    let (dst, src) = (o.dst(), o.src(0));
    if src.ne[0] > LONG_ROW {
        return argsort_long(o, order);
    }
    let x = Access::rows(&src);
    let (n, wanted) = (src.ne[0], dst.ne[0]);
    let kernel: Kernel = Box::new(move |w| {
        let rows = w.range_of(dst.rows());
        if rows.rest().is_empty() {
            return Ok(());
        }
        // SAFETY: the scratch memory is aligned to 64 bytes and has `n` keys for each worker with
        // rows, which are initialised here. Any bytes are valid keys.
        let keys = unsafe {
            let first = w.scratch().cast::<u64>().add(w.index() * n);
            first.write_bytes(0, n);
            std::slice::from_raw_parts_mut(first, n)
        };
        for row in rows {
            let index = dst.row_index(row);
            // SAFETY: `o` has passed the check of ARGSORT or TOP_K: the source has the rows of the
            // destination. A row of the source has `n` elements.
            unsafe {
                each_value(x, src.row_ptr(index), n, |i, value| {
                    keys[i] = ordered(order, value, i);
                });
            }
            if wanted < n {
                keys.select_nth_unstable(wanted);
            }
            keys[..wanted].sort_unstable();
            let row = dst.row_ptr(index);
            for (i, key) in keys[..wanted].iter().enumerate() {
                // SAFETY: `i < wanted = dst.ne[0]`, the length of a row, which is of i32 by the
                // check of ARGSORT and TOP_K. The low half of a key is an index.
                unsafe {
                    row.wrapping_add(i * dst.nb[0])
                        .cast::<i32>()
                        .write(*key as u32 as i32)
                };
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: o.workers().min(dst.rows()) * n * size_of::<u64>(),
    }
}
