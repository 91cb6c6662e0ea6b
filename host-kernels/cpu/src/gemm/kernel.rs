//! What a matrix product kernel is: its arguments, its activations, and how to call it.

use std::ptr::{self, NonNull};

use crate::formats::{self, Format, Type};

/// The arguments of a [`Gemm`].
///
/// `dst[c * dst_stride + r] = dot(row r of w, column c of x)` for `r` in `0..rows`, `c` in
/// `0..cols`.
#[derive(Debug, Clone, Copy)]
pub struct GemmArgs {
    /// Elements of a row of weights and of a column of activations.
    pub k: usize,
    /// The first row of weights (src0).
    pub w: *const u8,
    /// Bytes from one row of weights to the next.
    pub w_stride: usize,
    /// Rows of weights.
    pub rows: usize,
    /// The first column of activations (a row of src1).
    pub x: *const u8,
    /// Bytes from one column of activations to the next.
    pub x_stride: usize,
    /// Columns of activations.
    pub cols: usize,
    /// The first column of results (a row of dst).
    pub dst: *mut f32,
    /// Floats from one column of results to the next.
    pub dst_stride: usize,
    /// Where each column is, instead of `x` and `dst` with their strides: only for a kernel that is
    /// [independent of other columns](MatmulKernel::takes_tables).
    pub table: Option<ColumnTable>,
}

impl GemmArgs {
    /// Rows of `k` weights from `w` on, `w_stride` bytes apart, times the columns of a table.
    pub(crate) fn with_table(
        (w, w_stride): (*const u8, usize),
        (k, rows): (usize, usize),
        columns: &mut [Column],
    ) -> GemmArgs {
        GemmArgs {
            k,
            w,
            w_stride,
            rows,
            x: ptr::null(),
            x_stride: 0,
            cols: columns.len(),
            dst: ptr::null_mut(),
            dst_stride: 0,
            table: Some(ColumnTable {
                columns: NonNull::from(columns).cast(),
                first_row: 0,
            }),
        }
    }
}

/// A column of activations and the column of its results.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// The activations.
    pub x: *const u8,
    /// The results.
    pub dst: *mut f32,
}

/// Columns that are not at equal distances: those of several guests.
#[derive(Debug, Clone, Copy)]
pub struct ColumnTable {
    /// [`GemmArgs::cols`] columns.
    pub columns: NonNull<Column>,
    /// The first row of weights has the result with this index in each column.
    pub first_row: usize,
}

impl GemmArgs {
    /// Column `c` of the activations.
    ///
    /// # Safety
    /// `c < cols`, and the contract of [`Gemm`] holds.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) unsafe fn column(&self, c: usize) -> *const u8 {
        // SAFETY: the table has `cols` columns; without a table, the columns from `x` on are
        // `x_stride` bytes apart. The caller guarantees `c < cols`.
        unsafe {
            match &self.table {
                None => self.x.add(c * self.x_stride),
                Some(table) => table.columns.add(c).read().x,
            }
        }
    }

    /// The result of the first row in column `c`.
    ///
    /// # Safety
    /// As [`GemmArgs::column`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) unsafe fn result(&self, c: usize) -> *mut f32 {
        // SAFETY: the table has `cols` columns, each with the result of the first row at
        // `first_row`; without a table, the columns from `dst` on are `dst_stride` floats apart.
        // The caller guarantees `c < cols`.
        unsafe {
            match &self.table {
                None => self.dst.add(c * self.dst_stride),
                Some(table) => table.columns.add(c).read().dst.add(table.first_row),
            }
        }
    }

    /// The same columns with `rows` rows from row `first` on, whose weights are at `w`.
    #[inline(always)]
    pub(crate) fn with_rows(
        &self,
        first: usize,
        rows: usize,
        w: *const u8,
        w_stride: usize,
    ) -> GemmArgs {
        let table = self.table.map(|table| ColumnTable {
            first_row: table.first_row + first,
            ..table
        });
        GemmArgs {
            w,
            w_stride,
            rows,
            dst: self.dst.wrapping_add(first),
            table,
            ..*self
        }
    }
    /// Row `r` of the weights; the last row if `r` is not below `rows`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> *const u8 {
        self.w.wrapping_add(r.min(self.rows - 1) * self.w_stride)
    }
}

/// Multiplies rows of weights with columns of activations.
///
/// # Safety
/// - `k` is a multiple of the block sizes of the weight type and of the activation type, if it has
///   one;
/// - `w` is readable for `rows` rows of `k` weights, `x` for `cols` columns of `k` activations;
/// - `dst` is aligned for floats and writable for `cols` columns of `rows` floats, no two of which
///   overlap, and overlaps neither `w` nor `x`;
/// - with a table, the kernel [takes tables](MatmulKernel::takes_tables), the table is readable,
///   and this holds for the columns of the table instead of those at `x` and `dst`;
/// - the processor supports the level that the kernel was compiled for.
pub type Gemm = unsafe fn(args: &GemmArgs);

/// The most rows that [`WeightedRows`] adds.
pub(crate) const MAX_WEIGHTED_ROWS: usize = 64;

/// The arguments of [`WeightedRows`].
///
/// `out[i * out_stride + c] += weights[i * weights_stride + j] * (element c of row j)`, summed over
/// `j` in `0..terms`, for `i` in `0..results` and `c` in `0..n`.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct WeightedRowsArgs {
    /// Rows of results, at most [`MAX_WEIGHTED_ROWS`].
    pub(crate) results: usize,
    /// Rows that are added, at most [`MAX_WEIGHTED_ROWS`].
    pub(crate) terms: usize,
    /// One bit for each of these rows. The weights of a row without its bit are 0, and its scales
    /// may be NaN.
    pub(crate) live: u64,
    /// Elements of a row.
    pub(crate) n: usize,
    /// The weights of the first row of results.
    pub(crate) weights: *const f32,
    /// Floats from the weights of one row of results to the next.
    pub(crate) weights_stride: usize,
    /// For each row of results, the sum of the weights of this call and of others, in whose share
    /// errors count.
    pub(crate) totals: *const f32,
    /// The first row.
    pub(crate) rows: *const u8,
    /// Bytes from one row to the next.
    pub(crate) rows_stride: usize,
    /// The first row of results.
    pub(crate) out: *mut f32,
    /// Floats from one row of results to the next.
    pub(crate) out_stride: usize,
}

/// Adds rows of blocks, each times a weight, to rows of results. A row of results depends on its
/// own weights only, not on the other rows of results.
///
/// # Safety
/// - `n` is a multiple of the block of the type, and `results` and `terms` are at most
///   [`MAX_WEIGHTED_ROWS`];
/// - `weights` is readable for `results` rows of `terms` floats, `totals` for `results` floats,
///   `rows` for `terms` rows of `n` elements;
/// - `out` is readable and writable for `results` rows of `n` floats, which overlap neither each
///   other nor the operands;
/// - the processor supports the level that the function was compiled for.
pub(crate) type WeightedRows = unsafe fn(args: &WeightedRowsArgs);

/// From this many columns on, products may be [rounded](MatmulKernel::rounded). With fewer columns,
/// the product is bound by memory, not by arithmetic.
pub const ROUNDED_COLUMNS: usize = 8;

/// The format that columns of activations are converted to before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// A ggml type. All kernels that are not [rounded](MatmulKernel::rounded) take one.
    Typed(Type),
    /// Integers of 14 bits, stored as `i16`, with one scale per 32. Chunks have 256 elements; the
    /// last chunk of a column occupies as much memory as the others.
    I16,
    /// Integers of 8 bits with one scale per 32, as a kernel of
    /// [short rows](MatmulKernel::of_short_rows) reads them. Memory for a column is aligned to
    /// floats, and has whole chunks of 256 elements.
    Prepared,
    /// BF16, for tiles of AMX. Columns are an odd number of cache lines apart, so that the columns
    /// of a tile are in different sets of a cache.
    Tiles,
}

impl Activation {
    /// The format of a ggml type.
    ///
    /// # Panics
    /// For all but [`Activation::Typed`], which are no ggml types.
    pub fn format(self) -> &'static Format {
        match self {
            Activation::Typed(ty) => Format::of(ty).expect("every activation is a format"),
            Activation::I16 => panic!("the 14-bit integers are no ggml type"),
            Activation::Prepared => panic!("prepared columns are no ggml type"),
            Activation::Tiles => panic!("columns for tiles are no ggml type"),
        }
    }
}

/// The most columns of a call, of kernels that unpack weights to panels.
pub(super) const PANEL_COLUMNS: usize = 256;

/// How to multiply with one type of weights.
#[derive(Debug, Clone, Copy)]
pub struct MatmulKernel {
    /// The type of the weights.
    pub weight: Type,
    /// The format of the activations.
    pub activation: Activation,
    /// Converts a column of `k` activations.
    pub quantize_activation: formats::QuantizeRow,
    /// Multiplies.
    pub gemm: Gemm,
    /// From this many columns on, `gemm` unpacks weights into panels, and its time per column is
    /// smallest.
    pub panel_cols: usize,
    /// If rows are divided between calls, each part should be a multiple of this.
    pub row_tile: usize,
    /// If columns are divided between calls, the most that a call should have: those that share
    /// what is unpacked, and whose sums and activations stay in a cache.
    pub most_columns: usize,
    /// Whether `gemm` takes a [`ColumnTable`]. Each column of a table gets the bits that the column
    /// gets in a call of fewer than [`panel_cols`](MatmulKernel::panel_cols) columns without one.
    pub takes_tables: bool,
    /// Whether each result is the same for any number of columns: one order of sums. Then the
    /// columns of a table go through panels, too.
    pub one_order: bool,
}
