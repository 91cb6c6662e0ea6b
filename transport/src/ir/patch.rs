//! What changed from one graph image to another of the same length.
//!
//! llama.cpp builds its graph anew whenever the visible part of the KV cache grows. The new one has the same nodes;
//! a few extents and offsets differ. A patch says which words: runs of `position, count, words...`.

use super::codec::DecodeError;

/// Equal words between two differing ones that travel along, because a run of their own would take as many.
const GAP: usize = 2;

/// The patch that makes `new` of `base`. `None` when they have different lengths, or the patch would have more than
/// `limit` words.
pub fn diff(base: &[u32], new: &[u32], limit: usize) -> Option<Vec<u32>> {
    if base.len() != new.len() {
        return None;
    }
    let mut patch = Vec::new();
    let mut at = 0;
    while let Some(first) = next_difference(base, new, at) {
        // The end of the run: one behind its last differing word.
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

/// The image that `patch` makes of `base`.
pub fn apply(base: &[u32], patch: &[u32]) -> Result<Vec<u32>, DecodeError> {
    let mut image = base.to_vec();
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
            Some(place) => place.copy_from_slice(words),
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
    fn runs_are_joined_over_short_gaps_only() {
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
    fn a_patch_out_of_place_is_refused() {
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
        fn a_patch_makes_the_new_image(
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
