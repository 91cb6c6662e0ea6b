//! The filter between a hypervisor and the `vfio_user` crate: passes on only complete messages of
//! the right size, without files.
//!
//! The crate reads the structure of a command regardless of the size in the header, allocates as
//! much as a message asks for, and unwraps a string conversion. The filter reads each message
//! completely and checks it before the crate sees it. The files that a hypervisor sends (the
//! guest's memory) are closed: the device needs none.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use vgpu_transport::link::scm_rights;

/// Bytes of a message header: id, command, size, flags, error.
pub(super) const HEAD: usize = 16;

/// Largest access to a region in bytes.
const MAX_ACCESS: usize = 4096;

/// Longest capability string of a hypervisor in bytes.
const MAX_TEXT: usize = 4096;

/// How long a write waits for a side that takes no bytes. Hypervisors take each answer before they
/// send many more messages, and a socket has room for dozens of answers: also a hypervisor that is
/// stopped for longer, as by a debugger, does not let a write wait.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers with files in a connection. A hypervisor asks for the file of the window once or twice.
/// Files that it does not take stay in the kernel, which limits those of all processes of a user.
const MAX_FILES: usize = 16;

/// A hypervisor has asked for more files.
#[derive(Debug, thiserror::Error)]
#[error("the hypervisor has asked for the window more than {MAX_FILES} times")]
struct TooManyFiles;

/// A message of a hypervisor that the `vfio_user` crate cannot read. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum MessageError {
    #[error("a message of {size} bytes; the limits are {HEAD} and {most}")]
    Size { size: usize, most: usize },
    #[error("command {command} in {size} bytes instead of {wanted}")]
    CommandSize {
        command: u16,
        size: usize,
        wanted: usize,
    },
    #[error("command {command} before the version negotiation")]
    NotNegotiated { command: u16 },
    #[error("command {command} after the version negotiation")]
    NegotiatedTwice { command: u16 },
    #[error(
        "the capabilities are not a string of at most {MAX_TEXT} bytes with its only zero byte at \
         the end"
    )]
    Capabilities,
    #[error("an access to {count} bytes of a region; at most {MAX_ACCESS}")]
    Access { count: usize },
    #[error("command {command} is not supported")]
    Command { command: u16 },
    #[error("the device's answer of {size} bytes announces migration in an unknown form")]
    Migration { size: usize },
}

/// A side that takes no bytes.
#[derive(Debug, thiserror::Error)]
#[error("{side} takes no bytes: a write has waited for longer than the timeout")]
struct WriteTimedOut {
    side: &'static str,
}

/// The sides, as an error names them.
const HYPERVISOR: &str = "the hypervisor";
const DEVICE: &str = "the device";

/// Passes messages on until one side disconnects, takes no bytes for `write_timeout`, or the
/// hypervisor breaks the protocol.
///
/// # Errors
/// The sockets, a write that has timed out, or a message that breaks the protocol.
pub(super) fn run(
    hypervisor: &UnixStream,
    device: &UnixStream,
    write_timeout: Duration,
) -> io::Result<()> {
    hypervisor.set_nonblocking(false)?;
    for side in [hypervisor, device] {
        side.set_write_timeout(Some(write_timeout))?;
    }
    let mut is_negotiated = false;
    let mut files = 0;
    loop {
        let mut fds = [
            PollFd::new(hypervisor, PollFlags::IN),
            PollFd::new(device, PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let [from_monitor, from_device] = [0, 1].map(|i| !fds[i].revents().is_empty());
        if from_device && !pass_back(device, hypervisor, &mut files)? {
            return Ok(());
        }
        if from_monitor {
            let Some(message) = receive(hypervisor)? else {
                return Ok(());
            };
            check(&message, is_negotiated).map_err(io::Error::other)?;
            write(device, DEVICE, &message)?;
            if !is_negotiated {
                is_negotiated = true;
                let Some(mut versions) = receive(device)? else {
                    return Ok(());
                };
                hide_migration(&mut versions).map_err(io::Error::other)?;
                write(hypervisor, HYPERVISOR, &versions)?;
            }
        }
    }
}

/// Replaces the capability of migration by spaces in the answer to the version negotiation. The
/// crate always has it, although nothing of the device can be saved: a hypervisor that reads the
/// capability could take the device for one that can be migrated. An answer that has it in another
/// form is refused.
fn hide_migration(versions: &mut [u8]) -> Result<(), MessageError> {
    const NAME: &[u8] = b"migration";
    const KEY: &[u8] = b"\"migration\":{";
    let find = |bytes: &[u8], text: &[u8]| bytes.windows(text.len()).position(|part| part == text);
    if let Some(mut start) = find(versions, KEY)
        && let Some(len) = versions[start..].iter().position(|byte| *byte == b'}')
    {
        let mut end = start + len + 1;
        if start > 0 && versions[start - 1] == b',' {
            start -= 1;
        } else if versions.get(end) == Some(&b',') {
            end += 1;
        }
        versions[start..end].fill(b' ');
    }
    match find(versions, NAME) {
        None => Ok(()),
        Some(_) => Err(MessageError::Migration {
            size: versions.len(),
        }),
    }
}

/// Reads a message of one side, and closes its files. `None`: the side has disconnected.
fn receive(side: &UnixStream) -> io::Result<Option<Vec<u8>>> {
    let mut message = vec![0; HEAD];
    let mut got = 0;
    while got < HEAD {
        match scm_rights::receive(side, &mut message[got..], RecvFlags::CMSG_CLOEXEC)?.bytes {
            0 if got == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => got += count,
        }
    }
    message.resize(size(&message).map_err(io::Error::other)?, 0);
    (&*side).read_exact(&mut message[HEAD..])?;
    Ok(Some(message))
}

/// The size of the message with this header, in bytes.
pub(super) fn size(head: &[u8]) -> Result<usize, MessageError> {
    let size = word(head, 4) as usize;
    let most = HEAD + MAX_ACCESS.max(MAX_TEXT) + 64;
    if !(HEAD..=most).contains(&size) {
        return Err(MessageError::Size { size, most });
    }
    Ok(size)
}

/// Checks that the crate can read the message.
pub(super) fn check(message: &[u8], is_negotiated: bool) -> Result<(), MessageError> {
    let command = u16::from_le_bytes([message[2], message[3]]);
    let size = message.len();
    let exactly = |wanted: usize| {
        if size == wanted {
            Ok(())
        } else {
            Err(MessageError::CommandSize {
                command,
                size,
                wanted,
            })
        }
    };
    if (command == 1) == is_negotiated {
        return Err(match is_negotiated {
            true => MessageError::NegotiatedTwice { command },
            false => MessageError::NotNegotiated { command },
        });
    }
    match command {
        // Version numbers and a string with one zero byte, at its end.
        1 => {
            let text = message.get(20..).unwrap_or_default();
            let is_text = !text.is_empty()
                && text.len() <= MAX_TEXT
                && text.iter().position(|b| *b == 0) == Some(text.len() - 1);
            if is_text {
                Ok(())
            } else {
                Err(MessageError::Capabilities)
            }
        }
        2 => exactly(48),     // map memory
        3 => exactly(40),     // unmap memory
        4 | 7 => exactly(32), // device, interrupt information
        5 => exactly(48),     // region information
        8 => exactly(36),     // set interrupts: no data
        9 | 10 => {
            if size < 32 {
                return exactly(32);
            }
            let count = word(message, 28) as usize;
            if count > MAX_ACCESS {
                return Err(MessageError::Access { count });
            }
            exactly(32 + if command == 10 { count } else { 0 })
        }
        13 => exactly(HEAD), // reset
        _ => Err(MessageError::Command { command }),
    }
}

pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4]
        .iter()
        .rev()
        .fold(0, |word, byte| word << 8 | u32::from(*byte))
}

/// Passes on a message of the device with its files, and counts these. `false`: the device has
/// disconnected.
///
/// # Errors
/// The sockets, or more files than [`MAX_FILES`].
fn pass_back(device: &UnixStream, hypervisor: &UnixStream, passed: &mut usize) -> io::Result<bool> {
    let mut bytes = [0; 16384];
    let got = scm_rights::receive(device, &mut bytes, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Ok(false);
    }
    let files: Vec<_> = got.files.iter().map(|file| file.as_fd()).collect();
    *passed += files.len();
    if *passed > MAX_FILES {
        return Err(io::Error::other(TooManyFiles));
    }
    let bytes = &bytes[..got.bytes];
    let sent = loop {
        match scm_rights::send(hypervisor, bytes, &files, SendFlags::empty()) {
            // The kernel does not go on with a call that has a timeout after a signal.
            Err(Errno::INTR) => {}
            sent => break sent.map_err(|error| explained(HYPERVISOR, error.into()))?,
        }
    };
    // The files were sent with the first byte.
    write(hypervisor, HYPERVISOR, &bytes[sent..])?;
    Ok(true)
}

/// Writes all bytes to a side.
fn write(mut side: &UnixStream, name: &'static str, bytes: &[u8]) -> io::Result<()> {
    side.write_all(bytes)
        .map_err(|error| explained(name, error))
}

/// The error of a write to a side. Says of a write that has timed out what that means.
fn explained(side: &'static str, error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, WriteTimedOut { side })
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_of_migration_is_hidden_wherever_it_is() {
        for (said, left) in [
            (
                r#"{"a":{"b":1,"migration":{"pgsize":4096}}}"#,
                r#"{"a":{"b":1}}"#,
            ),
            (
                r#"{"a":{"migration":{"pgsize":1},"b":2}}"#,
                r#"{"a":{"b":2}}"#,
            ),
            (r#"{"a":{"migration":{}}}"#, r#"{"a":{}}"#),
            (r#"{"a":{"b":1}}"#, r#"{"a":{"b":1}}"#),
        ] {
            let mut bytes = said.as_bytes().to_vec();
            hide_migration(&mut bytes).unwrap();
            assert_eq!(bytes.len(), said.len());
            bytes.retain(|byte| *byte != b' ');
            assert_eq!(String::from_utf8(bytes).unwrap(), left);
        }
        for said in [
            r#"{"migration":{"#,
            r#"{"migration": {}}"#,
            r#"{"migration":true}"#,
            r#"{"migration":{},"a":{"migration":{}}}"#,
        ] {
            let refused = hide_migration(&mut said.as_bytes().to_vec());
            let size = said.len();
            assert_eq!(refused, Err(MessageError::Migration { size }), "{said}");
        }
    }

    fn message(command: u16, size: usize) -> Vec<u8> {
        let mut message = vec![0; size];
        message[2..4].copy_from_slice(&command.to_le_bytes());
        message[4..8].copy_from_slice(&(size as u32).to_le_bytes());
        message
    }

    #[test]
    fn filter_accepts_valid_messages() {
        let mut version = message(1, 23);
        version[20..].copy_from_slice(b"{}\0");
        assert_eq!(check(&version, false), Ok(()));
        for (command, size) in [
            (2, 48),
            (3, 40),
            (4, 32),
            (5, 48),
            (7, 32),
            (8, 36),
            (13, 16),
        ] {
            assert_eq!(check(&message(command, size), true), Ok(()), "{command}");
        }
        let mut write = message(10, 36);
        write[28] = 4;
        assert_eq!(check(&write, true), Ok(()));
        let mut read = message(9, 32);
        read[28] = 4;
        assert_eq!(check(&read, true), Ok(()));
    }

    #[test]
    fn filter_rejects_invalid_messages() {
        // Commands before and after the negotiation.
        check(&message(4, 32), false).unwrap_err();
        let mut version = message(1, 23);
        version[20..].copy_from_slice(b"{}\0");
        check(&version, true).unwrap_err();
        // No string, a string with an inner zero byte, a string without an end.
        check(&message(1, 16), false).unwrap_err();
        check(&message(1, 20), false).unwrap_err();
        version[20..].copy_from_slice(b"{\0\0");
        check(&version, false).unwrap_err();
        version[20..].copy_from_slice(b"{} ");
        check(&version, false).unwrap_err();
        // Wrong sizes.
        for command in 2..20 {
            check(&message(command, 17), true).unwrap_err();
        }
        let mut read = message(9, 32);
        read[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
        check(&read, true).unwrap_err();
        let mut write = message(10, 32);
        write[28] = 4;
        check(&write, true).unwrap_err();
    }

    #[test]
    fn connection_closes_on_an_invalid_monitor_message() {
        for bytes in [
            vec![0xff; 64],
            vec![0; 64],
            message(1, 16),
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        ] {
            let (mut hypervisor, ours) = UnixStream::pair().unwrap();
            let (device, _crate) = UnixStream::pair().unwrap();
            hypervisor.write_all(&bytes).unwrap();
            run(&ours, &device, WRITE_TIMEOUT).unwrap_err();
        }
    }

    /// The error of [`run`], for sides of which one takes no bytes for a short time.
    fn timed_out(hypervisor: &UnixStream, device: &UnixStream) -> String {
        let ended = run(hypervisor, device, Duration::from_millis(50));
        ended.unwrap_err().to_string()
    }

    /// Writes a message again and again, until the other end is closed.
    fn flood(mut side: UnixStream, message: &[u8]) {
        while side.write_all(message).is_ok() {}
    }

    #[test]
    fn hypervisor_that_takes_no_answers_is_waited_for_until_the_timeout() {
        let (hypervisor, ours) = UnixStream::pair().unwrap();
        let (device, server) = UnixStream::pair().unwrap();
        // More than the socket to the hypervisor has room for.
        let answers = std::thread::spawn(|| flood(server, &[0; 4096]));
        let error = timed_out(&ours, &device);
        assert!(error.contains("the hypervisor takes no bytes"), "{error}");
        drop((hypervisor, device));
        answers.join().unwrap();
    }

    #[test]
    fn device_that_takes_no_messages_is_waited_for_until_the_timeout() {
        let (mut hypervisor, ours) = UnixStream::pair().unwrap();
        let (device, mut server) = UnixStream::pair().unwrap();
        let mut version = message(1, 23);
        version[20..].copy_from_slice(b"{}\0");
        hypervisor.write_all(&version).unwrap();
        // Answers, and takes nothing more. Its end of the socket stays open.
        let server = std::thread::spawn(move || {
            server.read_exact(&mut [0; 23]).unwrap();
            server.write_all(&message(1, HEAD)).unwrap();
            server
        });
        // More than the socket to the device has room for.
        let messages = std::thread::spawn(|| flood(hypervisor, &message(13, HEAD)));
        let error = timed_out(&ours, &device);
        assert!(error.contains("the device takes no bytes"), "{error}");
        drop(ours);
        messages.join().unwrap();
        drop(server.join().unwrap());
    }

    #[test]
    fn hypervisor_gets_a_limited_number_of_files() {
        let (hypervisor, ours) = UnixStream::pair().unwrap();
        let (device, server) = UnixStream::pair().unwrap();
        let filter = std::thread::spawn(move || run(&ours, &device, WRITE_TIMEOUT));
        // The hypervisor takes nothing, as the kernel has room for these.
        for _ in 0..=MAX_FILES {
            let files = [hypervisor.as_fd()];
            scm_rights::send(&server, &message(5, HEAD), &files, SendFlags::empty()).unwrap();
        }
        let error = filter.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("more than 16 times"), "{error}");
    }
}
