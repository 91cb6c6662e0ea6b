//! Tensors with arbitrary strides. Validation computes their length without overflow and accepts
//! exactly the tensors that end in their buffer. The buffers have sizes only, and no memory.

use proptest::prelude::*;
use vgpu_transport::ir::{
    BufferId, Capabilities, Graph, Invalid, Limits, Node, Op, OpKind, Rule, Shape, Sources, Tensor,
    Type, TypeSet, validate,
};

/// A graph that copies a tensor to itself, in a buffer of `size` bytes.
fn check(shape: Shape, offset: u64, size: u64) -> Result<(), Invalid> {
    let caps = Capabilities::new(vec![Rule::uniform(OpKind::Copy, TypeSet::of(Type::ALL), 1)]);
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: vec![Tensor {
            shape,
            buffer: 0,
            offset,
        }],
        nodes: vec![Node {
            op: Op::Copy {},
            dst: 0,
            src: Sources::new([Some(0)]),
        }],
    };
    validate(graph, &caps, &Limits::default(), |_| Some(size)).map(|_| ())
}

/// The end of the last byte, computed in 128 bits.
fn end(shape: &Shape, offset: u64) -> u128 {
    let blocks = shape.ne[0] / shape.ty.block_elements();
    let steps = [blocks, shape.ne[1], shape.ne[2], shape.ne[3]];
    let last: u128 = steps
        .into_iter()
        .zip(shape.nb)
        .map(|(n, nb)| u128::from(n - 1) * u128::from(nb))
        .sum();
    u128::from(offset) + last + u128::from(shape.ty.block_bytes())
}

/// Values mostly near the powers of two at which an overflow could occur.
fn number() -> impl Strategy<Value = u64> {
    let near = (0..64u32, -64i64..64).prop_map(|(bit, by)| (1u64 << bit).wrapping_add_signed(by));
    prop_oneof![3 => near, 1 => any::<u64>()]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 20_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn strides_that_engines_compute_with_lie_inside_the_buffer(
        ne in prop::array::uniform4(prop_oneof![1 => Just(0), 9 => 1..4u64]),
        nb in prop::array::uniform4(prop_oneof![number(), 0..4096u64]),
        size in prop_oneof![number(), 4096..1u64 << 20],
    ) {
        let shape = Shape { ty: Type::F32, ne, nb: nb.map(|nb| nb / 4 * 4) };
        let plain = shape.with_plain_strides();
        if shape.is_empty() {
            prop_assert_eq!(plain.nb, [4; 4]);
        } else if check(shape, 0, size).is_ok() {
            for (n, nb) in ne.into_iter().zip(plain.nb) {
                prop_assert!((n - 1) * nb < size, "{plain:?} in {size} bytes");
            }
        }
    }

    #[test]
    fn tensors_are_valid_only_inside_their_buffer(
        ty in prop::sample::select(Type::ALL),
        ne in prop::array::uniform4(1..5u64),
        nb in prop::array::uniform4(number()),
        offset in number(),
        size in number(),
        exactly in any::<bool>(),
    ) {
        let element = if ty.is_quantized() { 1 } else { ty.block_bytes() };
        let mut shape = Shape { ty, ne, nb: nb.map(|nb| nb / element * element) };
        shape.ne[0] *= ty.block_elements();
        if ty.is_quantized() {
            shape.nb[0] = ty.block_bytes();
        }
        let offset = offset / element * element;
        let end = end(&shape, offset);
        // Half of the buffers end with the tensor, or one byte before its end.
        let size = match u64::try_from(end) {
            Ok(end) if exactly => end - size % 2,
            _ => size,
        };
        // Few elements, so that the tensor stays below the limit of revisits.
        let elements = shape.ne.iter().product::<u64>() / ty.block_elements() * ty.block_bytes();
        prop_assume!(elements <= size.saturating_mul(Limits::default().revisits));
        let fits = end <= u128::from(size);
        let outcome = check(shape, offset, size);
        let what = format!("{shape:?} at {offset} of {size}: {outcome:?}");
        prop_assert_eq!(outcome.is_ok(), fits, "{}", what);
    }
}

#[test]
fn strides_above_4_gib_are_not_truncated() {
    let shape = |nb1: u64| Shape {
        ty: Type::F32,
        ne: [2, 3, 1, 1],
        nb: [4, nb1, 0, 0],
    };
    let far = (1 << 32) + 4;
    assert_eq!(check(shape(far), 8, 8 + 2 * far + 8), Ok(()));
    assert!(matches!(
        check(shape(far), 8, 8 + 2 * far + 7),
        Err(Invalid::OutOfBounds { end, .. }) if end == 16 + 2 * far
    ));
    // Truncated to 32 bits, these values would fit.
    assert!(check(shape(1 << 32), 0, 1 << 20).is_err());
    // Twice the stride overflows to 0 in 64 bits.
    assert!(check(shape(1 << 63), 0, 1 << 20).is_err());
}
