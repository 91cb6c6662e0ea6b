//! Conversions of single elements between f32 and the 16-bit floating-point formats.

use half::f16;

/// The value of an IEEE half given by its bits.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32_const()
}

/// The bits of the IEEE half nearest to `value`, ties to even, as F16C rounds.
#[inline(always)]
pub const fn f32_to_f16(value: f32) -> u16 {
    f16::from_f32_const(value).to_bits()
}

/// The value of a bfloat16 given by its bits.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The bits of the bfloat16 nearest to `value`, ties to even; a NaN stays one and becomes quiet.
#[inline(always)]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else {
        ((bits + (0x7fff + (bits >> 16 & 1))) >> 16) as u16
    }
}
