//! The resources of a process as Linux reports them: memory, descriptors, threads.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Bytes of resident memory that may be added without a leak, since allocators keep freed memory.
/// A leaked model is 38 MiB; a leaked window is 2 MiB in each of hundreds of rounds.
const SLACK: u64 = 24 << 20;

/// Mappings that may be added without a leak, for the same reason. A leaked window or buffer is one
/// in each round.
const MAPPINGS_SLACK: usize = 64;

/// The resources of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResourceUsage {
    /// Resident bytes, shared memory included.
    pub(super) resident: u64,
    /// Bytes of address space in use. Not compared, since allocators keep their mappings.
    pub(super) mapped: u64,
    pub(super) descriptors: usize,
    /// Ranges of the address space.
    pub(super) mappings: usize,
    /// Shared memory files, open or mapped.
    pub(super) memory_files: usize,
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
        memory_files += maps.lines().filter(|line| line.contains("memfd:")).count();
        Ok(ResourceUsage {
            resident: field("VmRSS:")? << 10,
            mapped: field("VmSize:")? << 10,
            descriptors,
            mappings: maps.lines().count(),
            memory_files,
            threads: field("Threads:")?,
        })
    }

    /// A description of the difference if the process holds more than `before`. Resident memory may
    /// grow by [`SLACK`], the mappings by [`MAPPINGS_SLACK`].
    fn excess(&self, before: &ResourceUsage) -> Option<String> {
        let is_more = self.resident > before.resident + SLACK
            || self.descriptors > before.descriptors
            || self.mappings > before.mappings + MAPPINGS_SLACK
            || self.memory_files > before.memory_files
            || self.threads > before.threads;
        is_more.then(|| format!("{self}; before: {before}"))
    }
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} MiB, {} descriptors, {} mappings, {} memory files, {} threads",
            self.resident as f64 / f64::from(1 << 20),
            self.descriptors,
            self.mappings,
            self.memory_files,
            self.threads
        )
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
