//! Memory that the allocator of the C library keeps after it was freed.

/// Blocks from this size on are mapped, and given back to the kernel when they are freed. What is
/// free at the end of a heap is given back from the same size on.
#[cfg(feature = "server")]
const MAPPED_FROM: libc::c_int = 1 << 20;

/// Heaps at most, which threads share. Each keeps free blocks between those in use.
#[cfg(feature = "server")]
const MAX_HEAPS: libc::c_int = 4;

/// Limits what the allocator keeps of freed memory, for a process that serves guests: call it once,
/// early. By default glibc raises the size from which it maps blocks to that of the largest block
/// that was freed, up to 32 MiB, and then keeps up to 64 MiB at the end of each of eight heaps for
/// each processor, and what is free between blocks in use. No tenant is charged for these.
#[cfg(feature = "server")]
pub fn limit_kept_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_MMAP_THRESHOLD, MAPPED_FROM),
        (libc::M_TRIM_THRESHOLD, MAPPED_FROM),
        (libc::M_ARENA_MAX, MAX_HEAPS),
    ] {
        // SAFETY: the function takes two integers, and locks the allocator. The function refuses no
        // value of this size.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives the freed memory of all threads back to the kernel. The allocator would keep most of the
/// memory of graphs for later allocations, and no tenant is charged for it. Takes some milliseconds
/// for a heap of some hundred MiB. Inside the plugin it does nothing: the heap is the program's.
pub(crate) fn trim() {
    #[cfg(all(feature = "server", target_env = "gnu"))]
    // SAFETY: the function takes no pointer, locks each arena of the allocator, and moves no memory
    // that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, feature = "server", target_env = "gnu"))]
mod tests {
    use std::hint::black_box;
    use std::process::Command;
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Set in the process of the test that allocates: `limited` or `unlimited`.
    const CHILD: &str = "VGPU_TEST_KEPT_MEMORY";

    /// Resident anonymous memory of this process, in KiB.
    fn resident() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let number = line.unwrap().split_whitespace().next().unwrap();
        number.parse().unwrap()
    }

    /// Frees what a guest over TCP may have queued, and prints by how many KiB the process is then
    /// larger than before.
    fn allocate_and_free() {
        if std::env::var(CHILD).unwrap() == "limited" {
            limit_kept_memory();
        }
        // The first block of this size that is freed raises glibc's threshold.
        drop(black_box(vec![1_u8; 16 << 20]));
        let before = resident();
        let queues = black_box(vec![1_u8; 12 << 20]);
        // A session that goes on has a block behind it.
        let other = black_box(vec![1_u8; 1000]);
        drop(queues);
        println!("kept: {}", resident().saturating_sub(before));
        drop(other);
        println!("heaps: {}", heaps_of_threads(24));
    }

    /// Heaps besides the first one while so many threads have memory.
    fn heaps_of_threads(threads: usize) -> usize {
        let barrier = Barrier::new(threads + 1);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let kept = black_box(vec![1_u8; 1000]);
                    barrier.wait();
                    barrier.wait();
                    drop(kept);
                });
            }
            barrier.wait();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            barrier.wait();
            // glibc aligns these heaps to their greatest size.
            let is_heap = |line: &&str| {
                let start = line.split('-').next().unwrap();
                let start = u64::from_str_radix(start, 16).unwrap();
                start.is_multiple_of(64 << 20) && line.contains(" rw-p 00000000 00:00 0")
            };
            maps.lines().filter(is_heap).count()
        })
    }

    #[test]
    fn freed_memory_is_given_back_to_the_kernel() {
        if std::env::var_os(CHILD).is_some() {
            return allocate_and_free();
        }
        let found = |way| -> [u64; 2] {
            let name = "heap::tests::freed_memory_is_given_back_to_the_kernel";
            let mut child = Command::new(std::env::current_exe().unwrap());
            let child = child.args([name, "--exact", "--nocapture"]);
            let output = child.env(CHILD, way).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let text = String::from_utf8(output.stdout).unwrap();
            ["kept: ", "heaps: "].map(|what| {
                let number = text.split(what).nth(1).and_then(|rest| rest.lines().next());
                number.unwrap().parse().unwrap()
            })
        };
        // Otherwise the test would see nothing.
        let [kept, heaps] = found("unlimited");
        assert!(kept > 11 << 10 && heaps > 6, "{kept} KiB, {heaps} heaps");
        let [kept, heaps] = found("limited");
        assert!(kept < 1 << 10, "{kept} KiB");
        assert!(heaps < 4, "{heaps} heaps");
    }
}
