//! The columns of activations of a product, and their conversion.

use super::super::gather::RowReader;
use crate::gemm::{Activation, MatmulKernel};
use crate::kernel::Kernel;
use crate::kernel::Worker;
use crate::operands::Operands;
use crate::view::View;

/// The elements of a column that a thread converts at once: a multiple of every block and chunk.
const STRIP: usize = 2048;

/// Columns of activations, in the format that the weights are multiplied with.
#[derive(Clone, Copy)]
pub(super) struct Activations {
    pub(super) source: View,
    reader: RowReader,
    pub(super) kernel: MatmulKernel,
    /// Whether the columns are used in the source, without conversion.
    in_place: bool,
    /// Whether an earlier node has converted them, or no conversion is needed.
    done: bool,
    /// Whether each thread converts the rows that it has computed in the kernel before.
    by_rows: bool,
    /// Bytes of one converted column.
    pub(super) column_bytes: usize,
}

impl Activations {
    pub(super) fn new(operands: &Operands<'_>, source: View, kernel: MatmulKernel) -> Activations {
        let column_bytes = kernel.activation.column_bytes(source.ne[0]);
        let in_place = Activation::Typed(source.ty) == kernel.activation && source.dense_rows();
        let bytes = (source.rows().checked_mul(column_bytes))
            .expect("converted columns are a small multiple of operands that were validated");
        let done = in_place || operands.cache_activations(source, kernel.activation, bytes);
        Activations {
            source,
            reader: RowReader::new(&source),
            kernel,
            in_place,
            done,
            by_rows: !done && operands.follows_rows(source),
            column_bytes,
        }
    }

    /// The same columns for another kernel with the same activation format.
    pub(super) fn multiplied_by(self, kernel: MatmulKernel) -> Activations {
        debug_assert_eq!(kernel.activation, self.kernel.activation);
        Activations { kernel, ..self }
    }

    /// Strides of dimensions 1 to 3 of the converted columns, in bytes.
    pub(super) fn strides(&self) -> [usize; 3] {
        let View { ne, nb, .. } = self.source;
        match self.in_place {
            true => [nb[1], nb[2], nb[3]],
            false => {
                let column = self.column_bytes;
                [column, column * ne[1], column * ne[1] * ne[2]]
            }
        }
    }

    /// The first converted column.
    pub(super) fn base(&self, w: &Worker<'_>) -> *const u8 {
        match self.in_place {
            true => self.source.ptr(),
            false => w.activations(),
        }
    }

    /// Converts this worker's range of the columns, unless they are converted.
    pub(super) fn convert(&self, w: &Worker<'_>) {
        if self.done {
            return;
        }
        let k = self.source.ne[0];
        let strips = k.div_ceil(STRIP);
        let mut buffer = [0f32; STRIP];
        let units = match self.by_rows {
            true => w.range_of_groups(self.source.rows(), strips),
            false => w.range_of(self.source.rows() * strips),
        };
        for unit in units {
            let (column, start) = (unit / strips, unit % strips * STRIP);
            let n = STRIP.min(k - start);
            let row = self.source.row_ptr(self.source.row_index(column));
            let to = column * self.column_bytes + self.kernel.activation.offset(start);
            // SAFETY: the row has `k >= start + n` elements. `to` is the offset of this strip in
            // the activation memory that `new` has reserved, and one worker writes it. `STRIP` is a
            // multiple of every block and chunk, and `k` is a multiple of the block by the check of
            // the IR.
            unsafe {
                let values = match self.reader.in_place(row) {
                    Some(row) => row.add(start),
                    None => {
                        self.reader.read(row, start, n, buffer.as_mut_ptr());
                        buffer.as_ptr()
                    }
                };
                (self.kernel.quantize_activation)(values, w.activations().add(to), n);
            }
        }
    }
}

/// The kernel that converts the activations of MUL_MAT, if they must be converted.
pub(super) fn converted(operands: &Operands<'_>, activations: Activations) -> Option<Kernel> {
    (!activations.done).then(|| -> Kernel {
        operands.converts_first(activations.source);
        Box::new(move |w| {
            activations.convert(w);
            Ok(())
        })
    })
}
