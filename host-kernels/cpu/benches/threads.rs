//! What starting and ending a job on all threads costs: the engine's thread team beside
//! `rayon::ThreadPool::broadcast`, in turns.
//!
//! `cargo bench -p vgpu-cpu --bench threads -- [--threads N] [--repeats N]`
//!
//! A row for each length of job and of pause between two jobs. A job is one graph: decoding starts
//! one for each token, and samples the token in the pause. Median microseconds of a job beyond its
//! work.

#[allow(
    dead_code,
    unused_imports,
    reason = "the engine and the tests use the rest"
)]
#[path = "../src/thread_team.rs"]
mod thread_team;

use std::hint::black_box;
use std::time::{Duration, Instant};

use thread_team::ThreadTeam;
use vgpu_median::median;

/// Jobs in a round.
const JOBS: usize = 400;

/// Work of each thread in a job, and the pause after a job, in microseconds.
const ROWS: [(u64, u64); 4] = [(0, 0), (50, 0), (50, 100), (500, 1000)];

fn spin(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// The median time of `job` less `work`, in microseconds; `pause` after each.
fn measure(work: Duration, pause: Duration, mut job: impl FnMut()) -> f64 {
    median((0..JOBS).map(|_| {
        let begun = Instant::now();
        job();
        let took = begun.elapsed();
        spin(pause);
        (took.as_secs_f64() - work.as_secs_f64()) * 1e6
    }))
}

fn main() {
    let (mut threads, mut repeats) = (2, 7);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let number = arguments.next().and_then(|n| n.parse().ok());
            number.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--bench" => {} // from cargo
            "--threads" => threads = number(),
            "--repeats" => repeats = number(),
            other => panic!("{other} is no option"),
        }
    }
    let team = ThreadTeam::new(threads, &[]).expect("threads");
    let pool = { rayon::ThreadPoolBuilder::new().num_threads(threads) }
        .build()
        .expect("threads");
    println!("{threads} threads; median of {repeats} rounds of {JOBS} jobs, us beyond the work");
    println!(
        "{:>8} {:>8} {:>12} {:>12}",
        "work", "pause", "thread team", "broadcast"
    );
    for (work, pause) in
        ROWS.map(|(work, pause)| (Duration::from_micros(work), Duration::from_micros(pause)))
    {
        let mut rounds = [vec![], vec![]];
        for _ in 0..repeats {
            rounds[0].push(measure(work, pause, || {
                // SAFETY: only this thread has the team.
                unsafe {
                    team.run(&|index| {
                        black_box(index);
                        spin(work)
                    })
                }
            }));
            rounds[1].push(measure(work, pause, || {
                pool.broadcast(|context| {
                    black_box(context.index());
                    spin(work)
                });
            }));
        }
        let [ours, rayons] = rounds.map(median);
        let (work, pause) = (work.as_micros(), pause.as_micros());
        println!("{work:>8} {pause:>8} {ours:>12.2} {rayons:>12.2}");
    }
}
