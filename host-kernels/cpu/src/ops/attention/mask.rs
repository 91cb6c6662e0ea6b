//! The keys of a tile that the mask does not hide, and the mask of the tile as floats.

use super::state::{Attention, QueryBlock, TILE_KEYS, Workspace};
use crate::formats::{Format, Type};
use crate::simd::{Lanes, Simd, Transpose};
use crate::view::View;

const _: () = assert!(
    TILE_KEYS == u64::BITS as usize,
    "the keys of a tile are bits of a word"
);

/// The F16 value that hides a key.
const MINUS_INFINITY: u16 = 0xfc00;

/// The effect of the mask on a tile of keys.
#[derive(Clone, Copy)]
pub(super) struct Visible {
    /// One bit for each key: whether any row sees the key.
    pub(super) live: u64,
    /// The mask is 0 for all rows and keys.
    pub(super) plain: bool,
}

impl Visible {
    /// The number of keys up to the last one that any row sees.
    pub(super) fn keys(self) -> usize {
        TILE_KEYS - self.live.leading_zeros() as usize
    }
}

impl Attention {
    /// Reads the mask of `keys` keys from `first` on.
    ///
    /// # Safety
    /// `first + keys` is at most the number of keys, and `keys <= TILE_KEYS`.
    pub(super) unsafe fn visible(&self, block: QueryBlock, first: usize, keys: usize) -> Visible {
        let Some(mask) = self.mask else {
            return Visible {
                live: u64::MAX >> (64 - keys),
                plain: true,
            };
        };
        let heads = if self.mask_is_shared() {
            1
        } else {
            block.heads
        };
        if keys == TILE_KEYS {
            // Most tiles are plain, which is quick to see.
            let mut any = [0u64; TILE_KEYS / 4];
            for (head, token) in
                (0..heads).flat_map(|head| (0..block.tokens).map(move |t| (head, t)))
            {
                // SAFETY: by the check of FLASH_ATTN_EXT, a row of the mask is dense, with an F16
                // for each key, and the caller guarantees `TILE_KEYS` keys from `first` on. Any
                // bytes are integers, and the read needs no alignment.
                let four = unsafe {
                    let from = self.mask_row(mask, block, token, head).add(first);
                    from.cast::<[u64; TILE_KEYS / 4]>().read_unaligned()
                };
                any.iter_mut()
                    .zip(four)
                    .for_each(|(any, four)| *any |= four);
            }
            // Minus zero is zero.
            if any.iter().fold(0, |all, any| all | any) & 0x7fff_7fff_7fff_7fff == 0 {
                return Visible {
                    live: u64::MAX,
                    plain: true,
                };
            }
        }
        let (mut seen, mut any) = ([0u16; TILE_KEYS], [0u16; TILE_KEYS]);
        let mut halves = [MINUS_INFINITY; TILE_KEYS];
        for head in 0..heads {
            for token in 0..block.tokens {
                // SAFETY: by the check of FLASH_ATTN_EXT, a row of the mask is dense, with an F16
                // for each key. The caller guarantees `first + keys`; `halves` has
                // `TILE_KEYS >= keys` elements.
                unsafe {
                    let from = self.mask_row(mask, block, token, head).add(first);
                    halves.as_mut_ptr().copy_from_nonoverlapping(from, keys);
                }
                for i in 0..TILE_KEYS {
                    seen[i] |= halves[i] ^ MINUS_INFINITY;
                    any[i] |= halves[i];
                }
            }
        }
        let mut live = 0;
        for (i, &seen) in seen.iter().enumerate() {
            live |= u64::from(seen != 0) << i;
        }
        Visible {
            live,
            plain: any[..keys].iter().all(|&any| any << 1 == 0), // minus zero is zero
        }
    }

    /// Whether all heads of a token have the same row of the mask.
    pub(super) fn mask_is_shared(&self) -> bool {
        self.mask.is_none_or(|mask| mask.ne[2] == 1)
    }

    /// The row of the mask for a token and a head of a block.
    fn mask_row(&self, mask: View, block: QueryBlock, token: usize, head: usize) -> *const u16 {
        let index = [
            block.first_token + token,
            (block.first_head + head) % mask.ne[2],
            block.sequence % mask.ne[3],
        ];
        mask.row_ptr(index).cast()
    }

    /// Reads the mask of `keys` keys from `first` on as floats: a tile for each row of the block,
    /// or for the rows of its first head if the heads share the mask.
    ///
    /// # Safety
    /// `first + keys` is at most the number of keys, and `keys <= TILE_KEYS`. `space` is the
    /// workspace of this operator and this worker.
    pub(super) unsafe fn read_mask_by_row(
        &self,
        block: QueryBlock,
        first: usize,
        keys: usize,
        space: &Workspace,
    ) {
        for head in 0..if self.mask_is_shared() {
            1
        } else {
            block.heads
        } {
            for token in 0..block.tokens {
                let row = head * block.pitch + token;
                // SAFETY: `head` and `token` are in the block, and `row` is a row of the block, for
                // which the workspace has a tile. The caller guarantees the keys.
                unsafe { self.read_mask_row(block, [token, head], [first, keys], space, row) };
            }
        }
    }

    /// As [`Attention::read_mask_by_row`], by key: for each key, the mask of
    /// [`Attention::mask_lanes`] rows, which repeats for the other rows.
    ///
    /// # Safety
    /// As [`Attention::read_mask_by_row`].
    pub(super) unsafe fn read_mask_by_key(
        &self,
        block: QueryBlock,
        first: usize,
        keys: usize,
        space: &Workspace,
    ) {
        let lanes = self.mask_lanes();
        for lane in 0..lanes {
            // Rows that pad a block have the mask of the last token.
            let token = (lane % block.pitch).min(block.tokens - 1);
            let head = match self.mask_is_shared() {
                true => 0,
                false => (lane / block.pitch).min(block.heads - 1),
            };
            // SAFETY: `token` and `head` are in the block, and `lane < lanes <= block_rows()`, so
            // the workspace has the tile. The caller guarantees the keys.
            unsafe { self.read_mask_row(block, [token, head], [first, keys], space, lane) };
        }
        let transpose = Transpose {
            src: space.masks,
            src_stride: TILE_KEYS,
            rows: lanes,
            columns: TILE_KEYS,
            dst: space.biases,
            dst_stride: lanes,
        };
        // SAFETY: `masks` and `biases` have `block_rows() * TILE_KEYS` floats each, and
        // `lanes <= block_rows()`. The two arrays do not overlap.
        unsafe { transpose.run() };
    }

    /// Reads one row of the mask of a tile to tile `to` of the workspace.
    ///
    /// # Safety
    /// As [`Attention::read_mask_by_row`]. The token and the head are in the block, and
    /// `to < block_rows()`.
    unsafe fn read_mask_row(
        &self,
        block: QueryBlock,
        [token, head]: [usize; 2],
        [first, keys]: [usize; 2],
        space: &Workspace,
        to: usize,
    ) {
        let Some(mask) = self.mask else { return };
        let halves_to_floats = Format::of(Type::F16)
            .expect("F16 is a format")
            .dequantize_row;
        // SAFETY: by the check of FLASH_ATTN_EXT, a row of the mask is dense, with an F16 for each
        // key. `masks` has `TILE_KEYS` floats for tile `to`. The caller guarantees `first + keys`
        // and `keys <= TILE_KEYS`.
        unsafe {
            let from = self.mask_row(mask, block, token, head).add(first);
            (halves_to_floats)(from.cast(), space.masks.add(to * TILE_KEYS), keys);
        }
    }
}

/// Scores after the cap (0: no cap) and the mask, which is multiplied with the slopes of the heads.
#[inline(always)]
pub(super) fn shaped<S: Simd>(
    simd: S,
    score: Lanes<S>,
    cap: f32,
    mask: Option<(Lanes<S>, Lanes<S>)>,
) -> Lanes<S> {
    let mut score = score;
    if cap != 0.0 {
        score = score.tanh() * cap;
    }
    match mask {
        None => score,
        Some((mask, slope)) => {
            // A slope of 0 does not make a hidden key visible: -inf times 0 would be NaN.
            let minus_infinity = simd.splat(f32::NEG_INFINITY);
            let hidden = mask.le(minus_infinity);
            hidden.select(minus_infinity, mask.mul_add(slope, score))
        }
    }
}
