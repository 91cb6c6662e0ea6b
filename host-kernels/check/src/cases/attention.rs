//! FLASH_ATTN_EXT: types of caches, sizes of heads, masks, softcaps.

use vgpu_transport::ir::{Op, Precision, Type};

use super::list::{List, f32s, numbers_of};
use super::operation::ROUNDED;
use crate::graph::{Fill, Operand};

pub(super) fn all(list: &mut List) {
    let alike = [Type::F32, Type::F16, Type::Bf16, Type::Q8_0, Type::Q4_0].map(|ty| [ty; 2]);
    let mixed = [
        [Type::Bf16, Type::Q8_0],
        [Type::Q8_0, Type::Q5_1],
        [Type::F32, Type::F16],
    ];
    // Each is allowed to be F32, which the engines use.
    let mut accumulators = [
        Precision::Default,
        Precision::F32,
        Precision::Bf16,
        Precision::F16,
        Precision::Q8,
    ]
    .into_iter()
    .cycle();
    for [k, v] in alike.into_iter().chain(mixed) {
        for [size, tokens, keys, heads, kv] in [
            [128, 1, 1000, 8, 2],
            [64, 70, 130, 4, 4],
            [80, 3, 257, 6, 2],
            [256, 1, 512, 4, 1],
        ] {
            if (k.is_quantized() || v.is_quantized()) && size % 32 != 0 {
                continue;
            }
            let op = Op::FlashAttnExt {
                scale: 1.0 / (size as f32).sqrt(),
                max_bias: 0.0,
                logit_softcap: if tokens == 3 { 10.0 } else { 0.0 },
                accumulator: accumulators.next().unwrap_or(Precision::Default),
                n_kv_max: 0,
            };
            let mask = Operand {
                ty: Type::F16,
                ne: [keys, tokens, 1, 1],
                fill: Fill::Mask(keys as i64 - tokens as i64),
            };
            let sinks = (tokens == 3).then(|| f32s([heads, 1, 1, 1]));
            let [k, v] = [k, v].map(|ty| Some(numbers_of(ty, [size, keys, kv, 1])));
            let q = f32s([size, tokens, heads, 1]);
            list.with(
                op,
                ROUNDED,
                f32s([size, heads, tokens, 1]),
                &[Some(q), k, v, Some(mask), sinks],
            );
        }
    }
    // A softcap without a mask, for a number of keys that is no multiple of 64.
    let (size, tokens, keys, heads) = (64, 70, 130, 4);
    let cache = numbers_of(Type::F16, [size, keys, heads, 1]);
    list.add(
        Op::FlashAttnExt {
            scale: 0.125,
            max_bias: 0.0,
            logit_softcap: 10.0,
            accumulator: Precision::Default,
            n_kv_max: 0,
        },
        ROUNDED,
        f32s([size, heads, tokens, 1]),
        &[f32s([size, tokens, heads, 1]), cache, cache],
    );
}

/// Attention large enough for the kernels that GPUs use if all SMs have work.
pub(super) fn large(list: &mut List) {
    for [size, cap] in [[64, 0], [128, 0], [256, 10]] {
        let op = Op::FlashAttnExt {
            scale: 1.0 / (size as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: cap as f32,
            accumulator: Precision::Default,
            n_kv_max: 0,
        };
        let (tokens, keys, heads) = (200, 330, 64);
        let mask = Operand {
            ty: Type::F16,
            ne: [keys, tokens, 1, 1],
            fill: Fill::Mask(keys as i64 - tokens as i64),
        };
        let cache = Some(numbers_of(Type::F16, [size, keys, heads / 2, 1]));
        let sources = [
            Some(f32s([size, tokens, heads, 1])),
            cache,
            cache,
            Some(mask),
            Some(f32s([heads, 1, 1, 1])),
        ];
        list.with(op, ROUNDED, f32s([size, heads, tokens, 1]), &sources);
    }
}

/// Attention for each kernel on tensor cores: by the type and size of heads, for few tokens and for
/// many.
pub(super) fn every_size(list: &mut List) {
    for ty in [Type::F16, Type::Bf16, Type::Q8_0, Type::F32] {
        for [size, values] in [[64, 64], [128, 128], [256, 256], [576, 512]] {
            for tokens in [1, 40] {
                let op = Op::FlashAttnExt {
                    scale: 1.0 / (size as f32).sqrt(),
                    max_bias: 0.0,
                    logit_softcap: 0.0,
                    accumulator: Precision::Default,
                    n_kv_max: 0,
                };
                let (keys, heads) = (96, 2);
                let mask = Operand {
                    ty: Type::F16,
                    ne: [keys, tokens, 1, 1],
                    fill: Fill::Mask(keys as i64 - tokens as i64),
                };
                let sources = [
                    f32s([size, tokens, heads, 1]),
                    numbers_of(ty, [size, keys, 1, 1]),
                    numbers_of(ty, [values, keys, 1, 1]),
                    mask,
                ];
                list.add(op, ROUNDED, f32s([values, heads, tokens, 1]), &sources);
            }
        }
    }
}
