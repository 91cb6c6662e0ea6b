//! The conversation about weights.

use std::sync::Arc;

use vgpu_transport::wire::{ContentHash, Reply, Request, Wanted};

use super::connection::{Connection, unexpected};
use super::{Allocation, Session, SessionError};
use crate::weights::Progress;

impl Session {
    /// Tells the host that a buffer, to which nothing was written, is for weights. Returns the lengths of what the
    /// host may have, or `None` when it keeps none. From here on the buffer is used by messages.
    pub(crate) fn begin_weights(
        &self,
        to: &Allocation,
        progress: &Arc<Progress>,
    ) -> Result<Option<Vec<u64>>, SessionError> {
        self.talk(|c| {
            c.forget_users(to.id)?;
            match c.ask(&Request::Weights { buffer: to.id }) {
                Ok(Reply::Held { lengths, .. }) => {
                    to.do_not_map();
                    c.uploads.push((to.id, Arc::clone(progress)));
                    Ok(Some(lengths.0))
                }
                Ok(other) => Err(unexpected(&other)),
                Err(SessionError::Refused(reason)) => {
                    tracing::debug!("weights of buffer {} are not shared: {reason}", to.id.0);
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Asks the host to put bytes of this hash into a buffer. Whether it has.
    pub(crate) fn adopt(
        &self,
        to: &Allocation,
        offset: u64,
        len: u64,
        hash: ContentHash,
        proof: impl FnOnce(ContentHash) -> ContentHash,
    ) -> Result<bool, SessionError> {
        self.talk(|c| {
            let request = Request::Adopt {
                buffer: to.id,
                offset,
                len,
                hash,
            };
            let answer = match c.ask(&request)? {
                Reply::Prove { nonce, .. } => c.ask(&Request::Proof {
                    proof: proof(nonce),
                })?,
                answer => answer,
            };
            match answer {
                Reply::Done { .. } => {
                    c.copied.not_sent += len;
                    Ok(true)
                }
                Reply::Missing { .. } => Ok(false),
                other => Err(unexpected(&other)),
            }
        })
    }

    /// Asks which extents the host has; it keeps them for this buffer. Places in `wanted`.
    pub(crate) fn ask_for(
        &self,
        to: &Allocation,
        wanted: &[(ContentHash, u64)],
    ) -> Result<Vec<usize>, SessionError> {
        let request = Request::Ask {
            buffer: to.id,
            wanted: Wanted(wanted.to_vec()),
        };
        self.talk(|c| match c.ask(&request)? {
            Reply::Have { places, .. } => {
                let places = places
                    .0
                    .into_iter()
                    .filter_map(|place| usize::try_from(place).ok());
                Ok(places.filter(|&place| place < wanted.len()).collect())
            }
            other => Err(unexpected(&other)),
        })
    }

    /// Has the host put bytes that it keeps for a buffer into it.
    pub(crate) fn take(
        &self,
        to: &Allocation,
        offset: u64,
        len: u64,
        hash: ContentHash,
    ) -> Result<(), SessionError> {
        let request = Request::Take {
            buffer: to.id,
            offset,
            len,
            hash,
        };
        self.talk(|c| {
            c.send(&request, (&[][..]).into())?;
            c.copied.not_sent += len;
            Ok(())
        })
    }

    /// Names bytes of a buffer as a unit that others may ask for.
    pub(crate) fn name_extent(
        &self,
        to: &Allocation,
        offset: u64,
        len: u64,
    ) -> Result<(), SessionError> {
        let buffer = to.id;
        let request = Request::Extent {
            buffer,
            offset,
            len,
        };
        self.talk(|c| c.send(&request, (&[][..]).into()).map(drop))
    }
}

impl Connection {
    /// A graph is about to run: what was uploaded before is complete.
    pub(super) fn settle_uploads(&mut self) -> Result<(), SessionError> {
        while let Some((buffer, progress)) = self.uploads.pop() {
            self.forget_users(buffer)?;
            self.send(&Request::Settle { buffer }, (&[][..]).into())?;
            progress.finish();
        }
        Ok(())
    }
}
