//! The loop over few columns, of which up to four are multiplied at once.

/// Runs a block for each four, two or one of `$cols` columns, with the index of the first column as
/// `$c` and their number as the constant `$n`.
macro_rules! by_columns {
    ($cols:expr, $c:ident, $n:ident, $body:block) => {{
        let mut $c = 0;
        while $c < $cols {
            macro_rules! columns {
                                ($columns:literal) => {{
                                    const $n: usize = $columns;
                                    $body
                                    $c += $n;
                                }};
                            }
            match $cols - $c {
                4.. => columns!(4),
                2.. => columns!(2),
                _ => columns!(1),
            }
        }
    }};
}

pub(super) use by_columns;
