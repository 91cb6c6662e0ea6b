//! Machine code of kernels: built in, from the cache, or compiled now.

use std::fs;
use std::path::PathBuf;

use tracing::{debug, info, warn};

use crate::nvrtc::{CompileError, Nvrtc};
use crate::source::Source;

/// Machine code that is built into this program: file, architecture, code. The build script lists
/// the files of the folder `VGPU_CUBINS`.
static BUILT_IN: &[(&str, &str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// Whether machine code of kernels is built into this program. Without any, the first start on a
/// GPU needs NVRTC.
pub fn has_machine_code() -> bool {
    !BUILT_IN.is_empty()
}

/// Finds machine code for one architecture.
pub(crate) struct CubinLoader {
    arch: String,
    cache: Option<PathBuf>,
    /// Loaded for the first file that has to be compiled.
    compiler: Option<Nvrtc>,
}

impl CubinLoader {
    /// A loader for `arch`, which keeps compiled code in the folder `cache`.
    pub(crate) fn new(arch: String, cache: Option<PathBuf>) -> CubinLoader {
        CubinLoader {
            arch,
            cache,
            compiler: None,
        }
    }

    /// The machine code of a source file.
    ///
    /// # Errors
    /// [`CompileError`] if the code has to be compiled and cannot be.
    pub(crate) fn load(&mut self, source: &Source) -> Result<Vec<u8>, CompileError> {
        let built_in = { BUILT_IN.iter() }
            .filter(|(name, arch, _)| *name == source.name && runs(arch, &self.arch))
            // The latest, whose names are as long as the others.
            .max_by_key(|(_, arch, _)| *arch);
        if let Some((_, _, code)) = built_in {
            return Ok(code.to_vec());
        }
        if self.compiler.is_none() {
            self.compiler = Some(Nvrtc::load(None)?);
        }
        let compiler = self.compiler.as_ref().expect("it was just loaded");
        let kept = self.cache.as_ref().map(|cache| {
            let name = source.code_name(&self.arch, compiler.version());
            cache.join(format!("{name}.cubin"))
        });
        if let Some(code) = kept.as_ref().and_then(|path| fs::read(path).ok()) {
            debug!(
                file = source.name,
                arch = self.arch,
                "kernels are loaded from the cache"
            );
            return Ok(code);
        }
        info!(file = source.name, arch = self.arch, "compiling kernels");
        let code = compiler.compile(source, &self.arch)?.cubin;
        if let Some(path) = kept {
            // Other processes may read the file at any time, so it appears complete or not at all.
            let part = path.with_extension(format!("{}.part", std::process::id()));
            let parent = path.parent().expect("a file in the cache has a folder");
            let written = fs::create_dir_all(parent)
                .and_then(|()| fs::write(&part, &code))
                .and_then(|()| fs::rename(&part, &path));
            if let Err(error) = written {
                warn!("the cache {} cannot be written: {error}", path.display());
            }
        }
        Ok(code)
    }
}

/// Whether machine code for one architecture runs on a GPU of another one: that of a lower minor
/// compute capability does, unless it is for one architecture alone (`sm_90a`). Source: CUDA C++
/// Programming Guide, "Binary Compatibility".
fn runs(code: &str, gpu: &str) -> bool {
    let parts = |arch: &str| -> Option<(u32, u32)> {
        let number: u32 = arch.strip_prefix("sm_")?.parse().ok()?;
        Some((number / 10, number % 10))
    };
    match (parts(code), parts(gpu)) {
        (Some((major, minor)), Some((gpu_major, gpu_minor))) => {
            major == gpu_major && minor <= gpu_minor
        }
        _ => code == gpu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_later_gpus_of_the_same_major_capability() {
        for gpu in ["sm_80", "sm_86", "sm_87", "sm_89"] {
            assert!(runs("sm_80", gpu), "{gpu}");
        }
        assert!(runs("sm_89", "sm_89") && !runs("sm_89", "sm_86"));
        assert!(!runs("sm_80", "sm_75") && !runs("sm_80", "sm_90a"));
        assert!(runs("sm_90a", "sm_90a") && runs("sm_120a", "sm_120a"));
        assert!(!runs("sm_100a", "sm_103a") && !runs("sm_120a", "sm_121a"));
    }
}
