//! Queries to the processes of virtual machines, over their control sockets.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::control::ControlError;

/// How long a process may take to answer.
pub(super) const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Queries all processes of virtual machines at once, so that those that do not answer cost
/// [`REPORT_TIMEOUT`] together. Returns each name with the answer.
pub(super) fn query_all<T: Send>(
    machines: &[(String, PathBuf)],
    query: impl Fn(&Path, Duration) -> Result<T, ControlError> + Sync,
) -> Vec<(String, Result<T, ControlError>)> {
    let query = &query;
    thread::scope(|scope| {
        let threads: Vec<_> = machines
            .iter()
            .map(|(name, control)| {
                let builder = thread::Builder::new().name("vgpu-query".into());
                (
                    name,
                    builder.spawn_scoped(scope, move || query(control, REPORT_TIMEOUT)),
                )
            })
            .collect();
        let answers = threads.into_iter().map(|(name, thread)| {
            let panicked = |_| Err(ControlError::Panicked);
            let answer = thread
                .map_err(ControlError::from)
                .and_then(|thread| thread.join().unwrap_or_else(panicked));
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
    fn machines_are_queried_at_once() {
        const COUNT: usize = 3;
        let machines: Vec<_> = (0..COUNT)
            .map(|i| (format!("vm{i}"), PathBuf::from(format!("/{i}"))))
            .collect();
        let (begun, changed) = (Mutex::new(0), Condvar::new());
        // Each answer comes when all queries have begun.
        let query = |path: &Path, _| {
            let mut begun = begun.lock().unwrap();
            *begun += 1;
            changed.notify_all();
            let limit = Duration::from_secs(10);
            let (_begun, waited) = { &changed }
                .wait_timeout_while(begun, limit, |begun| *begun < COUNT)
                .unwrap();
            match waited.timed_out() {
                true => Err(ControlError::Late { bytes: 0 }),
                false => Ok(path.to_owned()),
            }
        };
        let answers = query_all(&machines, query);
        assert_eq!(answers.len(), COUNT);
        for ((name, answer), (expected, path)) in answers.iter().zip(&machines) {
            assert_eq!((name, answer.as_ref().unwrap()), (expected, path));
        }
    }
}
