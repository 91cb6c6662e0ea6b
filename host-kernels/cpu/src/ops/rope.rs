//! ROPE: rotary position embedding, and its gradient.
//!
//! Each row is one head of one token. Each pair of its elements is rotated by an angle: the
//! position of the token times a frequency that decreases from pair to pair (see
//! `vgpu_engine::rope`).

use vgpu_transport::ir::{OpKind, RopeMode, Rule, Type, TypeSet};

use super::f32_rows::Access;
use super::gather::RowReader;
use super::rows::index as row_id;
use crate::formats::Format;
use crate::kernel::{Compiled, Fault};
use crate::operands::Operands;
use crate::simd::{Simd, Task, chunks, dispatch};
use crate::view::View;
use vgpu_engine::EngineError;
use vgpu_engine::rope::{Rotation, greater, less};

/// The type combinations that this family runs.
pub(super) fn rules() -> Vec<Rule> {
    let types = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);
    vec![Rule::uniform(OpKind::Rope, types, 1)]
}

/// ROPE and ROPE_BACK.
pub(super) fn rope(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let dst = operands.dst();
    let writer = RowWriter::new(&dst);
    Ok(rotated(operands, move |index, row| {
        // SAFETY: `operands` have passed the check of ROPE: the destination has the lengths of the
        // source. So `index`, a row of the source, is one of the destination, which has as many
        // elements as `row`.
        unsafe { writer.write(row, dst.row_ptr(index)) };
        Ok(())
    }))
}

/// ROPE and the SET_ROWS of its result, which no other node reads.
///
/// # Safety
/// The nodes are a group of [`FusionKind::RopeRows`](vgpu_engine::fuse::FusionKind) that an
/// arrangement has found.
pub(super) unsafe fn rope_rows(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let [rope, rows] = nodes else {
        return None;
    };
    let (heads, cache, ids) = (rope.dst(), rows.dst(), rows.src(1));
    let width = heads.ne[0];
    let writer = Access::rows(&cache);
    // The result of ROPE must be f32, and a head must be whole blocks of the cache.
    let fits = heads.ty == Type::F32 && width.is_multiple_of(cache.ty.block_elements() as usize);
    fits.then(|| {
        rotated(rope, move |[head, token, _], row| {
            // SAFETY: in a group of this kind, the rows of SET_ROWS are the tokens of ROPE. The
            // check of SET_ROWS requires an i32 or i64 for each.
            let id = unsafe { row_id(&ids, [token, 0, 0], cache.ne[1])? };
            let to = writer.at(cache.row_ptr([id, 0, 0]), head * width);
            // SAFETY: `row_id` has checked the id. In a group of this kind, a row of SET_ROWS, and
            // so of the cache, has `width` elements for each head, one head after the other, in one
            // matrix. `width` is a multiple of the block.
            unsafe { writer.store(row.as_ptr(), width, to.cast_mut()) };
            Ok(())
        })
    })
}

/// The kernel that rotates rows and calls `write` with the indices and the floats of each row.
fn rotated(
    operands: &Operands<'_>,
    write: impl Fn([usize; 3], &[f32]) -> Result<(), Fault> + Send + Sync + 'static,
) -> Compiled {
    let (x, positions) = (operands.src(0), operands.src(1));
    let angles = Angles {
        rotation: Rotation::of(operands.op()).expect("this family has one operator"),
        factors: operands.optional(2),
    };
    let (start, pairs) = (
        angles.rotation.start as usize,
        angles.rotation.pairs as usize,
    );
    let n = 2 * pairs;
    let tokens = x.ne[2];
    let reader = RowReader::new(&x);

    // Each thread has a row, and the cosines and sines of one token.
    let sizes = [x.ne[0], pairs, pairs].map(|n| n.next_multiple_of(16));
    let each = sizes.iter().sum::<usize>();
    Compiled {
        kernels: vec![Box::new(move |w| {
            // SAFETY: the scratch memory has `each` floats for each worker, which are the three
            // parts and are initialised here.
            let (row, cos, sin) = unsafe {
                let own = w.scratch().cast::<f32>().add(w.index() * each);
                own.write_bytes(0, each);
                let part = |at, n| std::slice::from_raw_parts_mut(own.add(at), n);
                (
                    part(0, x.ne[0]),
                    part(sizes[0], pairs),
                    part(sizes[0] + sizes[1], pairs),
                )
            };
            let mut computed_for = None;
            for index in w.range_of(x.rows()).map(|row| x.row_index(row)) {
                let token = index[1];
                if computed_for.replace(token) != Some(token) {
                    let position = |axis: usize| {
                        let at = positions.ptr().cast::<i32>();
                        // SAFETY: `operands` have passed the check of ROPE: `positions` is
                        // contiguous, with an i32 for each token, or for each axis and token if the
                        // mode has four axes.
                        unsafe { at.add(axis * tokens + token).read() as f32 }
                    };
                    angles.fill(position, cos, sin);
                }
                // SAFETY: `index` is a row of the source with `x.ne[0]` elements, the length of
                // `row`.
                unsafe { reader.read(x.row_ptr(index), 0, row.len(), row.as_mut_ptr()) };
                dispatch(Rotate {
                    x: &mut row[start..start + n],
                    cos,
                    sin,
                    adjacent: angles.rotation.mode == RopeMode::Normal,
                });
                write(index, row)?;
            }
            Ok(())
        })],
        scratch_bytes: operands.workers() * each * size_of::<f32>(),
    }
}

/// Writes rows of a plain type.
#[derive(Clone, Copy)]
struct RowWriter {
    format: &'static Format,
    stride: usize,
    dense: bool,
}

impl RowWriter {
    fn new(view: &View) -> RowWriter {
        RowWriter {
            format: Format::of(view.ty).expect("the rules claim no other types"),
            stride: view.nb[0],
            dense: view.dense_rows(),
        }
    }

    /// # Safety
    /// `to` is a row of the view, with as many elements as `row`.
    unsafe fn write(&self, row: &[f32], to: *mut u8) {
        let write = self.format.quantize_row;
        if self.dense {
            // SAFETY: the elements of the row at `to` are adjacent, and there are `row.len()` of
            // them. `row` is scratch memory, which no tensor overlaps.
            return unsafe { write(row.as_ptr(), to, row.len()) };
        }
        for (i, value) in row.iter().enumerate() {
            // SAFETY: the caller guarantees `row.len() > i` elements at `to`, `stride` bytes apart.
            unsafe { write(value, to.add(i * self.stride), 1) };
        }
    }
}

/// The rotation angles of the pairs of a row.
#[derive(Clone, Copy)]
struct Angles {
    rotation: Rotation,
    /// Divisors of the frequencies, an f32 for each pair.
    factors: Option<View>,
}

impl Angles {
    /// Computes the cosine and sine of the angle of every pair. `position` returns the position of
    /// the token on an axis.
    fn fill(&self, position: impl Fn(usize) -> f32, cos: &mut [f32], sin: &mut [f32]) {
        let axes = match self.rotation.mode {
            RopeMode::Normal | RopeMode::Neox => 1,
            RopeMode::Mrope | RopeMode::Imrope | RopeMode::Vision => 4,
        };
        let mut origin = [0.0; 4];
        (0..axes).for_each(|axis| origin[axis] = position(axis));
        let mut theta = origin;
        for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
            let axis = if axes == 1 {
                0
            } else {
                self.axis(i, &origin, &mut theta)
            };
            let factor = self.factors.map_or(1.0, |factors| {
                // SAFETY: the check of ROPE requires dense `factors`, at least one f32 for each
                // pair.
                unsafe { factors.ptr().cast::<f32>().add(i).read() }
            });
            let (c, s) = self.angle(i, theta[axis] / factor);
            *cos = c;
            *sin = s * self.rotation.sign;
            theta
                .iter_mut()
                .for_each(|theta| *theta *= self.rotation.step);
        }
    }

    /// The axis of pair `i`. In vision mode, the frequencies start again in each section.
    fn axis(&self, i: usize, origin: &[f32; 4], theta: &mut [f32; 4]) -> usize {
        let [t, h, w, e] = self.rotation.sections.map(i64::from);
        let ends = [t, t + h, t + h + w];
        let sector = i as i64 % (t + h + w + e);
        if self.rotation.mode == RopeMode::Vision {
            // An empty section begins at the same pair as the next section. The first of them
            // counts.
            let begins = [0, ends[0], ends[1], ends[2]];
            if let Some(axis) = begins.iter().position(|&begin| begin == sector) {
                theta[axis] = origin[axis];
            }
        }
        if self.rotation.mode == RopeMode::Imrope {
            match sector % 3 {
                1 if sector < 3 * h => 1,
                2 if sector < 3 * w => 2,
                0 if sector < 3 * t => 0,
                _ => 3,
            }
        } else {
            ends.iter().position(|&end| sector < end).unwrap_or(3)
        }
    }

    /// The cosine and sine for pair `i` at `theta`, with the correction of YaRN.
    fn angle(&self, i: usize, theta: f32) -> (f32, f32) {
        let Rotation {
            freq_scale,
            ext_factor,
            magnitude,
            ramp: [low, high],
            ..
        } = self.rotation;
        let mut angle = freq_scale * theta;
        if ext_factor != 0.0 {
            let along = (i as f32 - low) / greater(0.001, high - low);
            let mix = (1.0 - less(1.0, greater(0.0, along))) * ext_factor;
            angle = angle * (1.0 - mix) + theta * mix;
        }
        (angle.cos() * magnitude, angle.sin() * magnitude)
    }
}

/// Rotates the pairs of `x`, one for each cosine: adjacent elements, or elements of the two halves.
struct Rotate<'a> {
    x: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    adjacent: bool,
}

impl Task for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Rotate {
            x,
            cos,
            sin,
            adjacent,
        } = self;
        if adjacent {
            for ((pair, &cos), &sin) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cos - b * sin;
                pair[1] = a * sin + b * cos;
            }
            return;
        }
        let (first, second) = x.split_at_mut(cos.len());
        chunks::<S>(cos.len(), |i, n| {
            let at = i..i + n;
            let (a, b) = (
                simd.load(&first[at.clone()]),
                simd.load(&second[at.clone()]),
            );
            let (cos, sin) = (simd.load(&cos[at.clone()]), simd.load(&sin[at.clone()]));
            (a * cos - b * sin).store(&mut first[at.clone()]);
            (a * sin + b * cos).store(&mut second[at]);
        });
    }
}
