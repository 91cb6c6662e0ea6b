//! Where a run is divided into pieces, between which a turn can end: by the time that the backend
//! was measured to take. Plans of the same operators with about the same work share a [`Pace`], so
//! that a plan which differs from an earlier one in lengths and places is not measured again.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vgpu_transport::ir::Shape;
use vgpu_transport::lock::lock;

/// What a piece takes at most by the measurements, unless a single node takes longer.
pub(crate) const PIECE: Duration = Duration::from_millis(3);

/// What a piece should take that is measured. Pieces of [`PIECE`] are made of these.
const SLICE: Duration = Duration::from_micros(1500);

/// The most nodes of a piece that is measured. The first one of a run has one node.
const MAX_UNKNOWN_NODES: usize = 32;

/// A piece that is measured ends after so much work by estimate.
const MAX_UNKNOWN: Duration = Duration::from_millis(5);

/// The runs whose pieces are measured: in its first run, a backend may compile kernels.
const MEASURED_RUNS: u32 = 2;

/// The pieces are made anew when the backend takes this many times as long as they say, or this
/// part of the time.
const SLOWER: f64 = 1.5;
const FASTER: f64 = 1.0 / SLOWER;

/// What is left of a prediction that was too long, for the next one.
const SHORTER: f64 = 0.8;

/// A flight that should have taken as long changes the correction by half of its error, a shorter
/// one by less.
const WEIGHTY: Duration = Duration::from_millis(8);

/// What a piece takes at least, whatever the corrections say.
const LEAST: Duration = Duration::from_micros(10);

/// How many paces a device keeps, of so many measured pieces each at most: 32 MiB in all. A plan of
/// more pieces is measured at each run.
const MAX_PACES: usize = 256;
const MAX_MEASURED: usize = 2048;

/// Nodes that follow each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Piece {
    /// The node behind the last one, among those of the device.
    pub(crate) end: usize,
    /// How long the piece takes.
    pub(crate) time: Duration,
    /// Whether another engine runs the next node of the graph.
    pub(crate) is_last: bool,
}

/// How long plans take that have the same operators, and about the same work.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// The pieces that were measured, with the shortest time of each.
    measured: Vec<Piece>,
    /// How often.
    runs: u32,
    /// Made of `measured`.
    pieces: Option<Arc<[Piece]>>,
    /// How long a run took since, relative to `pieces`.
    correction: f64,
}

/// How long the device had work, until somebody has waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Took {
    /// So long.
    Exactly(Duration),
    /// No longer: the device had nothing to do when somebody began to wait.
    AtMost(Duration),
    /// So long, with a time in between when it had nothing to do, since the next piece came too
    /// late.
    Late(Duration),
}

impl Took {
    /// The time until somebody has waited.
    pub(crate) fn duration(self) -> Duration {
        match self {
            Took::Exactly(took) | Took::AtMost(took) | Took::Late(took) => took,
        }
    }
}

/// What is known of the pieces of a plan.
#[derive(Debug, Clone)]
pub(crate) enum Known {
    /// Nothing.
    Nothing,
    /// The ends of pieces, whose times are measured again.
    Ends(Arc<[Piece]>),
    /// The pieces, and how long they take now, relative to their times.
    Pieces(Arc<[Piece]>, f64),
}

impl Pace {
    /// What is known now.
    pub(crate) fn known(&self) -> Known {
        match &self.pieces {
            Some(pieces) => Known::Pieces(Arc::clone(pieces), self.correction),
            None if self.measured.is_empty() => Known::Nothing,
            None => Known::Ends(self.measured.as_slice().into()),
        }
    }

    /// Learns from a run whose pieces were measured, each alone.
    pub(crate) fn learn(&mut self, run: &[Piece]) {
        if self.pieces.is_some() || run.len() > MAX_MEASURED {
            return;
        }
        let same = |piece: &Piece, other: &Piece| piece.end == other.end;
        let is_same = self.measured.len() == run.len()
            && self.measured.iter().zip(run).all(|(a, b)| same(a, b));
        match is_same {
            true => {
                for (known, new) in self.measured.iter_mut().zip(run) {
                    known.time = known.time.min(new.time);
                }
            }
            false => (self.measured, self.runs) = (run.to_vec(), 0),
        }
        self.runs += 1;
        if self.runs >= MEASURED_RUNS {
            self.divide();
        }
    }

    /// Learns from pieces that followed each other without a wait: they should have taken
    /// `predicted`, by their times.
    pub(crate) fn observe(&mut self, predicted: Duration, took: Took) {
        if self.pieces.is_none() || predicted.is_zero() {
            return;
        }
        let relative = |took: Duration| took.as_secs_f64() / predicted.as_secs_f64();
        let now = match took {
            Took::Exactly(took) => relative(took),
            Took::AtMost(took) => relative(took).min(self.correction),
            Took::Late(took) => SHORTER * relative(took).min(self.correction),
        };
        // One slow run, beside other work of the machine, says little.
        let weight = (predicted.as_secs_f64() / WEIGHTY.as_secs_f64()).min(1.0) / 2.0;
        self.correction += weight * (now - self.correction);
        if !(FASTER..=SLOWER).contains(&self.correction) {
            for piece in &mut self.measured {
                piece.time = piece.time.mul_f64(self.correction).max(LEAST);
            }
            self.divide();
        }
    }

    /// Makes the pieces anew.
    fn divide(&mut self) {
        (self.pieces, self.correction) = (Some(joined(&self.measured).into()), 1.0);
    }
}

/// Joins pieces that follow each other, as long as they take no longer than [`PIECE`] together.
fn joined(measured: &[Piece]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for next in measured {
        match pieces.last_mut() {
            Some(piece) if !piece.is_last && piece.time + next.time <= PIECE => {
                piece.time += next.time;
                (piece.end, piece.is_last) = (next.end, next.is_last);
            }
            _ => pieces.push(*next),
        }
    }
    pieces
}

/// The size of the next piece of a run whose pieces are measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Growth(usize);

impl Growth {
    /// For the first piece of a run: one node.
    pub(crate) fn new() -> Growth {
        Growth(1)
    }

    /// The nodes of the next piece, at least one. `estimates`: the seconds of the nodes that there
    /// are.
    pub(crate) fn nodes(self, estimates: &[f32]) -> usize {
        let mut left = MAX_UNKNOWN.as_secs_f32();
        let fitting = estimates.iter().take(self.0).take_while(|&&seconds| {
            let fits = left > 0.0;
            left -= seconds;
            fits
        });
        fitting.count().max(1)
    }

    /// Learns from a piece of `nodes` nodes that took `took`.
    pub(crate) fn learn(&mut self, nodes: usize, took: Duration) {
        let fitting = SLICE.as_nanos() * nodes as u128 / took.as_nanos().max(1);
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX);
        self.0 = fitting.clamp(1, MAX_UNKNOWN_NODES.min(2 * self.0));
    }
}

/// What a plan has in common with those that take as long, but for a factor below two.
pub(crate) struct Key(std::hash::DefaultHasher);

impl Key {
    /// A node of the device, by its operator, its seconds by estimate, and the types of its result
    /// and operands, with whether their elements follow each other in memory.
    pub(crate) fn node<'a>(
        &mut self,
        op: &str,
        seconds: f32,
        tensors: impl Iterator<Item = &'a Shape>,
    ) {
        self.0.write(op.as_bytes());
        // The exponent of the number.
        self.0.write_u32(seconds.to_bits() >> 23);
        for shape in tensors {
            self.0.write_u32(shape.ty as u32);
            self.0.write_u8(shape.is_contiguous().into());
        }
    }

    /// A copy of the last result of the device to its place.
    pub(crate) fn copy(&mut self) {
        self.0.write_u8(0xfe);
    }

    /// The last node reads a copy of its weights, and is faster by that.
    pub(crate) fn repacked(&mut self) {
        self.0.write_u8(0xfd);
    }

    /// A node of another engine.
    pub(crate) fn other(&mut self) {
        self.0.write_u8(0xff);
    }
}

/// The paces of a device.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    /// Of each process and device another one, so that a guest cannot look for equal hashes.
    state: RandomState,
    known: Mutex<Recent>,
}

/// A pace, and when a plan has asked for it last.
#[derive(Debug, Default)]
struct KnownPace {
    pace: Arc<Mutex<Pace>>,
    last: u64,
}

#[derive(Debug, Default)]
struct Recent {
    /// By the hash of the key, and the number of nodes.
    paces: HashMap<(u64, usize), KnownPace>,
    /// How many plans have asked.
    asked: u64,
}

impl Paces {
    /// A key without nodes.
    pub(crate) fn key(&self) -> Key {
        Key(self.state.build_hasher())
    }

    /// The pace of plans with this key and so many nodes of the device. The one that no plan has
    /// asked for longest is forgotten.
    pub(crate) fn of(&self, key: &Key, nodes: usize) -> Arc<Mutex<Pace>> {
        let mut recent = lock(&self.known);
        recent.asked += 1;
        let asked = recent.asked;
        let key = (key.0.finish(), nodes);
        if recent.paces.len() >= MAX_PACES && !recent.paces.contains_key(&key) {
            let oldest = recent.paces.iter().min_by_key(|(_, known)| known.last);
            let oldest = oldest.map(|(key, _)| *key);
            oldest.and_then(|key| recent.paces.remove(&key));
        }
        let known = recent.paces.entry(key).or_default();
        known.last = asked;
        Arc::clone(&known.pace)
    }
}

#[cfg(test)]
mod tests {
    use vgpu_transport::ir::Type;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pieces(times: &[u32]) -> Vec<Piece> {
        let ends = 1..;
        let piece = |(end, &time)| Piece {
            end,
            time: time * MS,
            is_last: false,
        };
        ends.zip(times).map(piece).collect()
    }

    fn learnt(pace: &Pace) -> Vec<(usize, Duration)> {
        let Known::Pieces(pieces, _) = pace.known() else {
            panic!("{pace:?}");
        };
        pieces.iter().map(|piece| (piece.end, piece.time)).collect()
    }

    #[test]
    fn pieces_are_joined_up_to_the_limit_and_not_across_another_engine() {
        let mut pace = Pace::default();
        assert!(matches!(pace.known(), Known::Nothing));
        let mut run = pieces(&[1, 1, 1, 1, 7, 2, 2, 1]);
        run[6].is_last = true;
        // A backend that compiles kernels in its first run.
        let mut slow = run.clone();
        slow.iter_mut().for_each(|piece| piece.time *= 9);
        pace.learn(&slow);
        assert!(matches!(pace.known(), Known::Ends(ends) if ends.len() == run.len()));
        pace.learn(&run);
        let expected = [(3, 3), (4, 1), (5, 7), (6, 2), (7, 2), (8, 1)];
        assert_eq!(learnt(&pace), expected.map(|(end, time)| (end, time * MS)));
    }

    #[test]
    fn pieces_follow_the_speed_of_the_device() {
        let mut pace = Pace::default();
        pace.learn(&pieces(&[1; 12]));
        pace.learn(&pieces(&[1; 12]));
        assert_eq!(learnt(&pace).len(), 4);
        let predict = |pace: &Pace| {
            let Known::Pieces(pieces, correction) = pace.known() else {
                panic!("{pace:?}");
            };
            let sum: Duration = pieces.iter().map(|piece| piece.time).sum();
            (sum, sum.mul_f64(correction))
        };
        // One slow run is not enough.
        pace.observe(predict(&pace).0, Took::Exactly(20 * MS));
        assert_eq!(learnt(&pace).len(), 4);
        for _ in 0..9 {
            pace.observe(predict(&pace).0, Took::Exactly(36 * MS));
        }
        let (_, predicted) = predict(&pace);
        assert!(predicted.abs_diff(36 * MS) < MS, "{predicted:?}");
        assert_eq!(learnt(&pace).len(), 12, "a node takes 3 ms now");
        // A device that gets its work too late is faster than it seems.
        for _ in 0..20 {
            let (sum, predicted) = predict(&pace);
            let took = predicted.max(12 * MS);
            let is_late = predicted > 12 * MS;
            pace.observe(
                sum,
                if is_late {
                    Took::Late(took)
                } else {
                    Took::Exactly(took)
                },
            );
        }
        let (sum, predicted) = predict(&pace);
        assert!((10 * MS..13 * MS).contains(&predicted), "{predicted:?}");
        assert!(learnt(&pace).len() < 12, "{pace:?}");
        // Nobody was there when the device had done its work: it is no slower than predicted.
        for _ in 0..20 {
            pace.observe(sum, Took::AtMost(9 * predicted));
        }
        assert_eq!(predict(&pace).1, predicted);
        // But it may be faster.
        for _ in 0..20 {
            pace.observe(predict(&pace).0, Took::AtMost(4 * MS));
        }
        assert!(predict(&pace).1 < 5 * MS, "{pace:?}");
    }

    #[test]
    fn measured_pieces_begin_with_one_node_and_grow_with_the_time() {
        let mut growth = Growth::new();
        let mut sizes = Vec::new();
        for took in [10, 20, 40, 80, 160, 320, 320, 6400] {
            let nodes = growth.nodes(&[0.0; 100]);
            sizes.push(nodes);
            growth.learn(nodes, Duration::from_micros(took));
        }
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(growth.nodes(&[0.0; 100]), 7, "32 nodes took 6.4 ms");
        // The estimate is a bound, but a piece has one node at least.
        assert_eq!(growth.nodes(&[0.002; 100]), 3);
        assert_eq!(growth.nodes(&[9.0; 100]), 1);
        assert_eq!(growth.nodes(&[0.0; 2]), 2);
    }

    /// Short flights, such as between nodes of the CPU engine, say little of long ones.
    #[test]
    fn short_flights_change_the_times_slowly_and_never_to_nothing() {
        let times = |flights: u32| {
            let mut pace = Pace::default();
            let run = pieces(&[2, 2, 2, 2]);
            pace.learn(&run);
            pace.learn(&run);
            for _ in 0..flights {
                pace.observe(
                    Duration::from_micros(100),
                    Took::Exactly(Duration::from_micros(1)),
                );
            }
            learnt(&pace)
        };
        assert_eq!(times(0), times(20));
        let after_many = times(1_000_000);
        assert!(
            after_many.iter().all(|&(_, time)| time >= LEAST),
            "{after_many:?}"
        );
        // A long one counts at once.
        let mut pace = Pace::default();
        let run = pieces(&[2, 2, 2, 2]);
        pace.learn(&run);
        pace.learn(&run);
        pace.observe(8 * MS, Took::Exactly(24 * MS));
        assert_eq!(learnt(&pace)[0].1, 4 * MS);
    }

    #[test]
    fn plans_of_about_the_same_work_share_a_pace_and_old_ones_are_forgotten() {
        let paces = Paces::default();
        let of = |op: &str, seconds: f32| {
            let mut key = paces.key();
            key.node(op, seconds, std::iter::empty());
            paces.of(&key, 1)
        };
        let with = |nb: u64| {
            let mut key = paces.key();
            let shape = Shape {
                ty: Type::F32,
                ne: [4, 4, 1, 1],
                nb: [nb, 16, 64, 64],
            };
            key.node("ADD", 1.0, [shape].iter());
            paces.of(&key, 1)
        };
        assert!(Arc::ptr_eq(&with(4), &with(4)));
        assert!(
            !Arc::ptr_eq(&with(4), &with(64)),
            "strides can make a node slow"
        );
        let first = of("ADD", 1.1e-3);
        assert!(Arc::ptr_eq(&first, &of("ADD", 1.2e-3)));
        assert!(!Arc::ptr_eq(&first, &of("ADD", 9e-3)));
        assert!(!Arc::ptr_eq(&first, &of("MUL", 1.1e-3)));
        let held = of("SUB", 1.0);
        for at in 0..MAX_PACES {
            of(&at.to_string(), 1.0);
            assert!(Arc::ptr_eq(&held, &of("SUB", 1.0)));
        }
        assert!(!Arc::ptr_eq(&first, &of("ADD", 1.1e-3)));
        assert!(lock(&paces.known).paces.len() <= MAX_PACES);
    }
}
