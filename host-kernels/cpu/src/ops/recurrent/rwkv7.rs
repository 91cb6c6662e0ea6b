//! RWKV_WKV7: the state update of RWKV 7.

use vgpu_transport::ir::Op;

use super::tokens::{HeadOutput, Tokens, each_head};
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};

/// One head of one sequence.
///
/// Contract: `out.state` and `out.before` have `size * size` floats; the inputs and `out.y` have
/// `size` floats for each token; no other thread writes them.
struct Wkv7 {
    /// r, w, k, v, a, b
    inputs: [Tokens; 6],
    size: usize,
    out: HeadOutput,
}

impl PtrTask for Wkv7 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Wkv7 { size, out, .. } = self;
        let HeadOutput {
            tokens,
            state,
            before,
            ..
        } = out;
        // SAFETY: the contract of `Wkv7` guarantees `size * size` floats at `state` and `before`,
        // and `size` floats at each input and at `y` for each token. `i` and `j + len` are at most
        // `size`.
        unsafe {
            for t in tokens {
                let [r, w, k, v, a, b] = self.inputs.map(|input| input.at_token(t));
                let y = out.y.wrapping_add(t * out.y_stride);
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
pub(super) fn rwkv_wkv7(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::RwkvWkv7 {});
    let [r, w, k, v, a, b, state] = o.sources();
    let inputs = [r, w, k, v, a, b];
    each_head(o.dst(), r, state, move |head, out| {
        // SAFETY: `o` has passed the check of RWKV_WKV7, which requires contiguous inputs with
        // `size` floats for each head of each token, a state of `size * size` floats for each head
        // of a sequence, and a destination of the results and then the states. A head is run by one
        // thread and writes only its rows of the results and its state.
        unsafe {
            dispatch_ptr(Wkv7 {
                inputs: inputs.map(|input| head.of(&input)),
                size: head.size,
                out,
            })
        };
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
