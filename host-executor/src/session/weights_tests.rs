//! Uploads and seals of a session that is to end.

use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_transport::bytes::BytesMut;
use vgpu_transport::link::GuestEnd as _;
use vgpu_transport::link::window::{WindowGuest, WindowHost, inproc_pair};
use vgpu_transport::wire::{DeviceIndex, MAX_PAYLOAD, Offer, ProtocolVersion};

use super::*;
use crate::limits::Limits;
use crate::weights::{Sharing, WeightStore};

const BUFFER: BufferId = BufferId(1);

/// Payloads of the extent, and those that are equal in all uploads.
const PAYLOADS: u64 = 16;
const EQUAL: u64 = 12;

/// A session with both ends of its link.
struct Program {
    session: Session,
    guest: WindowGuest,
    host: WindowHost,
}

impl Program {
    /// A program with a buffer for weights, of which it has named all bytes as one extent.
    fn start(engine: &Arc<CpuEngine>, store: &WeightStore) -> Program {
        let (guest, host) = inproc_pair().expect("memory for a window");
        let session = Session::new(1, Arc::clone(engine) as _, Limits::default());
        let session = session.sharing(store, "a domain");
        let mut program = Program {
            session,
            guest,
            host,
        };
        let len = PAYLOADS * MAX_PAYLOAD as u64;
        let hello = Request::Hello {
            offer: Offer::SERVED,
            name: "test".into(),
            device: DeviceIndex(0),
        };
        let (buffer, size, offset) = (BUFFER, len, 0);
        for request in [
            hello,
            Request::Alloc { buffer, size },
            Request::Weights { buffer },
            Request::Extent {
                buffer,
                offset,
                len,
            },
        ] {
            let answer = program.perform(&request, &[], &StopFlag::new());
            assert!(answer.is_ok(), "{request:?}");
        }
        program
    }

    fn perform(
        &mut self,
        request: &Request,
        payload: &[u8],
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let (mut message, mut incoming) = (Vec::new(), Vec::new());
        request.encode(ProtocolVersion::CURRENT, &mut message);
        { &mut self.guest }
            .send(&message, payload.into())
            .expect("the link is open");
        let received = { &mut self.host }.receive(&mut incoming, Duration::from_secs(60));
        let received = received.expect("the link is open").expect("a request");
        let request = Request::decode(ProtocolVersion::CURRENT, &incoming);
        let request = request.expect("what was sent");
        let answer = { &mut self.session }.perform(received.request, request, &mut self.host, stop);
        self.host.retire();
        answer
    }

    /// Sends a payload of the extent, all of whose bytes are `value`.
    fn write(&mut self, payload: u64, value: u8, stop: &StopFlag) -> Result<Answer, SessionEnd> {
        let write = Request::Write {
            buffer: BUFFER,
            offset: payload * MAX_PAYLOAD as u64,
        };
        self.perform(&write, &vec![value; MAX_PAYLOAD], stop)
    }

    /// Sends the equal payloads, and one with `value`.
    fn write_to(&mut self, value: u8, stop: &StopFlag) -> Result<Answer, SessionEnd> {
        for payload in 0..EQUAL {
            let written = self.write(payload, payload as u8, &StopFlag::new());
            assert!(matches!(written, Ok(Answer::Nothing)));
        }
        self.write(EQUAL, value, stop)
    }

    /// The first byte of each payload so far.
    fn first_bytes(&self) -> Vec<u8> {
        let memory = self.session.buffers.find(BUFFER).expect("it is allocated");
        let first = |payload: u64| {
            let mut byte = [0];
            let at = payload * MAX_PAYLOAD as u64;
            let read = memory.read(at, BytesMut::from(&mut byte[..]));
            read.expect("it is inside");
            byte[0]
        };
        (0..=EQUAL).map(first).collect()
    }
}

#[test]
fn a_write_that_leaves_a_followed_upload_ends_with_its_session() {
    let engine = Arc::new(CpuEngine::new(1, Some(256 << 20)).expect("a thread and 256 MiB"));
    let store = WeightStore::new(Sharing::Tenant, None).expect("a thread");
    let (goes_on, ends) = (StopFlag::new(), StopFlag::new());
    ends.set();
    let start = || Program::start(&engine, &store);
    let mut leader = start();
    assert!(matches!(
        leader.write_to(101, &goes_on),
        Ok(Answer::Nothing)
    ));
    // The bytes so far would be copied.
    let mut one = start();
    assert!(matches!(
        one.write_to(102, &ends),
        Err(SessionEnd::Shutdown)
    ));
    let mut two = start();
    assert!(matches!(two.write_to(102, &goes_on), Ok(Answer::Nothing)));
    let bytes: Vec<u8> = (0..EQUAL as u8).chain([102]).collect();
    assert_eq!(two.first_bytes(), bytes);
    // The bytes so far would be compared with those of the second one, which has left the leader.
    let mut three = start();
    assert!(matches!(
        three.write_to(102, &ends),
        Err(SessionEnd::Shutdown)
    ));
    let mut four = start();
    assert!(matches!(four.write_to(102, &goes_on), Ok(Answer::Nothing)));
    let upload = &four.session.weights.uploads[&BUFFER];
    assert!(upload.followed_bytes() > 0, "it follows the second one");
}

#[test]
fn a_seal_ends_with_its_session_before_the_next_extent() {
    let engine = Arc::new(CpuEngine::new(1, Some(256 << 20)).expect("a thread and 256 MiB"));
    let store = WeightStore::new(Sharing::Tenant, None).expect("a thread");
    let ends = StopFlag::new();
    ends.set();
    let mut program = Program::start(&engine, &store);
    assert!(program.write_to(101, &StopFlag::new()).is_ok());
    let sealed = program.perform(&Request::Seal { buffer: BUFFER }, &[], &ends);
    assert!(matches!(sealed, Err(SessionEnd::Shutdown)));
}
