//! What the processor can do.

use std::sync::OnceLock;

/// A set of instructions that kernels are written for, in the order in which they are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Portable Rust: the reference the others are tested against.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI, the dot products of integers in 256 bits.
    Avx2Vnni,
    /// AVX-512 F, BW, DQ, VL and VNNI, with all of AVX2's but for AVX-VNNI, which older processors lack.
    Avx512,
    /// The same with the BF16 dot product.
    Avx512Bf16,
}

impl Level {
    /// Every level, lowest first.
    pub const ALL: [Level; 5] = [
        Level::Scalar,
        Level::Avx2,
        Level::Avx2Vnni,
        Level::Avx512,
        Level::Avx512Bf16,
    ];

    /// Whether this processor, under this operating system, runs the level.
    pub fn is_supported(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2Vnni => Level::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => {
                Level::Avx512.is_supported() && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The highest level of this machine, asked for once. The environment variable `VGPU_CPU_LEVEL`
    /// (`scalar`, `avx2`, `avx2vnni`, `avx512`, `avx512bf16`) lowers it, to find out whether a wrong result
    /// comes from a kernel.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let limit = match std::env::var("VGPU_CPU_LEVEL") {
                Err(_) => Level::Avx512Bf16,
                Ok(name) => Level::ALL
                    .into_iter()
                    .find(|level| level.name() == name)
                    .unwrap_or_else(|| {
                        tracing::warn!("VGPU_CPU_LEVEL={name:?} names no level; it is ignored");
                        Level::Avx512Bf16
                    }),
            };
            Level::ALL
                .into_iter()
                .rev()
                .find(|level| *level <= limit && level.is_supported())
                .expect("the scalar level is always supported")
        })
    }

    /// The name of the level in `VGPU_CPU_LEVEL` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx2Vnni => "avx2vnni",
            Level::Avx512 => "avx512",
            Level::Avx512Bf16 => "avx512bf16",
        }
    }
}
