//! Reads how busy, full and hot the GPU of the engine is, on a thread that nobody waits for.
//!
//! The figures come from a library of the driver, whose calls may hang as any call of a driver.
//! Status and metrics get what was read last, with its age.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;
use vgpu_transport::lock::{lock, wait_timeout_while};

#[cfg(feature = "cuda")]
use crate::engine::AddressError;
use crate::log_limit::LogLimit;
use crate::status::GpuStatus;

/// How often the GPU is asked.
const PERIOD: Duration = Duration::from_secs(1);

/// Figures that are older say nothing of now: the driver hangs, or the process was stopped.
const MAX_AGE: Duration = Duration::from_secs(10);

/// How long after a refusal NVML is opened again.
#[cfg(feature = "cuda")]
const RETRY: Duration = Duration::from_secs(60);

/// Lines in 10 s about figures that are missing.
const LINES: u64 = 5;

/// What is read of a GPU: without its age, which [`GpuMonitor::status`] adds.
type Read = dyn FnMut() -> GpuStatus + Send;

/// The figures that were read last.
#[derive(Debug)]
pub(crate) struct GpuMonitor {
    state: Mutex<GpuMonitorState>,
    /// Notified when `is_over` is set.
    ended: Condvar,
}

#[derive(Debug)]
struct GpuMonitorState {
    last: Option<(GpuStatus, Instant)>,
    /// Since when the first answer has been waited for.
    since: Instant,
    is_over: bool,
}

impl GpuMonitor {
    /// Starts the thread that calls `read` once a second, until the returned object is dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(mut read: Box<Read>) -> io::Result<GpuWatch> {
        let monitor = Arc::new(GpuMonitor {
            state: Mutex::new(GpuMonitorState {
                last: None,
                since: Instant::now(),
                is_over: false,
            }),
            ended: Condvar::new(),
        });
        let own = Arc::clone(&monitor);
        thread::Builder::new()
            .name("vgpu-gpu".into())
            .spawn(move || own.ask(&mut *read))?;
        Ok(GpuWatch(monitor))
    }

    /// The GPU of the CUDA engine, whose PCI address `find` returns. Calls `find` on the thread,
    /// and again after a refusal.
    ///
    /// # Errors
    /// No thread can be started.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_cuda(
        mut find: impl FnMut() -> Result<String, AddressError> + Send + 'static,
    ) -> io::Result<GpuWatch> {
        use vgpu_cuda::nvml::Nvml;

        let mut address = String::new();
        let mut opened = None;
        let mut refused = String::new();
        let mut next_try = Instant::now();
        GpuMonitor::start(Box::new(move || {
            if opened.is_none() && Instant::now() >= next_try {
                let found = match address.is_empty() {
                    true => find(),
                    false => Ok(address.clone()),
                };
                match found.map(|found| {
                    address = found;
                    Nvml::open(&address)
                }) {
                    Ok(Ok(nvml)) => opened = Some(nvml),
                    Ok(Err(error)) => refused = error.to_string(),
                    Err(error) => refused = error.to_string(),
                }
                next_try = Instant::now() + RETRY;
            }
            match &opened {
                Some(nvml) => {
                    let read = figures(&address, nvml.read());
                    // The GPU may have been reset: its old handle is of no use.
                    if read.is_empty() {
                        opened = None;
                        refused = read.missing.join("; ");
                    }
                    read
                }
                None => GpuStatus {
                    address: address.clone(),
                    missing: vec![refused.clone()],
                    ..GpuStatus::default()
                },
            }
        }))
    }

    /// The figures that were read last. Old ones are left out, and the reason says so.
    fn status(&self) -> Option<GpuStatus> {
        let state = lock(&self.state);
        let (mut status, at) = match &state.last {
            Some((status, at)) => (status.clone(), *at),
            None if state.since.elapsed() < MAX_AGE => return None,
            None => (GpuStatus::default(), state.since),
        };
        drop(state);
        let age = at.elapsed();
        if age >= MAX_AGE {
            status = GpuStatus {
                address: status.address,
                missing: vec![format!(
                    "the driver has not answered for {} s",
                    age.as_secs()
                )],
                ..GpuStatus::default()
            };
        }
        status.age = age.as_secs_f64();
        Some(status)
    }

    fn ask(&self, read: &mut Read) {
        let mut logged = Vec::new();
        let limit = LogLimit::new(LINES);
        loop {
            let status = read();
            for reason in &status.missing {
                // A figure may be missing every other time.
                if !logged.contains(reason) && limit.passes(Instant::now()) {
                    warn!(
                        "a figure of the GPU {} is missing: {reason}",
                        status.address
                    );
                }
            }
            logged.clone_from(&status.missing);
            let mut state = lock(&self.state);
            state.last = Some((status, Instant::now()));
            let goes_on = |state: &mut GpuMonitorState| !state.is_over;
            state = wait_timeout_while(&self.ended, state, PERIOD, goes_on);
            if state.is_over {
                return;
            }
        }
    }
}

/// What NVML has answered, with each reason once.
#[cfg(feature = "cuda")]
fn figures(address: &str, reading: vgpu_cuda::nvml::Reading) -> GpuStatus {
    use vgpu_cuda::nvml::{NvmlError, Reading};

    fn known<T>(figure: Result<T, NvmlError>, missing: &mut Vec<String>) -> Option<T> {
        let reason = match figure {
            Ok(figure) => return Some(figure),
            Err(error) => error.to_string(),
        };
        if !missing.contains(&reason) {
            missing.push(reason);
        }
        None
    }

    let Reading {
        busy,
        memory,
        temperature,
        power,
    } = reading;
    let mut missing = Vec::new();
    let memory = known(memory, &mut missing);
    GpuStatus {
        address: address.to_owned(),
        busy: known(busy, &mut missing),
        memory_used: memory.map(|(used, _)| used),
        memory_total: memory.map(|(_, total)| total),
        temperature: known(temperature, &mut missing),
        power: known(power, &mut missing),
        missing,
        age: 0.0,
    }
}

/// Reads the figures for as long as it exists.
#[derive(Debug)]
pub(crate) struct GpuWatch(Arc<GpuMonitor>);

impl GpuWatch {
    /// The figures that were read last. `None`: none yet.
    pub(crate) fn status(&self) -> Option<GpuStatus> {
        self.0.status()
    }
}

impl Drop for GpuWatch {
    /// Does not wait for the thread, which may hang in the driver.
    fn drop(&mut self) {
        lock(&self.0.state).is_over = true;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn status(power: f64) -> GpuStatus {
        GpuStatus {
            address: "0000:01:00.0".into(),
            power: Some(power),
            ..GpuStatus::default()
        }
    }

    fn with(last: Option<GpuStatus>, ago: Duration) -> GpuMonitor {
        let at = Instant::now().checked_sub(ago).expect("the clock is old");
        GpuMonitor {
            state: Mutex::new(GpuMonitorState {
                last: last.map(|status| (status, at)),
                since: at,
                is_over: false,
            }),
            ended: Condvar::new(),
        }
    }

    #[test]
    fn old_figures_are_not_shown_as_present_ones() {
        let fresh = with(Some(status(7.0)), Duration::ZERO).status();
        assert_eq!(fresh.expect("figures").power, Some(7.0));
        assert_eq!(with(None, Duration::ZERO).status(), None);
        for last in [Some(status(7.0)), None] {
            let old = with(last, MAX_AGE).status().expect("a reason");
            assert_eq!((old.power, old.busy), (None, None));
            let reason = "the driver has not answered for 10 s";
            assert_eq!(old.missing, [reason]);
            assert!(old.age >= 10.0, "{}", old.age);
        }
    }

    #[test]
    fn figures_are_read_until_nobody_wants_them() {
        let (sender, reads) = mpsc::channel();
        let watch = GpuMonitor::start(Box::new(move || {
            let _ = sender.send(());
            status(3.0)
        }));
        let watch = watch.expect("a thread");
        let limit = Duration::from_secs(60);
        reads.recv_timeout(limit).expect("a first read");
        reads.recv_timeout(limit).expect("a second read");
        assert_eq!(watch.status().expect("figures").power, Some(3.0));
        drop(watch);
        // The thread ends, and drops its end of the channel.
        let end = loop {
            if let Err(end) = reads.recv_timeout(limit) {
                break end;
            }
        };
        assert_eq!(end, mpsc::RecvTimeoutError::Disconnected);
    }
}
