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
    /// AVX-512 F, BW, DQ, VL and VNNI, with all of AVX2's but for AVX-VNNI, which older processors
    /// lack.
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

    /// The fastest level of this machine, asked for once: the highest, but for one that only some
    /// processors are fast at (`Level::pays`). The environment variable `VGPU_CPU_LEVEL` (`scalar`,
    /// `avx2`, `avx2vnni`, `avx512`, `avx512bf16`) names another one, or where that is not
    /// supported the next lower one, to find out whether a wrong result comes from a kernel.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let asked = std::env::var("VGPU_CPU_LEVEL").ok().and_then(|name| {
                let level = Level::ALL.into_iter().find(|level| level.name() == name);
                if level.is_none() {
                    tracing::warn!("VGPU_CPU_LEVEL={name:?} names no level; it is ignored");
                }
                level
            });
            let is_fit = |level: &Level| match asked {
                Some(limit) => *level <= limit,
                None => level.pays(),
            };
            { Level::ALL.into_iter().rev() }
                .filter(is_fit)
                .find(|level| level.is_supported())
                .expect("the scalar level is always supported")
        })
    }

    /// Whether this processor, if it supports the level, is at least as fast with it as with the
    /// one below.
    ///
    /// Intel's processors multiply pairs of bfloat16 in 512 bits no faster than AVX-512's other
    /// products: of many columns 97 GFLOPS a thread on one with AMX, where F16 and BF16 reach 218
    /// and 230 as integers of 16 bits, and 113 and 109 of eight columns in single precision (`cargo
    /// bench -p vgpu-cpu --bench gemm -- --level avx512bf16`).
    fn pays(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Level::Avx512Bf16 {
            let leaf = std::arch::x86_64::__cpuid(0);
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
            return vendor.as_flattened() != b"GenuineIntel";
        }
        true
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
