//! Which keys of a tile the mask shows, and the mask of the tile as floats.

use super::state::{Attention, Block, TILE_KEYS, Workspace};
use crate::formats::{Format, Type};
use crate::simd::{Lanes, Simd, Transpose};
use crate::view::View;

const _: () = assert!(
    TILE_KEYS == u64::BITS as usize,
    "the keys of a tile are bits of a word"
);

/// The half that hides a key.
const MINUS_INFINITY: u16 = 0xfc00;

/// What a mask says of a tile of keys.
#[derive(Clone, Copy)]
pub(super) struct Visible {
    /// The keys that any row sees, one bit each.
    pub(super) live: u64,
    /// All rows see all keys as they are.
    pub(super) plain: bool,
}

impl Visible {
    /// As many keys as are worth a look: none behind them is seen.
    pub(super) fn keys(self) -> usize {
        TILE_KEYS - self.live.leading_zeros() as usize
    }
}

impl Attention {
    /// Looks at the mask of `keys` keys from `first` on.
    ///
    /// # Safety
    /// There are so many keys.
    pub(super) unsafe fn look(&self, block: Block, first: usize, keys: usize) -> Visible {
        let Some(mask) = self.mask else {
            return Visible {
                live: u64::MAX >> (64 - keys),
                plain: true,
            };
        };
        let (mut seen, mut any) = ([0u16; TILE_KEYS], [0u16; TILE_KEYS]);
        let mut halves = [MINUS_INFINITY; TILE_KEYS];
        for head in 0..if self.mask_is_shared() {
            1
        } else {
            block.heads
        } {
            for token in 0..block.tokens {
                // SAFETY: the rows of a mask are dense halves, one for each key.
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

    /// Whether the heads of a token share their row of the mask.
    pub(super) fn mask_is_shared(&self) -> bool {
        self.mask.is_none_or(|mask| mask.ne[2] == 1)
    }

    /// Where the mask begins of a token and a head of a block.
    fn mask_row(&self, mask: View, block: Block, token: usize, head: usize) -> *const u16 {
        let index = [
            block.first_token + token,
            (block.first_head + head) % mask.ne[2],
            block.sequence % mask.ne[3],
        ];
        mask.row_ptr(index).cast()
    }

    /// Reads the mask for `keys` keys from `first` on as floats: a tile for each row of the block,
    /// or only for those of its first head if they share them.
    ///
    /// # Safety
    /// There is a mask and so many keys; the workspace is of this operation and this thread.
    pub(super) unsafe fn read_mask_by_row(
        &self,
        block: Block,
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
                // SAFETY: by the caller's contract; the workspace has room for a tile for each row.
                unsafe { self.read_mask_row(block, [token, head], [first, keys], space, row) };
            }
        }
    }

    /// The same by key: for each key, the mask of as many rows as [`Attention::mask_lanes`], which
    /// repeats.
    ///
    /// # Safety
    /// As [`Attention::read_mask_by_row`].
    pub(super) unsafe fn read_mask_by_key(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        space: &Workspace,
    ) {
        let lanes = self.mask_lanes();
        for lane in 0..lanes {
            // Rows that pad a block see what a neighbour sees.
            let token = (lane % block.pitch).min(block.tokens - 1);
            let head = match self.mask_is_shared() {
                true => 0,
                false => (lane / block.pitch).min(block.heads - 1),
            };
            // SAFETY: by the caller's contract; there are no more lanes than rows.
            unsafe { self.read_mask_row(block, [token, head], [first, keys], space, lane) };
        }
        let turn = Transpose {
            src: space.masks,
            src_stride: TILE_KEYS,
            rows: lanes,
            columns: TILE_KEYS,
            dst: space.biases,
            dst_stride: lanes,
        };
        // SAFETY: the workspace has a tile for each lane in both forms.
        unsafe { turn.run() };
    }

    /// Reads one row of a tile's mask to tile `to` of the workspace.
    ///
    /// # Safety
    /// As [`Attention::read_mask_by_row`]; the block has the token and the head, the workspace the tile.
    unsafe fn read_mask_row(
        &self,
        block: Block,
        [token, head]: [usize; 2],
        [first, keys]: [usize; 2],
        space: &Workspace,
        to: usize,
    ) {
        let Some(mask) = self.mask else { return };
        let halves_to_floats = Format::of(Type::F16)
            .expect("halves are a format")
            .dequantize_row;
        // SAFETY: the rows of a mask are dense halves, one for each key; for the rest, the caller.
        unsafe {
            let from = self.mask_row(mask, block, token, head).add(first);
            (halves_to_floats)(from.cast(), space.masks.add(to * TILE_KEYS), keys);
        }
    }
}

/// Scores with the cap (0: none) and their mask, with the slopes of their heads.
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
            // What is hidden is hidden, however small the slope.
            let minus_infinity = simd.splat(f32::NEG_INFINITY);
            let hidden = mask.le(minus_infinity);
            hidden.select(minus_infinity, mask.mul_add(slope, score))
        }
    }
}
