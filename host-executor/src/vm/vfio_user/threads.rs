//! The two threads that serve a hypervisor, and their end.
//!
//! One thread runs the server of the `vfio_user` crate, the other one the [filter] in front of the
//! server. A thread waits only in calls on two sockets: the one to the hypervisor, and the one
//! between the filter and the server. Shutting both down ends all of these calls.
#![forbid(unsafe_code)]

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::dispatcher::{Dispatch, with_default};
use vfio_user::Server;

use super::connections::Connection;
use super::device::Function;
use super::filter;
use super::regions::{interrupts, regions};
use crate::vm::machine_log::MachineLog;

/// The device that the threads serve.
pub(super) struct Device {
    pub(super) function: Function,
    /// The file of the window.
    pub(super) file: OwnedFd,
    /// Bytes of the window.
    pub(super) window: usize,
}

/// The threads of one hypervisor. They end when the hypervisor disconnects or is
/// [disconnected](HypervisorThreads::disconnect), and not when this value is dropped: sessions of a
/// machine whose listener is closed go on.
pub(super) struct HypervisorThreads {
    sockets: Arc<Sockets>,
    threads: [JoinHandle<()>; 2],
    /// Each thread has a sender, and drops it at its end. Nothing is sent.
    ended: Receiver<()>,
}

/// The sockets between which the filter passes messages on.
struct Sockets {
    hypervisor: UnixStream,
    device: UnixStream,
}

impl Sockets {
    /// Shuts the sockets down for all their copies.
    fn shut_down(&self) {
        for socket in [&self.hypervisor, &self.device] {
            // Fails if the other end is closed.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Shuts the sockets down when it is dropped, for whatever reason.
struct ShutDown<'a>(&'a Sockets);

impl Drop for ShutDown<'_> {
    fn drop(&mut self) {
        self.0.shut_down();
    }
}

impl HypervisorThreads {
    /// Starts the threads, which serve `device` to `hypervisor`.
    ///
    /// # Errors
    /// A thread cannot be started. Then none is left.
    pub(super) fn start(
        hypervisor: UnixStream,
        connection: Connection,
        device: Device,
        log: &Arc<MachineLog>,
    ) -> io::Result<HypervisorThreads> {
        let (near, listener) = connection;
        let sockets = Arc::new(Sockets {
            hypervisor,
            device: near,
        });
        let (alive, ended) = mpsc::channel::<()>();
        let server = thread::Builder::new()
            .name("vgpu-vfio-user".into())
            .spawn({
                let (alive, log) = (alive.clone(), Arc::clone(log));
                move || {
                    let _alive = alive;
                    run_server(device, listener, &log);
                }
            })?;
        let filter = thread::Builder::new()
            .name("vgpu-vfio-filter".into())
            .spawn({
                let (sockets, log) = (Arc::clone(&sockets), Arc::clone(log));
                move || {
                    let _alive = alive;
                    run_filter(&sockets, &log);
                }
            });
        let filter = match filter {
            Ok(filter) => filter,
            Err(error) => {
                // No message has reached the server, which ends at once without a filter.
                sockets.shut_down();
                // A panic of the server has been logged.
                let _ = server.join();
                return Err(error);
            }
        };
        Ok(HypervisorThreads {
            sockets,
            threads: [server, filter],
            ended,
        })
    }

    /// Disconnects the hypervisor, also one that keeps its end of the socket open. The threads end
    /// soon, whatever they wait for.
    pub(super) fn disconnect(&self) {
        self.sockets.shut_down();
    }

    /// Waits up to `timeout` for the end of both threads. Returns the value if one of them still
    /// runs.
    pub(super) fn join(self, timeout: Duration) -> Option<HypervisorThreads> {
        if self.ended.recv_timeout(timeout) != Err(RecvTimeoutError::Disconnected) {
            return Some(self);
        }
        for thread in self.threads {
            // The thread has nothing left to do. A panic has been logged.
            let _ = thread.join();
        }
        None
    }
}

fn run_server(device: Device, listener: UnixListener, log: &MachineLog) {
    let Device {
        mut function,
        file,
        window,
    } = device;
    let regions = regions(window, file.as_raw_fd());
    let server = Server::from_owned_fd(listener.into(), true, interrupts(), regions);
    // The crate logs each connection, and each message that the server refuses: as many lines as a
    // hypervisor likes. Lines of this thread are therefore discarded meanwhile.
    let run = || with_default(&Dispatch::none(), || server.run(&mut function));
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log.info(format_args!("the device has ended: {error}")),
        Err(_) => log.warn("the device panicked: the hypervisor broke the protocol"),
    }
    drop(server);
    drop(file); // the server refers to the file by its number until here
}

fn run_filter(sockets: &Sockets, log: &MachineLog) {
    let _end = ShutDown(sockets);
    let (hypervisor, device) = (&sockets.hypervisor, &sockets.device);
    if let Err(error) = filter::run(hypervisor, device, filter::WRITE_TIMEOUT) {
        log.warn(format_args!("the hypervisor is disconnected: {error}"));
    }
}
