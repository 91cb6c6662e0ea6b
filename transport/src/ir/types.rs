//! Element types: stable wire ids, ggml's names, and block sizes.

macro_rules! types {
    ($($id:literal $variant:ident $name:literal $block:literal $bytes:literal,)*) => {
        /// The element type of a tensor.
        ///
        /// The discriminant is the id on the wire. The id does not change when ggml changes `enum
        /// ggml_type`: a guest translates ggml's types by name ([`Type::from_ggml_name`]).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Type {
            $(#[doc = concat!(
                "ggml `", $name, "`: ",
                stringify!($block), " elements in ", stringify!($bytes), " bytes."
            )]
            $variant = $id,)*
        }

        impl Type {
            /// Every type, in order of id.
            pub const ALL: &'static [Type] = &[$(Type::$variant,)*];

            /// The type with this wire id.
            pub const fn from_id(id: u8) -> Option<Type> {
                match id {
                    $($id => Some(Type::$variant),)*
                    _ => None,
                }
            }

            /// The name that `ggml_type_name` returns for this type.
            pub const fn ggml_name(self) -> &'static str {
                match self {
                    $(Type::$variant => $name,)*
                }
            }

            /// Elements in one block; 1 for plain types (`ggml_blck_size`).
            pub const fn block_elements(self) -> u64 {
                match self {
                    $(Type::$variant => $block,)*
                }
            }

            /// Bytes of one block (`ggml_type_size`).
            pub const fn block_bytes(self) -> u64 {
                match self {
                    $(Type::$variant => $bytes,)*
                }
            }
        }
    };
}

types! {
    0  F32    "f32"     1   4,
    1  F16    "f16"     1   2,
    2  Q4_0   "q4_0"    32  18,
    3  Q4_1   "q4_1"    32  20,
    6  Q5_0   "q5_0"    32  22,
    7  Q5_1   "q5_1"    32  24,
    8  Q8_0   "q8_0"    32  34,
    9  Q8_1   "q8_1"    32  36,
    10 Q2K    "q2_K"    256 84,
    11 Q3K    "q3_K"    256 110,
    12 Q4K    "q4_K"    256 144,
    13 Q5K    "q5_K"    256 176,
    14 Q6K    "q6_K"    256 210,
    15 Q8K    "q8_K"    256 292,
    16 Iq2Xxs "iq2_xxs" 256 66,
    17 Iq2Xs  "iq2_xs"  256 74,
    18 Iq3Xxs "iq3_xxs" 256 98,
    19 Iq1S   "iq1_s"   256 50,
    20 Iq4Nl  "iq4_nl"  32  18,
    21 Iq3S   "iq3_s"   256 110,
    22 Iq2S   "iq2_s"   256 82,
    23 Iq4Xs  "iq4_xs"  256 136,
    24 I8     "i8"      1   1,
    25 I16    "i16"     1   2,
    26 I32    "i32"     1   4,
    27 I64    "i64"     1   8,
    28 F64    "f64"     1   8,
    29 Iq1M   "iq1_m"   256 56,
    30 Bf16   "bf16"    1   2,
    34 Tq1_0  "tq1_0"   256 54,
    35 Tq2_0  "tq2_0"   256 66,
    39 Mxfp4  "mxfp4"   32  17,
    40 Nvfp4  "nvfp4"   64  36,
    41 Q1_0   "q1_0"    128 18,
    42 Q2_0   "q2_0"    64  18,
}

impl Type {
    /// The type with the name `name` in `ggml_type_name`.
    pub fn from_ggml_name(name: &str) -> Option<Type> {
        Type::ALL.iter().copied().find(|t| t.ggml_name() == name)
    }

    /// Whether the type stores elements in blocks with shared scales.
    pub const fn is_quantized(self) -> bool {
        self.block_elements() > 1
    }

    /// The size of `elements` consecutive elements, in bytes. `None` when the elements do not fill
    /// whole blocks or the size does not fit 64 bits.
    pub const fn row_bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// The bytes of whole blocks between the end of a row of `elements` elements and the next
    /// multiple of [`ROW_UNIT`] elements. 0 for types without blocks.
    ///
    /// ggml's backends for GPUs allocate them behind a tensor (`MATRIX_ROW_PADDING` in
    /// `ggml-cuda`), because their matrix products read the last row in such units.
    pub const fn row_padding(self, elements: u64) -> u64 {
        match elements % ROW_UNIT {
            0 => 0,
            _ if !self.is_quantized() => 0,
            over => (ROW_UNIT - over) / self.block_elements() * self.block_bytes(),
        }
    }
}

/// The elements of a row of quantised weights that ggml's backends for GPUs read at a time.
pub const ROW_UNIT: u64 = 512;

/// A set of types, one bit per wire id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TypeSet(u64);

impl TypeSet {
    /// The empty set.
    pub const EMPTY: TypeSet = TypeSet(0);

    /// The set of the given types.
    pub const fn of(types: &[Type]) -> TypeSet {
        let mut bits = 0;
        let mut i = 0;
        while i < types.len() {
            bits |= 1 << types[i] as u8;
            i += 1;
        }
        TypeSet(bits)
    }

    /// The set of the wire ids whose bits are set in `bits`.
    pub const fn from_bits(bits: u64) -> TypeSet {
        TypeSet(bits)
    }

    /// The bits of this set.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether `ty` belongs to the set.
    pub const fn contains(self, ty: Type) -> bool {
        self.0 >> ty as u8 & 1 == 1
    }

    /// The union of both sets.
    pub const fn union(self, other: TypeSet) -> TypeSet {
        TypeSet(self.0 | other.0)
    }

    /// The types of this set that are not in the other set.
    pub const fn without(self, other: TypeSet) -> TypeSet {
        TypeSet(self.0 & !other.0)
    }

    /// The types of the set.
    pub fn iter(self) -> impl Iterator<Item = Type> {
        let all = Type::ALL.iter().copied();
        all.filter(move |&ty| self.contains(ty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_are_unique_and_round_trip() {
        for &ty in Type::ALL {
            assert_eq!(Type::from_id(ty as u8), Some(ty));
            assert_eq!(Type::from_ggml_name(ty.ggml_name()), Some(ty));
            assert!((ty as u8) < 64, "{ty:?} does not fit a TypeSet");
        }
        assert_eq!(Type::from_id(4), None);
        assert_eq!(Type::from_ggml_name("q4_2"), None);
    }

    #[test]
    fn row_bytes_requires_whole_blocks_and_does_not_overflow() {
        assert_eq!(Type::Q4K.row_bytes(512), Some(288));
        assert_eq!(Type::Q4K.row_bytes(100), None);
        assert_eq!(Type::F64.row_bytes(u64::MAX), None);
    }
}
