//! Finds what lasts too long.
//!
//! The rule has no thread and no clock of its own. Time is what passes between two looks, and a
//! look counts for at most twice its period: a process that was stopped (SIGSTOP, a frozen control
//! group, a paused virtual machine) is not blamed for the time in which it could not run.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{SessionActivity, ThreadState};

/// What the watch reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Something lasts long. For the log.
    Slow(String),
    /// A request lasts long, and no part of it does. Guests cause any number of these.
    LongRequest(String),
    /// The engine does not come back. The process is of no use any more.
    Stuck(String),
}

/// What is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// The turn of the session with this record, which began at this time.
    Turn(usize, u64),
    /// What the thread with this record does since this time.
    Work(usize, u64),
    /// The thread with this record waits since this time for an engine that nobody has.
    Wait(usize, u64),
    /// A call of the engine that began at this time.
    Call(u64),
    /// The request of the thread with this record, which began at this time, whatever the thread
    /// does for it.
    Request(usize, u64),
}

impl Subject {
    /// The thread that this is about, if it is a part of a request.
    fn part_of_request(self) -> Option<usize> {
        match self {
            Subject::Turn(record, _) | Subject::Work(record, _) | Subject::Wait(record, _) => {
                Some(record)
            }
            Subject::Call(_) | Subject::Request(..) => None,
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    /// Counted time.
    lasts: Duration,
    /// Reports so far.
    reports: u32,
}

/// Watches an executor.
#[derive(Debug)]
pub(crate) struct Watch {
    /// After this time, and after three times this time, there is a line in the log.
    slow: Duration,
    /// After this time the process is of no use any more. `None`: never.
    limit: Option<Duration>,
    seen: BTreeMap<Subject, Seen>,
    /// What the engine has not come back from for longer than `slow`, at the last look.
    hang: Option<String>,
    /// Who has waited longer than `slow` for an engine that nobody has, at the last look.
    starved: Option<String>,
}

impl Watch {
    pub(crate) fn new(slow: Duration, limit: Option<Duration>) -> Watch {
        Watch {
            slow,
            limit,
            seen: BTreeMap::new(),
            hang: None,
            starved: None,
        }
    }

    /// What the engine has not come back from for long, as of the last look.
    pub(crate) fn hang(&self) -> Option<&str> {
        self.hang.as_deref()
    }

    /// Who waits in vain for an engine that nobody has, as of the last look.
    pub(crate) fn starved(&self) -> Option<&str> {
        self.starved.as_deref()
    }

    /// How often to [`look`](Watch::look).
    pub(crate) fn period(&self) -> Duration {
        let shortest = self.limit.map_or(self.slow, |limit| limit.min(self.slow));
        (shortest / 4).clamp(Duration::from_millis(1), Duration::from_secs(1))
    }

    /// Looks at what all sessions do, and at the present call of the engine with its beginning and
    /// its age. `passed`: since the last look.
    pub(crate) fn look(
        &mut self,
        sessions: &[SessionActivity],
        call: Option<(u64, Duration)>,
        passed: Duration,
    ) -> Vec<Notice> {
        let most = 2 * self.period();
        let mut subjects: Vec<(Subject, Duration, bool, String)> = Vec::new();
        let is_engine_taken = sessions.iter().any(|session| session.turn.is_some());
        for session in sessions {
            if let Some(turn) = &session.turn {
                let subject = Subject::Turn(session.record, turn.since);
                let waiting = { sessions.iter() }
                    .filter(|other| other.is_in(ThreadState::WaitsForEngine))
                    .count();
                let what = format!(
                    "{} has had the engine without a pause, {turn}; {waiting} others wait for it",
                    session.name()
                );
                subjects.push((subject, turn.age, true, what));
            } else if let Some(now) = &session.now
                && now.state.is_work()
            {
                let subject = Subject::Work(session.record, now.since);
                let what = format!("{} {now}", session.name());
                subjects.push((subject, now.age, now.is_engine_call(), what));
            } else if let Some(now) = &session.now
                && now.state == ThreadState::WaitsForEngine
                && !is_engine_taken
            {
                let subject = Subject::Wait(session.record, now.since);
                let what = format!("{} {now}, which no session has", session.name());
                subjects.push((subject, now.age, false, what));
            }
            // Behind what the thread does: that line says more.
            if let Some(now) = &session.now
                && let Some(request) = &now.request
            {
                let subject = Subject::Request(session.record, request.since);
                let what = format!(
                    "{} {now}, {} turns of which are over, after {:.1?} in the queue",
                    session.name(),
                    request.turns,
                    request.queued
                );
                subjects.push((subject, request.age, false, what));
            }
        }
        if let Some((since, age)) = call {
            let what = "the engine has not answered how much memory is free".to_owned();
            subjects.push((Subject::Call(since), age, true, what));
        }
        let mut notices = Vec::new();
        // Threads with a line about a part of their request.
        let mut reported = BTreeSet::new();
        let mut seen = BTreeMap::new();
        (self.hang, self.starved) = (None, None);
        for (subject, age, is_engine, what) in subjects {
            let one = match self.seen.remove(&subject) {
                Some(one) => Seen {
                    lasts: one.lasts + passed.min(most),
                    ..one
                },
                None => Seen {
                    lasts: age.min(most),
                    reports: 0,
                },
            };
            let one = seen.entry(subject).or_insert(one);
            let limit = self.limit.filter(|_| is_engine);
            let lasts = one.lasts;
            if lasts >= self.slow {
                let found = || Some(format!("{what}, for {lasts:.0?}"));
                match subject {
                    Subject::Wait(..) => self.starved = found(),
                    Subject::Request(..) => {}
                    _ if is_engine => self.hang = found(),
                    _ => {}
                }
            }
            if limit.is_some_and(|limit| lasts >= limit) {
                notices.push(Notice::Stuck(format!("{what}, for {lasts:.1?}")));
            } else if one.reports < 2 && lasts >= self.slow * (1 + 2 * one.reports) {
                one.reports += 1;
                if let Subject::Request(record, _) = subject {
                    if !reported.contains(&record) {
                        notices.push(Notice::LongRequest(format!("{what}, for {lasts:.1?}")));
                    }
                    continue;
                }
                reported.extend(subject.part_of_request());
                let end = limit.map_or(String::new(), |limit| {
                    format!("; this process ends after {limit:?} (engine.max-turn-time)")
                });
                notices.push(Notice::Slow(format!("{what}, for {lasts:.1?}{end}")));
            }
        }
        self.seen = seen;
        notices
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Activities, Activity, GraphInfo};
    use super::*;
    use crate::stats::{RequestKind, SUBMIT};
    use std::sync::Arc;

    const SECOND: Duration = Duration::from_secs(1);

    fn busy(all: &Arc<Activities>) -> Activity {
        let activity = all.begin(3, "alice", "-");
        activity.request(ThreadState::Executes, SUBMIT, 9);
        let longest = Some((3, "MUL_MAT"));
        let (graph, nodes) = (1, 5);
        activity.begin_turn(
            9,
            &GraphInfo {
                graph,
                nodes,
                longest,
            },
        );
        activity
    }

    /// The second of each notice, of `count` looks.
    fn notices(watch: &mut Watch, all: &Activities, count: u64) -> Vec<(u64, Notice)> {
        let each = (1..=count).map(|second| {
            let notices = watch.look(&all.snapshot(), None, SECOND);
            notices.into_iter().map(move |notice| (second, notice))
        });
        each.flatten().collect()
    }

    #[test]
    fn a_turn_is_reported_twice_and_then_ends_the_process() {
        let all = Activities::new(4);
        let holder = busy(&all);
        let waiter = all.begin(4, "bob", "-");
        waiter.request(ThreadState::WaitsForEngine, SUBMIT, 2);
        let mut watch = Watch::new(10 * SECOND, Some(40 * SECOND));
        let mut found = notices(&mut watch, &all, 45);
        let is_of_waiter = |(_, notice): &(u64, Notice)| matches!(notice, Notice::LongRequest(_));
        let of_waiter: Vec<_> = found.extract_if(.., |one| is_of_waiter(one)).collect();
        assert_eq!(of_waiter.len(), 2, "{of_waiter:?}");
        let [first, second, stuck, ..] = &found[..] else {
            panic!("{found:?}");
        };
        let Notice::Slow(text) = &first.1 else {
            panic!("{first:?}");
        };
        for part in [
            "session 3 (guest alice)",
            "request 9",
            "graph 1 of 5 nodes",
            "node 3 (MUL_MAT)",
            "1 others wait",
            "10.0s",
            "ends after 40s",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert!(matches!(second.1, Notice::Slow(_)));
        assert!(matches!(stuck.1, Notice::Stuck(_)), "{stuck:?}");
        // The first look sees a turn that has just begun.
        assert_eq!([first.0, second.0, stuck.0], [11, 31, 41]);
        let hang = watch.hang().expect("it hangs");
        assert!(hang.contains("session 3 (guest alice)"), "{hang}");
        // Another turn of the same session is another matter.
        holder.end_turn();
        drop(holder);
        let again = busy(&all);
        assert_eq!(notices(&mut watch, &all, 10), []);
        assert_eq!(watch.hang(), None);
        drop((waiter, again));
    }

    #[test]
    fn a_process_that_could_not_run_is_not_blamed() {
        let all = Activities::new(1);
        let _holder = busy(&all);
        let mut watch = Watch::new(10 * SECOND, Some(40 * SECOND));
        assert_eq!(notices(&mut watch, &all, 3), []);
        // Stopped for an hour.
        let late = watch.look(&all.snapshot(), None, 3600 * SECOND);
        assert_eq!(late, []);
    }

    #[test]
    fn waiting_is_no_work_and_a_guest_cannot_end_the_process() {
        let all = Activities::new(8);
        let of = |state, kind| {
            let activity = all.begin(1, "-", "-");
            activity.request(state, RequestKind::of_name(kind), 1);
            activity
        };
        // A guest decides how long this takes.
        let replies = of(ThreadState::Replies, "READ");
        let idle = all.begin(1, "-", "-");
        idle.set(ThreadState::Idle);
        let mut watch = Watch::new(10 * SECOND, Some(20 * SECOND));
        let found = notices(&mut watch, &all, 100);
        let [
            (11, Notice::LongRequest(text)),
            (31, Notice::LongRequest(_)),
        ] = &found[..]
        else {
            panic!("{found:?}");
        };
        assert!(text.contains("sends a reply, request 1 (READ)"), "{text}");
        drop(replies);
        // These read a disk.
        let _slow = [
            of(ThreadState::Executes, "PROOF"),
            of(ThreadState::Executes, "ATTACH"),
        ];
        let found = notices(&mut watch, &all, 100);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found.iter().all(|(_, n)| matches!(n, Notice::Slow(_))));
    }

    #[test]
    fn every_request_that_can_call_the_engine_can_be_a_hanging_engine() {
        let executes = [
            "ALLOC", "FREE", "WRITE", "READ", "FILL", "COPY", "SUBMIT", "FORGET", "WEIGHTS",
            "EXTENT", "SEAL",
        ];
        let executes = executes.map(|kind| (ThreadState::Executes, kind));
        let others = [
            (ThreadState::Compiles, "GRAPH"),
            (ThreadState::Compiles, "PATCH"),
            (ThreadState::CallsEngine, "LOOKUP"),
            (ThreadState::CallsEngine, "PROOF"),
            (ThreadState::CallsEngine, "ATTACH"),
        ];
        for (state, kind) in executes.into_iter().chain(others) {
            let all = Activities::new(1);
            let activity = all.begin(1, "-", "-");
            activity.request(state, RequestKind::of_name(kind), 1);
            let mut watch = Watch::new(10 * SECOND, Some(20 * SECOND));
            let found = notices(&mut watch, &all, 100);
            let is_stuck = |(_, notice): &(u64, Notice)| matches!(notice, Notice::Stuck(_));
            assert!(found.iter().any(is_stuck), "{kind}: {found:?}");
        }
    }

    /// A request takes many turns, or waits for many turns of others.
    #[test]
    fn a_request_that_lasts_is_reported_although_no_part_of_it_does() {
        let all = Activities::new(2);
        let [computes, waits] = [(3, "alice"), (4, "bob")].map(|(id, guest)| {
            let activity = all.begin(id, guest, "-");
            activity.request(ThreadState::WaitsForEngine, SUBMIT, 9);
            activity
        });
        let mut watch = Watch::new(10 * SECOND, Some(20 * SECOND));
        let mut found = Vec::new();
        for second in 1..=100 {
            computes.request(ThreadState::Executes, SUBMIT, 9);
            computes.begin_turn(9, &GraphInfo::default());
            let notices = watch.look(&all.snapshot(), None, SECOND);
            found.extend(notices.into_iter().map(|notice| (second, notice)));
            computes.end_turn();
            computes.count_turns(9, 1, Duration::ZERO);
            computes.request(ThreadState::WaitsForEngine, SUBMIT, 9);
        }
        let seconds: Vec<_> = found.iter().map(|(second, _)| *second).collect();
        assert_eq!(seconds, [11, 11, 31, 31], "{found:?}");
        for ((_, notice), parts) in found.iter().zip([
            [
                "session 3 (guest alice)",
                "request 9 (SUBMIT)",
                "10 turns of which",
            ],
            [
                "session 4 (guest bob) waits",
                "request 9 (SUBMIT)",
                "0 turns of which",
            ],
        ]) {
            let Notice::LongRequest(text) = notice else {
                panic!("{notice:?}");
            };
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
        // The engine is not at fault.
        assert_eq!((watch.hang(), watch.starved()), (None, None));
        // The next request of the same session is another matter.
        computes.set(ThreadState::Idle);
        computes.request(ThreadState::WaitsForEngine, SUBMIT, 10);
        drop(waits);
        let found = notices(&mut watch, &all, 5);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn an_engine_that_nobody_gets_is_reported() {
        let all = Activities::new(2);
        let waiter = all.begin(1, "alice", "-");
        waiter.request(ThreadState::WaitsForEngine, SUBMIT, 2);
        let mut watch = Watch::new(10 * SECOND, Some(20 * SECOND));
        let found = notices(&mut watch, &all, 100);
        let [(11, Notice::Slow(text)), (31, Notice::Slow(_))] = &found[..] else {
            panic!("{found:?}");
        };
        assert!(text.contains("waits for the engine"), "{text}");
        assert!(text.contains("no session has"), "{text}");
        // The engine is not at fault, and still nobody makes progress.
        assert_eq!(watch.hang(), None);
        let starved = watch.starved().expect("it waits");
        assert!(
            starved.contains("session 1 (guest alice) waits"),
            "{starved}"
        );
        drop(waiter);
        watch.look(&all.snapshot(), None, SECOND);
        assert_eq!(watch.starved(), None);
    }

    #[test]
    fn without_a_limit_nothing_ends_the_process() {
        let all = Activities::new(1);
        let _holder = busy(&all);
        let mut watch = Watch::new(10 * SECOND, None);
        let found = notices(&mut watch, &all, 100_000);
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn an_engine_that_does_not_answer_is_reported() {
        let mut watch = Watch::new(10 * SECOND, Some(20 * SECOND));
        let mut found = Vec::new();
        for second in 0..25 {
            found.extend(watch.look(&[], Some((7, second * SECOND)), SECOND));
        }
        assert!(matches!(found[0], Notice::Slow(_)), "{found:?}");
        assert!(matches!(found[1], Notice::Stuck(_)), "{found:?}");
    }
}
