//! RWKV_WKV7: the state update of RWKV 7.

use super::tokens::{Head, Tokens};
use crate::kernel::Compiled;
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// One head of one sequence.
///
/// Contract: `state` and `before` have `size * size` floats; the inputs and `y` have `size` floats
/// for each token; no other thread writes them.
struct Wkv7 {
    /// r, w, k, v, a, b
    inputs: [Tokens; 6],
    size: usize,
    tokens: usize,
    state: *mut f32,
    before: *const f32,
    y: *mut f32,
    y_stride: usize,
}

impl PtrTask for Wkv7 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Wkv7 {
            size,
            tokens,
            state,
            before,
            ..
        } = self;
        // SAFETY: the contract of `Wkv7` guarantees `size * size` floats at `state` and `before`,
        // and `size` floats at each input and at `y` for each token. `i` and `j + len` are at most
        // `size`.
        unsafe {
            for t in 0..tokens {
                let [r, w, k, v, a, b] = self.inputs.map(|input| input.at_token(t));
                let y = self.y.wrapping_add(t * self.y_stride);
                let from = if t == 0 { before } else { state.cast_const() };
                for i in 0..size {
                    let (from, to) = (from.add(i * size), state.add(i * size));
                    let removed = dot(simd, a, from, size);
                    let v = v.add(i).read();
                    let mut sum = simd.splat(0.0);
                    chunks::<S>(size, |j, len| {
                        let kv = simd.load_ptr(k.add(j), len) * v;
                        let new = simd
                            .load_ptr(from.add(j), len)
                            .mul_add(simd.load_ptr(w.add(j), len), kv);
                        let new = simd
                            .load_ptr(b.add(j), len)
                            .mul_add(simd.splat(removed), new);
                        new.store_ptr(to.add(j), len);
                        sum = new.mul_add(simd.load_ptr(r.add(j), len), sum);
                    });
                    y.add(i).write(sum.sum());
                }
            }
        }
    }
}

/// Sources: r, w, k, v, a, b, state. The destination holds the results, then the states.
pub(super) fn rwkv_wkv7(dst: View, sources: [View; 7]) -> Compiled {
    let [r, w, k, v, a, b, state] = sources;
    let inputs = [r, w, k, v, a, b];
    let [size, heads, tokens, _] = r.ne;
    let seqs = state.ne[1];
    let tokens = tokens.checked_div(seqs).unwrap_or(0);
    Compiled::one(move |w| {
        for unit in w.share(heads * seqs) {
            let (h, seq) = (unit % heads, unit / heads);
            let head = Head {
                size,
                heads,
                head: h,
                first_token: seq * tokens,
            };
            let at = (seq * heads + h) * size * size;
            let out = dst.ptr().cast::<f32>();
            // SAFETY: the check of the operator requires contiguous sources of `size * heads *
            // tokens` floats for each sequence, a state of `size * size` floats for each head, and
            // a destination that holds both. A unit is run by one thread and writes only its rows
            // of the results and its state.
            unsafe {
                dispatch_ptr(Wkv7 {
                    inputs: inputs.map(|input| head.of(&input)),
                    size,
                    tokens,
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + h) * size),
                    y_stride: heads * size,
                })
            };
        }
        Ok(())
    })
}

/// The dot product of two vectors of `n` floats.
///
/// # Safety
/// `a` and `b` are readable for `n` floats.
#[inline(always)]
unsafe fn dot<S: Simd>(simd: S, a: *const f32, b: *const f32, n: usize) -> f32 {
    let mut sum = simd.splat(0.0);
    chunks::<S>(n, |i, len| {
        // SAFETY: the caller guarantees `n` floats at `a` and `b`, and `i + len <= n`. Lanes from
        // `len` on are 0.
        sum = unsafe {
            simd.load_ptr(a.add(i), len)
                .mul_add(simd.load_ptr(b.add(i), len), sum)
        };
    });
    sum.sum()
}
