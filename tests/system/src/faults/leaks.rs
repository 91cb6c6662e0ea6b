//! The resources of a process as Linux reports them: memory, descriptors, threads.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use xtask_common::process;
use xtask_common::workspace;

/// Bytes of anonymous memory that may be added without a leak: the C library keeps freed memory, in
/// up to eight arenas for each processor. A leaked model is 38 MiB. [`HeapCounts`] has no such
/// slack.
const SLACK: u64 = 24 << 20;

/// Bytes of the heap that may be added without a leak: a limited number of past tenants and hashes,
/// and tables that have room for twice as much. docs/life-events.md has the figures.
const HEAP_SLACK: i64 = 256 << 10;

/// Bytes of the heap that a link over TCP keeps: a queue for each direction, which holds 8 MiB
/// (`HIGH_WATER` in `transport/src/link/stream/framing.rs`).
pub(super) const TCP_QUEUES: i64 = 2 * (8 << 20);

/// Mappings that may be added without a leak, for the same reason. A leaked window or buffer is one
/// in each round.
const MAPPINGS_SLACK: usize = 64;

/// Bytes of mapped memory files that may be added without a leak: of each slot of a virtual
/// machine the executor keeps a page with the last program's heartbeat. A leaked window has 8 MiB.
const MAPPED_SLACK: u64 = 64 << 10;

/// The resources of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResourceUsage {
    /// Resident bytes of anonymous memory. The pages of programs and libraries are the kernel's to
    /// drop, and what is resident of shared memory depends on what was last sent through a window:
    /// shared memory is compared as [`memory_files`](ResourceUsage::memory_files).
    pub(super) anonymous: u64,
    /// Resident bytes of shared memory. Not compared.
    pub(super) shared: u64,
    /// Bytes of address space in use. Not compared, since allocators keep their mappings.
    pub(super) mapped: u64,
    pub(super) descriptors: usize,
    /// Ranges of the address space.
    pub(super) mappings: usize,
    /// Shared memory files: open ones, and those with a mapping.
    pub(super) memory_files: usize,
    /// Bytes of the mappings of shared memory files. The kernel joins mappings of neighbouring
    /// parts of a file, such as of two slots of a virtual machine, so their number says nothing.
    pub(super) memory_files_mapped: u64,
    pub(super) threads: u64,
}

impl ResourceUsage {
    pub(super) fn of(pid: u32) -> Result<ResourceUsage> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .context("reading a process's status")?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|number| number.parse().ok())
                .with_context(|| format!("no {name} in a process's status"))
        };
        let (mut descriptors, mut memory_files) = (0, 0);
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))
            .context("reading a process's descriptors")?
        {
            let entry = entry.context("reading a process's descriptors")?;
            descriptors += 1;
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            memory_files += usize::from(target.to_string_lossy().contains("memfd:"));
        }
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
            .context("reading a process's mappings")?;
        let (mapped_files, memory_files_mapped) = memory_files_in(&maps);
        memory_files += mapped_files;
        Ok(ResourceUsage {
            anonymous: field("RssAnon:")? << 10,
            shared: field("RssShmem:")? << 10,
            mapped: field("VmSize:")? << 10,
            descriptors,
            mappings: maps.lines().count(),
            memory_files,
            memory_files_mapped,
            threads: field("Threads:")?,
        })
    }

    /// A description of the difference if the process holds more than `before`. Anonymous memory
    /// may grow by [`SLACK`], the mappings by [`MAPPINGS_SLACK`].
    fn excess(&self, before: &ResourceUsage) -> Option<String> {
        let is_more = self.anonymous > before.anonymous + SLACK
            || self.descriptors > before.descriptors
            || self.mappings > before.mappings + MAPPINGS_SLACK
            || self.memory_files > before.memory_files
            || self.memory_files_mapped > before.memory_files_mapped + MAPPED_SLACK
            || self.threads > before.threads;
        is_more.then(|| format!("{self}; before: {before}"))
    }
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} MiB anonymous, {:.1} MiB shared, {} descriptors, {} mappings, {} memory files \
             with {:.1} MiB mapped, {} threads",
            mib(self.anonymous),
            mib(self.shared),
            self.descriptors,
            self.mappings,
            self.memory_files,
            mib(self.memory_files_mapped),
            self.threads
        )
    }
}

/// The shared memory files in the list of a process's mappings: how many, and the bytes of all
/// their mappings.
fn memory_files_in(maps: &str) -> (usize, u64) {
    let (mut files, mut bytes) = (BTreeSet::new(), 0);
    // Such as `7f0000000000-7f0000001000 rw-s 00000000 00:01 17   /memfd:vgpu-window (deleted)`.
    for line in maps.lines().filter(|line| line.contains("memfd:")) {
        let mut words = line.split_whitespace();
        let ends = words.next().and_then(|range| range.split_once('-'));
        if let Some((start, end)) = ends {
            let number = |hex| u64::from_str_radix(hex, 16).unwrap_or(0);
            bytes += number(end).saturating_sub(number(start));
        }
        // The device and the number of the file, after the rights and the offset.
        files.insert((words.nth(2), words.next()));
    }
    (files.len(), bytes)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// How many bytes processes hold in the heap of the C library, exactly: the counts of the preloaded
/// library `tests/programs/count_heap.c`.
#[derive(Debug)]
pub(super) struct HeapCounts {
    folder: PathBuf,
    library: PathBuf,
}

impl HeapCounts {
    /// Builds the library in `scratch`, where the counts will be.
    pub(super) fn build(scratch: &Path) -> Result<HeapCounts> {
        let (folder, library) = (scratch.join("heap"), scratch.join("count_heap.so"));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"])
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(format!("-DHEAP_COUNTS={folder:?}"))
            .arg(workspace::root().join("tests/programs/count_heap.c"));
        process::output(&mut cc)?;
        Ok(HeapCounts { folder, library })
    }

    /// The library to preload.
    pub(super) fn library(&self) -> &Path {
        &self.library
    }

    /// The bytes that a process with the library has allocated and not freed.
    pub(super) fn of(&self, pid: u32) -> Result<i64> {
        let file = self.folder.join(pid.to_string());
        let bytes = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let bytes = bytes.try_into().ok().context("no count of a heap")?;
        Ok(i64::from_ne_bytes(bytes))
    }

    /// Waits up to `timeout` until a process holds no more than `before`, but for the slack
    /// and `more` bytes. Returns the bytes above `before`.
    ///
    /// # Errors
    /// If the process holds more after `timeout`.
    pub(super) fn expect_no_more(
        &self,
        pid: u32,
        (before, more): (i64, i64),
        who: &str,
        timeout: Duration,
    ) -> Result<i64> {
        let started = Instant::now();
        loop {
            let now = self.of(pid)?;
            if now <= before + HEAP_SLACK + more {
                return Ok(now - before);
            }
            if started.elapsed() > timeout {
                bail!("{who} holds {now} bytes in its heap; before: {before}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Waits up to `timeout` until a process holds no more resources than `before`. The thread of a
/// session frees its resources some time after the guest has ended.
///
/// # Errors
/// If the process holds more after `timeout`.
pub(super) fn expect_no_more(
    pid: u32,
    before: &ResourceUsage,
    who: &str,
    timeout: Duration,
) -> Result<ResourceUsage> {
    let started = Instant::now();
    loop {
        let now = ResourceUsage::of(pid)?;
        match now.excess(before) {
            None => return Ok(now),
            Some(excess) if started.elapsed() > timeout => bail!("{who} holds {excess}"),
            Some(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_mappings_of_a_file_are_one_file_with_the_same_bytes() {
        let file = |range: &str, number: u32| {
            format!("{range} rw-s 00000000 00:01 {number}    /memfd:vgpu-window (deleted)\n")
        };
        let other = "7f0000000000-7f0000009000 r-xp 00000000 08:01 5    /usr/bin/vgpu\n";
        let joined = [&file("1000-3000", 7), &file("8000-9000", 8), other].concat();
        let apart = [&file("1000-2000", 7), &file("2000-3000", 7), other].concat();
        assert_eq!(memory_files_in(&joined), (2, 0x3000));
        assert_eq!(memory_files_in(&apart), (1, 0x2000));
    }
}
