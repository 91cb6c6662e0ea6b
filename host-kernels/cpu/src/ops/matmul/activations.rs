//! The columns of activations of a product, and their conversion.

use super::super::gather::RowReader;
use crate::gemm::{Activation, MatmulKernel};
use crate::kernel::Kernel;
use crate::kernel::Worker;
use crate::operands::Operands;
use crate::view::View;

/// Elements of a column that a thread converts at once, a multiple of every block and chunk.
const PIECE: usize = 2048;

/// Columns of activations as a weight is multiplied with them.
#[derive(Clone, Copy)]
pub(super) struct Activations {
    pub(super) source: View,
    reader: RowReader,
    pub(super) kernel: MatmulKernel,
    /// Whether the columns are used as they are in the source, not converted.
    in_place: bool,
    /// Whether a node before has converted them.
    done: bool,
    /// Whether each thread converts the rows that it has just made.
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

    /// The same for another kernel that takes the same activations.
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

    /// Where the first converted column lies.
    pub(super) fn base(&self, w: &Worker<'_>) -> *const u8 {
        match self.in_place {
            true => self.source.ptr(),
            false => w.activations(),
        }
    }

    /// Converts this thread's part of the columns, unless that is done.
    pub(super) fn convert(&self, w: &Worker<'_>) {
        if self.done {
            return;
        }
        let k = self.source.ne[0];
        let pieces = k.div_ceil(PIECE);
        let mut buffer = [0f32; PIECE];
        let units = match self.by_rows {
            true => {
                let rows = w.share(self.source.rows());
                rows.start * pieces..rows.end * pieces
            }
            false => w.share(self.source.rows() * pieces),
        };
        for unit in units {
            let (column, start) = (unit / pieces, unit % pieces * PIECE);
            let n = PIECE.min(k - start);
            let row = self.source.row_ptr(self.source.row_index(column));
            let to = column * self.column_bytes + self.kernel.activation.column_bytes(start);
            // SAFETY: the row and its elements lie in the source; the place in the activation memory is this
            // piece's alone, inside what `new` asked for; blocks and chunks divide `PIECE`, and
            // blocks, by the IR's rules, `k`.
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

/// The kernel that converts the activations of MUL_MAT, if one has to.
pub(super) fn converted(operands: &Operands<'_>, activations: Activations) -> Option<Kernel> {
    (!activations.done).then(|| -> Kernel {
        operands.converts_first(activations.source);
        Box::new(move |w| {
            activations.convert(w);
            Ok(())
        })
    })
}
