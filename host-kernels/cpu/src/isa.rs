//! Instruction sets of the processor.

use std::sync::OnceLock;

use vgpu_engine::work::Speed;

/// An instruction set that kernels are compiled for; higher levels are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Portable Rust: the reference that the other levels are tested against.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with AVX-VNNI: integer dot products in 256 bits.
    Avx2Vnni,
    /// AVX-512 F, BW, DQ, VL and VNNI, and those of [`Level::Avx2`]. AVX-VNNI is not included:
    /// older processors with AVX-512 lack it.
    Avx512,
    /// AVX-512 with the BF16 dot product.
    Avx512Bf16,
    /// [`Level::Avx512Bf16`], and for many columns AMX with tiles of BF16.
    Amx,
}

impl Level {
    /// Every level, lowest first.
    pub const ALL: [Level; 6] = [
        Level::Scalar,
        Level::Avx2,
        Level::Avx2Vnni,
        Level::Avx512,
        Level::Avx512Bf16,
        Level::Amx,
    ];

    /// Whether kernels can run at the level: it is compiled in, and the processor and the operating
    /// system support it. For [`Level::Amx`], Linux is asked once for the permission, which the
    /// process keeps.
    pub fn is_supported(self) -> bool {
        let is_compiled = match self {
            Level::Scalar => true,
            Level::Avx2 => cfg!(feature = "avx2"),
            Level::Avx2Vnni => cfg!(feature = "avx-vnni"),
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => cfg!(feature = "avx512"),
        };
        is_compiled && self.has_instructions()
    }

    /// Checks that kernels can run at the level.
    ///
    /// # Panics
    /// If the level is not [supported](Level::is_supported): kernels would execute an illegal
    /// instruction.
    pub(crate) fn expect_supported(self) {
        assert!(
            self.is_supported(),
            "{self:?} is not compiled in, or the processor lacks it"
        );
    }

    /// Whether the processor and the operating system support the level's instructions.
    fn has_instructions(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx2Vnni => {
                Level::Avx2.has_instructions() && is_x86_feature_detected!("avxvnni")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.has_instructions()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => {
                Level::Avx512.has_instructions() && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Level::Avx512Bf16.has_instructions() && may_use_tiles(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The fastest level of this machine, determined once: the highest supported level that is not
    /// slower than the level below on this processor. For diagnosis, the environment variable
    /// `VGPU_CPU_LEVEL` (`scalar`, `avx2`, `avx2vnni`, `avx512`, `avx512bf16`, `amx`) selects
    /// another level; if that is not supported, the next lower one is used.
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
            let highest_first = || Level::ALL.into_iter().rev().filter(is_fit);
            let best = highest_first()
                .find(|level| level.is_supported())
                .expect("the scalar level is always supported");
            // Tiles are asked for only if there are kernels for them.
            let is_missing = |level: &Level| *level > best && *level != Level::Amx;
            let missing =
                highest_first().find(|level| is_missing(level) && level.has_instructions());
            if let Some(missing) = missing {
                tracing::warn!(
                    "this build has no kernels for {}; those for {} are slower",
                    missing.name(),
                    best.name()
                );
            }
            best
        })
    }

    /// Whether a processor that supports the level is at least as fast with it as with the level
    /// below.
    ///
    /// On Intel processors, the BF16 dot product in 512 bits is no faster than other products of
    /// AVX-512. On one with AMX, a thread reaches 97 GFLOPS with many columns; as 16-bit integers,
    /// F16 and BF16 reach 218 and 230, and with eight columns in single precision 113 and 109
    /// (`cargo bench -p vgpu-cpu --bench gemm -- --level avx512bf16`).
    fn pays(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Level::Avx512Bf16 {
            let leaf = std::arch::x86_64::__cpuid(0);
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
            return vendor.as_flattened() != b"GenuineIntel";
        }
        true
    }

    /// The speed of a thread, for estimates: about half of what the kernels for many columns reach
    /// on processors of 2 GHz, and a nanosecond for each float that an operator without vector
    /// instructions visits four times.
    pub fn speed(self) -> Speed {
        let products = match self {
            Level::Scalar => 5e8,
            Level::Avx2 | Level::Avx2Vnni => 1e10,
            // F32 has no products with tiles.
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => 2e10,
        };
        Speed {
            products,
            ..Speed::default()
        }
    }

    /// The name of the level in `VGPU_CPU_LEVEL` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx2Vnni => "avx2vnni",
            Level::Avx512 => "avx512",
            Level::Avx512Bf16 => "avx512bf16",
            Level::Amx => "amx",
        }
    }
}

/// Whether the processor has tiles and the product of BF16, and Linux lets this process use them.
///
/// The first call asks Linux for the permission, which the process keeps. It is not given if the
/// kernel or the hypervisor has no tiles, if a thread's alternate signal stack is too small for
/// them, or if a seccomp filter forbids the question.
#[cfg(target_arch = "x86_64")]
fn may_use_tiles() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        let has_leaf = std::arch::x86_64::__cpuid_count(0, 0).eax >= 7;
        let has_instructions =
            has_leaf && std::arch::x86_64::__cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES;
        has_instructions && ask_for_tile_data()
    })
}

/// Asks Linux for the state of tiles in this process (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_arch = "x86_64")]
fn ask_for_tile_data() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: `arch_prctl` with this operation takes numbers only, and accesses no memory.
        let result = unsafe {
            libc::syscall(
                libc::SYS_arch_prctl,
                ARCH_REQ_XCOMP_PERM,
                XFEATURE_XTILEDATA,
            )
        };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            tracing::info!("this process may not use AMX, but AVX-512: {error}");
        }
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}
