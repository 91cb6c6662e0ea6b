//! SSM_CONV: a causal convolution of each channel along the tokens.

use vgpu_transport::ir::{Op, Type};

use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::ops::f32_rows::{Access, STAGE, Weighted, apply};

/// From this many tokens on, a vector operation per tap is faster than scalar operations.
const MANY_TOKENS: usize = 16;

/// Products in a unit of work, about.
const UNIT_PRODUCTS: usize = 1 << 20;

/// `dst[c, t, s] = sum_i x[t + i, c, s] * kernel[i, c]`
pub(super) fn ssm_conv(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::SsmConv {});
    let (dst, [x, kernel]) = (o.dst(), o.sources());
    let [channels, tokens, seqs, _] = dst.ne;
    let taps = kernel.ne[0];
    let values = Access::new(x.ty, x.nb[0]);
    let weights = Access::new(kernel.ty, kernel.nb[0]);
    let direct = Access::direct();
    // The tokens of a channel are a stride of the destination apart.
    let out = Access::new(Type::F32, dst.nb[1]);
    let grain = (UNIT_PRODUCTS / taps.max(1)).clamp(MANY_TOKENS, STAGE);
    let parts = tokens.div_ceil(grain);
    Compiled::one(move |w| {
        let mut sums = [0.0; STAGE];
        for unit in w.range_of(channels * seqs * parts) {
            let (start, unit) = (unit % parts * grain, unit / parts);
            let (c, s) = (unit % channels, unit / channels);
            let row = x.row_ptr([c, s, 0]).cast_const();
            let weight = |i: usize| {
                let mut value = 0.0;
                // SAFETY: `o` has passed the check of SSM_CONV, which requires a row of `taps > i`
                // elements of the kernel for each channel.
                unsafe { weights.load(weights.at(kernel.row_ptr([c, 0, 0]), i), 1, &mut value) };
                value
            };
            let to = dst.ptr().wrapping_add(c * dst.nb[0] + s * dst.nb[2]);
            let n = grain.min(tokens - start);
            sums[..n].fill(0.0);
            for i in 0..taps {
                let (weight, from) = (weight(i), values.at(row, start + i));
                // SAFETY: `o` has passed the check of SSM_CONV: the row of `x` has
                // `tokens + taps - 1` elements, and `start + i + n` is at most that. `sums` has
                // `STAGE >= n` floats.
                unsafe {
                    if n < MANY_TOKENS {
                        for (t, sum) in sums[..n].iter_mut().enumerate() {
                            let mut value = 0.0;
                            values.load(values.at(from, t), 1, &mut value);
                            *sum += value * weight;
                        }
                    } else {
                        let sums = sums.as_mut_ptr();
                        let src = [(values, from), (direct, sums.cast_const().cast())];
                        apply(Weighted { weight }, (direct, sums.cast()), src, n);
                    }
                }
            }
            // SAFETY: `dst` has `tokens >= start + n` floats for each channel, `nb[1]` bytes apart.
            unsafe { out.store(sums.as_ptr(), n, out.at(to, start).cast_mut()) };
        }
        Ok(())
    })
}
