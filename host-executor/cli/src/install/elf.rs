//! Reads a shared library from its file, without loading it or running its code.
//!
//! `xtask/common/src/elf.rs` reads libraries too. The command must not depend on xtask, and a crate
//! below both would hold a dozen lines around `object`: the SONAME and the names of the exports.
//! The rest differs. This module reads addresses and code; xtask's module reads versions,
//! visibility and the libraries that a library needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use object::elf;
use object::read::ExportTarget;
use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSection as _};

/// The plugin's file name.
pub(super) const PLUGIN: &str = "libggml-vgpu.so";

/// The largest library that is read into memory, far larger than any ggml.
const MAX_LIBRARY_BYTES: u64 = 1 << 30;
/// How many bytes of a function are searched for the instruction that loads its result.
const FUNCTION_START: usize = 32;

/// A shared library's file.
#[derive(Debug)]
pub(crate) struct Library {
    path: PathBuf,
    data: Vec<u8>,
    machine: elf::Machine,
    soname: Option<String>,
    /// Exported symbols, with the addresses of functions and data.
    exports: BTreeMap<String, Option<u64>>,
}

impl Library {
    pub(crate) fn read(path: &Path) -> Result<Library> {
        let file =
            std::fs::metadata(path).with_context(|| format!("reading {}", path.display()))?;
        ensure!(
            file.is_file() && file.len() <= MAX_LIBRARY_BYTES,
            "{} is not a library: it has {} bytes, or is not a file",
            path.display(),
            file.len()
        );
        let data = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        Library::parse(path, data)
            .with_context(|| format!("{} is not a shared library", path.display()))
    }

    fn parse(path: &Path, data: Vec<u8>) -> Result<Library> {
        let file = ElfFile64::<Endianness>::parse(data.as_slice())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let dynamic = file.elf_dynamic_table()?;
        ensure!(!dynamic.is_empty(), "the library has no dynamic section");
        let soname = dynamic.iter().find(|entry| entry.tag == elf::DT_SONAME);
        let soname = soname.map(|entry| dynamic.string(entry)).transpose()?;
        let mut exports = BTreeMap::new();
        for export in file.exports()? {
            let export = export?;
            let address = match export.target() {
                // The name of a symbol version.
                ExportTarget::Absolute { .. } => continue,
                ExportTarget::Address { address } => Some(address),
                _ => None,
            };
            if let Some(name) = export.name().into_name() {
                exports.insert(text(name), address);
            }
        }
        let machine = file.elf_header().e_machine.get(file.endian());
        Ok(Library {
            path: path.to_owned(),
            machine,
            soname: soname.map(text),
            exports,
            data,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }

    /// The name by which the dynamic linker knows the library (SONAME).
    pub(crate) fn soname(&self) -> Option<&str> {
        self.soname.as_deref()
    }

    /// Whether the library exports `symbol`.
    pub(crate) fn exports(&self, symbol: &str) -> bool {
        self.exports.contains_key(symbol)
    }

    /// The name of the processor architecture, for messages.
    pub(crate) fn machine(&self) -> String {
        match self.machine {
            elf::EM_X86_64 => "x86-64".to_owned(),
            elf::EM_AARCH64 => "aarch64".to_owned(),
            other => format!("machine {}", other.0),
        }
    }

    /// The text that begins with `words`, up to the next zero byte.
    pub(crate) fn line(&self, words: &str) -> Option<&str> {
        let start = find(&self.data, words.as_bytes())?;
        let rest = &self.data[start + words.len()..];
        let end = rest.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }

    /// The string constant that `function` returns. The function must do nothing else.
    ///
    /// Compilers translate such a function into an instruction that computes the string's address,
    /// and a return.
    pub(crate) fn returned_string(&self, function: &str) -> Result<String> {
        let file = ElfFile64::<Endianness>::parse(self.data.as_slice())?;
        let address = { self.exports.get(function).copied().flatten() }
            .with_context(|| format!("{} has no {function}", self.path.display()))?;
        let bytes = |address: u64, at_most: usize| -> Result<&[u8]> {
            for section in file.sections() {
                if let Some(offset) = address.checked_sub(section.address())
                    && offset < section.size()
                {
                    let data = section.data()?;
                    let data = usize::try_from(offset).ok().and_then(|at| data.get(at..));
                    let data = data.context("a section is shorter than its header says")?;
                    return Ok(&data[..data.len().min(at_most)]);
                }
            }
            bail!("address {address:#x} is in none of the sections")
        };
        let code = bytes(address, FUNCTION_START)?;
        let string = match self.machine {
            elf::EM_X86_64 => x86_64_address(code, address),
            elf::EM_AARCH64 => aarch64_address(code, address),
            _ => None,
        };
        let string = string.with_context(|| {
            format!(
                "{function} in {} does not return a string constant",
                self.path.display()
            )
        })?;
        let text = bytes(string, 256)?;
        let end = text
            .iter()
            .position(|&byte| byte == 0)
            .context("the string is not terminated")?;
        Ok(std::str::from_utf8(&text[..end])
            .context("the string is not UTF-8")?
            .to_owned())
    }
}

/// The address computed by `lea DISPLACEMENT(%rip), %rax`.
fn x86_64_address(code: &[u8], start: u64) -> Option<u64> {
    let at = find(code, &[0x48, 0x8d, 0x05])?;
    let displacement = i32::from_le_bytes(code.get(at + 3..at + 7)?.try_into().ok()?);
    // Relative to the next instruction.
    start
        .checked_add(at as u64 + 7)?
        .checked_add_signed(displacement.into())
}

/// The address computed by `adrp x0, PAGE; add x0, x0, #OFFSET`.
fn aarch64_address(code: &[u8], start: u64) -> Option<u64> {
    let words: Vec<u32> = code
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    let at = words
        .iter()
        .position(|word| word & 0x9f00_001f == 0x9000_0000)?;
    let adrp = words[at];
    let pages = i64::from(adrp >> 5 & 0x7_ffff) << 2 | i64::from(adrp >> 29 & 3);
    let pages = pages << 43 >> 43; // 21 bits, signed
    let page = (start.checked_add(4 * at as u64)? & !0xfff).checked_add_signed(pages << 12)?;
    let add = words[at + 1..]
        .iter()
        .find(|word| *word & 0xffc0_03ff == 0x9100_0000)?;
    page.checked_add(u64::from(add >> 10 & 0xfff))
}

fn find(data: &[u8], what: &[u8]) -> Option<usize> {
    let first = *what.first()?;
    let mut from = 0;
    while let Some(at) = data[from..].iter().position(|&byte| byte == first) {
        let at = from + at;
        if data[at..].starts_with(what) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_that_load_an_address_are_read() {
        // endbr64; lea 0x100(%rip), %rax; ret
        let code = [0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x8d, 0x05, 0, 1, 0, 0, 0xc3];
        assert_eq!(x86_64_address(&code, 0x1000), Some(0x1000 + 11 + 0x100));
        let back = [0x48, 0x8d, 0x05, 0xf0, 0xff, 0xff, 0xff, 0xc3];
        assert_eq!(x86_64_address(&back, 0x1000), Some(0x1000 + 7 - 16));
        assert_eq!(x86_64_address(&[0xc3; 16], 0x1000), None);
        assert_eq!(x86_64_address(&code[..8], 0x1000), None, "cut off");

        let words = |words: &[u32]| {
            words
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        // adrp x0, . + 2 pages; add x0, x0, #0x123; ret
        let code = words(&[0xd000_0000, 0x9104_8c00, 0xd65f_03c0]);
        assert_eq!(aarch64_address(&code, 0x5678), Some(0x7123));
        // adrp x0, . - 1 page
        let code = words(&[0xd503_245f, 0xf0ff_ffe0, 0x9100_0400]);
        assert_eq!(aarch64_address(&code, 0x5678), Some(0x4001));
        assert_eq!(aarch64_address(&words(&[0xd65f_03c0]), 0), None);
    }

    #[test]
    fn a_real_library_is_read_and_other_files_are_refused() {
        let libc =
            std::fs::read_to_string("/proc/self/maps").expect("the mappings of this process");
        let libc = libc
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
            .expect("the test program is linked to libc");
        let library = Library::read(Path::new(libc)).expect("a library");
        assert_eq!(library.soname(), Some("libc.so.6"));
        assert!(library.exports("malloc") && !library.exports("ggml_version"));
        let version = library
            .returned_string("gnu_get_libc_version")
            .expect("it returns a string");
        assert!(version.starts_with("2."), "{version}");

        let error = Library::read(Path::new("/proc/self/cmdline")).expect_err("no library");
        assert!(
            format!("{error:#}").contains("/proc/self/cmdline"),
            "{error:#}"
        );
        assert!(Library::read(Path::new("/")).is_err());
    }
}
