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
}

/// What a tenant has got.
#[derive(Debug, Clone, Default)]
struct Got {
    ran: Duration,
    graphs: u32,
    /// The longest uninterrupted wait of a graph.
    longest_wait: Duration,
}

/// Simulates the scheduler for `length`.
fn simulate(guests: &[Guest], length: Duration) -> Vec<Got> {
    let mut queue = Queue::default();
    let mut got = vec![Got::default(); guests.len()];
    let mut left: Vec<Duration> = guests.iter().map(|g| g.graph).collect();
    // When a tenant submits its next graph; `None` while one is submitted.
    let mut submits: Vec<Option<Duration>> = guests.iter().map(|_| Some(Duration::ZERO)).collect();
    let mut waits_since = vec![Duration::ZERO; guests.len()];
    let mut now = Duration::ZERO;
    let arrive = |queue: &mut Queue,
                  submits: &mut [Option<Duration>],
                  now: Duration,
                  waits: &mut [Duration]| {
        let mut any = false;
        for (i, at) in submits.iter_mut().enumerate() {
            if at.is_some_and(|at| at <= now) {
                waits[i] = at.take().unwrap_or(now);
                let share = Entitlement {
                    weight: guests[i].weight,
                    in_flight: 1,
                };
                queue.enter(TenantId(i as u64), share, Ticket(i as u64));
                any = true;
            }
        }
        any
    };
    while now < length {
        arrive(&mut queue, &mut submits, now, &mut waits_since);
        let Some((tenant, ticket)) = queue.next() else {
            now = submits
                .iter()
                .flatten()
                .min()
                .copied()
                .expect("a tenant submits again");
            continue;
        };
        let i = tenant.0 as usize;
        got[i].longest_wait = got[i].longest_wait.max(now - waits_since[i]);
        let since = now;
        let mut end = queue.allowance(tenant);
        loop {
            let piece = guests[i].piece.min(left[i]);
            now += piece;
            left[i] -= piece;
            queue.progress(tenant, piece);
            if arrive(&mut queue, &mut submits, now, &mut waits_since) {
                end = queue.cut(tenant, now - since);
            }
            if left[i].is_zero() || end.is_some_and(|end| now - since >= end) {
                break;
            }
        }
        let is_done = left[i].is_zero();
        queue.used(tenant, ticket, Duration::ZERO, is_done);
        got[i].ran += now - since;
        waits_since[i] = now;
        if is_done {
            got[i].graphs += 1;
            left[i] = guests[i].graph;
            submits[i] = Some(now + guests[i].pause);
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
                    (SLICE + MIN_SLICE + 2 * g.piece).as_secs_f64() / f64::from(g.weight)
                };
                prop_assert!((va - vb).abs() <= too_long(i) + too_long(j), "{va} and {vb} of \
                 {guests:?}");
            }
        }
    }

    /// No graph waits longer than one turn of each other tenant plus the lead of its own, and every
    /// tenant makes progress.
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
                ..busy(w, graph, piece)
            })
            .collect();
        let got = simulate(&guests, Duration::from_secs(5));
        for (i, (a, guest)) in got.iter().zip(&guests).enumerate() {
            prop_assert!(a.graphs > 0, "{guests:?}: {got:?}");
            // The lead of its own last turn, and the credit of each other tenant.
            let own = (SLICE + MIN_SLICE + 2 * guest.piece).as_secs_f64() / f64::from(guest.weight);
            let others = guests.iter().enumerate().filter(|&(j, _)| j != i);
            let bound: f64 = others
                .map(|(_, g)| {
                    own * f64::from(g.weight)
                        + (SLICE + MIN_SLICE + 2 * g.piece + CREDIT).as_secs_f64()
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
        ..busy(1, 5_000, 20)
    };
    let alone = simulate(std::slice::from_ref(&decode), Duration::from_secs(10))[0].graphs;
    let beside = simulate(&[decode, busy(1, 400_000, 1_000)], Duration::from_secs(10))[0].graphs;
    let kept = f64::from(beside) / f64::from(alone);
    assert!(kept > 0.49, "{kept} of its speed alone");
}

#[test]
fn turn_of_a_single_tenant_has_no_limit() {
    let mut queue = Queue::default();
    let share = Entitlement {
        weight: 1,
        in_flight: 4,
    };
    queue.enter(TenantId(1), share, Ticket(1));
    assert_eq!(queue.next(), Some((TenantId(1), Ticket(1))));
    assert_eq!(queue.allowance(TenantId(1)), None);
    assert_eq!(queue.cut(TenantId(1), MS), None);
    assert_eq!(queue.next(), None);
}

#[test]
fn started_graphs_of_a_tenant_are_limited() {
    let mut queue = Queue::default();
    let share = Entitlement {
        weight: 1,
        in_flight: 2,
    };
    for ticket in 1..=4 {
        queue.enter(TenantId(1), share, Ticket(ticket));
    }
    let mut started = std::collections::BTreeSet::new();
    let mut done = Vec::new();
    for turn in 0u64.. {
        let Some((tenant, ticket)) = queue.next() else {
            break;
        };
        started.insert(ticket);
        assert!(started.len() <= 2, "{started:?}");
        let is_done = turn % 3 == 2;
        queue.used(tenant, ticket, MS, is_done);
        if is_done {
            started.remove(&ticket);
            done.push(ticket);
        }
    }
    assert_eq!(done.len(), 4);
}

#[test]
fn unused_time_gives_no_credit() {
    let mut queue = Queue::default();
    let share = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    for turn in 0..1000 {
        queue.enter(TenantId(1), share, Ticket(turn));
        let (tenant, ticket) = queue.next().expect("the graph waits");
        queue.used(tenant, ticket, 10 * MS, true);
    }
    // After ten seconds a tenant enters for the first time.
    queue.enter(TenantId(2), share, Ticket(5000));
    queue.enter(TenantId(1), share, Ticket(5001));
    assert_eq!(queue.next(), Some((TenantId(2), Ticket(5000))));
    let allowance = queue.allowance(TenantId(2)).expect("the other one waits");
    assert!(allowance <= CREDIT + 10 * MS + SLICE, "{allowance:?}");
}

#[test]
fn idle_tenants_are_removed() {
    let mut queue = Queue::default();
    let share = Entitlement {
        weight: 1,
        in_flight: 1,
    };
    for guest in 0..10_000 {
        queue.enter(TenantId(guest), share, Ticket(guest));
        let (tenant, ticket) = queue.next().expect("the graph waits");
        queue.used(tenant, ticket, MS, true);
    }
    assert!(
        queue.tenants.len() <= MAX_IDLE_TENANTS + 2,
        "{}",
        queue.tenants.len()
    );
}
