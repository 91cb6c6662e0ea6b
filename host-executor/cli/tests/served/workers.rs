//! The workers of a `vgpu serve --isolate`.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use vgpu_transport::wire::Reply;

use super::{Scratch, Serve};
use crate::common::{Guest, TIMEOUT};

/// The workers of a supervisor, by the number of their first session, once there are `count` of
/// them.
pub(crate) fn workers(serve: &Serve, count: usize) -> BTreeMap<u64, Pid> {
    let start = Instant::now();
    loop {
        let found: BTreeMap<u64, Pid> = children(serve.child.id())
            .into_iter()
            .filter_map(|pid| {
                let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
                let session = line
                    .split('\0')
                    .find_map(|word| word.strip_prefix("--worker="))?;
                Some((session.parse().ok()?, Pid::from_raw(pid)?))
            })
            .collect();
        if found.len() == count {
            return found;
        }
        assert!(
            start.elapsed() < TIMEOUT,
            "{found:?} instead of {count} workers"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn children(pid: u32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process is there");
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .map(|pid| pid.parse().expect("a number"))
                .collect::<Vec<i32>>()
        })
        .collect()
}

/// A guest that has sent HELLO, and the number of its session.
pub(crate) fn guest(serve: &Serve, scratch: &Scratch) -> (Guest, u64) {
    let mut guest = serve.connect(&scratch.socket());
    match guest.hello() {
        Reply::Welcome { session, .. } => (guest, session),
        other => panic!("{other:?}"),
    }
}
