//! A set of pages of one region.

use std::ops::Range;

/// Page numbers, one bit each: a set of the pages of a region takes 1/32,768 of its bytes.
#[derive(Default)]
pub(super) struct PageSet {
    words: Vec<u64>,
    count: u64,
}

impl PageSet {
    /// The number of pages in the set.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Whether a page of `pages` is in the set.
    pub(super) fn has_any(&self, pages: Range<u64>) -> bool {
        masks(&pages).any(|(index, mask)| self.words.get(index).is_some_and(|w| w & mask != 0))
    }

    /// Adds `pages`.
    pub(super) fn insert(&mut self, pages: Range<u64>) {
        if !pages.is_empty() {
            let words = pages.end.div_ceil(64) as usize;
            self.words.resize(words.max(self.words.len()), 0);
        }
        for (index, mask) in masks(&pages) {
            let word = &mut self.words[index];
            self.count += u64::from((mask & !*word).count_ones());
            *word |= mask;
        }
    }

    /// Removes `pages`.
    pub(super) fn remove(&mut self, pages: Range<u64>) {
        for (index, mask) in masks(&pages) {
            let Some(word) = self.words.get_mut(index) else {
                return;
            };
            self.count -= u64::from((mask & *word).count_ones());
            *word &= !mask;
        }
    }

    /// The ranges of `pages` that are not in the set, in order.
    pub(super) fn gaps(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps: Vec<Range<u64>> = Vec::new();
        for page in pages.filter(|&page| !self.has_any(page..page + 1)) {
            match gaps.last_mut() {
                Some(last) if last.end == page => last.end = page + 1,
                _ => gaps.push(page..page + 1),
            }
        }
        gaps
    }
}

/// The index of each word that has bits of `pages`, and a mask of these bits.
fn masks(pages: &Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let Range { start, end } = *pages;
    let words = match start < end {
        true => start / 64..end.div_ceil(64),
        false => 0..0,
    };
    words.map(move |word| {
        let from = start.saturating_sub(word * 64);
        let to = (end - word * 64).min(64);
        let mask = (u64::MAX << from) & (u64::MAX >> (64 - to));
        (word as usize, mask)
    })
}

#[cfg(test)]
mod tests {
    use vgpu_gguf::Rng;

    use super::*;

    #[test]
    fn a_page_set_does_what_a_set_of_numbers_does() {
        let mut set = PageSet::default();
        let mut model = std::collections::BTreeSet::new();
        let mut random = Rng::new(1, 0);
        let mut next = |below: u64| random.below(below);
        for _ in 0..5000 {
            let start = next(300);
            let pages = start..start + next(140);
            match next(3) {
                0 => {
                    set.insert(pages.clone());
                    model.extend(pages);
                }
                1 => {
                    set.remove(pages.clone());
                    model.retain(|page| !pages.contains(page));
                }
                _ => {
                    let any = pages.clone().any(|page| model.contains(&page));
                    assert_eq!(set.has_any(pages.clone()), any, "{pages:?}");
                    let gaps = set.gaps(pages.clone());
                    let missing: Vec<u64> = gaps.into_iter().flatten().collect();
                    let expected = pages.filter(|page| !model.contains(page));
                    assert_eq!(missing, expected.collect::<Vec<_>>());
                }
            }
            assert_eq!(set.count(), model.len() as u64);
        }
    }
}
