//! The scheduling rule with a simulated clock.

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A tenant that runs graphs of one length, with a pause between them.
#[derive(Debug, Clone)]
struct Guest {
    weight: u32,
    graph: Duration,
    /// The longest piece that the engine cannot interrupt.
    piece: Duration,
    pause: Duration,
    /// The pause after every tenth graph.
    tenth: Duration,
    /// What a graph takes more in a turn after that of another tenant, with cold caches.
    cold: Duration,
    /// The tenant, if not one of its own: this is one more session of that guest.
    session_of: Option<usize>,
    /// When its last graph comes at the latest.
    leaves: Duration,
}

/// What a tenant has got.
#[derive(Debug, Clone, Default)]
struct Served {
    ran: Duration,
    graphs: u32,
    /// Turns after that of another tenant.
    switches: u32,
    /// The longest uninterrupted wait of a graph.
    longest_wait: Duration,
}

/// Until when a tenant that has come has its turn: see [`promise`].
type Promise = Option<Duration>;

/// What the rule promises a tenant at its arrival, if it has the smallest virtual time of all.
/// Another one that comes with a smaller time ends the promises of others.
fn promise(
    queue: &Queue,
    promises: &mut [Promise],
    (came, at): (TenantId, Duration),
    piece: Duration,
) {
    let is_smallest = |tenant: TenantId| {
        let time = queue.tenants[&tenant].time;
        let mut others = queue.tenants.iter().filter(|(other, _)| **other != tenant);
        others.all(|(_, other)| other.time > time)
    };
    for (i, promise) in promises.iter_mut().enumerate() {
        *promise = promise.filter(|_| is_smallest(TenantId(i as u64)));
    }
    if is_smallest(came) {
        promises[came.0 as usize] = Some(at + ROUND / 2 + MIN_SLICE + piece);
    }
}

/// The graphs that the guests of a simulation submit.
struct Arrivals<'a> {
    guests: &'a [Guest],
    /// When a guest submits its next graph; `None` while one is submitted.
    submits: Vec<Option<Duration>>,
    waits_since: Vec<Duration>,
    promises: Vec<Promise>,
    /// The longest piece of all guests.
    piece: Duration,
}

impl Arrivals<'_> {
    fn of(guests: &[Guest]) -> Arrivals<'_> {
        let pieces = guests.iter().map(|guest| guest.piece);
        Arrivals {
            guests,
            submits: vec![Some(Duration::ZERO); guests.len()],
            waits_since: vec![Duration::ZERO; guests.len()],
            promises: vec![None; guests.len()],
            piece: pieces.max().unwrap_or_default(),
        }
    }

    /// When the next graph is submitted.
    fn next(&self) -> Option<Duration> {
        self.submits.iter().flatten().min().copied()
    }

    /// Enters what has been submitted by `now`. Returns whether there was a graph.
    fn enter(&mut self, queue: &mut Queue, now: Duration) -> bool {
        let mut any = false;
        for (i, guest) in self.guests.iter().enumerate() {
            if self.submits[i].is_some_and(|at| at <= now) {
                self.waits_since[i] = self.submits[i].take().unwrap_or(now);
                let entitlement = Entitlement {
                    weight: guest.weight,
                    in_flight: 1,
                };
                let tenant = TenantId(guest.session_of.unwrap_or(i) as u64);
                let was_idle = queue.tenants.get(&tenant).is_none_or(TenantQueue::is_idle);
                queue.enter(tenant, entitlement, Ticket(i as u64), now);
                if was_idle {
                    promise(queue, &mut self.promises, (tenant, now), self.piece);
                }
                any = true;
            }
        }
        any
    }
}

/// Simulates the scheduler for `length`, and checks that tenants that come and have the smallest
/// virtual time get the device within 8.5 ms and one piece.
fn simulate(guests: &[Guest], length: Duration) -> Vec<Served> {
    let mut queue = Queue::new(true);
    let mut got = vec![Served::default(); guests.len()];
    let mut left: Vec<Duration> = guests.iter().map(|g| g.graph).collect();
    let mut now = Duration::ZERO;
    let mut last = None;
    let mut arrivals = Arrivals::of(guests);
    while now < length {
        arrivals.enter(&mut queue, now);
        let arrival = arrivals.next();
        let (tenant, ticket) = match queue.next(now) {
            Next::Run(tenant, ticket) => (tenant, ticket),
            Next::Hold(_, until) => {
                assert!(until > now, "a hold without an end");
                now = until.min(arrival.unwrap_or(until));
                continue;
            }
            Next::Idle => {
                now = arrival.expect("a tenant submits again");
                continue;
            }
        };
        let i = ticket.0 as usize;
        let promised = arrivals.promises[tenant.0 as usize].take().unwrap_or(now);
        assert!(
            now <= promised,
            "{tenant:?} waits until {now:?}, and not until {promised:?}"
        );
        got[i].longest_wait = got[i].longest_wait.max(now - arrivals.waits_since[i]);
        if last.replace(tenant) != Some(tenant) {
            got[i].switches += 1;
            left[i] += guests[i].cold;
        }
        let since = now;
        let mut end = queue.allowance(tenant);
        loop {
            let piece = guests[i].piece.min(left[i]);
            let piece_end = now + piece;
            left[i] -= piece;
            while let Some(at) = arrivals.next().filter(|&at| at < piece_end) {
                let at = at.max(now);
                queue.progress(tenant, at - now);
                now = at;
                arrivals.enter(&mut queue, now);
                end = queue.cut(tenant, now - since);
            }
            queue.progress(tenant, piece_end - now);
            now = piece_end;
            if arrivals.enter(&mut queue, now) {
                end = queue.cut(tenant, now - since);
            }
            if left[i].is_zero() || end.is_some_and(|end| now - since >= end) {
                break;
            }
        }
        let is_done = left[i].is_zero();
        queue.used(tenant, ticket, Duration::ZERO, is_done, now);
        got[i].ran += now - since;
        arrivals.waits_since[i] = now;
        if is_done {
            got[i].graphs += 1;
            left[i] = guests[i].graph;
            let is_tenth = got[i].graphs.is_multiple_of(10);
            let guest = &guests[i];
            let next = now + if is_tenth { guest.tenth } else { guest.pause };
            arrivals.submits[i] = (next <= guest.leaves).then_some(next);
        }
    }
    got
}

fn busy(weight: u32, graph_us: u64, piece_us: u64) -> Guest {
    Guest {
        weight,
        graph: Duration::from_micros(graph_us),
        piece: Duration::from_micros(piece_us),
        pause: Duration::ZERO,
        tenth: Duration::ZERO,
        cold: Duration::ZERO,
        session_of: None,
        leaves: Duration::MAX,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Tenants that always have graphs waiting get time in proportion to their weights, to within
    /// the overrun of one turn.
    #[test]
    fn busy_guests_share_by_weight(
        guests in prop::collection::vec((1u32..20, 100u64..200_000, 20u64..1500), 2..6),
        seconds in 1u64..4,
    ) {
        let guests: Vec<Guest> = guests
            .into_iter()
            .map(|(w, graph, piece)| busy(w, graph, piece))
            .collect();
        let got = simulate(&guests, Duration::from_secs(seconds));
        for (a, i) in got.iter().zip(&guests) {
            for (b, j) in got.iter().zip(&guests) {
                let va = a.ran.as_secs_f64() / f64::from(i.weight);
                let vb = b.ran.as_secs_f64() / f64::from(j.weight);
                let too_long = |g: &Guest| {
                    (ROUND / 2 + MIN_SLICE + 2 * g.piece).as_secs_f64() / f64::from(g.weight)
                };
                prop_assert!((va - vb).abs() <= too_long(i) + too_long(j), "{va} and {vb} of \
                 {guests:?}");
            }
        }
    }

    /// No graph waits longer than one turn of each other tenant plus the lead of its own and the
    /// pauses in which the device stays idle for the others, and every tenant makes progress.
    #[test]
    fn waiting_time_of_each_tenant_is_bounded(
        guests in prop::collection::vec(
            (1u32..5, 100u64..300_000, 20u64..1500, 0u64..20_000),
            1..6,
        ),
    ) {
        let guests: Vec<Guest> = guests
            .into_iter()
            .map(|(w, graph, piece, pause)| Guest {
                pause: Duration::from_micros(pause),
                tenth: Duration::from_micros(pause),
                ..busy(w, graph, piece)
            })
            .collect();
        let got = simulate(&guests, Duration::from_secs(10));
        for (i, (a, guest)) in got.iter().zip(&guests).enumerate() {
            prop_assert!(a.graphs > 0, "{guests:?}: {got:?}");
            // The lead of its own last turn; for each other tenant its credit, and the pause after
            // which it returns.
            let own = ROUND / 2 + MIN_SLICE + 2 * guest.piece;
            let own = own.as_secs_f64() / f64::from(guest.weight);
            let others = guests.iter().enumerate().filter(|&(j, _)| j != i);
            let bound: f64 = others
                .map(|(_, g)| {
                    own * f64::from(g.weight)
                        + (ROUND / 2 + MIN_SLICE + 2 * g.piece + CREDIT + 2 * g.pause).as_secs_f64()
                })
                .sum();
            prop_assert!(a.longest_wait.as_secs_f64() <= bound, "{i} waited {:?}, {bound}: \
             {guests:?}", a.longest_wait);
        }
    }
}

#[test]
fn turn_shares_follow_weights_of_one_and_three() {
    for (graph, piece) in [(5_000, 20), (150_000, 1_000), (300, 300)] {
        let got = simulate(
            &[busy(1, graph, piece), busy(3, graph, piece)],
            Duration::from_secs(10),
        );
        let ratio = got[1].ran.as_secs_f64() / got[0].ran.as_secs_f64();
        assert!((2.95..3.05).contains(&ratio), "{ratio}");
    }
}

#[test]
fn decoding_gets_half_of_the_device_beside_a_continuous_prefill() {
    let decode = Guest {
        pause: MS / 3,
        tenth: MS / 3,
        ..busy(1, 5_000, 20)
    };
    let alone = simulate(std::slice::from_ref(&decode), Duration::from_secs(10))[0].graphs;
    let beside = simulate(&[decode, busy(1, 400_000, 1_000)], Duration::from_secs(10))[0].graphs;
    let kept = f64::from(beside) / f64::from(alone);
    assert!(kept > 0.49, "{kept} of its speed alone");
}

/// A guest that decodes, and its graphs in ten seconds alone.
fn decoding(graph: Duration, pause: Duration) -> (Guest, f64) {
    let guest = Guest {
        graph,
        piece: MIN_SLICE,
        pause,
        tenth: pause,
        ..busy(1, 0, 0)
    };
    let alone = &simulate(std::slice::from_ref(&guest), LONG)[0];
    (guest, f64::from(alone.graphs))
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn decoding_keeps_half_of_its_rate_beside_pieces_of_any_length() {
    let us = Duration::from_micros;
    for graph in [us(200), MS, 5 * MS, 30 * MS] {
        for pause in [us(50), us(300), 3 * MS, 20 * MS, 45 * MS] {
            let (guest, alone) = decoding(graph, pause);
            for piece in [us(100), MS, 3 * MS, 7 * MS, 30 * MS, 100 * MS, 600 * MS] {
                for (pieces, between) in [(1, 0), (1, 100), (3, 0), (100_000, 0)] {
                    let attacker = Guest {
                        graph: piece * pieces,
                        piece,
                        pause: us(between),
                        tenth: us(between),
                        ..busy(1, 0, 0)
                    };
                    let got = simulate(&[guest.clone(), attacker.clone()], LONG);
                    let kept = f64::from(got[0].graphs) / alone;
                    assert!(
                        kept >= 0.47,
                        "{guest:?} keeps {kept:.2} of its rate beside {attacker:?}"
                    );
                }
            }
        }
    }
}

/// With short pauses, a guest computes several tokens in a turn, and only the first with cold
/// caches.
#[test]
fn decoding_keeps_its_rate_with_cold_caches() {
    let us = Duration::from_micros;
    for (graph, pause) in [(2000, 150), (5500, 150), (5500, 450), (12_000, 900)] {
        for cold in [300, 600, 1000] {
            let (guest, alone) = decoding(us(graph), us(pause));
            let guest = Guest {
                cold: us(cold),
                ..guest
            };
            let others = [500, 3000, 30_000].map(|piece| busy(1, 400_000, piece));
            for other in others.into_iter().chain([guest.clone()]) {
                let got = &simulate(&[guest.clone(), other.clone()], LONG)[0];
                let kept = f64::from(got.graphs) / alone;
                assert!(kept >= 0.46, "{guest:?} keeps {kept:.3} beside {other:?}");
                let per_graph = f64::from(got.switches) / f64::from(got.graphs);
                let most = graph as f64 / 12_000.0;
                assert!(per_graph < most, "{per_graph:.2} switches beside {other:?}");
            }
        }
    }
}

/// Graphs of a guest that is served as each test below needs.
const ONE_GRAPH: Entitlement = Entitlement {
    weight: 1,
    in_flight: 1,
};
const DECODES: TenantId = TenantId(1);
const BUSY: TenantId = TenantId(2);
const COMES: TenantId = TenantId(3);
const TOKEN: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(100);

/// A queue in which `DECODES` has just ended its second token, [`PAUSE`] after the first, and the
/// graph 2 of `BUSY` waits; and the time.
fn after_a_token(has_caches: bool) -> (Queue, Duration) {
    let mut queue = Queue::new(has_caches);
    let mut at = MS;
    run_once(&mut queue, DECODES, Ticket(0), TOKEN, &mut at);
    at += PAUSE;
    queue.enter(DECODES, ONE_GRAPH, Ticket(1), at);
    assert_eq!(queue.next(at), Next::Run(DECODES, Ticket(1)));
    queue.enter(BUSY, ONE_GRAPH, Ticket(2), at);
    at += TOKEN;
    queue.used(DECODES, Ticket(1), TOKEN, true, at);
    (queue, at)
}

/// A graph that comes in a pause does not wait for the tenant that would keep its turn.
#[test]
fn a_turn_is_kept_only_from_those_that_waited_before() {
    for has_caches in [true, false] {
        for comes_in_the_pause in [false, true] {
            let (mut queue, mut at) = after_a_token(has_caches);
            if comes_in_the_pause {
                queue.enter(TenantId(3), ONE_GRAPH, Ticket(3), at);
            }
            let kept = matches!(queue.next(at), Next::Hold(..));
            assert_eq!(kept, has_caches && !comes_in_the_pause);
            at += PAUSE;
            queue.enter(DECODES, ONE_GRAPH, Ticket(4), at);
            if kept {
                assert_eq!(queue.next(at), Next::Run(DECODES, Ticket(4)));
            }
        }
    }
}

/// The device waits for a guest whose turn is kept no longer than twice its last pause.
#[test]
fn a_turn_that_is_kept_ends_when_its_guest_does_not_return() {
    let (mut queue, at) = after_a_token(true);
    let until = at + 2 * PAUSE;
    assert_eq!(queue.next(at), Next::Hold(Ticket(2), until));
    let paid = queue.time_of(DECODES);
    assert_eq!(queue.next(until), Next::Run(BUSY, Ticket(2)));
    assert_eq!(
        queue.time_of(DECODES),
        paid + 2 * PAUSE,
        "it pays for the wait"
    );
}

/// Once an attacker has gone, a guest has its rate alone, whatever the attacker has had.
#[test]
fn decoding_has_its_whole_rate_after_an_attacker() {
    let us = Duration::from_micros;
    let (second, gone) = (Duration::from_secs(1), Duration::from_secs(10));
    for (graph, pause) in [(200, 50), (2000, 150), (5500, 450), (30_000, 3000)] {
        let (guest, _) = decoding(us(graph), us(pause));
        for piece in [500, 3000, 100_000] {
            for (length, between) in [(piece, 100), (3 * piece, 0), (5_000_000, 0)] {
                let attacker = Guest {
                    pause: us(between),
                    tenth: us(between),
                    leaves: gone,
                    ..busy(1, length, piece)
                };
                let graphs = |guests: &[Guest], until| simulate(guests, until)[0].graphs;
                let both = [guest.clone(), attacker.clone()];
                // Its last graph is done by then: alone, it would take as long, and twice at most.
                let from = gone + 3 * us(length);
                let kept = graphs(&both, from + second) - graphs(&both, from);
                let alone = second.div_duration_f64(guest.graph + guest.pause);
                assert!(
                    f64::from(kept) >= 0.99 * alone - 1.0,
                    "{kept} of {alone} beside {attacker:?}"
                );
            }
        }
    }
}

/// One more graph of a tenant that waits already does not end a turn, as one does of a tenant that
/// comes.
#[test]
fn a_turn_ends_at_once_only_for_a_tenant_that_comes() {
    let (mut queue, at) = after_a_token(false);
    assert_eq!(queue.next(at), Next::Run(BUSY, Ticket(2)));
    queue.progress(BUSY, TOKEN);
    queue.enter(DECODES, ONE_GRAPH, Ticket(3), at + TOKEN);
    // Each has had the same, but for the credit of a tenant that returns.
    queue.progress(BUSY, 3 * MS);
    let ran = TOKEN + 3 * MS;
    assert_eq!(queue.cut(BUSY, ran), Some(ran), "the other has come");
    queue.used(BUSY, Ticket(2), Duration::ZERO, false, at + ran);
    assert_eq!(queue.next(at + ran), Next::Run(DECODES, Ticket(3)));
    queue.progress(DECODES, 7 * MS);
    queue.enter(BUSY, ONE_GRAPH, Ticket(4), at + ran + 7 * MS);
    let cut = queue.cut(DECODES, 7 * MS).unwrap();
    assert!(cut > 8 * MS, "{cut:?}, ahead of a tenant that waits");
}

/// Where turns begin with cold caches, one has 2 ms before a tenant that comes ends it.
#[test]
fn a_turn_with_cold_caches_is_not_ended_at_once() {
    for (has_caches, least) in [(false, MS), (true, MIN_WARM_SLICE)] {
        let mut queue = Queue::new(has_caches);
        queue.enter(BUSY, ONE_GRAPH, Ticket(0), MS);
        assert_eq!(queue.next(MS), Next::Run(BUSY, Ticket(0)));
        queue.progress(BUSY, 6 * MS);
        queue.enter(DECODES, ONE_GRAPH, Ticket(1), 7 * MS);
        for ran in [MS, 3 * MS] {
            assert_eq!(queue.cut(BUSY, ran), Some(ran.max(least)), "{has_caches}");
        }
    }
}

/// A turn that is to end sooner anyway does not become 2 ms long for a tenant that comes.
#[test]
fn a_tenant_that_comes_makes_no_turn_longer() {
    // Of its 8 ms, as much is left.
    for left in [1500, 600].map(Duration::from_micros) {
        let mut queue = Queue::new(true);
        queue.enter(BUSY, ONE_GRAPH, Ticket(0), MS);
        queue.enter(DECODES, ONE_GRAPH, Ticket(1), MS);
        assert_eq!(queue.next(MS), Next::Run(DECODES, Ticket(1)));
        queue.used(DECODES, Ticket(1), Duration::ZERO, false, MS);
        queue.last = Some(BUSY);
        assert_eq!(queue.next(MS), Next::Run(BUSY, Ticket(0)));
        let before = queue.slice(0) - left;
        queue.progress(BUSY, before);
        queue.used(BUSY, Ticket(0), Duration::ZERO, false, MS + before);
        assert_eq!(
            queue.next(MS + before),
            Next::Run(BUSY, Ticket(0)),
            "it goes on"
        );
        let allowance = queue.allowance(BUSY).expect("one waits");
        assert_eq!(allowance, left.max(MIN_SLICE));
        queue.enter(COMES, ONE_GRAPH, Ticket(2), MS + before);
        let cut = queue.cut(BUSY, Duration::ZERO).expect("two wait");
        assert!(cut <= allowance, "{cut:?} of {allowance:?}");
    }
}

/// A turn that ends for a tenant that has come does not go on with another graph, also if a third
/// tenant is the first of those that wait.
#[test]
fn a_turn_that_was_ended_does_not_go_on() {
    let mut queue = Queue::new(true);
    let mut at = MS;
    let mut run = |queue: &mut Queue, tenant, ticket, time: Duration, is_done| {
        assert_eq!(queue.next(at), Next::Run(tenant, Ticket(ticket)));
        queue.progress(tenant, time);
        at += time;
        if is_done && tenant == BUSY {
            queue.enter(BUSY, ONE_GRAPH, Ticket(3), at);
        }
        queue.used(tenant, Ticket(ticket), Duration::ZERO, is_done, at);
        at
    };
    queue.enter(COMES, ONE_GRAPH, Ticket(0), MS);
    let at = run(&mut queue, COMES, 0, 2 * MS, true);
    queue.enter(DECODES, ONE_GRAPH, Ticket(1), at);
    queue.enter(BUSY, ONE_GRAPH, Ticket(2), at);
    run(&mut queue, DECODES, 1, MS, false);
    let at = run(&mut queue, BUSY, 2, 4 * MS, true);
    assert_eq!(queue.continued(DECODES), Some(BUSY), "nobody has come");
    queue.enter(COMES, ONE_GRAPH, Ticket(4), at);
    assert_eq!(queue.first(), Some(DECODES));
    assert_eq!(queue.continued(DECODES), None);
    assert_eq!(queue.next(at), Next::Run(DECODES, Ticket(1)));
}

/// A guest of many sessions has no shorter turns beside it than a guest of one.
#[test]
fn sessions_of_one_tenant_cut_no_turns_of_another() {
    let us = Duration::from_micros;
    for (graph, pause) in [(2000, 150), (5500, 450)] {
        let (guest, alone) = decoding(us(graph), us(pause));
        let guest = Guest {
            cold: us(1000),
            ..guest
        };
        // One of several sessions always waits.
        for sessions in [4, 16] {
            let session = Guest {
                session_of: Some(1),
                pause: us(100),
                tenth: us(100),
                ..busy(1, 900, 500)
            };
            let mut guests = vec![session; 1 + sessions];
            guests[0] = guest.clone();
            let got = &simulate(&guests, LONG)[0];
            let kept = f64::from(got.graphs) / alone;
            assert!(kept >= 0.46, "{guest:?}: {kept:.3} beside {sessions}");
            let per_graph = f64::from(got.switches) / f64::from(got.graphs);
            let most = graph as f64 / 12_000.0;
            assert!(per_graph < most, "{per_graph:.2} switches, {sessions}");
        }
    }
}

/// A tenant that returns after a longer time waits for a turn at most, also beside a guest that
/// keeps its turns.
#[test]
fn a_guest_with_little_to_do_waits_for_no_turn_that_is_kept() {
    let us = Duration::from_micros;
    let (guest, _) = decoding(us(5500), us(300));
    let light = Guest {
        graph: us(200),
        pause: 100 * MS,
        tenth: 100 * MS,
        ..guest.clone()
    };
    let got = simulate(&[guest, busy(1, 400_000, 500), light], LONG);
    let waited = got[2].longest_wait;
    assert!(waited <= ROUND / 2 + SLICE, "{waited:?}");
}

#[test]
fn a_longer_pause_now_and_then_costs_a_guest_no_more_than_its_length() {
    let (mut guest, _) = decoding(5 * MS, MS / 3);
    for tenth in [8 * MS, 12 * MS, 30 * MS] {
        guest.tenth = tenth;
        let alone = simulate(std::slice::from_ref(&guest), LONG)[0].graphs;
        for piece in [30_000, 100_000, 600_000] {
            let got = simulate(&[guest.clone(), busy(1, 2 * piece, piece)], LONG);
            let kept = f64::from(got[0].graphs) / f64::from(alone);
            assert!(
                kept >= 0.45,
                "{kept} of its rate with {tenth:?} beside pieces of {piece} us"
            );
        }
    }
}

#[test]
fn pauses_of_one_guest_take_no_more_than_its_share_from_another() {
    for (graph, pause) in [
        (10, 1300),
        (10, 1700),
        (100, 2300),
        (10, 10_000),
        (500, 300),
        (5000, 300),
        (5000, 49_000),
    ] {
        for piece in [20, 500, 1000, 30_000, 200_000] {
            let [graph, pause] = [graph, pause].map(Duration::from_micros);
            let (guest, _) = decoding(graph, pause);
            let got = simulate(&[guest.clone(), busy(1, 400_000, piece)], LONG);
            let share = got[1].ran.as_secs_f64() / LONG.as_secs_f64();
            assert!(
                share > 0.48,
                "{share} beside {guest:?} in pieces of {piece} us"
            );
            // A guest that needs less than half is not waited for without need.
            let duty = graph.as_secs_f64() / (graph + pause).as_secs_f64();
            if piece <= 1000 && duty < 0.05 {
                assert!(
                    share > 0.9,
                    "{share} beside {guest:?} in pieces of {piece} us"
                );
            }
        }
    }
}

#[test]
fn device_does_not_wait_for_a_guest_that_is_gone_or_slow() {
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let (decodes, overran) = (TenantId(1), TenantId(2));
    for pause in [MS, 20 * MS, MAX_PAUSE + MS] {
        let mut queue = Queue::new(true);
        let mut at = MS;
        // Each graph but the first waits for a piece of 200 ms.
        run_once(&mut queue, decodes, Ticket(0), MS, &mut at);
        at += pause;
        queue.enter(overran, entitlement, Ticket(1), at);
        assert_eq!(queue.next(at), Next::Run(overran, Ticket(1)));
        queue.enter(decodes, entitlement, Ticket(2), at);
        at += 200 * MS;
        queue.used(overran, Ticket(1), 200 * MS, false, at);
        assert_eq!(queue.next(at), Next::Run(decodes, Ticket(2)));
        at += MS;
        queue.used(decodes, Ticket(2), MS, true, at);
        // The guest does not return.
        let since = at;
        while let Next::Hold(ticket, until) = queue.next(at) {
            assert_eq!(ticket, Ticket(1));
            at = until;
        }
        match pause <= MAX_PAUSE {
            true => assert!((pause..2 * pause + CREDIT + MAX_PAUSE).contains(&(at - since))),
            false => assert_eq!(at, since, "a slow guest is waited for"),
        }
        // What it has been waited for is charged to it.
        let charged = queue.time_of(decodes).saturating_sub(2 * MS);
        assert!(charged + MS >= at - since, "{charged:?}");
    }
}

#[test]
fn a_tenant_pays_for_all_the_time_that_the_device_has_stayed_idle_for_it() {
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let (decodes, overran) = (TenantId(1), TenantId(2));
    // The thread of the next graph wakes up on time, and late.
    for late in [Duration::ZERO, 7 * MS] {
        let mut queue = Queue::new(true);
        let mut at = MS;
        run_once(&mut queue, decodes, Ticket(0), MS, &mut at);
        at += MS;
        queue.enter(overran, entitlement, Ticket(1), at);
        assert_eq!(queue.next(at), Next::Run(overran, Ticket(1)));
        queue.enter(decodes, entitlement, Ticket(2), at);
        at += 200 * MS;
        queue.used(overran, Ticket(1), 200 * MS, false, at);
        assert_eq!(queue.next(at), Next::Run(decodes, Ticket(2)));
        at += MS;
        queue.used(decodes, Ticket(2), MS, true, at);
        let (since, before) = (at, queue.time_of(decodes));
        while let Next::Hold(_, until) = queue.next(at) {
            at = until + late;
        }
        assert!(at > since + late, "the device was not held");
        assert_eq!(queue.time_of(decodes) - before, at - since, "{late:?} late");
    }
}

#[test]
fn turn_of_a_single_tenant_has_no_limit() {
    let mut queue = Queue::new(true);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 4,
    };
    queue.enter(TenantId(1), entitlement, Ticket(1), MS);
    assert_eq!(queue.next(MS), Next::Run(TenantId(1), Ticket(1)));
    assert_eq!(queue.allowance(TenantId(1)), None);
    assert_eq!(queue.cut(TenantId(1), MS), None);
    assert_eq!(queue.next(MS), Next::Idle);
}

#[test]
fn started_graphs_of_a_tenant_are_limited() {
    let mut queue = Queue::new(true);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 2,
    };
    for ticket in 1..=4 {
        queue.enter(TenantId(1), entitlement, Ticket(ticket), Duration::ZERO);
    }
    let mut started = std::collections::BTreeSet::new();
    let mut done = Vec::new();
    for turn in 0u64.. {
        let at = turn as u32 * MS;
        let Next::Run(tenant, ticket) = queue.next(at) else {
            break;
        };
        started.insert(ticket);
        assert!(started.len() <= 2, "{started:?}");
        let is_done = turn % 3 == 2;
        queue.used(tenant, ticket, MS, is_done, at + MS);
        if is_done {
            started.remove(&ticket);
            done.push(ticket);
        }
    }
    assert_eq!(done.len(), 4);
}

/// Runs a graph that nothing else waits for.
fn run_once(
    queue: &mut Queue,
    tenant: TenantId,
    ticket: Ticket,
    took: Duration,
    at: &mut Duration,
) {
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    queue.enter(tenant, entitlement, ticket, *at);
    assert_eq!(queue.next(*at), Next::Run(tenant, ticket));
    *at += took;
    queue.used(tenant, ticket, took, true, *at);
}

#[test]
fn unused_time_gives_no_credit() {
    let mut queue = Queue::new(true);
    let entitlement = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    let mut at = Duration::ZERO;
    for turn in 0..1000 {
        run_once(&mut queue, TenantId(1), Ticket(turn), 10 * MS, &mut at);
    }
    // After ten seconds a tenant enters for the first time.
    queue.enter(TenantId(2), entitlement, Ticket(5000), at);
    queue.enter(TenantId(1), entitlement, Ticket(5001), at);
    assert_eq!(queue.next(at), Next::Run(TenantId(2), Ticket(5000)));
    let allowance = queue.allowance(TenantId(2)).expect("the other one waits");
    assert!(allowance <= CREDIT + ROUND / 2, "{allowance:?}");
}

#[test]
fn idle_tenants_are_removed() {
    let mut queue = Queue::new(true);
    let mut at = Duration::ZERO;
    for guest in 0..10_000 {
        run_once(&mut queue, TenantId(guest), Ticket(guest), MS, &mut at);
    }
    assert!(
        queue.tenants.len() <= MAX_IDLE_TENANTS + 2,
        "{}",
        queue.tenants.len()
    );
}

const EQUAL: Entitlement = Entitlement {
    weight: 1,
    in_flight: 1,
};

/// Simulates sessions of tenant 1 that work outside of turns without an end, beside a tenant 2 that
/// has a graph all the time from `since` on. Each session works for `piece` at a time, and the
/// machine has a processor for each. Returns for how long they worked from `since` to `end`.
fn flood(
    sessions: usize,
    processors: u32,
    piece: Duration,
    since: Duration,
    end: Duration,
) -> Duration {
    let mut queue = Queue::new(true);
    // When each session ends its work or looks again, and when its work is paid for.
    let mut next = vec![(Duration::ZERO, Duration::ZERO); sessions];
    let (mut worked, mut is_contended) = (Duration::ZERO, false);
    loop {
        let i = (0..sessions).min_by_key(|&i| next[i].0).expect("a session");
        let (now, paid) = next[i];
        if now >= end {
            return worked;
        }
        if now >= since && !is_contended {
            queue.enter(TenantId(2), EQUAL, Ticket(1), now);
            is_contended = true;
        }
        next[i] = match queue.pause(TenantId(1), paid, now) {
            Some(left) => (now + left, paid),
            None => {
                let done = now + piece;
                worked += if now >= since { piece } else { Duration::ZERO };
                let work = (piece, processors);
                (done, queue.work_outside(TenantId(1), EQUAL, work, done))
            }
        };
    }
}

#[test]
fn work_outside_of_turns_takes_the_granted_processors_while_others_are_active() {
    let second = 1000 * MS;
    for (sessions, processors) in [(1, 1), (2, 1), (48, 1), (48, 4)] {
        for piece in [MS, 100 * MS] {
            // The first second, in which nobody else is active, is forgotten.
            let (since, end) = (second, 11 * second);
            let worked = flood(sessions, processors, piece, since, end).as_secs_f64();
            let granted = f64::from(processors.min(sessions as u32)) * 10.0;
            // Each session ends the piece that it has begun.
            let most = granted + (OUTSIDE_LEAD + 2 * piece * sessions as u32).as_secs_f64();
            assert!(
                (0.98 * granted..=most).contains(&worked),
                "{sessions} sessions on {processors} processors, {piece:?}: {worked} s of {granted}"
            );
        }
    }
}

#[test]
fn work_outside_of_turns_has_no_limit_for_a_tenant_that_is_alone() {
    let (second, never) = (1000 * MS, Duration::MAX);
    let mut queue = Queue::new(true);
    // Others that were active a while ago, with a graph and without.
    queue.enter(TenantId(2), EQUAL, Ticket(1), Duration::ZERO);
    assert_eq!(
        queue.next(Duration::ZERO),
        Next::Run(TenantId(2), Ticket(1))
    );
    queue.work_outside(TenantId(3), EQUAL, (MS, 1), MS);
    let pause = |queue: &Queue, at| queue.pause(TenantId(1), never, at).is_some();
    assert!(pause(&queue, second), "a graph runs");
    queue.used(TenantId(2), Ticket(1), second, true, second);
    assert!(pause(&queue, second + MAX_PAUSE), "it has just ended");
    assert!(!pause(&queue, second + MAX_PAUSE + MS));
    queue.work_outside(TenantId(3), EQUAL, (MS, 1), 2 * second);
    assert!(pause(&queue, 2 * second + MAX_PAUSE));
    assert!(!pause(&queue, 2 * second + MAX_PAUSE + MS));
    // Its own work is no reason.
    queue.work_outside(TenantId(1), EQUAL, (second, 1), 3 * second);
    assert!(!pause(&queue, 3 * second));
}

#[test]
fn tenant_that_pauses_slows_no_other_one() {
    let second = 1000 * MS;
    let mut queue = Queue::new(true);
    let [attacker, victim] = [1, 2].map(TenantId);
    queue.work_outside(victim, EQUAL, (MS, 1), MS);
    // Many sessions at once: a debt of ten seconds.
    let owed = queue.work_outside(attacker, EQUAL, (10 * second, 1), 2 * MS);
    let mut at = 2 * MS;
    while at < 5 * second {
        let paid = queue.work_outside(victim, EQUAL, (8 * MS, 1), at);
        let is_active = at <= 2 * MS + MAX_PAUSE;
        assert_eq!(queue.pause(victim, paid, at).is_some(), is_active, "{at:?}");
        assert!(queue.pause(attacker, owed, at).is_some(), "{at:?}");
        assert_eq!(queue.debt(attacker, at), Some(owed - at));
        at += 4 * MS;
    }
    // What it does now counts again.
    queue.work_outside(attacker, EQUAL, (MS, 1), at);
    let paid = queue.work_outside(victim, EQUAL, (16 * MS, 1), at);
    assert!(queue.pause(victim, paid, at).is_some());
}

#[test]
fn tenant_is_remembered_while_it_owes_time() {
    let second = 1000 * MS;
    let mut queue = Queue::new(true);
    let [guest, other] = [1, 2].map(TenantId);
    assert_eq!(queue.debt(guest, MS), None);
    queue.work_outside(other, EQUAL, (MS, 1), MS);
    queue.work_outside(guest, EQUAL, (second, 1), MS);
    // A turn of two seconds beside another graph.
    queue.enter(guest, EQUAL, Ticket(1), 2 * MS);
    queue.enter(other, EQUAL, Ticket(2), 2 * MS);
    let begun = queue.now;
    assert_eq!(queue.next(2 * MS), Next::Run(guest, Ticket(1)));
    queue.used(guest, Ticket(1), 2 * second, true, 2 * second);
    assert_eq!(queue.now, begun);
    let at = 3 * second;
    assert_eq!(queue.debt(guest, at), Some(2 * second), "for its turn");
    // Hundreds of others that come and go do not make the scheduler forget it.
    for tenant in 3..600 {
        queue.enter(TenantId(tenant), EQUAL, Ticket(tenant), at);
        queue.withdraw(TenantId(tenant), Ticket(tenant), at);
    }
    assert_eq!(queue.debt(guest, 100 * second), Some(2 * second));
}

#[test]
fn graph_that_leaves_the_queue_before_its_first_turn_ends_no_other_one() {
    let mut queue = Queue::new(true);
    let tenant = TenantId(1);
    let two = Entitlement {
        weight: 1,
        in_flight: 2,
    };
    queue.enter(tenant, two, Ticket(1), MS);
    assert_eq!(queue.next(MS), Next::Run(tenant, Ticket(1)));
    queue.enter(tenant, two, Ticket(2), 2 * MS);
    assert!(queue.is_full());
    queue.withdraw(tenant, Ticket(2), 3 * MS);
    assert!(queue.waiting() == 0 && !queue.is_full());
    // The first graph is still one of the two that the tenant may have.
    queue.enter(tenant, two, Ticket(3), 4 * MS);
    assert!(queue.is_full());
}

#[test]
fn work_outside_of_turns_changes_no_virtual_time() {
    let mut queue = Queue::new(true);
    queue.work_outside(TenantId(1), EQUAL, (1000 * MS, 1), MS);
    queue.enter(TenantId(1), EQUAL, Ticket(1), MS);
    queue.enter(TenantId(2), EQUAL, Ticket(2), MS);
    assert_eq!(queue.time_of(TenantId(1)), queue.time_of(TenantId(2)));
}
