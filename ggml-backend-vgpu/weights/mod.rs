//! Weights that the host may have already.
//!
//! A buffer that ggml uses for weights is told to the host as one (`WEIGHTS`). From then on each large tensor is
//! first asked for by its hash, if there is a chance that the host has it: it has said which lengths it knows. If it
//! has the bytes they are not sent. Otherwise they are, and named, so that the host can offer them to the next.
//!
//! Where the hash comes from:
//!
//! - from what we remember of the file that the program reads from (`files`), if it has not changed since;
//! - else, if the link is slower than hashing (any but a unix socket, over which bytes go as fast as memory can be
//!   copied), from the bytes themselves;
//! - else nowhere: the bytes are sent, and the host finds out by itself that it has them twice.
//!
//! When the first graph runs, loading is over. A thread of low priority then hashes what was read from files, for the
//! next time.

mod files;
mod remember;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vgpu_transport::bytes::Bytes;
use vgpu_transport::wire::{ContentHash, MAX_ASKED, MAX_EXTENTS, MIN_EXTENT};

use crate::session::{Allocation, Session, SessionError};
use files::{ModelFile, Region};
use remember::Learned;

/// Bytes hashed at once.
const PIECE: usize = 64 << 10;

/// What is known of a buffer's use.
pub(crate) struct Weights {
    /// Whether bytes are hashed for the purpose of asking.
    hashes_first: bool,
    state: Mutex<State>,
}

enum State {
    /// Nothing was written yet.
    Unknown,
    /// Anything else than weights, or the host keeps none.
    Other,
    Weights(Upload),
}

/// The upload of a buffer's weights.
struct Upload {
    /// Lengths of what the host may have.
    lengths: HashSet<u64>,
    /// Units named so far.
    extents: usize,
    /// Files that the program reads from: what is known of them was asked for.
    files: Vec<Arc<ModelFile>>,
    /// What of it the host keeps for us.
    kept: HashSet<(ContentHash, u64)>,
    /// What comes of it, for whom it concerns when the upload is over.
    progress: Arc<Progress>,
}

/// What an upload has come to.
#[derive(Default)]
pub(crate) struct Progress {
    learned: Mutex<Vec<Learned>>,
    counts: Mutex<Counts>,
}

/// Bytes of an upload.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    sent: u64,
    not_sent: u64,
}

impl Weights {
    /// For a new buffer.
    pub(crate) fn new(hashes_first: bool) -> Weights {
        Weights {
            hashes_first,
            state: Mutex::new(State::Unknown),
        }
    }

    /// The buffer is used for something that only memory with a content of its own can do.
    pub(crate) fn are_not(&self) {
        let mut state = self.state();
        if matches!(*state, State::Unknown) {
            *state = State::Other;
        }
    }

    /// Somebody is about to write `data`. `true` when that need not be done, because the host has put the bytes there.
    pub(crate) fn upload(
        &self,
        session: &Session,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
        is_for_weights: impl FnOnce() -> bool,
    ) -> Result<bool, SessionError> {
        let mut state = self.state();
        if matches!(*state, State::Unknown) {
            *state = match is_for_weights() && to.size() >= MIN_EXTENT {
                true => Upload::begin(session, to)?.map_or(State::Other, State::Weights),
                false => State::Other,
            };
        }
        match &mut *state {
            State::Weights(upload) => upload.part(session, to, offset, data, self.hashes_first),
            State::Unknown | State::Other => Ok(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upload {
    /// Tells the host. `None` when it keeps no weights.
    fn begin(session: &Session, to: &Allocation) -> Result<Option<Upload>, SessionError> {
        let progress = Arc::<Progress>::default();
        let lengths = session.begin_weights(to, &progress)?;
        Ok(lengths.map(|lengths| Upload {
            lengths: lengths.into_iter().collect(),
            extents: 0,
            files: Vec::new(),
            kept: HashSet::new(),
            progress,
        }))
    }

    fn part(
        &mut self,
        session: &Session,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
        hashes_first: bool,
    ) -> Result<bool, SessionError> {
        let len = data.len() as u64;
        if len < MIN_EXTENT || self.extents >= MAX_EXTENTS {
            self.progress.count(|counts| counts.sent += len);
            return Ok(false);
        }
        self.extents += 1;
        let region = Region::of(data.as_ptr(), data.len());
        let may_be_there = self.lengths.contains(&len);
        if let Some(region) = region.as_ref().filter(|_| may_be_there) {
            self.ask_for_file(session, to, &region.file)?;
        }
        let known = region.as_ref().and_then(Region::hash);
        if let Some(hash) = known.filter(|&hash| self.kept.contains(&(hash, len))) {
            session.take(to, offset, len, hash)?;
            self.progress.count(|counts| counts.not_sent += len);
            return Ok(true);
        }
        let hash = match known {
            None if may_be_there && hashes_first => Some(hash(blake3::Hasher::new(), data)),
            known => known,
        };
        if let Some(region) = region.filter(|_| known.is_none()) {
            self.progress.learn(Learned { region, hash });
        }
        if let Some(hash) = hash.filter(|_| may_be_there) {
            let proof = |nonce: ContentHash| self::hash(blake3::Hasher::new_keyed(&nonce.0), data);
            if session.adopt(to, offset, len, hash, proof)? {
                self.progress.count(|counts| counts.not_sent += len);
                return Ok(true);
            }
        }
        session.name_extent(to, offset, len)?;
        self.progress.count(|counts| counts.sent += len);
        Ok(false)
    }

    /// Asks for all that is known of a file, once: a question for each part would take a round trip each.
    fn ask_for_file(
        &mut self,
        session: &Session,
        to: &Allocation,
        file: &Arc<ModelFile>,
    ) -> Result<(), SessionError> {
        if self.files.iter().any(|asked| Arc::ptr_eq(asked, file)) {
            return Ok(());
        }
        self.files.push(Arc::clone(file));
        let wanted = file.memory.all();
        let wanted: Vec<_> = wanted
            .into_iter()
            .filter(|(_, len)| self.lengths.contains(len))
            .take(MAX_EXTENTS)
            .collect();
        for some in wanted.chunks(MAX_ASKED) {
            let places = session.ask_for(to, some)?;
            self.kept
                .extend(places.into_iter().map(|place| some[place]));
        }
        Ok(())
    }
}

impl Progress {
    fn learn(&self, learned: Learned) {
        let mut all = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(learned);
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The upload is over.
    pub(crate) fn finish(&self) {
        let counts = *self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.not_sent > 0 {
            let (not_sent, all) = (counts.not_sent >> 20, (counts.not_sent + counts.sent) >> 20);
            tracing::info!("{not_sent} MiB of {all} MiB of weights were on the host already");
        }
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        remember::later(std::mem::take(&mut learned));
    }
}

/// The hash of bytes that somebody else may be writing: of what was seen of them, once.
fn hash(mut hasher: blake3::Hasher, data: Bytes<'_>) -> ContentHash {
    let mut piece = vec![0; PIECE];
    let mut rest = data;
    while !rest.is_empty() {
        let (part, behind) = rest.split_at(rest.len().min(PIECE));
        let piece = &mut piece[..part.len()];
        part.copy_to(piece);
        hasher.update(piece);
        rest = behind;
    }
    ContentHash(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_same_hash() {
        let data: Vec<u8> = (0..PIECE * 2 + 7).map(|i| ((i * i) >> 3) as u8).collect();
        let expected = *blake3::hash(&data).as_bytes();
        assert_eq!(hash(blake3::Hasher::new(), data[..].into()).0, expected);
    }

    /// Two programs with the same weights, over links of this process.
    #[cfg(feature = "inproc")]
    #[test]
    fn a_second_session_sends_what_is_not_there_and_reads_all() {
        use std::sync::Arc;
        use std::time::{Duration, Instant};
        use vgpu_cpu::CpuEngine;
        use vgpu_engine::Engine;
        use vgpu_executor::weights::Sharing;
        use vgpu_executor::{Limits, Stop};
        use vgpu_transport::ir::Graph;
        use vgpu_transport::link::window::inproc_pair;

        let engine: Arc<dyn Engine> = Arc::new(CpuEngine::new(1, Some(64 << 20)).unwrap());
        let store = vgpu_executor::Weights::new(Sharing::All, None).unwrap();
        let open = |user: &'static str| {
            let (guest, mut host) = inproc_pair().unwrap();
            let (engine, store) = (Arc::clone(&engine), store.clone());
            std::thread::spawn(move || {
                let session = vgpu_executor::Session::new(1, engine, Limits::default());
                session.sharing(&store, user).run(&mut host, &Stop::new())
            });
            Session::open(Box::new(guest), "test".into()).unwrap()
        };
        let size = 4 * MIN_EXTENT;
        let data: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        let (large, small) = data.split_at(3 * MIN_EXTENT as usize);
        let (large, small) = (large, &small[..1000]);

        // Another user than the first has to prove that it has the bytes.
        for (round, user) in ["one", "one", "two"].into_iter().enumerate() {
            let session = open(user);
            let to = session.alloc(size).unwrap();
            let weights = Weights::new(true);
            let parts = [(0, small), (MIN_EXTENT, large)];
            let there = parts.map(|(at, data)| {
                let is_there = weights
                    .upload(&session, &to, at, data.into(), || true)
                    .unwrap();
                if !is_there {
                    session.write(&to, at, data.into()).unwrap();
                }
                is_there
            });
            assert_eq!(there, [false, round > 0], "{user}");
            let nothing = Graph::default();
            let stream = session.open_stream();
            session
                .submit::<SessionError>(stream, None, 0, || Ok(&nothing))
                .unwrap();
            for (at, data) in parts {
                let mut read = vec![0; data.len()];
                session.read(&to, at, read[..].as_mut().into()).unwrap();
                assert!(read == data, "round {round}");
            }
            if round == 0 {
                let start = Instant::now();
                while store.stats().extents == 0 {
                    assert!(start.elapsed() < Duration::from_secs(60), "not hashed");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            // The bytes have to stay with somebody.
            std::mem::forget(session);
        }
        assert_eq!(store.stats().not_sent, 2 * large.len() as u64);

        // What was used for something else first stays what it is.
        let session = open("one");
        let to = session.alloc(size).unwrap();
        let weights = Weights::new(true);
        weights.are_not();
        let upload = weights.upload(&session, &to, 0, large.into(), || true);
        assert!(!upload.unwrap());
    }
}
