//! Limits of the memory that a product needs.

/// The most bytes that the columns of a tile take as `f32`, if there are at least
/// [`MIN_COLUMNS`].
pub(crate) const MAX_PREPARED: usize = 16 << 20;

/// The most bytes that each of the two buffers of a thread keeps between products.
pub(crate) const MAX_KEPT: usize = 4 << 20;

/// The fewest columns that a product is cut into, however long they are.
pub(crate) const MIN_COLUMNS: usize = 16;

/// The most rows of weights that a thread decodes at once, to less than two bytes for each element.
pub(crate) const DECODED_ROWS: usize = 32;

/// The most columns that a thread prepares as a whole, as `f32` or smaller. More columns are
/// prepared chunk by chunk.
const WHOLE_COLUMNS: usize = 32;

/// The longest chunk of a column, in elements.
const CHUNK: usize = 512;

/// The most bytes of chunks and of sums that a thread prepares besides.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// The most bytes that a product of rows and columns of `k` elements takes of each of the two
/// buffers of a thread, for any number of columns.
pub(crate) fn prepared_bytes(k: usize) -> usize {
    let padded = k.max(1).checked_next_multiple_of(CHUNK);
    let columns = WHOLE_COLUMNS * size_of::<f32>();
    let most = columns.max(DECODED_ROWS * 2);
    padded.map_or(usize::MAX, |k| {
        k.saturating_mul(most).saturating_add(CHUNK_BYTES)
    })
}
