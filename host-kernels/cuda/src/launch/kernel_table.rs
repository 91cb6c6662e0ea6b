//! The matrix kernels of each weight type.

use vgpu_transport::ir::Type;

use crate::params::VgView;

/// The kernels of one weight type, plain or repacked.
pub(crate) struct MatmulKernels {
    /// For one column, and for up to eight.
    pub(crate) vector: &'static str,
    pub(crate) vectors: &'static str,
    /// For many columns, on tensor cores.
    pub(crate) gemm: &'static str,
    /// The alignment in bytes of the weights' address and strides.
    alignment: i64,
}

impl MatmulKernels {
    fn of(ty: Type, repacked: bool) -> Option<MatmulKernels> {
        macro_rules! tuned {
            ($type:literal, $alignment:literal) => {
                Some(MatmulKernels {
                    vector: concat!("vg_mmv_", $type),
                    vectors: concat!("vg_mmv_", $type, "_cols8"),
                    gemm: concat!("vg_gemm_", $type),
                    alignment: $alignment,
                })
            };
        }
        if repacked {
            return match ty {
                Type::Q4_0 => tuned!("q4_0_repacked", 16),
                Type::Q8_0 => tuned!("q8_0_repacked", 16),
                Type::Mxfp4 => tuned!("mxfp4_repacked", 16),
                Type::Iq4Nl => tuned!("iq4_nl_repacked", 16),
                Type::Q6K => tuned!("q6_k_repacked", 16),
                _ => None,
            };
        }
        match ty {
            Type::F32 => tuned!("f32", 16),
            Type::F16 => tuned!("f16", 16),
            Type::Bf16 => tuned!("bf16", 16),
            Type::Q4_0 => tuned!("q4_0", 2),
            Type::Q4_1 => tuned!("q4_1", 4),
            Type::Q5_0 => tuned!("q5_0", 2),
            Type::Q5_1 => tuned!("q5_1", 4),
            Type::Q8_0 => tuned!("q8_0", 2),
            Type::Q1_0 => tuned!("q1_0", 2),
            Type::Q2_0 => tuned!("q2_0", 2),
            Type::Mxfp4 => tuned!("mxfp4", 1),
            Type::Nvfp4 => tuned!("nvfp4", 4),
            Type::Iq4Nl => tuned!("iq4_nl", 2),
            Type::Q2K => tuned!("q2_k", 4),
            Type::Q3K => tuned!("q3_k", 2),
            Type::Q4K => tuned!("q4_k", 16),
            Type::Q5K => tuned!("q5_k", 16),
            Type::Q6K => tuned!("q6_k", 2),
            Type::Iq4Xs => tuned!("iq4_xs", 2),
            Type::Tq1_0 => tuned!("tq1_0", 2),
            Type::Tq2_0 => tuned!("tq2_0", 2),
            Type::Iq2Xxs => tuned!("iq2_xxs", 2),
            Type::Iq2Xs => tuned!("iq2_xs", 2),
            Type::Iq2S => tuned!("iq2_s", 2),
            Type::Iq3Xxs => tuned!("iq3_xxs", 2),
            Type::Iq3S => tuned!("iq3_s", 2),
            Type::Iq1S => tuned!("iq1_s", 2),
            Type::Iq1M => tuned!("iq1_m", 2),
            _ => None,
        }
    }

    /// Whether the kernels can read weights with these lengths and strides.
    pub(crate) fn takes_weights(&self, w: &VgView, ty: Type) -> bool {
        // Repacked rows are adjacent, and only matrices begin at aligned addresses.
        let repacked = w.is_repacked();
        let row = w.ne[0] / ty.block_elements() as i64 * w.nb[0];
        let address_and_strides = [w.data as i64, w.nb[1], w.nb[2], w.nb[3]];
        let counts = |d: usize| !repacked || d == 0 || d > 1 && w.ne[d] > 1;
        // The kernels index the bytes of a row, and the rows, with 32 bits.
        (1..=1 << 28).contains(&w.ne[0])
            && w.ne[1] <= 1 << 28
            && w.ne[0] % 32 == 0
            && w.nb[0] == ty.block_bytes() as i64
            && (!repacked || w.nb[1] == row)
            && (0..4).all(|d| !counts(d) || address_and_strides[d] % self.alignment == 0)
    }

    /// The kernels for weights of this type and format.
    pub(crate) fn of_vectors(w: &VgView) -> Option<(Type, MatmulKernels)> {
        let (ty, repacked) = w.weights()?;
        Some((ty, MatmulKernels::of(ty, repacked)?))
    }
}
