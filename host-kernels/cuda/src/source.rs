//! The sources of the kernels.

/// A source file, which is compiled by itself.
#[derive(Debug)]
pub struct Source {
    /// The name without `.cu`.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// The one architecture that the file compiles for; `None`: any.
    pub only: Option<&'static str>,
}

macro_rules! sources {
    ($($name:literal)* $(; $only:literal: $($special:literal)*)*) => {
        &[
            $(sources!(@ $name, None),)*
            $($(sources!(@ $special, Some($only)),)*)*
        ]
    };
    (@ $name:literal, $only:expr) => {
        Source {
            name: $name,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $name, ".cu")),
            only: $only,
        }
    };
}

macro_rules! headers {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/", $name))),)*]
    };
}

/// All source files.
pub const SOURCES: &[Source] = sources! {
    "conv"
    "convert_f16"
    "deepseek"
    "elementwise"
    "fattn_bf16"
    "fattn_f16"
    "fattn_f32"
    "fattn_mask_tiles"
    "fattn_quant"
    "fattn_simt"
    "fused"
    "gemm_float"
    "gemm_iq"
    "gemm_k"
    "gemm_q32"
    "gemm_repack"
    "image"
    "matmul"
    "megakernel"
    "megakernel_cols8"
    "mmv_float"
    "mmv_iq"
    "mmv_joint_float"
    "mmv_joint_iq"
    "mmv_joint_k"
    "mmv_joint_q32"
    "mmv_joint_repack"
    "mmv_k"
    "mmv_q32"
    "mmv_repack"
    "moe_sort"
    "movement"
    "norm"
    "quantize_q8"
    "recurrent"
    "reduce"
    "repack"
    "rope"
    "training";
    "sm_90a":
    "convert_f16_sm90"
    "fattn_sm90"
    "gemm_sm90_few_k"
    "gemm_sm90_few_q32"
    "gemm_sm90_few_repack"
    "gemm_sm90_float"
    "gemm_sm90_k"
    "gemm_sm90_k_low"
    "gemm_sm90_q32"
    "gemm_sm90_q5"
    "gemm_sm90_repack"
};

/// The headers that the sources include, by name.
pub const HEADERS: &[(&str, &str)] = headers! {
    "activation_fns.cuh"
    "dequantize.cuh"
    "device.cuh"
    "elementwise.cuh"
    "fattn.cuh"
    "fattn_load.cuh"
    "fattn_merge.cuh"
    "fattn_tile.cuh"
    "formats.cuh"
    "fused.cuh"
    "gemm.cuh"
    "gemm_simt.cuh"
    "gemm_sm90.cuh"
    "gemm_sm90_few.cuh"
    "megakernel.cuh"
    "mmv.cuh"
    "params.h"
    "q8_layout.cuh"
    "quantize_q8.cuh"
    "rope.cuh"
    "rows.cuh"
    "sm90.cuh"
    "vec_dot_q8.cuh"
};

/// Compiler options besides the architecture.
pub(crate) const OPTIONS: [&str; 3] = [
    "--std=c++17",
    "--ptxas-options=-v",
    // Generic lambdas need no `__device__`.
    "--device-as-default-execution-space",
];

/// The architectures for which packages contain machine code: A100; L4 and L40; H100 and H200;
/// B200; GeForce and workstation cards of the Blackwell generation.
pub const ARCHITECTURES: &[&str] = &["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// The architecture of Hopper GPUs with warpgroup matrix instructions (`wgmma`).
pub const SM_90A: &str = "sm_90a";

/// The oldest architecture, with the kernels for any GPU only.
pub const GENERAL: &str = "sm_80";

/// The source files that compile for an architecture.
pub fn sources_for(arch: &str) -> impl Iterator<Item = &'static Source> {
    SOURCES.iter().filter(move |source| source.is_for(arch))
}

impl Source {
    /// Whether the file compiles for this architecture.
    pub fn is_for(&self, arch: &str) -> bool {
        self.only.is_none_or(|only| only == arch)
    }

    /// The names of the kernels in the file.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        self.text.lines().filter_map(|line| {
            { line.strip_prefix("KERNEL(") }
                .or_else(|| line.strip_prefix("KERNEL_AHEAD("))?
                .split(',')
                .next()
        })
    }

    /// The headers that the file includes, directly or not, sorted by name.
    pub fn headers(&self) -> Vec<(&'static str, &'static str)> {
        let mut found: Vec<(&str, &str)> = Vec::new();
        let mut texts = vec![self.text];
        while let Some(text) = texts.pop() {
            let included = text.lines().filter_map(|line| {
                let rest = line.trim_start().strip_prefix("#include \"")?;
                rest.split('"').next()
            });
            for name in included {
                // The shim's own header is not in the table.
                let header = HEADERS.iter().find(|(known, _)| *known == name);
                if let Some(&(name, text)) = header
                    && !found.iter().any(|(known, _)| *known == name)
                {
                    found.push((name, text));
                    texts.push(text);
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// A name for machine code with a hash of all that the code depends on: source, headers,
    /// options, compiler version and architecture.
    pub fn code_name(&self, arch: &str, (major, minor): (i32, i32)) -> String {
        let mut hash = blake3::Hasher::new();
        let options = OPTIONS.iter().map(|option| ("", *option));
        let texts = std::iter::once((self.name, self.text));
        for (name, text) in options.chain(texts).chain(self.headers()) {
            // Lengths keep the texts apart.
            for part in [name, text] {
                hash.update(&(part.len() as u64).to_le_bytes());
                hash.update(part.as_bytes());
            }
        }
        let hash = hash.finalize().to_hex();
        format!("{}-{arch}-nvrtc{major}.{minor}-{}", self.name, &hash[..32])
    }
}

/// The architecture with all features of a GPU of this compute capability.
pub fn architecture(major: i32, minor: i32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_names_are_unique() {
        let mut names: Vec<_> = SOURCES.iter().flat_map(Source::kernels).collect();
        assert!(SOURCES.iter().all(|source| source.kernels().count() > 0));
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(count, names.len());
    }

    #[test]
    fn code_names_depend_on_the_sources() {
        let source = |text| Source {
            name: "a",
            text,
            only: None,
        };
        let plain = source("#include \"fattn.cuh\"\nKERNEL(a, P, 1) {}");
        let names: Vec<&str> = plain.headers().iter().map(|(name, _)| *name).collect();
        assert!(names.contains(&"fattn.cuh") && names.contains(&"device.cuh"));
        assert!(
            names.contains(&"params.h") && !names.contains(&"mmv.cuh"),
            "{names:?}"
        );
        let name = |source: &Source| source.code_name("sm_80", (13, 0));
        assert_eq!(name(&plain), name(&plain));
        let others = [
            name(&source("#include \"fattn.cuh\"\nKERNEL(b, P, 1) {}")),
            name(&source("#include \"mmv.cuh\"\nKERNEL(a, P, 1) {}")),
            plain.code_name("sm_89", (13, 0)),
            plain.code_name("sm_80", (13, 1)),
        ];
        assert!(
            others.iter().all(|other| *other != name(&plain)),
            "{others:?}"
        );
        // Every file includes `params.h`, so the search for headers finds something in each.
        for source in SOURCES {
            assert!(
                source.headers().iter().any(|(name, _)| *name == "params.h"),
                "{}",
                source.name
            );
        }
    }

    #[test]
    fn all_files_are_listed() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        for entry in std::fs::read_dir(folder).expect("the folder of the kernels") {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let listed = SOURCES.iter().any(|s| format!("{}.cu", s.name) == name)
                || HEADERS.iter().any(|(header, _)| *header == name);
            assert!(listed, "{name}");
        }
    }

    #[test]
    fn architecture_specific_files_have_a_built_architecture() {
        let special = SOURCES.iter().filter_map(|source| source.only);
        assert!(special.clone().all(|only| ARCHITECTURES.contains(&only)));
        assert!(special.clone().any(|only| only == SM_90A));
        assert_eq!(
            sources_for("sm_80").count() + special.count(),
            SOURCES.len()
        );
    }

    #[test]
    fn architectures_are_those_of_the_cards() {
        assert_eq!(architecture(8, 0), "sm_80");
        assert_eq!(architecture(9, 0), "sm_90a");
        assert_eq!(architecture(12, 0), "sm_120a");
    }
}
