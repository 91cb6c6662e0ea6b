//! File types of llama.cpp: which type the matrices of a file have.

use crate::tensor::TensorType;

/// How the matrices of a file are stored (`llama_ftype`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    /// 16-bit floats.
    F16,
    /// Blocks of 32 with 8 bits each.
    Q8_0,
    /// Blocks of 32 with 4 bits each.
    Q4_0,
    /// `Q4_K`, with `Q6_K` for some tensors.
    Q4KM,
    /// Super-blocks of 256 with 6 bits each.
    Q6K,
    /// Blocks of 32 with 4 bits each that index a table.
    Iq4Nl,
    /// Blocks of 32 four-bit floats with a shared exponent.
    Mxfp4,
}

impl FileType {
    /// All of them.
    pub const ALL: [FileType; 7] = [
        FileType::F16,
        FileType::Q8_0,
        FileType::Q4_0,
        FileType::Q4KM,
        FileType::Q6K,
        FileType::Iq4Nl,
        FileType::Mxfp4,
    ];

    /// The name on command lines and in file names, such as `q4_k_m`.
    pub fn name(self) -> &'static str {
        match self {
            FileType::F16 => "f16",
            FileType::Q8_0 => "q8_0",
            FileType::Q4_0 => "q4_0",
            FileType::Q4KM => "q4_k_m",
            FileType::Q6K => "q6_k",
            FileType::Iq4Nl => "iq4_nl",
            FileType::Mxfp4 => "mxfp4",
        }
    }

    /// The value of `llama_ftype`, which is `general.file_type` in a file.
    pub fn id(self) -> u32 {
        match self {
            FileType::F16 => 1,
            FileType::Q4_0 => 2,
            FileType::Q8_0 => 7,
            FileType::Q4KM => 15,
            FileType::Q6K => 18,
            FileType::Iq4Nl => 25,
            FileType::Mxfp4 => 38,
        }
    }

    /// The type of most matrices.
    pub fn base(self) -> TensorType {
        match self {
            FileType::F16 => TensorType::F16,
            FileType::Q8_0 => TensorType::Q8_0,
            FileType::Q4_0 => TensorType::Q4_0,
            FileType::Q4KM => TensorType::Q4K,
            FileType::Q6K => TensorType::Q6K,
            FileType::Iq4Nl => TensorType::Iq4Nl,
            FileType::Mxfp4 => TensorType::Mxfp4,
        }
    }

    /// The type of attn_v and ffn_down in the layers that [`use_more_bits`] selects.
    pub fn more_bits(self) -> TensorType {
        match self {
            FileType::Q4KM => TensorType::Q6K,
            _ => self.base(),
        }
    }

    /// The type of the output matrix, and of an embedding that is also the output matrix:
    /// `llama-quantize` stores these with more bits than the other matrices.
    pub fn output(self) -> TensorType {
        match self {
            FileType::Q4_0 | FileType::Q4KM | FileType::Iq4Nl => TensorType::Q6K,
            FileType::Mxfp4 => TensorType::Q8_0,
            FileType::F16 | FileType::Q8_0 | FileType::Q6K => self.base(),
        }
    }
}

/// Whether `llama-quantize` stores attn_v and ffn_down of `layer` with more bits in a mix such as
/// Q4_K_M: the first and last eighth of the layers, and every third layer between.
pub fn use_more_bits(layer: u64, layers: u64) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_more_bits_are_those_of_llama_cpp() {
        let chosen = |layers| -> Vec<u64> {
            { 0..layers }
                .filter(|&layer| use_more_bits(layer, layers))
                .collect()
        };
        // 7 * 12 / 8 = 10, although 12 - 12 / 8 = 11.
        assert_eq!(chosen(12), [0, 3, 6, 9, 10, 11]);
        assert_eq!(chosen(2), [1]);
        assert_eq!(
            chosen(32),
            [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
        );
    }

    #[test]
    fn only_mixes_store_some_matrices_with_more_bits() {
        for file_type in FileType::ALL {
            let is_mix = file_type.more_bits() != file_type.base();
            assert_eq!(is_mix, file_type == FileType::Q4KM, "{file_type:?}");
        }
        assert_eq!(FileType::Q4_0.output(), TensorType::Q6K);
        assert_eq!(FileType::Q8_0.output(), TensorType::Q8_0);
        assert_eq!(FileType::Mxfp4.output(), TensorType::Q8_0);
    }
}
