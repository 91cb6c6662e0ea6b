//! What a shared library tells the dynamic linker.

use std::path::Path;

use anyhow::{Result, ensure};
use vgpu_elf::{ElfError, Library};

/// The parts of a library that a dynamic linker acts on.
#[derive(Debug, PartialEq, Eq)]
pub struct ElfLibrary {
    /// The library's own name, `DT_SONAME`.
    pub soname: Option<String>,
    /// Names of the libraries that the library needs, `DT_NEEDED`.
    pub needed: Vec<String>,
    /// Names of the symbols that others can bind to, sorted.
    pub exports: Vec<String>,
    /// Versions of other libraries' symbols that the library binds to, such as `GLIBC_2.34`.
    pub versions: Vec<String>,
    /// Whether the file has a symbol table for debuggers.
    pub has_symbol_table: bool,
}

impl ElfLibrary {
    /// Reads the library at `path`.
    ///
    /// # Errors
    /// As [`Library::read`], and if a list of the library is malformed.
    pub fn read(path: &Path) -> Result<ElfLibrary, ElfError> {
        let library = Library::read(path)?;
        Ok(ElfLibrary {
            soname: library.soname().map(str::to_owned),
            needed: library.needed()?,
            exports: library.visible_exports().map(str::to_owned).collect(),
            versions: library.versions()?,
            has_symbol_table: library.has_symbol_table()?,
        })
    }

    /// The oldest glibc that has all symbols that the library binds to: major and minor number.
    pub fn glibc(&self) -> Option<(u32, u32)> {
        let numbers = |version: &String| {
            let mut numbers = version.strip_prefix("GLIBC_")?.split('.').map(str::parse);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        };
        self.versions.iter().filter_map(numbers).max()
    }

    /// Checks that this library is the plugin as ggml expects it.
    ///
    /// # Errors
    /// If the SONAME is wrong, the library exports more or less than ggml's two entry points, needs
    /// a ggml library, or is not stripped.
    pub fn check_plugin(&self) -> Result<()> {
        ensure!(
            self.soname.as_deref() == Some("libggml-vgpu.so"),
            "its SONAME is {:?}, not libggml-vgpu.so",
            self.soname
        );
        ensure!(
            self.exports == ["ggml_backend_init", "ggml_backend_score"],
            "it exports {:?}, not exactly ggml_backend_init and ggml_backend_score",
            self.exports
        );
        // The program's ggml is the one to use, whatever its file is called.
        let ggml: Vec<_> = self
            .needed
            .iter()
            .filter(|name| name.contains("ggml"))
            .collect();
        ensure!(
            ggml.is_empty(),
            "it needs {ggml:?}, which a program may not have under that name"
        );
        ensure!(!self.has_symbol_table, "it is not stripped");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin() -> ElfLibrary {
        ElfLibrary {
            soname: Some("libggml-vgpu.so".into()),
            needed: vec!["libc.so.6".into()],
            exports: vec!["ggml_backend_init".into(), "ggml_backend_score".into()],
            versions: ["GLIBC_2.4", "GLIBC_2.17", "GCC_3.0", "GLIBC_PRIVATE"]
                .map(String::from)
                .into(),
            has_symbol_table: false,
        }
    }

    #[test]
    fn exports_of_the_plugin_are_exact() {
        plugin().check_plugin().unwrap();
        let wrong = [
            ElfLibrary {
                soname: Some("libggml_vgpu.so".into()),
                ..plugin()
            },
            ElfLibrary {
                soname: None,
                ..plugin()
            },
            ElfLibrary {
                needed: vec!["libggml-base.so.0".into()],
                ..plugin()
            },
            ElfLibrary {
                exports: vec!["ggml_backend_init".into()],
                ..plugin()
            },
            ElfLibrary {
                exports: [
                    "ggml_backend_init",
                    "ggml_backend_score",
                    "rust_eh_personality",
                ]
                .map(String::from)
                .into(),
                ..plugin()
            },
            ElfLibrary {
                has_symbol_table: true,
                ..plugin()
            },
        ];
        for library in wrong {
            assert!(library.check_plugin().is_err(), "accepted {library:?}");
        }
    }

    #[test]
    fn newest_required_glibc_version_is_reported() {
        assert_eq!(plugin().glibc(), Some((2, 17)));
        let own = ElfLibrary::read(&std::env::current_exe().unwrap()).unwrap();
        assert!(
            own.glibc().is_some_and(|version| version >= (2, 2)),
            "{own:?}"
        );
    }
}
