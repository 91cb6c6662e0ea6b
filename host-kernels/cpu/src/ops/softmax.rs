//! SOFT_MAX of scaled rows with a mask, ALiBi slopes, and sinks (one extra logit per head).

use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use super::gather::RowReader;
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};
use vgpu_engine::EngineError;

/// The type combinations that this family runs.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let masks = TypeSet::of(&[Type::F32, Type::F16]);
    vec![Rule::new(OpKind::SoftMax, f32, &[f32, masks, f32])]
}

/// Elements that are processed at once. The mask of these elements is converted on the stack.
const CHUNK: usize = 512;

/// The factor of the mask for each head (ALiBi, "attention with linear biases"): slopes decrease
/// geometrically over the heads. The slopes of heads after a power of two are between the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slopes {
    max_bias: f32,
    /// The largest power of two that is at most the number of heads.
    heads: usize,
}

impl Slopes {
    /// The slopes of `heads` heads.
    pub(super) fn new(max_bias: f32, heads: usize) -> Slopes {
        Slopes {
            max_bias,
            heads: heads.checked_ilog2().map_or(1, |log2| 1 << log2),
        }
    }

    /// The slope of a head.
    pub(super) fn of(&self, head: usize) -> f32 {
        let Slopes { max_bias, heads } = *self;
        if max_bias <= 0.0 {
            1.0
        } else if head < heads {
            2f32.powf(-max_bias / heads as f32).powf((head + 1) as f32)
        } else {
            let exponent = 2 * (head - heads) + 1;
            2f32.powf(-max_bias / 2.0 / heads as f32)
                .powf(exponent as f32)
        }
    }
}

/// SOFT_MAX.
pub(super) fn soft_max(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    parameters!(operands, Op::SoftMax { scale, max_bias });
    let (x, dst) = (operands.src(0), operands.dst());
    let mask = operands
        .optional(1)
        .map(|mask| (mask, RowReader::new(&mask)));
    let sinks = operands.optional(2);
    let slopes = Slopes::new(max_bias, x.ne[2]);
    Ok(Compiled::one(move |w| {
        for index in w.range_of(x.rows()).map(|row| x.row_index(row)) {
            let [i1, head, i3] = index;
            let mask = mask.map(|(mask, reader)| {
                let row = mask.row_ptr([i1, head % mask.ne[2], i3 % mask.ne[3]]);
                (row.cast_const(), reader)
            });
            // SAFETY: `operands` have passed the check of SOFT_MAX: `sinks` is contiguous, with one
            // f32 for each head.
            let sink = sinks.map(|s| unsafe { s.ptr().cast::<f32>().add(head).read() });
            // SAFETY: the check of SOFT_MAX requires dense rows of both, with the same lengths, and
            // a mask with rows as long for each `i1`, whose heads and sequences repeat into those
            // of the source. Both are f32 by the rule. Each row is written by one thread.
            unsafe {
                dispatch_ptr(Row {
                    n: x.ne[0],
                    x: x.row_ptr(index).cast(),
                    dst: dst.row_ptr(index).cast(),
                    mask,
                    scale,
                    slope: slopes.of(head),
                    sink,
                })
            };
        }
        Ok(())
    }))
}

/// One row.
///
/// Contract: `x` is readable and `dst` writable for `n` floats (they may be the same row), and the
/// mask has `n` elements.
struct Row {
    n: usize,
    x: *const f32,
    dst: *mut f32,
    mask: Option<(*const u8, RowReader)>,
    scale: f32,
    slope: f32,
    sink: Option<f32>,
}

impl PtrTask for Row {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Row { n, x, dst, .. } = self;
        // The logits are stored in the destination. Each is read from the source before that, so
        // both rows may be the same.
        let mut largest = simd.splat(f32::NEG_INFINITY);
        let mut mask = [0f32; CHUNK];
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            if let Some((row, reader)) = self.mask {
                // SAFETY: the mask has `n >= start + len` elements, and `len <= CHUNK`, the length
                // of the array.
                unsafe { reader.read(row, start, len, mask.as_mut_ptr()) };
            }
            let slope = simd.splat(self.slope);
            chunks::<S>(len, |i, lanes| {
                // SAFETY: `start + i + lanes <= n`, the floats of `x` and `dst`.
                unsafe {
                    let mut logits = simd.load_ptr(x.add(start + i), lanes) * self.scale;
                    if self.mask.is_some() {
                        logits = simd.load(&mask[i..i + lanes]).mul_add(slope, logits);
                    }
                    logits.store_ptr(dst.add(start + i), lanes);
                    if lanes == S::LANES {
                        largest = logits.max(largest);
                    } else {
                        largest = simd.splat(logits.largest(lanes)).max(largest);
                    }
                }
            });
        }
        let mut largest = largest.largest(S::LANES);
        if let Some(sink) = self.sink {
            largest = if largest > sink { largest } else { sink };
        }

        let mut sum = 0f64;
        for start in (0..n).step_by(CHUNK) {
            let mut part = simd.splat(0.0);
            chunks::<S>(CHUNK.min(n - start), |i, lanes| {
                // SAFETY: `start + i + lanes <= n`, the floats of `x` and `dst`.
                unsafe {
                    let at = dst.add(start + i);
                    (simd.load_ptr(at, lanes) - largest)
                        .exp()
                        .store_ptr(at, lanes);
                    part = part + simd.load_ptr(at, lanes); // lanes after the row are 0
                }
            });
            sum += f64::from(part.sum());
        }
        if let Some(sink) = self.sink {
            sum += f64::from((sink - largest).exp());
        }
        let inverse = (1.0 / sum) as f32;
        chunks::<S>(n, |i, lanes| {
            // SAFETY: `i + lanes <= n`, the floats of `dst`.
            unsafe {
                let at = dst.add(i);
                (simd.load_ptr(at, lanes) * inverse).store_ptr(at, lanes);
            }
        });
    }
}
