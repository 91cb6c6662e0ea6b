//! Rows of keys or values, read as `f32`.

use half::{bf16, f16};
use vgpu_transport::ir::Type;

use super::super::gather::RowReader;
use crate::gemm_rows::Element;
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// The rows of keys or of values.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    view: View,
    pub(super) reader: RowReader,
}

impl Rows {
    pub(super) fn new(view: View) -> Rows {
        Rows {
            view,
            reader: RowReader::new(&view),
        }
    }

    /// Reads `count` rows of keys or values as floats, to rows `stride` floats apart. A row that is
    /// not `live` becomes zeros.
    ///
    /// # Safety
    /// The view has the rows `first .. first + count`. `to` is writable for `count` rows.
    pub(super) unsafe fn read(
        &self,
        [first, i2, i3]: [usize; 3],
        count: usize,
        live: u64,
        to: *mut f32,
        stride: usize,
    ) {
        let Rows { view: x, reader } = self;
        let all = live | !(u64::MAX >> (64 - count)) == u64::MAX;
        let rows = x.row_ptr([first, i2, i3]).cast_const();
        // SAFETY: the caller guarantees `count` rows in the view and at `to`. In the first two arms
        // the rows are dense, and their stride is a multiple of an element.
        unsafe {
            match x.ty {
                Type::F16 if all && x.dense_rows() => dispatch_ptr(ReadTile {
                    rows: rows.cast::<f16>(),
                    rows_stride: x.nb[1] / size_of::<f16>(),
                    count,
                    n: x.ne[0],
                    to,
                    stride,
                }),
                Type::Bf16 if all && x.dense_rows() => dispatch_ptr(ReadTile {
                    rows: rows.cast::<bf16>(),
                    rows_stride: x.nb[1] / size_of::<bf16>(),
                    count,
                    n: x.ne[0],
                    to,
                    stride,
                }),
                _ => {
                    for i in 0..count {
                        let to = to.add(i * stride);
                        if live >> i & 1 == 1 {
                            let row = x.row_ptr([first + i, i2, i3]);
                            reader.read(row, 0, x.ne[0], to);
                        } else {
                            // Masked rows may hold NaN, and 0 times NaN is NaN.
                            to.write_bytes(0, x.ne[0]);
                        }
                    }
                }
            }
        }
    }
}

/// `count` rows of `n` elements as floats.
///
/// Contract: the rows are readable, and `to` is writable for `count` rows of `n` floats.
struct ReadTile<T> {
    rows: *const T,
    rows_stride: usize,
    count: usize,
    n: usize,
    to: *mut f32,
    stride: usize,
}

impl<T: Element> PtrTask for ReadTile<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        for row in 0..self.count {
            chunks::<S>(self.n, |i, lanes| {
                // SAFETY: the contract of the task guarantees `count` rows of `n` elements at
                // `rows` and at `to`; `row < count` and `i + lanes <= n`.
                unsafe {
                    let from = self.rows.add(row * self.rows_stride + i);
                    let to = self.to.add(row * self.stride + i);
                    T::load(simd, from, lanes).store_ptr(to, lanes);
                }
            });
        }
    }
}
