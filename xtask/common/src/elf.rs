//! What a shared library tells the dynamic linker.
//!
//! `host-executor/cli/src/install/elf.rs` reads libraries too, and says why no code is shared.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use object::read::elf::ElfFile64;
use object::read::{ExportFlags, ExportTarget};
use object::{Object as _, elf};

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
    /// If the file cannot be read, or is no 64-bit ELF file with a dynamic section.
    pub fn read(path: &Path) -> Result<ElfLibrary> {
        let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        ElfLibrary::parse(&data).with_context(|| format!("reading {} as ELF", path.display()))
    }

    fn parse(data: &[u8]) -> Result<ElfLibrary> {
        let file = ElfFile64::<object::Endianness>::parse(data)?;
        let endian = file.endian();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();

        let dynamic = file.elf_dynamic_table()?;
        ensure!(!dynamic.is_empty(), "it has no dynamic section");
        let soname = dynamic.iter().find(|entry| entry.tag == elf::DT_SONAME);
        let soname = soname.map(|entry| dynamic.string(entry)).transpose()?;
        let needed = { file.import_libraries()? }
            .map(|library| Ok(text(library?.name())))
            .collect::<Result<_>>()?;

        let mut exports = Vec::new();
        for export in file.exports()? {
            let export = export?;
            let ExportFlags::Elf { st_other, .. } = export.flags() else {
                continue;
            };
            let visible = matches!(st_other.visibility(), elf::STV_DEFAULT | elf::STV_PROTECTED);
            // Absolute symbols are the names of symbol versions.
            let absolute = matches!(export.target(), ExportTarget::Absolute { .. });
            if let Some(name) = export.name().into_name()
                && visible
                && !absolute
            {
                exports.push(text(name));
            }
        }
        exports.sort();
        let sections = file.elf_section_table();
        let mut versions = Vec::new();
        if let Some((mut files, names)) = sections.gnu_verneed(endian, data)? {
            let names = sections.strings(endian, data, names)?;
            while let Some((_, mut needed)) = files.next()? {
                while let Some(version) = needed.next()? {
                    versions.push(text(version.name(endian, names)?));
                }
            }
        }
        let has_symbol_table = !file.elf_symbol_table().is_empty();
        Ok(ElfLibrary {
            soname: soname.map(text),
            needed,
            exports,
            versions,
            has_symbol_table,
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
    fn a_real_library_is_read() {
        // The C library is mapped into this very process; its path is in the kernel's list.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
            .expect("the test program is linked to libc");
        let library = ElfLibrary::read(Path::new(libc)).unwrap();
        assert_eq!(library.soname.as_deref(), Some("libc.so.6"));
        assert!(
            library
                .needed
                .iter()
                .any(|name| name.starts_with("ld-linux")),
            "{library:?}"
        );
        assert!(library.exports.iter().any(|name| name == "malloc"));
        assert!(
            !library
                .exports
                .iter()
                .any(|name| name == "__libc_early_init_hidden")
        );
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

    #[test]
    fn non_elf_file_is_an_error() {
        assert!(ElfLibrary::parse(b"#!/bin/sh\n").is_err());
    }
}
