//! Sessions with an executor in this process.

use super::*;

use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::weights::Sharing;
use vgpu_executor::{Limits, StopFlag};
use vgpu_transport::ir::{Graph, Node, Op, PoolKind, Shape, Sources, Tensor, Type};
use vgpu_transport::link::window::inproc_pair;
use vgpu_transport::wire::{DeviceIndex, MIN_EXTENT, Offer};

fn hello(offer: Offer) -> Hello {
    Hello {
        offer,
        name: "test".into(),
        device: DeviceIndex(0),
    }
}

/// A timeout, not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// Executors in this process that share one store of weights.
struct Executors {
    engine: Arc<dyn Engine>,
    store: vgpu_executor::WeightStore,
}

impl Executors {
    fn new() -> Executors {
        Executors {
            engine: Arc::new(CpuEngine::new(1, Some(64 << 20)).unwrap()),
            store: vgpu_executor::WeightStore::new(Sharing::All, None).unwrap(),
        }
    }

    /// A session of this user.
    fn open(&self, user: &'static str) -> Arc<Session> {
        self.open_after(user, 0)
    }

    /// A session whose first request has the number after `last`.
    fn open_after(&self, user: &'static str, last: u64) -> Arc<Session> {
        self.open_with(user, last, Limits::default())
    }

    fn open_with(&self, user: &'static str, last: u64, limits: Limits) -> Arc<Session> {
        let (guest, host) = inproc_pair().unwrap();
        let (guest, mut host) = (guest.continuing_after(last), host.continuing_after(last));
        let (engine, store) = (Arc::clone(&self.engine), self.store.clone());
        std::thread::spawn(move || {
            let session = vgpu_executor::Session::new(1, engine, limits);
            session
                .sharing(&store, user)
                .run(&mut host, &StopFlag::new())
        });
        Session::open(Box::new(guest), hello(Offer::SERVED), true, HANG).unwrap()
    }

    fn wait_for_hashes(&self) {
        let start = Instant::now();
        while self.store.stats().extents == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "not hashed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn submit_empty_graph(session: &Session) {
    let backend = session.open_backend().unwrap();
    assert!(!session.submit_known(backend, None, 0).unwrap());
    let mut image = GraphImage::default();
    image.encode(&Graph::default());
    session
        .submit(backend, None, 0, &mut image, &[], Instant::now())
        .unwrap();
}

fn not_sent(session: &Session) -> u64 {
    session.connection.lock().unwrap().copied.not_sent
}

fn data(size: u64) -> Vec<u8> {
    (0..size).map(|i| (i % 251) as u8).collect()
}

/// Two programs with the same weights.
#[test]
fn second_session_sends_only_missing_weights_and_reads_all_of_them() {
    let executors = Executors::new();
    let size = 4 * MIN_EXTENT;
    let data = data(size);
    let (large, small) = data.split_at(3 * MIN_EXTENT as usize);
    let (large, small) = (large, &small[..1000]);

    // Another user than the first must prove that it has the bytes.
    for (round, user) in ["one", "one", "two"].into_iter().enumerate() {
        let session = executors.open(user);
        let to = session.alloc(size).unwrap();
        let parts = [(0, small), (MIN_EXTENT, large)];
        for (at, data) in parts {
            session.write(&to, at, data.into(), true).unwrap();
        }
        let expected = if round == 0 { 0 } else { large.len() as u64 };
        assert_eq!(not_sent(&session), expected, "{user}");
        submit_empty_graph(&session);
        for (at, data) in parts {
            let mut read = vec![0; data.len()];
            session.read(&to, at, read[..].as_mut().into()).unwrap();
            assert!(read == data, "round {round}");
        }
        if round == 0 {
            executors.wait_for_hashes();
        }
        // The executor keeps the bytes as long as a session has them.
        std::mem::forget(session);
    }
    assert_eq!(executors.store.stats().not_sent, 2 * large.len() as u64);

    // A buffer that was used for something else first is not for weights.
    let session = executors.open("one");
    let to = session.alloc(size).unwrap();
    session.mark_not_weights(&to);
    session.write(&to, 0, large.into(), true).unwrap();
    assert_eq!(not_sent(&session), 0);
    let mut read = vec![0; large.len()];
    session.read(&to, 0, read[..].as_mut().into()).unwrap();
    assert!(read == large);
}

/// After the upload, the executor keeps nothing for the buffer any more: asking for it would be
/// a protocol error.
#[test]
fn weights_rewritten_after_the_upload_are_sent_again() {
    let executors = Executors::new();
    let data = data(2 * MIN_EXTENT);
    let first = executors.open("one");
    let to = first.alloc(2 * MIN_EXTENT).unwrap();
    first.write(&to, 0, data[..].into(), true).unwrap();
    submit_empty_graph(&first);
    executors.wait_for_hashes();

    let second = executors.open("one");
    let to = second.alloc(2 * MIN_EXTENT).unwrap();
    second.write(&to, 0, data[..].into(), true).unwrap();
    assert_eq!(not_sent(&second), data.len() as u64);
    submit_empty_graph(&second);
    second.write(&to, 0, data[..].into(), true).unwrap();
    assert_eq!(not_sent(&second), data.len() as u64);
    let mut read = vec![0; data.len()];
    second.read(&to, 0, read[..].as_mut().into()).unwrap();
    assert!(read == data);
}

/// Works with a buffer for weights and a graph of its own, both new, and compares what it reads.
fn work(session: &Session, size: u64) -> Result<(), SessionError> {
    let data = data(size);
    let buffer = session.alloc(size)?;
    session.write(&buffer, 0, data[..].into(), true)?;
    let backend = session.open_backend()?;
    session.submit_known(backend, None, 0)?;
    let mut image = GraphImage::default();
    image.encode(&Graph {
        buffers: vec![buffer.id()],
        ..Graph::default()
    });
    let buffers = [Arc::clone(&buffer)];
    session.submit(backend, None, 0, &mut image, &buffers, Instant::now())?;
    let mut read = vec![0; size as usize];
    session.read(&buffer, 0, read[..].as_mut().into())?;
    assert!(read == data);
    session.free(&buffer)
}

#[test]
fn an_executor_that_never_answers_hello_is_named_with_the_time_that_was_waited() {
    let limit = Duration::from_millis(50);
    let (guest, _host) = inproc_pair().unwrap();
    let (sender, outcome) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let opened = Session::open(Box::new(guest), hello(Offer::SERVED), true, limit);
        sender.send(opened.err().unwrap().to_string()).unwrap();
    });
    let error = outcome.recv_timeout(HANG).expect("an end of the wait");
    let blames = "the executor has accepted the connection and has not answered for 0.";
    assert!(error.starts_with(blames), "{error}");
}

#[test]
fn refusal_that_comes_before_hello_is_known() {
    use vgpu_transport::link::HostEnd as _;
    use vgpu_transport::wire::ProtocolVersion;
    let (guest, mut host) = inproc_pair().unwrap();
    let reason = "the host drains".to_owned();
    let mut message = Vec::new();
    Reply::Ended { reason }.encode(ProtocolVersion::CURRENT, &mut message);
    host.send(&message, 0, &mut |_| {}).unwrap();
    drop(host);
    let guest = Box::new(guest);
    let error = Session::open(guest, hello(Offer::SERVED), true, HANG).err();
    let error = error.expect("a refusal").to_string();
    assert_eq!(error, "the executor refuses: the host drains");
}

#[test]
fn an_executor_that_chooses_a_version_that_was_not_offered_is_to_blame() {
    use vgpu_transport::link::HostEnd as _;
    use vgpu_transport::wire::{DeviceCount, HostVersions, ProtocolVersion, VersionRange};
    let engine = CpuEngine::new(1, Some(1 << 20)).unwrap();
    for (offered, chosen, is_offered) in [
        (Offer::only(ProtocolVersion::V3), ProtocolVersion::V4, false),
        (Offer::only(ProtocolVersion::V4), ProtocolVersion::V3, false),
        (Offer::SERVED, ProtocolVersion::V3, true),
    ] {
        let (guest, mut host) = inproc_pair().unwrap();
        let welcome = Reply::Welcome {
            protocol: chosen,
            served: HostVersions(VersionRange::only(chosen)),
            session: 1,
            engine: "cpu".into(),
            description: "a processor".into(),
            memory_total: 1,
            memory_free: 1,
            capabilities: engine.capabilities().clone(),
            devices: DeviceCount(1),
        };
        let host = std::thread::spawn(move || {
            let mut message = Vec::new();
            while host.receive(&mut message, HANG).unwrap().is_none() {}
            message.clear();
            welcome.encode(chosen, &mut message);
            host.send(&message, 0, &mut |_| {}).unwrap();
            host
        });
        let opened = Session::open(Box::new(guest), hello(offered), true, HANG);
        assert_eq!(opened.is_ok(), is_offered);
        if let Err(error) = opened {
            let blames = format!(
                "the executor is lost: the host broke the protocol: it chose protocol version \
                 {chosen} in WELCOME, and HELLO offered {}",
                offered.versions
            );
            assert_eq!(error.to_string(), blames);
        }
        drop(host.join().unwrap());
    }
}

#[test]
fn any_number_of_refused_allocations_leaves_the_session_usable() {
    let executors = Executors::new();
    let session = executors.open("one");
    for _ in 0..20_000 {
        let refused = session.alloc(1 << 40).err();
        assert!(
            matches!(refused, Some(SessionError::Refused(_))),
            "{refused:?}"
        );
        // The ids of refused requests are not next to each other.
        let buffer = session.alloc(0).unwrap();
        session.free(&buffer).unwrap();
    }
    work(&session, 2 * MIN_EXTENT).unwrap();
}

#[test]
fn numbers_that_are_used_up_end_the_session_with_a_reason_and_the_next_one_works() {
    const LEFT: u64 = 40;
    let last = u64::MAX - LEFT;
    for what in ["buffer ids", "backend ids", "graph ids", "request numbers"] {
        let executors = Executors::new();
        let session = match what {
            "request numbers" => executors.open_after("one", last),
            _ => executors.open("one"),
        };
        let connection = || session.connection.lock().unwrap();
        match what {
            "buffer ids" => connection().last_buffer = last,
            "backend ids" => connection().last_backend = last,
            "graph ids" => session.connection.lock_graphs().unwrap().set_last_id(last),
            _ => {}
        }
        let mut done = 0;
        let error = loop {
            match work(&session, 2 * MIN_EXTENT) {
                Ok(()) => done += 1,
                Err(error) => break error,
            }
        };
        match what {
            // Each round takes several requests.
            "request numbers" => assert!((2..LEFT / 4).contains(&done), "{done}"),
            _ => assert_eq!(done, LEFT, "{what}"),
        }
        assert!(matches!(error, SessionError::Lost(_)), "{what}: {error}");
        assert!(error.to_string().contains(what), "{error}");
        work(&executors.open("one"), 2 * MIN_EXTENT).unwrap();
    }
}

#[test]
fn reason_of_the_end_is_known_whatever_the_program_does_next() {
    let executors = Executors::new();
    for next in ["sends", "asks", "looks", "waits"] {
        let (guest, mut host) = inproc_pair().unwrap();
        let stop = StopFlag::new();
        let (engine, flag) = (Arc::clone(&executors.engine), stop.clone());
        let executor = std::thread::spawn(move || {
            let session = vgpu_executor::Session::new(1, engine, Limits::default());
            session.run(&mut host, &flag)
        });
        let guest = Box::new(guest);
        let session = Session::open(guest, hello(Offer::SERVED), true, HANG).unwrap();
        let buffer = session.alloc(8).unwrap();
        session.write(&buffer, 0, [1; 8][..].into(), false).unwrap();
        stop.set();
        executor.join().unwrap();
        // The link is closed, and has the reason.
        let _ = match next {
            "sends" => session.free(&buffer),
            "asks" => session.alloc(8).map(drop),
            "looks" => {
                assert!(session.connection.is_lost());
                Ok(())
            }
            _ => session.synchronize(),
        };
        let error = session.connection.check().unwrap_err().to_string();
        assert_eq!(
            error, "the executor is lost: the host is shutting down",
            "{next}"
        );
    }
}

/// A graph that takes minutes, from one buffer to another. Windows have the largest size that the
/// executor accepts.
fn endless_graph(from: BufferId, to: BufferId) -> Graph {
    let tensor = |buffer, n| Tensor {
        shape: Shape::contiguous(Type::F32, [n, n, 1, 1]).unwrap(),
        buffer,
        offset: 0,
    };
    Graph {
        buffers: vec![from, to],
        tensors: vec![tensor(0, 2048), tensor(1, 2047)],
        nodes: vec![Node {
            op: Op::Pool2d {
                kind: PoolKind::Max,
                k0: 512,
                k1: 512,
                s0: 1,
                s1: 1,
                p0: 255,
                p1: 255,
            },
            dst: 1,
            src: Sources::new([Some(0)]),
        }],
    }
}

#[test]
fn memory_is_reported_while_a_graph_runs() {
    const SIZE: u64 = 16 << 20;
    let executors = Executors::new();
    let limits = Limits {
        node_time: Some(Duration::from_secs(1 << 32)),
        ..Limits::default()
    };
    let session = executors.open_with("one", 0, limits);
    let (total, free) = session.memory().unwrap();
    let buffers = [(); 2].map(|()| session.alloc(SIZE).unwrap());
    let expected = (total, free - 2 * SIZE);
    assert_eq!(session.memory().unwrap(), expected);
    let backend = session.open_backend().unwrap();
    let mut image = GraphImage::default();
    image.encode(&endless_graph(buffers[0].id(), buffers[1].id()));
    session
        .submit(backend, None, 0, &mut image, &buffers, Instant::now())
        .unwrap();
    let assert_reported = || {
        let (sender, answer) = std::sync::mpsc::channel();
        let session = Arc::clone(&session);
        std::thread::spawn(move || sender.send(session.memory()));
        let answer = answer.recv_timeout(Duration::from_secs(60));
        let (total, free) = answer.expect("an answer").unwrap();
        // Some hundred bytes for the graph itself, if the answer is newer than the graph.
        let before = expected.1;
        assert_eq!(total, expected.0);
        assert!(
            (before - 4096..=before).contains(&free),
            "{free} of {before}"
        );
    };
    assert_reported();
    // A thread waits for the graph, and has the connection. The file of VGPU_DUMP says so.
    let last = session.last_request().unwrap();
    let waiter = Arc::clone(&session);
    std::thread::spawn(move || waiter.synchronize());
    let waits = format!("waits until request {last} is done");
    let start = Instant::now();
    while !session.connection.waits.line(start).contains(&waits) {
        let line = session.connection.waits.line(start);
        assert!(start.elapsed() < HANG, "{waits}: {line}");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_reported();
}

/// A graph and an upload of one buffer take the locks of the upload and of the connection in the
/// same order.
#[test]
fn graphs_and_uploads_of_two_threads_do_not_deadlock() {
    const ROUNDS: usize = 200;
    let executors = Executors::new();
    let session = executors.open("one");
    let data = data(MIN_EXTENT);
    let buffers: Vec<_> = (0..ROUNDS)
        .map(|_| session.alloc(MIN_EXTENT).unwrap())
        .collect();
    let begin = Arc::new(std::sync::Barrier::new(2));
    let (done, waiting) = std::sync::mpsc::channel();
    for uploads in [true, false] {
        let (session, data, done) = (Arc::clone(&session), data.clone(), done.clone());
        let (buffers, begin) = (buffers.clone(), Arc::clone(&begin));
        std::thread::spawn(move || {
            let backend = session.open_backend().unwrap();
            let mut image = GraphImage::default();
            for buffer in &buffers {
                begin.wait();
                if uploads {
                    session.write(buffer, 0, data[..].into(), true).unwrap();
                } else {
                    session.submit_known(backend, None, 0).unwrap();
                    image.encode(&Graph {
                        buffers: vec![buffer.id()],
                        ..Graph::default()
                    });
                    session
                        .submit(
                            backend,
                            None,
                            0,
                            &mut image,
                            &[Arc::clone(buffer)],
                            Instant::now(),
                        )
                        .unwrap();
                }
            }
            done.send(()).unwrap();
        });
    }
    for _ in 0..2 {
        waiting.recv_timeout(Duration::from_secs(60)).unwrap();
    }
    for buffer in &buffers {
        session.free(buffer).unwrap();
    }
}

/// The graphs of several threads become known in the order in which they are sent: a patch of a
/// graph that the executor does not have, or not any more, would end the session.
#[test]
fn threads_submit_patches_of_each_others_graphs() {
    const THREADS: usize = 4;
    const GRAPHS: usize = 2000;
    const DIGITS: usize = 7;
    let executors = Executors::new();
    let session = executors.open("one");
    let buffers: Vec<_> = (0..6 * DIGITS)
        .map(|_| session.alloc(256).unwrap())
        .collect();
    let submit = |thread: usize| {
        let backend = session.open_backend()?;
        let mut image = GraphImage::default();
        for i in 0..GRAPHS {
            // All graphs differ, in a third of their words. A digit is one of four buffers.
            let number = THREADS * i + thread;
            let digit = |at: usize| 4 * at + number / 4_usize.pow(at as u32) % 4;
            let names = (0..DIGITS).map(digit).chain(4 * DIGITS..6 * DIGITS);
            session.submit_known(backend, None, 0)?;
            image.encode(&Graph {
                buffers: names.map(|at| buffers[at].id()).collect(),
                ..Graph::default()
            });
            session.submit(backend, None, 0, &mut image, &buffers, Instant::now())?;
        }
        session.synchronize()?;
        session.submit_known(backend, None, 0)
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let submit = &submit;
        let threads: [_; THREADS] =
            std::array::from_fn(|thread| scope.spawn(move || submit(thread)));
        threads.map(|thread| thread.join().unwrap()).into()
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let patches = session.stats().unwrap().patches;
    assert!(patches as usize > THREADS * GRAPHS / 2, "{patches} patches");
}
