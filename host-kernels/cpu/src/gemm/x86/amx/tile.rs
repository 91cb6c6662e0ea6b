//! The tiles of AMX: permission, configuration, and the product of a block.
//!
//! The intrinsics of AMX are not stable, so that its instructions are assembly. The formats are
//! those of the *Intel 64 and IA-32 Architectures Software Developer's Manual*, volume 1, chapter
//! 18.

use std::arch::asm;

/// The most rows of a tile, and the most words of a row.
const SIDE: usize = 16;
/// The most columns and rows of the result that are multiplied at once: two tiles of each.
pub(super) const MAX_SIDE: usize = 2 * SIDE;
/// Bytes of a word of [`MAX_SIDE`] rows: of a pair, or of the sums of a column.
const WORDS_BYTES: usize = 4 * MAX_SIDE;
/// Bytes of a row of a tile.
const ROW_BYTES: usize = 64;

/// The size of a block of the result, each 1 to [`MAX_SIDE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) columns: usize,
    pub(super) rows: usize,
}

/// The operand of LDTILECFG: palette 1.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each tile.
    row_bytes: [u16; 16],
    /// Rows of each tile.
    rows: [u8; 16],
}

const _: () = assert!(size_of::<Configuration>() == 64);

/// The configuration of the tiles of this thread. Dropped, it releases them, so that they cost
/// nothing when the thread is suspended, and keep nothing.
pub(super) struct TileConfig {
    shape: Option<Shape>,
}

/// The product of a block of columns and rows.
pub(super) struct Block {
    /// The first column of BF16.
    pub(super) columns: *const u8,
    /// Bytes from one column to the next.
    pub(super) column_bytes: usize,
    /// For each two elements, a pair of BF16 of each of [`MAX_SIDE`] rows.
    pub(super) pairs: *const u8,
    /// Steps of 32 elements.
    pub(super) steps: usize,
    /// The sums to add to: [`MAX_SIDE`] floats for each column.
    pub(super) sums: *const f32,
    /// Whether the sums begin at 0 instead.
    pub(super) is_first: bool,
    /// Where the new sums go: those of a column are contiguous. May be `sums`.
    pub(super) to: *mut f32,
    /// Floats from the new sums of one column to those of the next.
    pub(super) to_stride: usize,
}

impl TileConfig {
    /// No tile yet.
    pub(super) fn new() -> TileConfig {
        TileConfig { shape: None }
    }

    /// Configures the tiles for blocks of a shape:
    /// - tiles 0 to 3 have the sums: a row for each column, tiles 1 and 3 for the last 16 rows of
    ///   weights, tiles 2 and 3 for the last 16 columns;
    /// - tiles 4 and 5 have the first and the last 16 columns, 32 elements of each;
    /// - tiles 6 and 7 have 16 pairs of elements of the first and the last 16 rows of weights.
    ///
    /// A tile without columns or rows is not configured.
    ///
    /// # Panics
    /// Unless both sides are 1 to [`MAX_SIDE`].
    ///
    /// # Safety
    /// The processor has AMX, and the process may use it ([`Level::Amx`](crate::isa::Level::Amx)).
    #[inline(always)]
    pub(super) unsafe fn set(&mut self, shape: Shape) {
        if self.shape == Some(shape) {
            return;
        }
        let halves = |side: usize| {
            assert!((1..=MAX_SIDE).contains(&side), "{shape:?} is no block");
            [side.min(SIDE), side.saturating_sub(SIDE)]
        };
        let (columns, rows) = (halves(shape.columns), halves(shape.rows));
        let mut configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut tile = |tile: usize, rows: usize, row_bytes: usize| {
            if rows > 0 && row_bytes > 0 {
                configuration.rows[tile] = rows as u8;
                configuration.row_bytes[tile] = row_bytes as u16;
            }
        };
        for i in 0..2 {
            for j in 0..2 {
                tile(2 * i + j, columns[i], 4 * rows[j]);
            }
            tile(4 + i, columns[i], ROW_BYTES);
            tile(6 + i, SIDE, 4 * rows[i]);
        }
        // SAFETY: LDTILECFG reads the 64 bytes of `configuration`, which is a valid palette 1: at
        // most 16 rows of 64 bytes, none of them with only one of both. It changes the registers of
        // tiles only, which no compiled code uses. The caller guarantees AMX and the permission.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly, preserves_flags));
        }
        self.shape = Some(shape);
    }

    /// Adds the products of a block to its sums.
    ///
    /// # Panics
    /// If no shape was set.
    ///
    /// # Safety
    /// - `columns` is readable for 64 bytes in each of `steps` steps, for each column of the shape;
    /// - `pairs` is readable for 16 pairs of [`MAX_SIDE`] rows in each step, four bytes for each;
    /// - `sums` is readable, unless it is the first, for [`MAX_SIDE`] floats for each column;
    /// - `to` is writable for the rows of the shape in each column, is equal to `sums` or does not
    ///   overlap it, and does not overlap the operands;
    /// - `steps > 0`;
    /// - no other configuration of this thread was set since that of this one.
    #[inline(always)]
    pub(super) unsafe fn multiply(&self, block: &Block) {
        let shape = self.shape.expect("a shape was set");
        // SAFETY: the contract of `multiply_tiles` is that of this function. A tile is accessed
        // only if the shape has columns and rows for it, so that it is configured.
        unsafe {
            match (shape.columns > SIDE, shape.rows > SIDE) {
                (true, true) => multiply_2x2(block),
                (true, false) => multiply_2x1(block),
                (false, true) => multiply_1x2(block),
                (false, false) => multiply_1x1(block),
            }
        }
    }
}

impl Drop for TileConfig {
    fn drop(&mut self) {
        if self.shape.is_some() {
            // SAFETY: TILERELEASE takes nothing. The tiles were configured on this thread, since a
            // configuration lives and dies in one call; so the processor has AMX.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
        }
    }
}

/// Defines the product of a block with these tiles of sums. Each line is used by the shapes that
/// have its tiles.
macro_rules! multiply {
    ($name:ident, [$($load:literal),*], [$($zero:literal),*], [$($product:literal),*], [$($store:literal),*]) => {
        /// # Safety
        /// As [`TileConfig::multiply`], with the tiles of the name configured.
        #[inline(always)]
        unsafe fn $name(block: &Block) {
            let columns = block.columns;
            let second_columns = columns.wrapping_add(SIDE * block.column_bytes);
            let second_to = block.to.wrapping_add(SIDE * block.to_stride);
            // SAFETY: tile loads and stores access the configured rows of a tile, at most 64 bytes
            // each: of `columns`, those of the shape, 64 bytes on in each step; of `pairs`, 16
            // pairs of a half of `MAX_SIDE` rows, `16 * 4 * MAX_SIDE` bytes on in each step; of
            // `sums` and `to`, the configured rows of each column. The loop runs `steps > 0` times.
            // The caller guarantees this memory. Tiles are used by no compiled code.
            unsafe {
                asm!(
                    // Not every shape has all operands.
                    "/* {a1} {c1} */",
                    "test {first:e}, {first:e}",
                    "jnz 22f",
                    $($load,)*
                    "jmp 23f",
                    "22:",
                    $($zero,)*
                    "23:",
                    $($product,)*
                    "add {a0}, 64",
                    "add {a1}, 64",
                    "add {b}, 2048",
                    "dec {steps}",
                    "jnz 23b",
                    $($store,)*
                    first = in(reg) u32::from(block.is_first),
                    a0 = inout(reg) columns => _,
                    a1 = inout(reg) second_columns => _,
                    xs = in(reg) block.column_bytes,
                    b = inout(reg) block.pairs => _,
                    bs = in(reg) WORDS_BYTES,
                    s = in(reg) block.sums,
                    c0 = in(reg) block.to,
                    c1 = in(reg) second_to,
                    cs = in(reg) 4 * block.to_stride,
                    steps = inout(reg) block.steps => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

multiply!(
    multiply_2x2,
    [
        "tileloadd tmm0, [{s} + {bs}*1]",
        "tileloadd tmm1, [{s} + {bs}*1 + 64]",
        "tileloadd tmm2, [{s} + {bs}*1 + 2048]",
        "tileloadd tmm3, [{s} + {bs}*1 + 2112]"
    ],
    [
        "tilezero tmm0",
        "tilezero tmm1",
        "tilezero tmm2",
        "tilezero tmm3"
    ],
    [
        "tileloadd tmm6, [{b} + {bs}*1]",
        "tileloadd tmm4, [{a0} + {xs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {bs}*1 + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7",
        "tileloadd tmm5, [{a1} + {xs}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6",
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    [
        "tilestored [{c0} + {cs}*1], tmm0",
        "tilestored [{c0} + {cs}*1 + 64], tmm1",
        "tilestored [{c1} + {cs}*1], tmm2",
        "tilestored [{c1} + {cs}*1 + 64], tmm3"
    ]
);
multiply!(
    multiply_2x1,
    [
        "tileloadd tmm0, [{s} + {bs}*1]",
        "tileloadd tmm2, [{s} + {bs}*1 + 2048]"
    ],
    ["tilezero tmm0", "tilezero tmm2"],
    [
        "tileloadd tmm6, [{b} + {bs}*1]",
        "tileloadd tmm4, [{a0} + {xs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm5, [{a1} + {xs}*1]",
        "tdpbf16ps tmm2, tmm5, tmm6"
    ],
    [
        "tilestored [{c0} + {cs}*1], tmm0",
        "tilestored [{c1} + {cs}*1], tmm2"
    ]
);
multiply!(
    multiply_1x2,
    [
        "tileloadd tmm0, [{s} + {bs}*1]",
        "tileloadd tmm1, [{s} + {bs}*1 + 64]"
    ],
    ["tilezero tmm0", "tilezero tmm1"],
    [
        "tileloadd tmm4, [{a0} + {xs}*1]",
        "tileloadd tmm6, [{b} + {bs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6",
        "tileloadd tmm7, [{b} + {bs}*1 + 64]",
        "tdpbf16ps tmm1, tmm4, tmm7"
    ],
    [
        "tilestored [{c0} + {cs}*1], tmm0",
        "tilestored [{c0} + {cs}*1 + 64], tmm1"
    ]
);
multiply!(
    multiply_1x1,
    ["tileloadd tmm0, [{s} + {bs}*1]"],
    ["tilezero tmm0"],
    [
        "tileloadd tmm4, [{a0} + {xs}*1]",
        "tileloadd tmm6, [{b} + {bs}*1]",
        "tdpbf16ps tmm0, tmm4, tmm6"
    ],
    ["tilestored [{c0} + {cs}*1], tmm0"]
);
