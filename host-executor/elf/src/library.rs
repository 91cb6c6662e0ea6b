//! A shared library's file.

use std::fs;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::ElfFile64;
use object::read::{ExportFlags, ExportTarget};
use object::{Endianness, Object as _, ObjectSection as _};

use crate::address::{aarch64_address, find, x86_64_address};
use crate::error::{ElfError, FileFault};

/// The largest library that is read into memory, far larger than any ggml.
const MAX_LIBRARY_BYTES: u64 = 1 << 30;
/// How many bytes of a function are searched for the instruction that loads its result.
const FUNCTION_START: usize = 32;
/// The longest string constant that is read, with its zero byte.
const MAX_STRING_BYTES: usize = 256;

/// A shared library's file.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    data: Vec<u8>,
    machine: elf::Machine,
    soname: Option<String>,
    /// Sorted by name. A name has one export for each version of its symbol.
    exports: Vec<Export>,
}

/// An exported symbol.
#[derive(Debug)]
struct Export {
    name: String,
    /// Of a function or data.
    address: Option<u64>,
    /// Whether other libraries can bind to the symbol.
    is_visible: bool,
}

impl Library {
    /// Reads the library at `path`.
    ///
    /// # Errors
    /// [`ElfError::Read`] if the file cannot be read, [`ElfError::NotALibrary`] if `path` is no
    /// file or the file has more than 1 GiB, and [`ElfError::NotShared`] if the content is no
    /// 64-bit ELF file with a dynamic section.
    pub fn read(path: &Path) -> Result<Library, ElfError> {
        let failed = |source| ElfError::Read {
            path: path.to_owned(),
            source,
        };
        let file = fs::metadata(path).map_err(failed)?;
        if !file.is_file() || file.len() > MAX_LIBRARY_BYTES {
            return Err(ElfError::NotALibrary {
                path: path.to_owned(),
                bytes: file.len(),
            });
        }
        let data = fs::read(path).map_err(failed)?;
        Library::parse(path, data).map_err(|source| ElfError::NotShared {
            path: path.to_owned(),
            source,
        })
    }

    fn parse(path: &Path, data: Vec<u8>) -> Result<Library, FileFault> {
        let file = ElfFile64::<Endianness>::parse(data.as_slice())?;
        let dynamic = file.elf_dynamic_table()?;
        if dynamic.is_empty() {
            return Err(FileFault::NoDynamicSection);
        }
        let soname = dynamic.iter().find(|entry| entry.tag == elf::DT_SONAME);
        let soname = soname.map(|entry| dynamic.string(entry)).transpose()?;
        let mut exports = Vec::new();
        for export in file.exports()? {
            let export = export?;
            let address = match export.target() {
                // The name of a symbol version.
                ExportTarget::Absolute { .. } => continue,
                ExportTarget::Address { address } => Some(address),
                _ => None,
            };
            let is_visible = match export.flags() {
                ExportFlags::Elf { st_other, .. } => {
                    matches!(st_other.visibility(), elf::STV_DEFAULT | elf::STV_PROTECTED)
                }
                _ => false,
            };
            if let Some(name) = export.name().into_name() {
                exports.push(Export {
                    name: text(name),
                    address,
                    is_visible,
                });
            }
        }
        exports.sort_by(|a, b| a.name.cmp(&b.name));
        let machine = file.elf_header().e_machine.get(file.endian());
        Ok(Library {
            path: path.to_owned(),
            machine,
            soname: soname.map(text),
            exports,
            data,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// The name by which the dynamic linker knows the library, `DT_SONAME`.
    pub fn soname(&self) -> Option<&str> {
        self.soname.as_deref()
    }

    /// Whether the library exports `symbol`.
    pub fn exports(&self, symbol: &str) -> bool {
        self.export(symbol).is_some()
    }

    /// The last of the exports with this name.
    fn export(&self, symbol: &str) -> Option<&Export> {
        let end = self
            .exports
            .partition_point(|export| export.name.as_str() <= symbol);
        let last = self.exports[..end].last();
        last.filter(|export| export.name == symbol)
    }

    /// Names of the symbols that other libraries can bind to, sorted. A symbol with several
    /// versions is listed once for each version.
    pub fn visible_exports(&self) -> impl Iterator<Item = &str> {
        let visible = self.exports.iter().filter(|export| export.is_visible);
        visible.map(|export| export.name.as_str())
    }

    /// The name of the processor architecture, for messages.
    pub fn machine(&self) -> String {
        match self.machine {
            elf::EM_X86_64 => "x86-64".to_owned(),
            elf::EM_AARCH64 => "aarch64".to_owned(),
            other => format!("machine {}", other.0),
        }
    }

    /// Names of the libraries that the library needs, `DT_NEEDED`.
    ///
    /// # Errors
    /// [`ElfError::NotShared`] if the dynamic section is malformed.
    pub fn needed(&self) -> Result<Vec<String>, ElfError> {
        let read = || -> Result<Vec<String>, FileFault> {
            let file = self.file()?;
            let needed = file.import_libraries()?;
            needed.map(|library| Ok(text(library?.name()))).collect()
        };
        read().map_err(|fault| self.malformed(fault))
    }

    /// Versions of other libraries' symbols that the library binds to, such as `GLIBC_2.34`.
    ///
    /// # Errors
    /// [`ElfError::NotShared`] if the list of versions is malformed.
    pub fn versions(&self) -> Result<Vec<String>, ElfError> {
        let read = || -> Result<Vec<String>, FileFault> {
            let (file, data) = (self.file()?, self.data.as_slice());
            let (endian, sections) = (file.endian(), file.elf_section_table());
            let mut versions = Vec::new();
            if let Some((mut files, names)) = sections.gnu_verneed(endian, data)? {
                let names = sections.strings(endian, data, names)?;
                while let Some((_, mut needed)) = files.next()? {
                    while let Some(version) = needed.next()? {
                        versions.push(text(version.name(endian, names)?));
                    }
                }
            }
            Ok(versions)
        };
        read().map_err(|fault| self.malformed(fault))
    }

    /// Whether the file has a symbol table for debuggers.
    ///
    /// # Errors
    /// [`ElfError::NotShared`] if the file is malformed.
    pub fn has_symbol_table(&self) -> Result<bool, ElfError> {
        let file = self.file().map_err(|fault| self.malformed(fault))?;
        Ok(!file.elf_symbol_table().is_empty())
    }

    /// The text that begins with `words`, up to the next zero byte.
    pub fn line(&self, words: &str) -> Option<&str> {
        let start = find(&self.data, words.as_bytes())?;
        let rest = &self.data[start + words.len()..];
        let end = rest.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }

    /// The string constant that `function` returns. The function must do nothing else.
    ///
    /// Compilers translate such a function into an instruction that computes the string's address,
    /// and a return.
    ///
    /// # Errors
    /// [`ElfError::NoFunction`] if the library does not export the function,
    /// [`ElfError::NotAString`] if the function does something else, and [`ElfError::String`] if
    /// the string is not in the file.
    pub fn returned_string(&self, function: &str) -> Result<String, ElfError> {
        let address = self.export(function).and_then(|export| export.address);
        let address = address.ok_or_else(|| ElfError::NoFunction {
            path: self.path.clone(),
            function: function.to_owned(),
        })?;
        let code = self.bytes_at(address, FUNCTION_START)?;
        let string = match self.machine {
            elf::EM_X86_64 => x86_64_address(code, address),
            elf::EM_AARCH64 => aarch64_address(code, address),
            _ => None,
        };
        let string = string.ok_or_else(|| ElfError::NotAString {
            path: self.path.clone(),
            function: function.to_owned(),
        })?;
        let bytes = self.bytes_at(string, MAX_STRING_BYTES)?;
        let end = { bytes.iter().position(|&byte| byte == 0) }.ok_or(FileFault::Unterminated)?;
        let string = std::str::from_utf8(&bytes[..end]).map_err(FileFault::NotUtf8)?;
        Ok(string.to_owned())
    }

    /// The bytes at an address of the loaded library, `at_most` so many.
    fn bytes_at(&self, address: u64, at_most: usize) -> Result<&[u8], FileFault> {
        for section in self.file()?.sections() {
            if let Some(offset) = address.checked_sub(section.address())
                && offset < section.size()
            {
                let data = section.data()?;
                let data = usize::try_from(offset).ok().and_then(|at| data.get(at..));
                let data = data.ok_or(FileFault::ShortSection)?;
                return Ok(&data[..data.len().min(at_most)]);
            }
        }
        Err(FileFault::NoSection(address))
    }

    fn file(&self) -> Result<ElfFile64<'_, Endianness>, FileFault> {
        Ok(ElfFile64::parse(self.data.as_slice())?)
    }

    fn malformed(&self, source: FileFault) -> ElfError {
        ElfError::NotShared {
            path: self.path.clone(),
            source,
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_real_library_is_read() {
        // The C library is mapped into this very process; its path is in the kernel's list.
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
            .expect("the test program is linked to libc");
        let library = Library::read(Path::new(libc)).unwrap();
        assert_eq!(library.path(), Path::new(libc));
        assert_eq!(library.soname(), Some("libc.so.6"));
        assert!(library.exports("malloc") && !library.exports("ggml_version"));
        assert!(library.visible_exports().is_sorted());
        assert!(library.visible_exports().any(|name| name == "malloc"));
        // The name of a symbol version is no export.
        assert!(!library.exports("GLIBC_2.17"));
        let needed = library.needed().unwrap();
        assert!(
            needed.iter().any(|name| name.starts_with("ld-linux")),
            "{needed:?}"
        );
        let version = library.returned_string("gnu_get_libc_version").unwrap();
        assert!(version.starts_with("2."), "{version}");
        let error = library.returned_string("ggml_version").unwrap_err();
        assert!(matches!(error, ElfError::NoFunction { .. }), "{error}");
        let error = library.returned_string("malloc").unwrap_err();
        assert!(
            matches!(error, ElfError::NotAString { .. } | ElfError::String(_)),
            "{error}"
        );
    }

    #[test]
    fn symbol_versions_and_tables_of_this_program_are_read() {
        let own = Library::read(&std::env::current_exe().unwrap()).unwrap();
        let versions = own.versions().unwrap();
        assert!(
            versions.iter().any(|name| name.starts_with("GLIBC_2.")),
            "{versions:?}"
        );
        assert!(own.has_symbol_table().unwrap());
        // The words are a part of the text, so that they are in the file only once.
        let text = std::hint::black_box(c"a line of vgpu-elf: its end")
            .to_str()
            .unwrap();
        assert_eq!(own.line(&text[..20]), Some("its end"));
    }

    #[test]
    fn other_files_are_refused() {
        let error = Library::read(Path::new("/")).unwrap_err();
        assert!(matches!(error, ElfError::NotALibrary { .. }), "{error}");
        let error = Library::read(Path::new("/no such file")).unwrap_err();
        assert!(matches!(error, ElfError::Read { .. }), "{error}");
        let error = Library::read(Path::new("/proc/self/cmdline")).unwrap_err();
        assert!(error.to_string().contains("/proc/self/cmdline"), "{error}");
        assert!(error.source().is_some());
        assert!(Library::parse(Path::new("script"), b"#!/bin/sh\n".to_vec()).is_err());
    }
}
