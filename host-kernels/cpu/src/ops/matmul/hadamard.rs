//! Products with a Hadamard matrix, by the fast Walsh-Hadamard transform.

use vgpu_transport::ir::Op;

use super::super::gather::RowReader;
use super::super::scratch::ScratchLayout;
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::simd::{Simd, Task, chunks, dispatch};

/// MUL_MAT with the normalised Hadamard matrix as weights, in `n log n` steps for each column.
///
/// # Panics
/// If the matrix is not square.
pub(super) fn hadamard(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::MulMat { hadamard: true, .. });
    let (x, dst) = (o.src(1), o.dst());
    assert_eq!(x.ne, dst.ne, "the matrix is square");
    let reader = RowReader::new(&x);
    let n = x.ne[0];
    let mut scratch = ScratchLayout::default();
    let own = scratch.room(o.workers(), n * size_of::<f32>());
    Compiled {
        kernels: vec![Box::new(move |w| {
            // SAFETY: the scratch memory has `n` floats for each worker at offset `own`.
            let column = unsafe {
                let start = w.scratch().add(own).cast::<f32>().add(w.index() * n);
                start.write_bytes(0, n);
                std::slice::from_raw_parts_mut(start, n)
            };
            for row in w.range_of(x.rows()) {
                let index = x.row_index(row);
                // SAFETY: the row is in the source and has `n` elements; `column` has `n` floats.
                unsafe { reader.read(x.row_ptr(index), 0, n, column.as_mut_ptr()) };
                dispatch(WalshHadamard(column));
                let to = dst.row_ptr(index).cast::<f32>();
                // SAFETY: the destination has the rows of the source, and `o` has passed the check
                // of MUL_MAT: the rows are dense and have `n` floats. One worker writes this row.
                unsafe { to.copy_from_nonoverlapping(column.as_ptr(), n) };
            }
            Ok(())
        })],
        scratch_bytes: scratch.bytes(),
    }
}

/// The fast Walsh-Hadamard transform of a power of two of floats, normalised.
struct WalshHadamard<'a>(&'a mut [f32]);

impl Task for WalshHadamard<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let x = self.0;
        let scale = 1.0 / (x.len() as f32).sqrt();
        x.iter_mut().for_each(|x| *x *= scale);
        let mut half = 1;
        while half < x.len() {
            for pair in x.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                chunks::<S>(half, |i, n| {
                    let (u, v) = (simd.load(&a[i..i + n]), simd.load(&b[i..i + n]));
                    (u + v).store(&mut a[i..i + n]);
                    (u - v).store(&mut b[i..i + n]);
                });
            }
            half *= 2;
        }
    }
}
