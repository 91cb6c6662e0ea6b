//! The cost of crossing the boundary: `cargo bench -p vgpu-transport`.
//!
//! The host is another process behind a unix socket, or a thread behind an in-process link. The
//! host copies uploads into a buffer and downloads out of one, as an engine does. The benchmark
//! shows bandwidth beside the bandwidth of one thread's memcpy of the same bytes, interleaved in
//! the same run. Every figure is a median. `--json` prints only the round trips, one JSON object
//! per line.

use std::env;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vgpu_median::median;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::unix::{ListenOptions, Listener, connect};
use vgpu_transport::link::window::{WindowGuest, WindowHost, inproc_pair};
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError, chunk_len};

/// The size of the largest transfer, in bytes.
const BUFFER: usize = 256 << 20;

/// The alignment of the engine's buffer, in bytes.
const ALIGN: usize = 256;

/// The environment variable with the socket's path in the host process.
const HOST_VARIABLE: &str = "VGPU_BENCH_HOST";

const WAIT: Duration = Duration::from_secs(20);

fn main() {
    if let Some(path) = env::var_os(HOST_VARIABLE) {
        let listener = Listener::bind(Path::new(&path), ListenOptions::default()).unwrap();
        let arrival = listener.accept(WAIT).unwrap().unwrap();
        return serve(arrival.handshake().unwrap());
    }
    let (guest, host) = inproc_pair().unwrap();
    let thread = thread::spawn(move || serve(host));
    measure("inproc", guest);
    thread.join().unwrap();

    let mut process = HostProcess::start();
    let guest = connect_when_there(&process.path);
    measure("unix", guest);
    process.child.wait().unwrap();
}

/// The first byte of a message: the operation of the host. An offset follows.
const EMPTY: u8 = 0;
const NOTHING: u8 = 3;
const WRITE: u8 = 1;
const READ: u8 = 2;

fn serve(mut host: WindowHost) {
    // The alignment is that of an engine's buffers. Copies across cache lines are a third slower.
    let mut memory = vec![1u8; BUFFER + ALIGN];
    let begin = memory.as_ptr().align_offset(ALIGN);
    let buffer = &mut memory[begin..begin + BUFFER];
    let mut message = Vec::new();
    loop {
        message.clear();
        let incoming = match host.receive(&mut message, WAIT) {
            Ok(Some(incoming)) => incoming,
            Ok(None) => continue,
            Err(LinkError::Closed) => return,
            Err(error) => panic!("{error}"),
        };
        let field = |i: usize| u64::from_le_bytes(message[i..i + 8].try_into().unwrap()) as usize;
        match message[0] {
            WRITE => {
                let offset = field(1);
                host.payload()
                    .copy_to(&mut buffer[offset..offset + incoming.payload_len]);
            }
            READ => {
                let (offset, len) = (field(1), field(9));
                let from = Bytes::from(&buffer[offset..offset + len]);
                host.send(b"data", len, &mut |mut room: BytesMut<'_>| {
                    room.copy_from(from)
                })
                .unwrap();
            }
            NOTHING => {}
            _ => host.send(b"done", 0, &mut |_| {}).unwrap(),
        }
        host.retire();
    }
}

fn measure(name: &str, mut guest: WindowGuest) {
    let mut message = Vec::new();
    let mut empty = |guest: &mut WindowGuest| {
        let began = Instant::now();
        guest.send(&[EMPTY], Bytes::from(&[][..])).unwrap();
        message.clear();
        guest
            .receive(&mut message, BytesMut::from(&mut [][..]))
            .unwrap();
        began.elapsed()
    };
    for _ in 0..1000 {
        empty(&mut guest);
    }
    let awake: Vec<Duration> = (0..20_000).map(|_| empty(&mut guest)).collect();
    let asleep: Vec<Duration> = (0..500)
        .map(|_| {
            thread::sleep(Duration::from_millis(2));
            empty(&mut guest)
        })
        .collect();
    if env::args().any(|argument| argument == "--json") {
        for (times, asleep) in [(awake, false), (asleep, true)] {
            let p50 = median(times).as_nanos() as f64 / 1e3;
            println!(r#"{{"link":"{name}","asleep":{asleep},"p50_us":{p50}}}"#);
        }
        return;
    }
    println!("{name}: empty round trip");
    show("  awake", awake);
    show("  from sleep", asleep);

    const FLOOD: u32 = 1_000_000;
    let began = Instant::now();
    let mut last = 0;
    for _ in 0..FLOOD {
        last = guest.send(&[NOTHING], Bytes::from(&[][..])).unwrap();
    }
    guest.wait_retired(last).unwrap();
    println!(
        "  one-way    mean {:6.2} us each",
        began.elapsed().as_secs_f64() * 1e6 / f64::from(FLOOD)
    );

    let source = vec![3u8; BUFFER];
    let mut target = vec![4u8; BUFFER];
    println!("{name}: GB/s   memcpy   upload          download");
    for size in [64 << 10, 1 << 20, 16 << 20, BUFFER] {
        // Small transfers come in sequences, as the tensors of a model do, with one wait at the
        // end.
        let train = size.max(16 << 20);
        let (mut memcpy, mut upload, mut download) = (vec![], vec![], vec![]);
        for i in 0..((1 << 30) / train).max(5) {
            let at = i * train % (BUFFER - train + 1);
            let (source, target) = (&source[at..at + train], &mut target[at..at + train]);
            memcpy.push(timed(|| {
                for (to, from) in target.chunks_mut(size).zip(source.chunks(size)) {
                    black_box(to).copy_from_slice(black_box(from));
                }
            }));
            upload.push(timed(|| {
                let last = put(&mut guest, at, source, chunk_len(size));
                guest.wait_retired(last).unwrap();
            }));
            download.push(timed(|| get(&mut guest, at, target, chunk_len(size))));
        }
        compare(
            &format!("{} KiB", size >> 10),
            train,
            memcpy,
            upload,
            download,
        );
    }
    let size = 64 << 10;
    let (mut memcpy, mut upload, mut download) = (vec![], vec![], vec![]);
    for i in 0..1000 {
        let at = i * size;
        let (source, target) = (&source[at..at + size], &mut target[at..at + size]);
        memcpy.push(timed(|| {
            black_box(&mut *target).copy_from_slice(black_box(source))
        }));
        upload.push(timed(|| {
            let last = put(&mut guest, at, source, chunk_len(size));
            guest.wait_retired(last).unwrap();
        }));
        download.push(timed(|| get(&mut guest, at, target, chunk_len(size))));
    }
    compare("64, alone", size, memcpy, upload, download);
    println!("  {:?}", guest.counters());
}

fn compare(
    what: &str,
    bytes: usize,
    memcpy: Vec<Duration>,
    upload: Vec<Duration>,
    download: Vec<Duration>,
) {
    let rate = |times: Vec<Duration>| bytes as f64 / median(times).as_secs_f64() / 1e9;
    let (memcpy, upload, download) = (rate(memcpy), rate(upload), rate(download));
    println!(
        "  {what:>10} {memcpy:8.2} {upload:8.2} ({:3.0} %) {download:8.2} ({:3.0} %)",
        upload / memcpy * 100.0,
        download / memcpy * 100.0
    );
}

/// Uploads in chunks. Returns the last request.
fn put(guest: &mut WindowGuest, at: usize, data: &[u8], chunk: usize) -> u64 {
    let mut last = 0;
    for (i, part) in data.chunks(chunk).enumerate() {
        let mut message = [0; 9];
        message[0] = WRITE;
        message[1..].copy_from_slice(&((at + i * chunk) as u64).to_le_bytes());
        last = guest.send(&message, Bytes::from(part)).unwrap();
    }
    last
}

/// Downloads in chunks, with several requests in flight.
fn get(guest: &mut WindowGuest, at: usize, data: &mut [u8], chunk: usize) {
    const AHEAD: usize = 4;
    let len = data.len();
    let mut ask = (0..len).step_by(chunk).map(|start| {
        let mut message = [0; 17];
        message[0] = READ;
        message[1..9].copy_from_slice(&((at + start) as u64).to_le_bytes());
        message[9..].copy_from_slice(&(chunk.min(len - start) as u64).to_le_bytes());
        message
    });
    for message in ask.by_ref().take(AHEAD) {
        guest.send(&message, Bytes::from(&[][..])).unwrap();
    }
    let mut reply = Vec::new();
    for part in data.chunks_mut(chunk) {
        reply.clear();
        let part_len = part.len();
        let got = guest.receive(&mut reply, BytesMut::from(part)).unwrap();
        assert_eq!(got, part_len);
        if let Some(message) = ask.next() {
            guest.send(&message, Bytes::from(&[][..])).unwrap();
        }
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let began = Instant::now();
    work();
    began.elapsed()
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_nanos() as f64 / 1e3;
    println!(
        "{what:12} p50 {:7.2} us   p90 {:7.2}   p99 {:7.2}",
        at(50),
        at(90),
        at(99)
    );
}

/// The host process.
struct HostProcess {
    child: Child,
    path: PathBuf,
    _folder: TempDir,
}

impl HostProcess {
    fn start() -> HostProcess {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vgpu.sock");
        let child = Command::new(env::current_exe().unwrap())
            .env(HOST_VARIABLE, &path)
            .spawn()
            .unwrap();
        HostProcess {
            child,
            path,
            _folder: folder,
        }
    }
}

fn connect_when_there(path: &Path) -> WindowGuest {
    let began = Instant::now();
    loop {
        match connect(path, WAIT) {
            Ok(guest) => return guest,
            Err(error) if began.elapsed() > WAIT => panic!("{error}"),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}
