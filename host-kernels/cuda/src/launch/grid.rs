//! Dimensions of grids and blocks.

/// The most threads of a block for kernels with one thread per element or one block per row.
pub(crate) const THREADS: u32 = 256;

/// The most blocks in dimensions 1 and 2 of a grid (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub(crate) const MAX_GRID_YZ: i64 = 65535;

/// Threads of a block for rows of `n` elements: whole warps, about four elements a thread.
pub(crate) fn threads_for(n: i64) -> u32 {
    let threads = (n as u64).div_ceil(4).next_power_of_two();
    threads.clamp(32, u64::from(THREADS)) as u32
}

/// `n / by` q8 up, for `n >= 0` and `by > 0`.
pub(crate) fn div_ceil(n: i64, by: i64) -> i64 {
    (n as u64).div_ceil(by as u64) as i64
}

/// Pairs of weight rows that a block of a matrix-vector kernel works on at a time.
pub(crate) const MMV_BLOCK_PAIRS: i64 = 4;

/// Threads of a block of a matrix-vector kernel.
pub(crate) const MMV_THREADS: u32 = 128;

/// The blocks of a launch of a matrix-vector kernel over these pairs of rows, of which `most` are
/// resident at a time.
pub(crate) fn mmv_blocks_across(pairs: i64, most: i64, splits_rows: bool) -> i64 {
    let blocks = match splits_rows {
        true => pairs,
        false => div_ceil(pairs, MMV_BLOCK_PAIRS),
    };
    blocks.min(most.max(1))
}
