//! OUT_PROD: `dst = a * transpose(b)`.

use vgpu_transport::ir::Op;

use super::super::gather::RowReader;
use super::super::scratch::{Output, ScratchLayout};
use crate::gemm_rows::GemmRows;
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};
use vgpu_engine::EngineError;

/// Rows of the result of OUT_PROD in a tile.
const OUTER_ROWS: usize = 16;

/// Columns in a tile, a multiple of every block.
const OUTER_COLUMNS: usize = 512;

/// Rows of the sources that are multiplied at once.
const OUTER_TERMS: usize = 64;

/// Rows of the sources in a unit of work, a multiple of [`OUTER_TERMS`].
const UNIT_TERMS: usize = 16 * OUTER_TERMS;

/// OUT_PROD: `dst[m, n] = sum over k of a[m, k] * b[n, k]`, batch by batch.
pub(in super::super) fn out_prod(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    parameters!(operands, Op::OutProd {});
    let (a, b, dst) = (operands.src(0), operands.src(1), operands.dst());
    let mut scratch = ScratchLayout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    let output = Output::new(dst, &[a, b], &mut scratch);
    let (a_reader, b_reader) = (RowReader::new(&a), RowReader::new(&b));
    let [m, n, ne2, ne3] = dst.ne;
    let terms = a.ne[1];
    let (column_tiles, row_tiles) = (m.div_ceil(OUTER_COLUMNS), n.div_ceil(OUTER_ROWS));
    // One thread does the steps of a tile in order.
    let steps = terms.div_ceil(UNIT_TERMS).max(1);
    // Each thread has a tile of rows of `a`, their factors from `b`, and the sums.
    let sizes = [
        OUTER_TERMS * OUTER_COLUMNS,
        OUTER_ROWS * OUTER_TERMS,
        OUTER_ROWS * OUTER_COLUMNS,
    ];
    let each = sizes.iter().sum::<usize>();
    let own = scratch.room(operands.workers(), each * size_of::<f32>());

    kernels.push(Box::new(move |w| {
        // SAFETY: the scratch memory has `each` floats for each worker at offset `own`, which are
        // the three parts.
        let [rows, weights, sums] = unsafe {
            let own = w.scratch().add(own).cast::<f32>().add(w.index() * each);
            [own, own.add(sizes[0]), own.add(sizes[0] + sizes[1])]
        };
        let strides = output.strides();
        for unit in w.range_of_groups(column_tiles * row_tiles * ne2 * ne3, steps) {
            let (step, tile) = (unit % steps, unit / steps);
            let column = tile % column_tiles * OUTER_COLUMNS;
            let row = tile / column_tiles % row_tiles * OUTER_ROWS;
            let batch = tile / column_tiles / row_tiles;
            let (i2, i3) = (batch % ne2, batch / ne2);
            let (a2, a3) = (i2 / (ne2 / a.ne[2]), i3 / (ne3 / a.ne[3]));
            let (width, height) = (OUTER_COLUMNS.min(m - column), OUTER_ROWS.min(n - row));
            // SAFETY: the buffers have `OUTER_TERMS >= count` rows of `OUTER_COLUMNS >= width`
            // floats and `OUTER_ROWS >= height` rows of factors and sums. `operands` have passed
            // the check of OUT_PROD: `a` has `terms` rows of `m` elements, `b` as many of `n`, and
            // the destination dense rows of `m` floats; the batches of `a` repeat into those of
            // `b`, which the destination has. `column` and `width` are multiples of a block. No
            // other tile has this part of the destination.
            unsafe {
                if step == 0 {
                    sums.write_bytes(0, height * OUTER_COLUMNS);
                }
                let first = step * UNIT_TERMS;
                let last = terms.min(first + UNIT_TERMS);
                for first in (first..last).step_by(OUTER_TERMS) {
                    let count = OUTER_TERMS.min(last - first);
                    for t in 0..count {
                        let from = a.row_ptr([first + t, a2, a3]);
                        a_reader.read(from, column, width, rows.add(t * OUTER_COLUMNS));
                        // A column of the weights: `n` is the first dimension of `b`.
                        let from = b.row_ptr([first + t, i2, i3]);
                        let mut weight = [0f32; OUTER_ROWS];
                        b_reader.read(from, row, height, weight.as_mut_ptr());
                        for (i, &weight) in weight[..height].iter().enumerate() {
                            *weights.add(i * OUTER_TERMS + t) = weight;
                        }
                    }
                    let product = GemmRows {
                        results: height,
                        terms: count,
                        n: width,
                        weights,
                        weights_stride: OUTER_TERMS,
                        weights_step: 1,
                        rows,
                        rows_stride: OUTER_COLUMNS,
                        out: sums,
                        out_stride: OUTER_COLUMNS,
                    };
                    product.add();
                }
                if step < steps - 1 {
                    continue;
                }
                for i in 0..height {
                    let to = (row + i) * strides[0] + i2 * strides[1] + i3 * strides[2];
                    let to = output.base(w.scratch()).add(to).cast::<f32>().add(column);
                    to.copy_from_nonoverlapping(sums.add(i * OUTER_COLUMNS), width);
                }
            }
        }
        Ok(())
    }));
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}
