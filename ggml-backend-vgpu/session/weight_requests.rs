//! The requests about weights.

use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, Reply, Request, Wanted};

use super::allocation::Allocation;
use super::error::SessionError;
use super::shared::SharedConnection;

/// Turns a buffer, to which nothing was written, into one for weights. Returns the lengths in bytes
/// of the weights that the executor has, or `None` if the executor does not share weights. The
/// buffer is then accessed by messages only.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost.
pub(super) fn begin(
    connection: &SharedConnection,
    to: &Allocation,
) -> Result<Option<Vec<u64>>, SessionError> {
    let buffer = to.id();
    connection.with_users_forgotten(buffer, |c| match c.ask(&Request::Weights { buffer }) {
        Ok(Reply::Held { lengths, .. }) => {
            to.unmap();
            Ok(Some(lengths.0))
        }
        Ok(other) => Err(SessionError::unexpected(other)),
        Err(SessionError::Refused(reason)) => {
            tracing::debug!("weights of buffer {} are not shared: {reason}", buffer.0);
            Ok(None)
        }
        Err(error) => Err(error),
    })
}

/// Asks the executor to put `len` bytes with this hash at `offset` of a buffer. Returns whether the
/// executor has done so. `proof` computes the hash of the bytes keyed with a nonce: it shows that
/// the program has the bytes.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost, [`SessionError::Refused`] if the executor
/// refuses.
pub(super) fn lookup(
    connection: &SharedConnection,
    to: &Allocation,
    offset: u64,
    len: u64,
    hash: ContentHash,
    proof: impl FnOnce(ContentHash) -> ContentHash,
) -> Result<bool, SessionError> {
    let request = Request::Lookup {
        buffer: to.id(),
        offset,
        len,
        hash,
    };
    connection.with_conn(|c| {
        let answer = match c.ask(&request)? {
            Reply::Prove { nonce, .. } => {
                let proof = proof(nonce);
                c.ask(&Request::Proof { proof })?
            }
            answer => answer,
        };
        match answer {
            Reply::Done { .. } => {
                c.copied.not_sent += len;
                Ok(true)
            }
            Reply::Missing { .. } => Ok(false),
            other => Err(SessionError::unexpected(other)),
        }
    })
}

/// Asks which of the `wanted` bytes (hash, length) the executor has. Returns their indices. The
/// executor reserves these bytes for the buffer until [`seal`].
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost, [`SessionError::Refused`] if the executor
/// refuses.
pub(super) fn query(
    connection: &SharedConnection,
    to: &Allocation,
    wanted: &[(ContentHash, u64)],
) -> Result<Vec<usize>, SessionError> {
    let request = Request::Query {
        buffer: to.id(),
        wanted: Wanted(wanted.to_vec()),
    };
    connection.with_conn(|c| match c.ask(&request)? {
        Reply::Have { indices, .. } => {
            let indices = indices.0.into_iter();
            let indices = indices.filter_map(|index| usize::try_from(index).ok());
            Ok(indices.filter(|&index| index < wanted.len()).collect())
        }
        other => Err(SessionError::unexpected(other)),
    })
}

/// Has the executor put bytes that it reserves for a buffer (see [`query`]) at `offset` of the
/// buffer. One-way.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost.
pub(super) fn attach(
    connection: &SharedConnection,
    to: &Allocation,
    offset: u64,
    len: u64,
    hash: ContentHash,
) -> Result<(), SessionError> {
    let request = Request::Attach {
        buffer: to.id(),
        offset,
        len,
        hash,
    };
    connection.with_conn(|c| {
        c.send(&request)?;
        c.copied.not_sent += len;
        Ok(())
    })
}

/// Names `len` bytes at `offset` of a buffer as a unit that others may ask for by its hash.
/// One-way.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost.
pub(super) fn name_extent(
    connection: &SharedConnection,
    to: &Allocation,
    offset: u64,
    len: u64,
) -> Result<(), SessionError> {
    let request = Request::Extent {
        buffer: to.id(),
        offset,
        len,
    };
    connection.with_conn(|c| c.send(&request).map(drop))
}

/// Says that the weights of a buffer are complete. One-way.
///
/// # Errors
///
/// [`SessionError::Lost`] if the session is lost.
pub(super) fn seal(connection: &SharedConnection, buffer: BufferId) -> Result<(), SessionError> {
    connection.with_users_forgotten(buffer, |c| c.send(&Request::Seal { buffer }).map(drop))
}
