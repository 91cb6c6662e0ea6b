//! Scores stored by row: a tile of keys for each query. Keys are multiplied in their own type.

use super::mask::{Visible, shaped};
use super::state::{Attention, QueryBlock, Sums, TILE_KEYS, Workspace};
use crate::gemm::GemmArgs;
use crate::simd::{Simd, Task, chunks, dispatch};

impl Attention {
    /// Converts the queries of a block to the type that keys are multiplied with.
    ///
    /// # Safety
    /// `space` is the workspace of this operator and this worker.
    pub(super) unsafe fn read_queries_by_row(&self, block: QueryBlock, space: &Workspace) {
        for (row, token, head) in block.queries() {
            let query = self.q.row_ptr([token, head, block.sequence]).cast::<f32>();
            // SAFETY: by the check of FLASH_ATTN_EXT, a query is a dense row of `k.ne[0]` floats, a
            // multiple of the block size of the keys. `queries` has `query_bytes` bytes for each
            // row of the block.
            unsafe {
                let to = space.queries.add(row * self.query_bytes);
                (self.kernel.quantize_activation)(query, to, self.k.ne[0]);
            }
        }
    }

    /// Computes the weights of a tile of keys, by row.
    ///
    /// # Safety
    /// `first + keys` is at most the number of keys. `space` is the workspace of this operator and
    /// this worker, with the queries of the block.
    pub(super) unsafe fn weights_by_row(
        &self,
        block: QueryBlock,
        first: usize,
        keys: usize,
        visible: Visible,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let [k2, k3] = self.shared(block, &self.k);
        let floats = block.rows() * TILE_KEYS;
        // SAFETY: the caller guarantees the keys and the converted queries. The workspace has
        // `TILE_KEYS >= keys` scores and masks for each row of the block, and the slices do not
        // overlap.
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
                table: None,
            });
            dispatch(WeightsByRow {
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

/// Computes the weights of a tile from its scores, stored by row.
struct WeightsByRow<'a, 'b> {
    attention: &'a Attention,
    block: QueryBlock,
    keys: usize,
    plain: bool,
    scores: &'a mut [f32],
    masks: &'a [f32],
    sums: &'a mut Sums<'b>,
}

impl Task for WeightsByRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeightsByRow {
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
                // Every score is -inf, except scores that are NaN.
                if scores.iter().any(|score| score.is_nan()) {
                    self.sums.weights[r] = f32::NAN;
                }
                scores.fill(0.0);
                continue;
            }
            self.sums.raise_largest(r, largest);
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
