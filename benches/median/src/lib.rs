//! The median, which all repeated measurements are reported as.
#![forbid(unsafe_code)]

/// The median of `figures`: of an even number the upper of the two in the middle, and zero of none.
///
/// # Panics
/// If a figure is not a number.
pub fn median<T: Copy + Default + PartialOrd>(figures: impl IntoIterator<Item = T>) -> T {
    let mut figures: Vec<T> = figures.into_iter().collect();
    figures.sort_unstable_by(|a, b| a.partial_cmp(b).expect("figures are numbers"));
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn median_does_not_depend_on_order() {
        assert_eq!(super::median([3, 1, 2]), 2);
        assert_eq!(super::median([4.0, 1.0, 3.0, 2.0]), 3.0);
        assert_eq!(super::median(Vec::<u64>::new()), 0);
    }
}
