//! Scores stored by key: all rows for each key. Keys and queries are floats. A vector holds the
//! scores of one key and as many rows as it has lanes, so no operation crosses lanes.

use super::mask::{Visible, shaped};
use super::state::{Attention, LINE_FLOATS, QueryBlock, Sums, Workspace};
use crate::gemm_rows::GemmRows;
use crate::simd::{PtrTask, Simd, Task, Transpose, chunks, dispatch, dispatch_ptr};

impl Attention {
    /// Scales and transposes the queries of a block: element after element, each for all rows.
    /// Computes the slopes of the heads.
    ///
    /// # Safety
    /// `space` is the workspace of this operator and this worker.
    pub(super) unsafe fn read_queries_by_key(&self, block: QueryBlock, space: &Workspace) {
        let (n, rows) = (self.k.ne[0], self.block_rows());
        let padded = n.next_multiple_of(LINE_FLOATS);
        for first in (0..rows).step_by(LINE_FLOATS) {
            for lane in 0..LINE_FLOATS {
                let (head, token) = ((first + lane) / block.pitch, (first + lane) % block.pitch);
                let is_query = head < block.heads && token < block.tokens;
                // SAFETY: by the check of FLASH_ATTN_EXT, a query is a dense row of `n` floats.
                // `key_tile` has at least `LINE_FLOATS` rows of `padded` floats, and `slopes` has
                // `rows > first + lane` floats.
                unsafe {
                    let to = space.key_tile.add(lane * padded);
                    if is_query {
                        let (token, head) = (block.first_token + token, block.first_head + head);
                        let query = self.q.row_ptr([token, head, block.sequence]);
                        dispatch_ptr(Scaled(query.cast(), n, self.scale, to));
                        space.slopes.add(first + lane).write(self.slopes.of(head));
                    } else {
                        to.write_bytes(0, n);
                        space.slopes.add(first + lane).write(1.0);
                    }
                }
            }
            let transpose = Transpose {
                src: space.key_tile,
                src_stride: padded,
                rows: LINE_FLOATS,
                columns: padded,
                dst: space.queries.cast::<f32>().wrapping_add(first),
                dst_stride: rows,
            };
            // SAFETY: `key_tile` has `LINE_FLOATS` rows of `padded` floats, and `queries` has
            // `padded` rows of `rows` floats; `first + LINE_FLOATS <= rows`.
            unsafe { transpose.run() };
        }
    }

    /// The floats of the mask for a key, by key. If the heads share the mask, so do their rows.
    pub(super) fn mask_lanes(&self) -> usize {
        match self.mask_is_shared() {
            true => self.cut.tokens.max(LINE_FLOATS),
            false => self.block_rows(),
        }
    }

    /// Computes the weights of a tile of keys, by key.
    ///
    /// # Safety
    /// `first + keys` is at most the number of keys. `space` is the workspace of this operator and
    /// this worker, with the queries of the block.
    pub(super) unsafe fn weights_by_key(
        &self,
        block: QueryBlock,
        first: usize,
        keys: usize,
        visible: Visible,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let (n, rows) = (self.k.ne[0], self.block_rows());
        let [k2, k3] = self.shared(block, &self.k);
        // SAFETY: the caller guarantees the keys, of `n` dense elements each. The workspace has
        // `TILE_KEYS >= keys` rows of keys, of scores (`rows` floats each) and of masks (`lanes <=
        // rows` floats each), and `rows` slopes. The slices do not overlap.
        unsafe {
            let (tile, stride) = match self.keys.reader.in_place(self.k.row_ptr([first, k2, k3])) {
                Some(keys) => (keys, self.k.nb[1] / size_of::<f32>()),
                None => {
                    let stride = n.next_multiple_of(LINE_FLOATS);
                    self.keys
                        .read([first, k2, k3], keys, u64::MAX, space.key_tile, stride);
                    (space.key_tile.cast_const(), stride)
                }
            };
            space.scores.write_bytes(0, keys * rows);
            let scores = GemmRows {
                results: keys,
                terms: n,
                n: rows,
                weights: tile,
                weights_stride: stride,
                weights_step: 1,
                rows: space.queries.cast::<f32>().cast_const(),
                rows_stride: rows,
                out: space.scores,
                out_stride: rows,
            };
            scores.add();
            if !visible.plain {
                self.read_mask_by_key(block, first, keys, space);
            }
            let lanes = self.mask_lanes();
            dispatch(WeightsByKey {
                attention: self,
                block,
                keys,
                scores: std::slice::from_raw_parts_mut(space.scores, keys * rows),
                masks: (!visible.plain)
                    .then(|| std::slice::from_raw_parts(space.biases.cast_const(), keys * lanes)),
                slopes: std::slice::from_raw_parts(space.slopes.cast_const(), rows),
                sums,
            });
        }
    }
}

/// Copies floats, times a factor.
///
/// Contract: the first pointer is readable and the second writable for this number of floats, and
/// they do not overlap.
struct Scaled(*const f32, usize, f32, *mut f32);

impl PtrTask for Scaled {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Scaled(from, n, factor, to) = self;
        chunks::<S>(n, |i, lanes| {
            // SAFETY: the contract of the task guarantees `n` floats at `from` and `to`; `i + lanes
            // <= n`.
            unsafe { (simd.load_ptr(from.add(i), lanes) * factor).store_ptr(to.add(i), lanes) }
        });
    }
}

/// Computes the weights of a tile from its scores, stored by key and already scaled.
struct WeightsByKey<'a, 'b> {
    attention: &'a Attention,
    block: QueryBlock,
    keys: usize,
    scores: &'a mut [f32],
    /// For each key, the mask of [`Attention::mask_lanes`] rows, which repeats for the other rows.
    masks: Option<&'a [f32]>,
    /// For each row, the factor of its mask.
    slopes: &'a [f32],
    sums: &'a mut Sums<'b>,
}

impl Task for WeightsByKey<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeightsByKey {
            attention,
            block,
            keys,
            scores,
            masks,
            slopes,
            sums,
        } = self;
        let (cap, rows) = (attention.cap, attention.block_rows());
        let lanes = attention.mask_lanes();
        let minus_infinity = simd.splat(f32::NEG_INFINITY);
        // The rows are whole vectors: their number is a multiple of `LINE_FLOATS`, which is a
        // multiple of `LANES`.
        for first in (0..block.rows()).step_by(S::LANES) {
            let old = simd.load(&sums.largest[first..]);
            let slope = simd.load(&slopes[first..]);
            let mut largest = old;
            for key in 0..keys {
                let at = key * rows + first;
                let score = simd.load(&scores[at..]);
                let mask = masks.map(|masks| {
                    let mask = simd.load(&masks[key * lanes + first % lanes..]);
                    (mask, slope)
                });
                let score = shaped(simd, score, cap, mask);
                if cap != 0.0 || masks.is_some() {
                    score.store(&mut scores[at..at + S::LANES]);
                }
                largest = score.max(largest);
            }
            // Rows that have not seen a key: e^(-inf - 0) is 0, e^(-inf - -inf) is NaN.
            let blind = largest.le(minus_infinity);
            let base = blind.select(simd.splat(0.0), largest);
            let mut sum = simd.splat(0.0);
            for key in 0..keys {
                let at = key * rows + first;
                let weight = (simd.load(&scores[at..]) - base).exp();
                weight.store(&mut scores[at..at + S::LANES]);
                sum = sum + weight;
            }
            let shrink = (old - base).exp();
            let weights = simd.load(&sums.weights[first..]);
            weights
                .mul_add(shrink, sum)
                .store(&mut sums.weights[first..first + S::LANES]);
            largest.store(&mut sums.largest[first..first + S::LANES]);
            let mut shrinks = [1.0; LINE_FLOATS];
            shrink.store(&mut shrinks[..S::LANES]);
            for (row, &shrink) in (first..block.rows()).zip(&shrinks[..S::LANES]) {
                if shrink != 1.0 {
                    let values = &mut sums.values[row * sums.width..][..sums.width];
                    values.iter_mut().for_each(|value| *value *= shrink);
                }
            }
        }
    }
}
