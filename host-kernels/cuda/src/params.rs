//! The parameter structures of kernels: `kernels/params.h` in Rust.

#[allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    non_camel_case_types,
    non_snake_case,
    clippy::all,
    clippy::undocumented_unsafe_blocks // bindgen's own access to bit fields
)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/cuda_params.rs"));
}

pub(crate) use bindings::*;

use vgpu_transport::ir::{Shape, Type};
use zerocopy::{Immutable, IntoBytes};

/// A parameter structure. The build script derives `IntoBytes`, so the structures of `params.h`
/// have no padding.
pub(crate) trait Params: IntoBytes + Immutable {}

impl<T: IntoBytes + Immutable> Params for T {}

impl VgView {
    /// The view of a tensor whose first element is at `address`. Strides of dimensions with one
    /// element, which may have any value, become those of a dense tensor.
    pub(crate) fn new(address: u64, shape: &Shape) -> VgView {
        let shape = shape.with_plain_strides();
        VgView {
            data: address,
            ne: shape.ne.map(|n| n as i64),
            nb: shape.nb.map(|n| n as i64),
            type_: u32::from(shape.ty as u8),
            reserved: 0,
        }
    }

    /// A dense result of attention as products read it: each row has all heads of a token.
    pub(crate) fn with_merged_heads(&self) -> VgView {
        let row = self.ne[0] * self.ne[1];
        let end = self.nb[3] * self.ne[3];
        VgView {
            ne: [row, self.ne[2] * self.ne[3], 1, 1],
            nb: [4, 4 * row, end, end],
            ..*self
        }
    }

    /// The same view with adjacent elements in each row, if the stride is larger.
    pub(crate) fn with_dense_rows(mut self) -> VgView {
        let size = Type::from_id(self.type_ as u8).map_or(0, Type::block_bytes);
        self.nb[0] = self.nb[0].min(size as i64);
        self
    }

    /// Of weights: the type, and whether they are repacked.
    pub(crate) fn weights(&self) -> Option<(Type, bool)> {
        let plain = u8::try_from(self.type_ & !VG_REPACKED).ok()?;
        Some((Type::from_id(plain)?, self.is_repacked()))
    }

    /// Whether the weights are repacked.
    pub(crate) fn is_repacked(&self) -> bool {
        self.type_ & VG_REPACKED != 0
    }

    /// The number of elements.
    pub(crate) fn elements(&self) -> i64 {
        self.ne.iter().product()
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> i64 {
        self.ne[1..].iter().product()
    }

    /// Whether the tensor has type `ty` and no gaps.
    pub(crate) fn is_dense(&self, ty: Type) -> bool {
        let mut step = ty.block_bytes() as i64;
        for d in 0..4 {
            if self.nb[d] != step {
                return false;
            }
            step *= match d {
                0 => self.ne[0] / ty.block_elements() as i64,
                _ => self.ne[d],
            };
        }
        self.type_ == u32::from(ty as u8)
    }

    /// The addresses from the first byte to one past the last.
    pub(crate) fn address_range(&self) -> std::ops::Range<u64> {
        let ty = Type::from_id(self.type_ as u8).expect("views are of tensors, which have types");
        let shape = Shape {
            ty,
            ne: self.ne.map(|n| n as u64),
            nb: self.nb.map(|n| n as u64),
        };
        self.data..self.data + shape.byte_len().expect("the tensor was validated")
    }

    /// Whether the extents of the two views have a byte in common.
    pub(crate) fn overlaps(&self, other: &VgView) -> bool {
        if self.data == 0 || other.data == 0 {
            return false;
        }
        let (a, b) = (self.address_range(), other.address_range());
        a.start < b.end && b.start < a.end
    }
}
