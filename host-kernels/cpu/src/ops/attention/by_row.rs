//! Scores stored by row: a tile of keys for each query. Keys are multiplied in their own type.

use super::mask::{Visible, shaped};
use super::state::{Attention, Block, Sums, TILE_KEYS, Workspace};
use crate::gemm::GemmArgs;
use crate::simd::{Simd, Task, chunks, dispatch};

impl Attention {
    /// Brings the queries of a block to the type that keys are multiplied with.
    ///
    /// # Safety
    /// The workspace is of this operation and this thread.
    pub(super) unsafe fn read_queries_by_row(&self, block: Block, space: &Workspace) {
        for (row, token, head) in block.queries() {
            let query = self.q.row_ptr([token, head, block.sequence]).cast::<f32>();
            // SAFETY: a query is a dense row of floats, which the blocks of the keys divide; the
            // workspace has room for one for each row.
            unsafe {
                let to = space.queries.add(row * self.query_bytes);
                (self.kernel.quantize_activation)(query, to, self.k.ne[0]);
            }
        }
    }

    /// Computes the weights of a tile of keys, by row.
    ///
    /// # Safety
    /// There are so many keys; the workspace is of this operation and this thread, with queries.
    pub(super) unsafe fn weigh_by_row(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        visible: Visible,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let [k2, k3] = self.shared(block, &self.k);
        let floats = block.rows() * TILE_KEYS;
        // SAFETY: by the caller's contract; the workspace has room for a tile of scores for each
        // row.
        unsafe {
            if !visible.plain {
                self.read_mask_by_row(block, first, keys, space);
            }
            (self.kernel.gemm)(&GemmArgs {
                k: self.k.ne[0],
                w: self.k.row_ptr([first, k2, k3]),
                w_stride: self.k.nb[1],
                rows: keys,
                x: space.queries,
                x_stride: self.query_bytes,
                cols: block.rows(),
                dst: space.scores,
                dst_stride: TILE_KEYS,
            });
            dispatch(WeighByRow {
                attention: self,
                block,
                keys,
                plain: visible.plain,
                scores: std::slice::from_raw_parts_mut(space.scores, floats),
                masks: std::slice::from_raw_parts(space.masks, floats),
                sums,
            });
        }
    }
}

/// Turns the scores of a tile, by row, into weights.
struct WeighByRow<'a, 'b> {
    attention: &'a Attention,
    block: Block,
    keys: usize,
    plain: bool,
    scores: &'a mut [f32],
    masks: &'a [f32],
    sums: &'a mut Sums<'b>,
}

impl Task for WeighByRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeighByRow {
            attention,
            block,
            keys,
            ..
        } = self;
        let Attention { scale, cap, .. } = *attention;
        let minus_infinity = simd.splat(f32::NEG_INFINITY);
        for (r, token, head) in block.queries() {
            let scores = &mut self.scores[r * TILE_KEYS..][..keys];
            let mask = (!self.plain).then(|| {
                let row = match attention.mask_is_shared() {
                    true => token - block.first_token,
                    false => r,
                };
                let row = &self.masks[row * TILE_KEYS..][..keys];
                (row, simd.splat(attention.slopes.of(head)))
            });
            let mut largest = minus_infinity;
            chunks::<S>(keys, |i, n| {
                let mask = mask.map(|(mask, slope)| (simd.load(&mask[i..i + n]), slope));
                let score = simd.load(&scores[i..i + n]) * scale;
                let score = shaped(simd, score, cap, mask);
                score.store(&mut scores[i..i + n]);
                let score = if n == S::LANES {
                    score
                } else {
                    simd.splat(score.largest(n))
                };
                largest = score.max(largest);
            });
            let largest = largest.largest(S::LANES);
            if largest == f32::NEG_INFINITY {
                // Hidden altogether, unless what is not hidden is NaN.
                if scores.iter().any(|score| score.is_nan()) {
                    self.sums.weights[r] = f32::NAN;
                }
                scores.fill(0.0);
                continue;
            }
            self.sums.rise(r, largest);
            let largest = self.sums.largest[r];
            let mut sum = simd.splat(0.0);
            chunks::<S>(keys, |i, n| {
                (simd.load(&scores[i..i + n]) - largest)
                    .exp()
                    .store(&mut scores[i..i + n]);
                sum = sum + simd.load(&scores[i..i + n]); // lanes beyond the keys are 0
            });
            self.sums.weights[r] += sum.sum();
        }
    }
}
