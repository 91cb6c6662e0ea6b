//! Extents of grids and blocks.

/// Most threads of a block of the kernels that give each element a thread, and of those that give a row a block.
pub(crate) const THREADS: u32 = 256;

/// Most blocks in dimensions 1 and 2 of a grid.
pub(crate) const MAX_GRID_YZ: i64 = 65535;

/// Threads of a block for rows of `n` elements: whole warps, with a few elements for each thread.
pub(crate) fn threads_for(n: i64) -> u32 {
    let threads = (n as u64).div_ceil(4).next_power_of_two();
    threads.clamp(32, u64::from(THREADS)) as u32
}

/// `n / by`, rounded up; of extents, which are not negative.
pub(crate) fn div_ceil(n: i64, by: i64) -> i64 {
    (n as u64).div_ceil(by as u64) as i64
}
