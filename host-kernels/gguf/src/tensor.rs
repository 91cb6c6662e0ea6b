//! Tensors and their types.

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32 with 4 bits each.
    Q4_0,
    /// Blocks of 32 with 8 bits each.
    Q8_0,
    /// Super-blocks of 256 with 4 bits each.
    Q4K,
    /// Super-blocks of 256 with 6 bits each.
    Q6K,
    /// Blocks of 32 with 4 bits each that index a table.
    Iq4Nl,
    /// Blocks of 32 four-bit floats with a shared exponent.
    Mxfp4,
}

impl TensorType {
    /// The value of `ggml_type`.
    pub(crate) fn id(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Q4_0 => 2,
            TensorType::Q8_0 => 8,
            TensorType::Q4K => 12,
            TensorType::Q6K => 14,
            TensorType::Iq4Nl => 20,
            TensorType::Mxfp4 => 39,
        }
    }

    /// Numbers per block.
    pub const fn block_len(self) -> u64 {
        match self {
            TensorType::F32 | TensorType::F16 => 1,
            TensorType::Q4_0 | TensorType::Q8_0 | TensorType::Iq4Nl | TensorType::Mxfp4 => 32,
            TensorType::Q4K | TensorType::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> u64 {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 => 2,
            TensorType::Q4_0 | TensorType::Iq4Nl => 2 + 16,
            TensorType::Q8_0 => 2 + 32,
            TensorType::Mxfp4 => 1 + 16,
            TensorType::Q4K => 2 + 2 + 12 + 128,
            TensorType::Q6K => 128 + 64 + 16 + 2,
        }
    }
}

/// One row of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name by which a runtime finds the tensor.
    pub name: String,
    /// Dimensions in numbers, the innermost first, as ggml counts them.
    pub dims: Vec<u64>,
    /// How the numbers are stored.
    pub kind: TensorType,
}

impl Tensor {
    /// How many numbers the tensor has.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Bytes of the tensor's data, without padding.
    pub fn bytes(&self) -> u64 {
        self.elements() / self.kind.block_len() * self.kind.block_bytes()
    }

    /// [`Tensor::bytes`] for dimensions that may overflow.
    pub(crate) fn checked_bytes(&self) -> Option<u64> {
        let elements = self
            .dims
            .iter()
            .try_fold(1u64, |all, &dim| all.checked_mul(dim))?;
        (elements / self.kind.block_len()).checked_mul(self.kind.block_bytes())
    }
}
