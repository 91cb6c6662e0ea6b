//! Reads and writes of buffers.

use std::collections::VecDeque;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::chunk_len;
use vgpu_transport::wire::{MAX_PAYLOAD, Reply, Request};

use super::allocation::Allocation;
use super::error::SessionError;
use super::pending::PendingRead;
use super::shared::SharedConnection;

/// Writes of at least so many bytes wait until the executor is idle and then go into memory that
/// both sides have mapped. Waiting is cheaper than copying so many bytes twice.
const MIN_WAIT_BYTES: usize = 256 << 10;

/// Asynchronous writes of at least so many bytes are sent from where they are. Smaller ones are
/// copied, which costs less than the bookkeeping.
const MIN_STAGED_BYTES: usize = 16 << 10;

/// The number of chunks of a read that are requested before the first answer is awaited.
const READS_IN_FLIGHT: usize = 4;

/// Writes `data` to `offset` of a buffer, in order with all other requests. The data may change
/// after the return.
///
/// # Errors
///
/// [`SessionError::OutOfRange`] if the buffer is mapped and does not have these bytes,
/// [`SessionError::Lost`] if the session is lost. The failure of a write by message is reported by
/// the next graph.
pub(super) fn write(
    connection: &SharedConnection,
    to: &Allocation,
    offset: u64,
    data: Bytes<'_>,
) -> Result<(), SessionError> {
    let len = data.len();
    if let Some(mut mapped) = to.mapped(offset, len)? {
        // Requests that are under way must not see these bytes; later requests must. So the bytes
        // go straight into the memory if nothing is under way, and in a message otherwise.
        let is_idle = connection.with_conn(|c| {
            if !c.is_idle() && len >= MIN_WAIT_BYTES {
                c.wait(c.sent())?;
            }
            let is_idle = c.is_idle();
            if is_idle {
                c.copied.to_host += len as u64;
            }
            Ok(is_idle)
        })?;
        if is_idle {
            mapped.copy_from(data);
            return Ok(());
        }
    }
    connection.with_conn(|c| {
        let (mut data, mut offset) = (data, offset);
        let (buffer, chunk) = (to.id(), chunk_len(data.len()));
        while !data.is_empty() {
            let (part, rest) = data.split_at(data.len().min(chunk));
            c.send_with(&Request::Write { buffer, offset }, part)?;
            offset += part.len() as u64;
            data = rest;
        }
        Ok(())
    })
}

/// As [`write()`], but the data must not change before the next synchronisation. Data in a host
/// buffer that is part of the link's memory is not copied.
///
/// # Errors
///
/// As for [`write()`].
pub(super) fn write_async(
    connection: &SharedConnection,
    to: &Allocation,
    offset: u64,
    data: Bytes<'_>,
) -> Result<(), SessionError> {
    let is_sent = connection.with_conn(|c| {
        if data.len() < MIN_STAGED_BYTES {
            return Ok(false);
        }
        let range = c.host_buffer_of(data.as_ptr(), data.len());
        let Some((base, staging)) =
            range.and_then(|range| Some((range.base, range.staging_offset?)))
        else {
            return Ok(false);
        };
        let (start, mut done) = (staging + (data.as_ptr().addr() - base), 0);
        while done < data.len() {
            let len = MAX_PAYLOAD.min(data.len() - done);
            let request = Request::Write {
                buffer: to.id(),
                offset: offset + done as u64,
            };
            c.send_staged(&request, start + done..start + done + len)?;
            done += len;
        }
        Ok(true)
    })?;
    match is_sent {
        true => Ok(()),
        false => write(connection, to, offset, data),
    }
}

/// Fills `out` with the bytes at `offset` of a buffer, after all earlier requests.
///
/// # Errors
///
/// [`SessionError::Failed`] if an earlier request that may have written the buffer has failed,
/// [`SessionError::OutOfRange`] or [`SessionError::Refused`] if the buffer does not have these
/// bytes, [`SessionError::Lost`] if the session is lost. After an error the content of `out` means
/// nothing.
pub(super) fn read(
    connection: &SharedConnection,
    from: &Allocation,
    offset: u64,
    mut out: BytesMut<'_>,
) -> Result<(), SessionError> {
    let buffer = from.id();
    if let Some(mapped) = from.mapped(offset, out.len())? {
        connection.with_conn(|c| {
            c.wait(c.sent())?;
            c.drain()?;
            c.copied.from_host += out.len() as u64;
            c.check(buffer)
        })?;
        out.copy_from(mapped.into());
        return Ok(());
    }
    connection.with_conn(|c| {
        let total = out.len();
        let chunk = chunk_len(total);
        c.round_trips += 1; // one for all chunks: they are requested ahead
        let (mut out, mut requested, mut waiting) = (out, 0, VecDeque::new());
        while requested < total || !waiting.is_empty() {
            while requested < total && waiting.len() < READS_IN_FLIGHT {
                let len = chunk.min(total - requested);
                let request = c.send(&Request::Read {
                    buffer,
                    offset: offset + requested as u64,
                    len: len as u64,
                })?;
                waiting.push_back((request, len));
                requested += len;
            }
            if let Some((request, len)) = waiting.pop_front() {
                let (part, rest) = out.split_at(len);
                out = rest;
                match c.reply_to(request, part)? {
                    Reply::Data { .. } => {}
                    other => return Err(SessionError::unexpected(other)),
                }
            }
        }
        c.check(buffer)
    })
}

/// Requests bytes at `offset` of a buffer, which are in memory at `to` after the next
/// synchronisation. If they cannot be read, every byte there is then `poison`. Returns `false`, and
/// requests nothing, if the memory is not that of a host buffer of this session, or if too much is
/// requested already.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost.
///
/// # Safety
///
/// `len` bytes at `to` must be writable, and not accessed, until the next synchronisation. If the
/// program frees the host buffer earlier,
/// [`Session::remove_host_buffer`](super::Session::remove_host_buffer) receives the answer before
/// the memory goes.
pub(super) unsafe fn read_async(
    connection: &SharedConnection,
    from: &Allocation,
    offset: u64,
    (to, len): (*mut u8, usize),
    poison: u8,
) -> Result<bool, SessionError> {
    connection.with_conn(|c| {
        if c.host_buffer_of(to, len).is_none() {
            return Ok(false);
        }
        // SAFETY: the memory is writable and not accessed until the next synchronisation (this
        // function's contract), and a synchronisation receives the answer, which drops the pending
        // read.
        let read = unsafe { PendingRead::new(from.id(), (to, len), poison) };
        c.send_read(offset, read)
    })
}
