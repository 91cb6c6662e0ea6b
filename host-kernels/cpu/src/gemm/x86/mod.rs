//! Kernels for x86-64.
//!
//! - `int_simd`, `block_simd`: integer operations for AVX2, AVX2 with AVX-VNNI, and AVX-512.
//! - `blocks`: blocks of each format, decoded to vectors of quants.
//! - `block32`, `k_quants`, `floats`: products of the three families. Few columns are multiplied
//!   with rows, many columns with panels.
//! - `block32::short_rows`: as many rows of blocks of 32 as a vector has lanes, for keys.
//! - `block32::weighted_rows`: sums of rows of blocks of 32, each times a weight, for values.
//! - `eight_rows`: eight rows of quantised weights at a time, in the order of sums of a panel.
//! - `amx`: products of many columns with tiles of BF16.
//! - `bf16_dot`: products with the BF16 dot product instruction.
//! - `int16`, `q8_int16`: products of 16-bit integers, for levels that multiply them faster than
//!   floats or signed bytes.
//! - `by_columns`: the loop over few columns.
//! - `panel`: the loops around a panel.
//! - `plain`: super-block formats without a kernel of their own, which are decoded first.
//! - `activations`: conversion from f32 to the activation formats.

// Tiles index several arrays by the same row and column.
#![allow(clippy::needless_range_loop)]

mod activations;
mod amx;
mod bf16_dot;
mod block32;
mod block32_decode;
mod block_simd;
mod blocks;
mod by_columns;
mod eight_rows;
mod floats;
mod int16;
mod int_simd;
mod k_quants;
mod panel;
mod plain;
mod q8_int16;

pub(super) use amx::column_bytes as tiles_column_bytes;
pub(super) use block32::column_bytes as prepared_column_bytes;
pub(super) use int16::column_bytes as i16_column_bytes;

use super::kernel::{Activation, Gemm, GemmArgs, MatmulKernel, ROUNDED_COLUMNS, WeightedRows};
use crate::formats::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K, BlockQ4_0,
    BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockTq1_0,
    BlockTq2_0, QuantizeRow, Type,
};
use crate::isa::Level;
use bf16_dot::Bf16Weights;

/// A [`Gemm`] that is compiled for the instructions of a level.
macro_rules! gemm {
    ($(#[$attribute:meta])* $name:ident $(<$format:ident: $bound:ident>)?, $body:expr) => {
        /// # Safety
        /// As [`crate::gemm::Gemm`].
        $(#[$attribute])*
        pub(super) unsafe fn $name $(<$format: $bound>)? (args: &GemmArgs) {
            // SAFETY: `$body` has the contract of `Gemm` and requires the instructions of its
            // level. `args` is passed on as it is, and the caller guarantees both: `Gemm` includes
            // the level that a kernel is compiled for.
            unsafe { $body(args) }
        }
    };
}

/// Defines the entry points of a level. The functions that they call are inlined into them, and so
/// are compiled for the instructions of the level.
macro_rules! entry_points {
    ($module:ident, $simd:ty, $features:literal) => {
        mod $module {
            use super::blocks::{Block32Kernel, SuperBlockKernel};
            use super::floats::{self as float_kernels, Float};
            use super::{block32 as block32_kernels, int16};
            use super::{k_quants as k_quant_kernels, plain as plain_kernels};
            use crate::formats::SuperBlockFormat;
            use crate::gemm::kernel::{GemmArgs, WeightedRowsArgs};

            gemm!(
                #[target_feature(enable = $features)]
                block32<B: Block32Kernel>,
                block32_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                k_quants<B: SuperBlockKernel>,
                k_quant_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                short_rows<B: Block32Kernel>,
                block32_kernels::short_rows_gemm::<$simd, B>
            );

            /// # Safety
            /// As [`crate::gemm::kernel::WeightedRows`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn weighted_rows<B: Block32Kernel>(args: &WeightedRowsArgs) {
                // SAFETY: the contract of `block32_kernels::weighted_rows` is that of this
                // function. The features of `$simd` are those that this function is compiled for,
                // so the processor has them.
                unsafe { block32_kernels::weighted_rows::<$simd, B>(args) }
            }

            /// # Safety
            /// As [`block32_kernels::prepare_column`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn prepare_column<B: Block32Kernel>(
                from: *const f32,
                to: *mut u8,
                k: usize,
            ) {
                // SAFETY: the contract of `block32_kernels::prepare_column` is that of this
                // function. The features of `$simd` are those that this function is compiled for,
                // so the processor has them.
                unsafe { block32_kernels::prepare_column::<$simd, B>(from, to, k) }
            }

            /// Whether the kernel of a format has one order of sums.
            pub(super) const fn block32_order<B: Block32Kernel>() -> bool {
                block32_kernels::has_one_order::<$simd, B>()
            }

            /// Whether the kernel of a format has one order of sums.
            pub(super) const fn k_quants_order<B: SuperBlockKernel>() -> bool {
                k_quant_kernels::has_one_order::<$simd, B>()
            }

            gemm!(
                #[target_feature(enable = $features)]
                floats<B: Float>,
                float_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                rounded<B: Float>,
                int16::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                plain<B: SuperBlockFormat>,
                |args| plain_kernels::gemm::<B>(args, multiply_plain)
            );

            /// # Safety
            /// As [`int16::round_column`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn round_column(from: *const f32, to: *mut u8, k: usize) {
                // SAFETY: the contract of `int16::round_column` is that of this function: `k`
                // floats at `from` and `column_bytes(k)` bytes at `to`. The features of `$simd` are
                // those that this function is compiled for, so the processor has them.
                unsafe { int16::round_column::<$simd>(from, to, k) }
            }

            /// # Safety
            /// As [`plain_kernels::multiply`].
            #[target_feature(enable = $features)]
            unsafe fn multiply_plain(args: &GemmArgs) {
                // SAFETY: the contract of `plain_kernels::multiply` is that of this function:
                // `args` is passed on as it is. The features of `$simd` are those that this
                // function is compiled for, so the processor has them.
                unsafe { plain_kernels::multiply::<$simd>(args) }
            }
        }
    };
}

#[cfg(feature = "avx2")]
entry_points!(avx2, crate::simd::Avx2, "avx2,fma,f16c");
#[cfg(feature = "avx-vnni")]
entry_points!(avx2_vnni, crate::simd::Avx2Vnni, "avx2,fma,f16c,avxvnni");
#[cfg(feature = "avx512")]
entry_points!(
    avx512,
    crate::simd::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
#[cfg(feature = "avx512")]
gemm!(
    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
    )]
    bf16_dot_product<W: Bf16Weights>,
    bf16_dot::gemm::<W>
);

/// Products with AMX, of rows that are unpacked to BF16.
#[cfg(feature = "avx512")]
mod amx_kernels {
    use super::amx::{self, BytePanel, Bytes};
    use super::bf16_dot::{Bf16Weights, PairPanel};
    use super::block32::Block32Panel;
    use super::k_quants::KQuantPanel;
    use super::plain::{self, PlainSuper};
    use crate::formats::SuperBlockFormat;
    use crate::gemm::kernel::GemmArgs;
    use crate::simd::Avx512;

    macro_rules! amx {
        ($name:ident<$format:ident: $bound:ident>, $body:expr) => {
            gemm!(
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
                )]
                $name<$format: $bound>,
                $body
            );
        };
    }

    amx!(bytes<P: BytePanel>, amx::gemm::<Bytes<P>>);
    amx!(pairs<W: Bf16Weights>, amx::gemm::<PairPanel<W>>);
    amx!(plain<B: SuperBlockFormat>, |args| plain::gemm::<B>(
        args,
        bytes::<KQuantPanel<Avx512, PlainSuper>>
    ));

    pub(super) type Blocks<B> = Block32Panel<Avx512, B>;
    pub(super) type SuperBlocks<B> = KQuantPanel<Avx512, B>;
}

/// The kernel for `weight` at `level`, above [`Level::Scalar`].
pub(super) fn kernel(weight: Type, level: Level) -> Option<MatmulKernel> {
    let portable = crate::gemm::scalar::kernel(weight)?;
    macro_rules! at_level {
        ($module:ident) => {{
            // A kernel, and whether it has one order of sums.
            macro_rules! entry {
                (block32, $block:ty) => {
                    (
                        $module::block32::<$block> as Gemm,
                        $module::block32_order::<$block>(),
                    )
                };
                (k_quants, $block:ty) => {
                    (
                        $module::k_quants::<$block> as Gemm,
                        $module::k_quants_order::<$block>(),
                    )
                };
                ($kernel:ident, $format:ty) => {
                    ($module::$kernel::<$format> as Gemm, false)
                };
            }
            match weight {
                Type::F32 => entry!(floats, floats::F32),
                Type::F16 => entry!(floats, floats::F16),
                Type::Bf16 => entry!(floats, floats::Bf16),
                Type::Q4_0 => entry!(block32, BlockQ4_0),
                Type::Q4_1 => entry!(block32, BlockQ4_1),
                Type::Q5_0 => entry!(block32, BlockQ5_0),
                Type::Q5_1 => entry!(block32, BlockQ5_1),
                Type::Q8_0 => entry!(block32, BlockQ8_0),
                Type::Q1_0 => entry!(block32, BlockQ1_0),
                Type::Q2_0 => entry!(block32, BlockQ2_0),
                Type::Iq4Nl => entry!(block32, BlockIq4Nl),
                Type::Mxfp4 => entry!(block32, BlockMxfp4),
                Type::Nvfp4 => entry!(block32, BlockNvfp4),
                Type::Q2K => entry!(k_quants, BlockQ2K),
                Type::Q3K => entry!(k_quants, BlockQ3K),
                Type::Q4K => entry!(k_quants, BlockQ4K),
                Type::Q5K => entry!(k_quants, BlockQ5K),
                Type::Q6K => entry!(k_quants, BlockQ6K),
                Type::Iq1S => entry!(plain, BlockIq1S),
                Type::Iq1M => entry!(plain, BlockIq1M),
                Type::Iq2Xxs => entry!(plain, BlockIq2Xxs),
                Type::Iq2Xs => entry!(plain, BlockIq2Xs),
                Type::Iq2S => entry!(plain, BlockIq2S),
                Type::Iq3Xxs => entry!(plain, BlockIq3Xxs),
                Type::Iq3S => entry!(plain, BlockIq3S),
                Type::Iq4Xs => entry!(k_quants, BlockIq4Xs),
                Type::Tq1_0 => entry!(plain, BlockTq1_0),
                Type::Tq2_0 => entry!(k_quants, BlockTq2_0),
                _ => return Some(portable),
            }
        }};
    }
    let (gemm, one_order): (Gemm, bool) = match (level, weight) {
        #[cfg(feature = "avx2")]
        (Level::Avx2, _) => at_level!(avx2),
        #[cfg(feature = "avx-vnni")]
        (Level::Avx2Vnni, _) => at_level!(avx2_vnni),
        #[cfg(feature = "avx512")]
        (Level::Avx512Bf16, Type::Bf16) => (bf16_dot_product::<bf16_dot::Bf16>, false),
        #[cfg(feature = "avx512")]
        (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, _) => at_level!(avx512),
        _ => {
            // Callers ask for supported levels only, and a level that is left out is none.
            debug_assert_eq!(level, Level::Scalar);
            return Some(portable);
        }
    };
    let activation = portable.activation.format().ty;
    let panel_cols = match activation {
        Type::F32 | Type::F16 | Type::Bf16 => floats::PANEL_COLS,
        Type::Q8K => k_quants::PANEL_COLS,
        _ => block32::PANEL_COLS,
    };
    let wide = level >= Level::Avx512;
    Some(MatmulKernel {
        gemm,
        quantize_activation: activations::quantizer(activation, wide)
            .unwrap_or(portable.quantize_activation),
        panel_cols,
        row_tile: if wide { 32 } else { 16 },
        takes_tables: !(weight == Type::Bf16 && level == Level::Avx512Bf16),
        one_order,
        ..portable
    })
}

/// Evaluates `$entry!($module, $block)` for a level and a type of the caches of keys and values.
macro_rules! cached {
    ($ty:expr, $level:expr, $entry:ident) => {{
        macro_rules! at_level {
            ($module:ident) => {
                match $ty {
                    Type::Q4_0 => $entry!($module, BlockQ4_0),
                    Type::Q4_1 => $entry!($module, BlockQ4_1),
                    Type::Q5_0 => $entry!($module, BlockQ5_0),
                    Type::Q5_1 => $entry!($module, BlockQ5_1),
                    Type::Q8_0 => $entry!($module, BlockQ8_0),
                    Type::Iq4Nl => $entry!($module, BlockIq4Nl),
                    _ => return None,
                }
            };
        }
        match $level {
            #[cfg(feature = "avx2")]
            Level::Avx2 => at_level!(avx2),
            #[cfg(feature = "avx-vnni")]
            Level::Avx2Vnni => at_level!(avx2_vnni),
            #[cfg(feature = "avx512")]
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => at_level!(avx512),
            _ => return None,
        }
    }};
}

/// [`MatmulKernel::of_short_rows`] at `level`.
pub(super) fn short_rows(weight: Type, level: Level) -> Option<MatmulKernel> {
    macro_rules! entry {
        ($module:ident, $block:ty) => {
            (
                $module::short_rows::<$block> as Gemm,
                $module::prepare_column::<$block> as QuantizeRow,
            )
        };
    }
    let (gemm, quantize_activation): (Gemm, QuantizeRow) = cached!(weight, level, entry);
    Some(MatmulKernel {
        activation: Activation::Prepared,
        quantize_activation,
        gemm,
        panel_cols: 1,
        takes_tables: false,
        one_order: true,
        ..kernel(weight, level)?
    })
}

/// [`weighted_rows`](crate::gemm::weighted_rows) at `level`.
pub(super) fn weighted_rows(ty: Type, level: Level) -> Option<WeightedRows> {
    macro_rules! entry {
        ($module:ident, $block:ty) => {
            $module::weighted_rows::<$block> as WeightedRows
        };
    }
    Some(cached!(ty, level, entry))
}

/// [`MatmulKernel::rounded`] at `level`.
pub(super) fn rounded(
    weight: Type,
    k: usize,
    columns: usize,
    level: Level,
) -> Option<MatmulKernel> {
    if columns < ROUNDED_COLUMNS {
        return None;
    }
    let is_faster = columns >= int16::COLUMNS && k >= int16::ELEMENTS;
    macro_rules! rounded {
        ($module:ident) => {{
            let gemm: Gemm = match weight {
                Type::F16 => $module::rounded::<floats::F16>,
                Type::Bf16 => $module::rounded::<floats::Bf16>,
                _ => return None,
            };
            Some(MatmulKernel {
                gemm,
                activation: Activation::I16,
                quantize_activation: $module::round_column,
                panel_cols: int16::COLUMNS,
                takes_tables: false,
                ..kernel(weight, level)?
            })
        }};
    }
    #[cfg(feature = "avx512")]
    if level == Level::Amx
        && k > 0
        && k.is_multiple_of(amx::STEP)
        && let Some((gemm, least)) = amx_gemm(weight)
        && columns >= least
    {
        return Some(MatmulKernel {
            gemm,
            activation: Activation::Tiles,
            quantize_activation: activations::to_bf16_wide,
            panel_cols: 1,
            row_tile: amx::PAIR_ROWS,
            most_columns: amx::BLOCK_COLUMNS,
            takes_tables: false,
            one_order: true,
            ..kernel(weight, level)?
        });
    }
    match (level, weight) {
        #[cfg(feature = "avx512")]
        (Level::Avx512Bf16, Type::F16) => Some(MatmulKernel {
            weight,
            gemm: bf16_dot_product::<bf16_dot::F16>,
            ..kernel(Type::Bf16, level)?
        }),
        #[cfg(feature = "avx2")]
        (Level::Avx2, _) if is_faster => rounded!(avx2),
        #[cfg(feature = "avx-vnni")]
        (Level::Avx2Vnni, _) if is_faster => rounded!(avx2_vnni),
        #[cfg(feature = "avx512")]
        (Level::Avx512 | Level::Amx, _) if is_faster => rounded!(avx512),
        _ => None,
    }
}

/// The product of `weight` with AMX, and the columns from which on it is faster than without.
#[cfg(feature = "avx512")]
fn amx_gemm(weight: Type) -> Option<(Gemm, usize)> {
    use amx_kernels::{Blocks, SuperBlocks, bytes, pairs, plain};
    let gemm: Gemm = match weight {
        Type::F16 => pairs::<bf16_dot::F16>,
        Type::Bf16 => pairs::<bf16_dot::Bf16>,
        Type::Q4_0 => bytes::<Blocks<BlockQ4_0>>,
        Type::Q4_1 => bytes::<Blocks<BlockQ4_1>>,
        Type::Q5_0 => bytes::<Blocks<BlockQ5_0>>,
        Type::Q5_1 => bytes::<Blocks<BlockQ5_1>>,
        Type::Q8_0 => bytes::<Blocks<BlockQ8_0>>,
        Type::Q1_0 => bytes::<Blocks<BlockQ1_0>>,
        Type::Q2_0 => bytes::<Blocks<BlockQ2_0>>,
        Type::Iq4Nl => bytes::<Blocks<BlockIq4Nl>>,
        Type::Mxfp4 => bytes::<Blocks<BlockMxfp4>>,
        Type::Nvfp4 => bytes::<Blocks<BlockNvfp4>>,
        Type::Q2K => bytes::<SuperBlocks<BlockQ2K>>,
        Type::Q3K => bytes::<SuperBlocks<BlockQ3K>>,
        Type::Q4K => bytes::<SuperBlocks<BlockQ4K>>,
        Type::Q5K => bytes::<SuperBlocks<BlockQ5K>>,
        Type::Q6K => bytes::<SuperBlocks<BlockQ6K>>,
        Type::Iq1S => plain::<BlockIq1S>,
        Type::Iq1M => plain::<BlockIq1M>,
        Type::Iq2Xxs => plain::<BlockIq2Xxs>,
        Type::Iq2Xs => plain::<BlockIq2Xs>,
        Type::Iq2S => plain::<BlockIq2S>,
        Type::Iq3Xxs => plain::<BlockIq3Xxs>,
        Type::Iq3S => plain::<BlockIq3S>,
        Type::Iq4Xs => bytes::<SuperBlocks<BlockIq4Xs>>,
        Type::Tq1_0 => plain::<BlockTq1_0>,
        Type::Tq2_0 => bytes::<SuperBlocks<BlockTq2_0>>,
        _ => return None,
    };
    let least = match weight {
        Type::F16 | Type::Bf16 => amx::FLOAT_COLUMNS,
        _ => amx::BLOCK_FORMAT_COLUMNS,
    };
    Some((gemm, least))
}
