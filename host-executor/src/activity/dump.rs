//! What everybody does now, as text for people.
#![forbid(unsafe_code)]

use std::fmt::{self, Write as _};
use std::time::Duration;

use super::{Activities, RequestNow, SessionActivity, ThreadNow, ThreadState, TurnNow};
use crate::version::version;

/// What a dump says of an engine.
#[derive(Clone, Copy)]
pub(crate) struct EngineFigures<'a> {
    pub(crate) name: &'a str,
    pub(crate) description: &'a str,
    /// How long the engine has not answered a call.
    pub(crate) unanswered: Option<Duration>,
    /// How long the engine stays idle at most for a guest that is about to return.
    pub(crate) hold: Option<Duration>,
}

/// What a dump says of the process besides its sessions and engines.
pub(crate) struct ProcessFigures {
    /// Since the start of the executor.
    pub(crate) uptime: Duration,
    /// An engine from which a session has waited so long for an answer is not said to answer.
    pub(crate) slow: Duration,
    /// Further lines.
    pub(crate) more: Vec<String>,
}

impl ThreadState {
    fn text(self) -> &'static str {
        match self {
            ThreadState::Handshake => "opens the link",
            ThreadState::FirstMessage => "waits for HELLO",
            ThreadState::Pins => "registers the memory of the link with the device",
            ThreadState::Idle => "waits for the guest's next request",
            ThreadState::Executes => "executes",
            ThreadState::CallsEngine => "calls the engine",
            ThreadState::Compiles => "receives or compiles a graph",
            ThreadState::WaitsForEngine => "waits for the engine",
            ThreadState::WaitsForUpload => "waits for the upload of the same weights",
            ThreadState::Pauses => "pauses: its guest has worked much outside of turns",
            ThreadState::Replies => "sends a reply",
            ThreadState::Ends => "frees the memory of the session",
        }
    }
}

impl ThreadNow {
    /// Whether the engine may be called, and nothing else can take long. A compilation is one: it
    /// begins when the graph is complete, and limits bound the size of a graph.
    pub(super) fn is_engine_call(&self) -> bool {
        match self.state {
            ThreadState::Pins
            | ThreadState::CallsEngine
            | ThreadState::Compiles
            | ThreadState::Ends => true,
            // The first four call no engine, or one that the monitor watches. The others read a
            // disk, and say when they call the engine.
            ThreadState::Executes => !matches!(
                self.request.map(|request| request.kind),
                None | Some("HELLO" | "MEMORY" | "FENCE" | "QUERY" | "LOOKUP" | "PROOF" | "ATTACH")
            ),
            ThreadState::Handshake
            | ThreadState::FirstMessage
            | ThreadState::Idle
            | ThreadState::WaitsForEngine
            | ThreadState::WaitsForUpload
            | ThreadState::Pauses
            | ThreadState::Replies => false,
        }
    }
}

impl fmt::Display for ThreadNow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.state.text())?;
        if let Some(session) = self.awaited {
            write!(f, " by session {session}")?;
        }
        match self.request {
            Some(RequestNow { number, kind, .. }) => write!(f, ", request {number} ({kind})"),
            None => Ok(()),
        }
    }
}

/// How long the request has lasted.
impl fmt::Display for RequestNow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestNow {
            age, turns, queued, ..
        } = self;
        write!(
            f,
            "request for {age:.1?}, {turns} turns over, queued for {queued:.1?}"
        )
    }
}

impl fmt::Display for TurnNow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TurnNow {
            request,
            graph,
            nodes,
            ..
        } = self;
        match nodes {
            0 => write!(f, "request {request}")?,
            _ => write!(f, "request {request}: graph {graph} of {nodes} nodes")?,
        }
        match &self.longest {
            Some((node, op)) => write!(f, ", node {node} ({op}) takes longest by estimate"),
            None => Ok(()),
        }
    }
}

impl SessionActivity {
    pub(super) fn is_in(&self, state: ThreadState) -> bool {
        self.now.is_some_and(|now| now.state == state)
    }

    /// How long the session has had the engine without a pause, or has been in a call of it.
    fn engine_call(&self) -> Option<Duration> {
        let now = self.now.filter(ThreadNow::is_engine_call);
        let turn = self.turn.as_ref().map(|turn| turn.age);
        turn.or(now.map(|now| now.age))
    }

    /// The session and its guest.
    pub(super) fn name(&self) -> String {
        let mut name = format!("session {} (guest {}", self.id, self.guest);
        // Writing to a string cannot fail.
        if let Some(program) = &self.program {
            let _ = write!(name, ", program {program}");
        }
        if let Some(pid) = self.pid {
            let _ = write!(name, ", pid {pid}");
        }
        name.push(')');
        name
    }
}

/// The lines of a dump. `engines`: by the index of the device.
pub(crate) fn dump(
    activities: &Activities,
    engines: &[EngineFigures<'_>],
    process: &ProcessFigures,
) -> String {
    let sessions = activities.snapshot();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_dump(&mut text, activities, &sessions, engines, process);
    text
}

fn write_dump(
    text: &mut String,
    activities: &Activities,
    sessions: &[SessionActivity],
    engines: &[EngineFigures<'_>],
    process: &ProcessFigures,
) -> fmt::Result {
    writeln!(
        text,
        "vgpu {}, process {}, up {:.1?}",
        version(),
        std::process::id(),
        process.uptime
    )?;
    for (device, engine) in engines.iter().enumerate() {
        write_engine(text, sessions, device, engine, process.slow)?;
    }
    for line in &process.more {
        writeln!(text, "{line}")?;
    }
    write_sessions(text, sessions, engines)?;
    match activities.without_record() {
        0 => Ok(()),
        count => writeln!(text, "{count} further sessions, of which nothing is known"),
    }
}

/// What the engine of a device does, and who has it.
fn write_engine(
    text: &mut String,
    sessions: &[SessionActivity],
    device: usize,
    engine: &EngineFigures<'_>,
    slow: Duration,
) -> fmt::Result {
    let own = || sessions.iter().filter(|session| session.device == device);
    write!(text, "engine {}: {}; ", engine.name, engine.description)?;
    let call = own()
        .filter_map(|session| Some((session.engine_call()?, session.id)))
        .max();
    match (engine.unanswered, call) {
        (Some(age), _) => writeln!(text, "has not answered a call for {age:.1?}")?,
        (None, Some((age, session))) if age >= slow => {
            writeln!(text, "has not come back to session {session} for {age:.1?}")?;
        }
        (None, _) => writeln!(text, "answers calls")?,
    }
    let waiting = own().filter(|session| session.is_in(ThreadState::WaitsForEngine));
    let waiting = waiting.count();
    let mut is_idle = true;
    for holder in own() {
        if let Some(turn) = &holder.turn {
            is_idle = false;
            writeln!(
                text,
                "turn: {} has the engine for {:.1?}, {turn}; {waiting} wait for it",
                holder.name(),
                turn.age
            )?;
        }
    }
    if is_idle {
        write!(
            text,
            "turn: no session has the engine, {waiting} wait for it"
        )?;
        match engine.hold {
            Some(hold) => writeln!(
                text,
                "; it stays idle for {hold:.1?} at most, for a guest that is about to return"
            )?,
            None => writeln!(text)?,
        }
    }
    Ok(())
}

/// What each session does. With several engines, the session says which one is its own.
fn write_sessions(
    text: &mut String,
    sessions: &[SessionActivity],
    engines: &[EngineFigures<'_>],
) -> fmt::Result {
    for session in sessions {
        write!(text, "{} at {}", session.name(), session.endpoint)?;
        match engines.get(session.device) {
            Some(engine) if engines.len() > 1 => writeln!(text, ", engine {}", engine.name)?,
            _ => writeln!(text)?,
        }
        match &session.now {
            Some(now) => {
                write!(text, "  {now}, for {:.1?}", now.age)?;
                if let Some(request) = &now.request {
                    write!(text, "; {request}")?;
                }
            }
            None => write!(
                text,
                "  its thread was stopped while it published what it does"
            )?,
        }
        if session.is_in(ThreadState::WaitsForEngine) {
            let of_device = sessions.iter().filter(|one| one.device == session.device);
            for holder in of_device.filter(|one| one.turn.is_some()) {
                write!(text, "; session {} has it", holder.id)?;
            }
        }
        if session.turn.is_some() {
            write!(text, "; has the engine")?;
        }
        writeln!(
            text,
            "; {} requests received, {} done",
            session.received, session.retired
        )?;
        if let Some(link) = &session.link {
            writeln!(text, "  link: {link}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activity::GraphInfo;
    use crate::stats::SUBMIT;

    #[test]
    fn a_dump_says_why_the_engine_is_idle_while_guests_wait() {
        let activities = Activities::new(1);
        let waits = activities.begin(7, "alice", "-");
        waits.set(ThreadState::WaitsForEngine);
        let mut engine = EngineFigures {
            name: "cpu",
            description: "an engine",
            unanswered: None,
            hold: Some(Duration::from_millis(12)),
        };
        let process = ProcessFigures {
            uptime: Duration::ZERO,
            slow: Duration::from_secs(10),
            more: Vec::new(),
        };
        let text = dump(&activities, &[engine], &process);
        let idle = "no session has the engine, 1 wait for it; it stays idle for 12.0ms at most";
        assert!(text.contains(idle), "{text}");
        engine.hold = None;
        assert!(!dump(&activities, &[engine], &process).contains("stays idle"));
    }

    #[test]
    fn a_dump_says_that_the_engine_has_not_come_back() {
        let activities = Activities::new(2);
        let engine = EngineFigures {
            name: "cpu",
            description: "an engine",
            unanswered: None,
            hold: None,
        };
        let engine_line = |slow| {
            let process = ProcessFigures {
                uptime: Duration::ZERO,
                slow,
                more: Vec::new(),
            };
            let text = dump(&activities, &[engine], &process);
            text.lines().nth(1).unwrap_or_default().to_owned()
        };
        let stuck = "engine cpu: an engine; has not come back to session 7 for ";
        let answers = "engine cpu: an engine; answers calls";
        // A session that waits for its guest is in no call.
        let session = activities.begin(7, "alice", "-");
        session.set(ThreadState::Idle);
        assert_eq!(engine_line(Duration::ZERO), answers);
        // Outside of a turn: a write into memory, for example.
        session.request(ThreadState::CallsEngine, SUBMIT, 3);
        assert!(engine_line(Duration::ZERO).starts_with(stuck));
        assert_eq!(engine_line(Duration::from_secs(1000)), answers);
        // In a turn.
        session.set(ThreadState::Idle);
        session.begin_turn(
            9,
            &GraphInfo {
                graph: 1,
                nodes: 5,
                longest: None,
            },
        );
        assert!(engine_line(Duration::ZERO).starts_with(stuck));
        assert_eq!(engine_line(Duration::from_secs(1000)), answers);
    }

    #[test]
    fn a_dump_says_how_long_a_request_and_its_present_state_have_lasted() {
        let activities = Activities::new(1);
        let waits = activities.begin(7, "alice", "-");
        waits.request(ThreadState::WaitsForEngine, SUBMIT, 9);
        waits.count_turns(9, 480, Duration::from_secs(58));
        std::thread::sleep(Duration::from_millis(20));
        waits.request(ThreadState::WaitsForEngine, SUBMIT, 9);
        let process = ProcessFigures {
            uptime: Duration::ZERO,
            slow: Duration::from_secs(10),
            more: Vec::new(),
        };
        let text = dump(&activities, &[], &process);
        let line = text
            .lines()
            .find(|line| line.contains("request 9 (SUBMIT)"));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        assert!(
            line.contains(", 480 turns over, queued for 58.0s"),
            "{line}"
        );
        let age = line
            .split_once("; request for ")
            .and_then(|(_, rest)| rest.split_once("ms,"));
        let (age, _) = age.unwrap_or_else(|| panic!("{line}"));
        assert!(age.parse::<f64>().unwrap() >= 20.0, "{line}");
    }

    #[test]
    fn a_dump_says_what_a_link_without_shared_memory_has_sent() {
        use vgpu_transport::link::HostEnd as _;
        use vgpu_transport::link::stream::{Plain, StreamHost};

        let activities = Activities::new(1);
        let session = activities.begin(7, "alice", "tcp:[::1]:4780");
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut host = StreamHost::new(Box::new(Plain::new(near))).unwrap();
        session.set_link(host.watch());
        host.send(&[1; 8], 0, &mut |_| {}).unwrap();
        let process = ProcessFigures {
            uptime: Duration::ZERO,
            slow: Duration::from_secs(10),
            more: Vec::new(),
        };
        let text = dump(&activities, &[], &process);
        // A header of 24 bytes, and the message.
        assert!(
            text.contains("\n  link: sent 32 bytes, the last ones "),
            "{text}"
        );
        let rest = "; received 0 bytes; 0 bytes wait for the socket; retired 0; last reply to \
                    request 0, ";
        assert!(text.contains(rest), "{text}");
    }

    #[test]
    fn a_dump_says_who_has_which_engine() {
        let activities = Activities::new(2);
        let busy = activities.begin(1, "alice", "-");
        busy.set_device(1);
        busy.request(ThreadState::Executes, SUBMIT, 4);
        busy.begin_turn(4, &GraphInfo::default());
        let waits = activities.begin(2, "bob", "-");
        waits.set(ThreadState::WaitsForEngine);
        let engines = ["cuda:0", "cuda:1"].map(|name| EngineFigures {
            name,
            description: "a GPU",
            unanswered: None,
            hold: None,
        });
        let process = ProcessFigures {
            uptime: Duration::ZERO,
            slow: Duration::from_secs(10),
            more: Vec::new(),
        };
        let text = dump(&activities, &engines, &process);
        let lines: Vec<&str> = text.lines().collect();
        for (line, words) in [
            (1, "engine cuda:0: a GPU; answers calls"),
            (2, "turn: no session has the engine, 1 wait for it"),
            (3, "engine cuda:1: a GPU; answers calls"),
            (4, "turn: session 1 (guest alice) has the engine for "),
            (5, "session 1 (guest alice) at -, engine cuda:1"),
            (7, "session 2 (guest bob) at -, engine cuda:0"),
        ] {
            assert!(lines[line].starts_with(words), "{text}");
        }
        assert!(lines[4].ends_with("; 0 wait for it"), "{text}");
        assert!(
            !text.contains("has it"),
            "bob waits for another engine: {text}"
        );
    }
}
