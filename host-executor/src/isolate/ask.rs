//! Questions to the processes of virtual machines, over their control sockets.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// How long the process of a virtual machine may take to answer.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Asks all processes of virtual machines at once, so that those that do not answer cost
/// [`REPORT_TIMEOUT`] together. Returns each name with the answer.
pub(super) fn ask_all<T: Send>(
    machines: &[(String, PathBuf)],
    ask: impl Fn(&Path, Duration) -> io::Result<T> + Sync,
) -> Vec<(String, io::Result<T>)> {
    let ask = &ask;
    thread::scope(|scope| {
        let asked: Vec<_> = machines
            .iter()
            .map(|(name, control)| {
                let builder = thread::Builder::new().name("vgpu-ask".into());
                (
                    name,
                    builder.spawn_scoped(scope, move || ask(control, REPORT_TIMEOUT)),
                )
            })
            .collect();
        let answers = asked.into_iter().map(|(name, thread)| {
            let panicked = |_| Err(io::Error::other("the asking thread panicked"));
            let answer = thread.and_then(|thread| thread.join().unwrap_or_else(panicked));
            (name.clone(), answer)
        });
        answers.collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    #[test]
    fn machines_are_asked_at_once() {
        const COUNT: usize = 3;
        let machines: Vec<_> = (0..COUNT)
            .map(|i| (format!("vm{i}"), PathBuf::from(format!("/{i}"))))
            .collect();
        let (asked, changed) = (Mutex::new(0), Condvar::new());
        // Each answer comes when all have been asked.
        let ask = |path: &Path, _| {
            let mut asked = asked.lock().unwrap();
            *asked += 1;
            changed.notify_all();
            let limit = Duration::from_secs(10);
            let (_asked, waited) = { &changed }
                .wait_timeout_while(asked, limit, |asked| *asked < COUNT)
                .unwrap();
            match waited.timed_out() {
                true => Err(io::Error::other("one after another")),
                false => Ok(path.to_owned()),
            }
        };
        let answers = ask_all(&machines, ask);
        assert_eq!(answers.len(), COUNT);
        for ((name, answer), (expected, path)) in answers.iter().zip(&machines) {
            assert_eq!((name, answer.as_ref().unwrap()), (expected, path));
        }
    }
}
