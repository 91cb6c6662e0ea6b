//! The differences between two graph images of the same length.
//!
//! llama.cpp builds a new graph whenever the used part of the KV cache grows. The new graph has the
//! same nodes, and only some lengths and offsets differ. A patch lists the changed words as runs of
//! `position, count, words...`.

use super::codec::{DecodeError, room};

/// The maximum number of equal words between two differing words of one run. A second run would
/// cost two words for its position and count.
const GAP: usize = 2;

/// The patch from `base` to `new`. `None` when the lengths differ, or when the patch exceeds
/// `limit` words.
pub fn diff(base: &[u32], new: &[u32], limit: usize) -> Option<Vec<u32>> {
    if base.len() != new.len() {
        return None;
    }
    let mut patch = Vec::new();
    let mut at = 0;
    while let Some(first) = next_difference(base, new, at) {
        // The end of the run is the position behind its last differing word.
        let mut end = first + 1;
        while let Some(next) = next_difference(base, new, end).filter(|next| next - end <= GAP) {
            end = next + 1;
        }
        patch.extend([first as u32, (end - first) as u32]);
        patch.extend_from_slice(&new[first..end]);
        if patch.len() > limit {
            return None;
        }
        at = end;
    }
    Some(patch)
}

fn next_difference(base: &[u32], new: &[u32], from: usize) -> Option<usize> {
    let differs = |(a, b): (&u32, &u32)| a != b;
    let found = base[from..].iter().zip(&new[from..]).position(differs)?;
    Some(from + found)
}

/// Applies `patch` to `base` and returns the new image.
///
/// # Errors
///
/// [`DecodeError::Patch`] for a run outside the image or the patch, and [`DecodeError::Trailing`]:
/// the guest is at fault. [`DecodeError::NoMemory`] for the new image.
pub fn apply(base: &[u32], patch: &[u32]) -> Result<Vec<u32>, DecodeError> {
    let mut image = room(base.len())?;
    image.extend_from_slice(base);
    let mut rest = patch;
    while let [position, count, words @ ..] = rest {
        let (position, count) = (*position as usize, *count as usize);
        let broken = DecodeError::Patch {
            position,
            count,
            words: words.len(),
            len: base.len(),
        };
        let Some((words, behind)) = words.split_at_checked(count).filter(|_| count > 0) else {
            return Err(broken);
        };
        match position
            .checked_add(count)
            .and_then(|end| image.get_mut(position..end))
        {
            Some(run) => run.copy_from_slice(words),
            None => return Err(broken),
        }
        rest = behind;
    }
    match rest.len() {
        0 => Ok(image),
        extra => Err(DecodeError::Trailing { extra }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn runs_span_short_gaps_only() {
        let base = [0; 12];
        let mut new = base;
        (new[1], new[3], new[9]) = (7, 8, 9);
        assert_eq!(
            diff(&base, &new, 99),
            Some(vec![1, 3, 7, 0, 8, 9, 1, 9]),
            "position, count, words"
        );
        assert_eq!(diff(&base, &new, 7), None);
        assert_eq!(diff(&base, &new[1..], 99), None);
        assert_eq!(diff(&base, &base, 0), Some(vec![]));
    }

    #[test]
    fn a_run_out_of_bounds_is_an_error() {
        for patch in [
            &[4, 1, 7][..],
            &[3, 2, 7, 7],
            &[u32::MAX, 1, 7],
            &[0, u32::MAX, 7],
            &[0, 0],
            &[0, 2, 7],
            &[0],
            &[0, 1, 7, 1],
        ] {
            apply(&[0; 4], patch).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn a_patch_reproduces_the_new_image(
            words in prop::collection::vec((0u32..3, 0u32..3), 0..200)
        ) {
            let (base, new): (Vec<u32>, Vec<u32>) = words.into_iter().unzip();
            let patch = diff(&base, &new, usize::MAX).unwrap();
            prop_assert_eq!(apply(&base, &patch).unwrap(), new);
        }

        #[test]
        fn any_words_patch_or_fail_cleanly(
            base in prop::collection::vec(any::<u32>(), 0..20),
            patch in prop::collection::vec(0u32..24, 0..20),
        ) {
            if let Ok(image) = apply(&base, &patch) {
                prop_assert_eq!(image.len(), base.len());
            }
        }
    }
}
