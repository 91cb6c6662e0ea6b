//! The loop over few columns, of which up to four are multiplied at once.

/// Runs a block for each four, two or one of `$cols` columns, with the index of the first column as
/// `$c` and their number as the constant `$n`.
macro_rules! by_columns {
    (@ $columns:literal, $c:ident, $n:ident, $body:block) => {{
        const $n: usize = $columns;
        $body
        $c += $n;
    }};
    ($cols:expr, $c:ident, $n:ident, $body:block) => {{
        let mut $c = 0;
        while $c < $cols {
            match $cols - $c {
                4.. => by_columns!(@ 4, $c, $n, $body),
                2.. => by_columns!(@ 2, $c, $n, $body),
                _ => by_columns!(@ 1, $c, $n, $body),
            }
        }
    }};
}

pub(super) use by_columns;
