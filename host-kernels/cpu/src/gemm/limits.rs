//! Limits of the memory that a product needs.

/// The most bytes of prepared operands that a thread keeps between products.
pub(crate) const MAX_PREPARED: usize = 16 << 20;

/// The fewest columns that a product is cut into, however long they are. A thread prepares as many
/// columns at once, of four bytes for each element.
pub(crate) const LEAST_COLUMNS: usize = 16;

/// The most rows of weights that a thread decodes at once, to less than two bytes for each element.
pub(crate) const DECODED_ROWS: usize = 32;
