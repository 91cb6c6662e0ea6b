use super::*;
use proptest::prelude::*;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::SeedableRng as _;

/// Every format, and the largest error of a round trip relative to the largest
/// magnitude in a block of smooth data: half a quantisation step, and the rounding of the scales.
const ROUND_TRIPS: &[(Type, f32)] = &[
    (Type::F32, 0.0),
    (Type::F16, 1.0 / 2048.0),
    (Type::Bf16, 1.0 / 256.0),
    (Type::Q4_0, 1.0 / 7.0),
    (Type::Q4_1, 1.0 / 14.0),
    (Type::Q5_0, 1.0 / 15.0),
    (Type::Q5_1, 1.0 / 30.0),
    (Type::Q8_0, 1.0 / 220.0),
    (Type::Q8_1, 1.0 / 220.0),
    (Type::Q4K, 1.0 / 10.0),
    (Type::Q5K, 1.0 / 20.0),
    (Type::Q6K, 1.0 / 20.0),
    (Type::Q8K, 1.0 / 250.0),
    (Type::Q2K, 0.3),
    (Type::Q3K, 0.2),
    (Type::Iq4Nl, 0.11),
    (Type::Iq4Xs, 0.11),
    (Type::Mxfp4, 0.25),
    (Type::Nvfp4, 0.25),
    (Type::Q1_0, 1.0),
    (Type::Q2_0, 0.51),
    (Type::Tq1_0, 0.51),
    (Type::Tq2_0, 0.51),
    (Type::Iq1S, 1.0),
    (Type::Iq1M, 1.0),
    (Type::Iq2Xxs, 0.8),
    (Type::Iq2Xs, 0.7),
    (Type::Iq2S, 0.7),
    (Type::Iq3Xxs, 0.4),
    (Type::Iq3S, 0.4),
];

fn quantize(ty: Type, x: &[f32]) -> Vec<u8> {
    let format = Format::of(ty).unwrap();
    let mut bytes = vec![0; format.row_bytes(x.len())];
    // SAFETY: the vectors have the elements of the row, which consists of whole blocks.
    unsafe { (format.quantize_row)(x.as_ptr(), bytes.as_mut_ptr(), x.len()) };
    bytes
}

fn dequantize(ty: Type, bytes: &[u8], n: usize) -> Vec<f32> {
    let format = Format::of(ty).unwrap();
    assert_eq!(bytes.len(), format.row_bytes(n));
    let mut x = vec![f32::NAN; n];
    // SAFETY: the vectors have the elements of the row, which consists of whole blocks.
    unsafe { (format.dequantize_row)(bytes.as_ptr(), x.as_mut_ptr(), n) };
    x
}

#[test]
fn a_round_trip_stays_within_half_a_step() {
    for &(ty, tolerance) in ROUND_TRIPS {
        for phase in 0..50 {
            let x: Vec<f32> = (0..768)
                .map(|i| 3.0 * (0.05 * i as f32 + phase as f32).sin())
                .collect();
            let y = dequantize(ty, &quantize(ty, &x), x.len());
            let block = Format::of(ty).unwrap().block;
            for (x, y) in x.chunks(block).zip(y.chunks(block)) {
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                for (x, y) in x.iter().zip(y) {
                    assert!(
                        (x - y).abs() <= tolerance * largest,
                        "{ty:?}: {x} became {y}"
                    );
                }
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for &(ty, _) in ROUND_TRIPS {
        let y = dequantize(ty, &quantize(ty, &[0.0; 512]), 512);
        assert!(y.iter().all(|&y| y == 0.0), "{ty:?}");
    }
}

#[test]
fn formats_agree_with_the_wire_types() {
    for &ty in Type::ALL {
        if let Some(format) = Format::of(ty) {
            assert_eq!(format.ty, ty);
            assert_eq!(Some(format.row_bytes(512) as u64), ty.row_bytes(512));
        }
    }
}

#[test]
fn halves_convert_as_the_half_crate_does_and_keep_nan() {
    for bits in 0..=u16::MAX {
        let value = f16_to_f32(bits);
        let bytes = bits.to_le_bytes();
        let row = dequantize(Type::F16, &bytes, 1)[0];
        assert!(row == value || row.is_nan() && value.is_nan(), "{bits:#x}");
        if !value.is_nan() {
            assert_eq!(f32_to_f16(value), bits);
            assert_eq!(quantize(Type::F16, &[value]), bytes);
        }
        let value = bf16_to_f32(bits);
        if value.is_nan() {
            assert!(bf16_to_f32(f32_to_bf16(value)).is_nan());
        } else {
            assert_eq!(f32_to_bf16(value), bits);
        }
    }
}

#[test]
fn both_ternary_formats_hold_the_same_values() {
    let x: Vec<f32> = (0..512).map(|i| (0.3 * i as f32).sin()).collect();
    let [a, b] = [Type::Tq1_0, Type::Tq2_0].map(|ty| dequantize(ty, &quantize(ty, &x), 512));
    assert_eq!(a, b);
    assert!(a.contains(&0.0) && a.iter().any(|&x| x > 0.9) && a.iter().any(|&x| x < -0.9));
}

#[test]
fn six_bit_scales_pack_and_unpack() {
    let scales = [0, 63, 1, 32, 17, 48, 63, 5];
    let mins = [63, 0, 31, 16, 33, 62, 2, 15];
    let (s, m) = k_quants::unpack_scales(&k_quants::pack_scales(&scales, &mins));
    assert!(scales.iter().zip(s).all(|(&a, b)| i16::from(a) == b));
    assert!(mins.iter().zip(m).all(|(&a, b)| i16::from(a) == b));
}

proptest! {
    /// A row is a sequence of blocks: the conversion of a block does not depend on its row.
    #[test]
    fn rows_are_independent_blocks(seed in any::<u64>(), which in 0..ROUND_TRIPS.len()) {
        let ty = ROUND_TRIPS[which].0;
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let x: Vec<f32> = (0..1024)
            .map(|_| (random.next_u32() as f32 / u32::MAX as f32 - 0.5) * 10.0)
            .collect();
        let whole = quantize(ty, &x);
        let half = whole.len() / 2;
        prop_assert_eq!(&whole[..half], &quantize(ty, &x[..512])[..]);
        prop_assert_eq!(&whole[half..], &quantize(ty, &x[512..])[..]);
        let y = dequantize(ty, &whole, 1024);
        prop_assert_eq!(&y[512..], &dequantize(ty, &whole[half..], 512)[..]);
    }
}
