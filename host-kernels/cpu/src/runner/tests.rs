use super::*;
use crate::barrier_schedule::PlannedKernel;
use crate::kernel::{Estimate, Fault, Worker};

fn phase(kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static) -> Phase {
    Phase {
        parts: vec![PlannedKernel::new(
            Box::new(kernel),
            vec![3],
            (3, "TEST"),
            Estimate::default(),
        )],
    }
}

/// Runs to the end without ever yielding.
fn run(runner: &Runner, phases: &[Phase]) -> Result<(), RunError> {
    let state = runner.start(4096, 0, usize::MAX)?;
    // SAFETY: the kernels of these tests need at most 4096 bytes.
    let left = unsafe { runner.run(phases, state, &Turn::new()) }?;
    assert!(left.is_none(), "the turn has no end");
    Ok(())
}

#[test]
fn every_unit_is_done_once_and_phases_do_not_overlap() {
    let runner = Runner::new(3, &[]).unwrap();
    let done: &'static [AtomicUsize] = Box::leak(
        (0..1000)
            .map(|_| AtomicUsize::new(0))
            .collect::<Vec<_>>()
            .into_boxed_slice(),
    );
    let phases: Vec<Phase> = (0..50)
        .map(|round| {
            phase(move |w| {
                let add = |range: std::ops::Range<usize>| {
                    for i in range {
                        assert_eq!(done[i].fetch_add(1, Ordering::Relaxed), round);
                    }
                };
                match round % 3 {
                    0 => w.chunks(1000, 7).for_each(add),
                    1 => w.runs(1000, 90).for_each(add),
                    _ => w.range_of(1000).for_each(|i| add(i..i + 1)),
                }
                Ok(())
            })
        })
        .collect();
    run(&runner, &phases).unwrap();
    assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 50));
}

#[test]
fn reads_of_unwritten_memory_differ_in_each_run() {
    let mut runner = Runner::new(1, &[]).unwrap();
    runner.fills_scratch = true;
    let read: &'static AtomicUsize = Box::leak(Box::default());
    let faulty = || {
        phase(move |w| {
            // SAFETY: the run has 4096 bytes of initialised working memory.
            read.store(unsafe { *w.scratch().add(4000) }.into(), Ordering::Relaxed);
            Ok(())
        })
    };
    let results = [0; 3].map(|_| {
        run(&runner, &[faulty()]).unwrap();
        read.load(Ordering::Relaxed)
    });
    assert!(
        results[0] != results[1] && results[1] != results[2],
        "{results:?}"
    );
    runner.fills_scratch = false;
    run(&runner, &[faulty()]).unwrap();
    assert_eq!(read.load(Ordering::Relaxed), results[2]);
}

#[test]
fn a_fault_or_a_panic_ends_the_run_and_leaves_the_runner_usable() {
    let runner = Runner::new(2, &[]).unwrap();
    let after = phase(|_| unreachable!("a phase after the failure"));
    let fault = phase(|w| {
        if w.index() == 1 {
            Err(Fault::Index {
                index: -1,
                count: 4,
            })
        } else {
            Ok(())
        }
    });
    let error = run(&runner, &[fault, after]).unwrap_err();
    assert_eq!(
        error,
        RunError::Index {
            node: 3,
            op: "TEST",
            index: -1,
            count: 4
        }
    );
    let panic = phase(|w| {
        if w.index() == 0 {
            panic!("boom {}", 7)
        } else {
            Ok(())
        }
    });
    let error = run(&runner, &[panic]).unwrap_err();
    assert_eq!(
        error,
        RunError::Kernel {
            node: 3,
            op: "TEST",
            message: "boom 7".into()
        }
    );
    run(&runner, &[phase(|_| Ok(()))]).unwrap();
}

#[test]
fn units_of_several_graphs_interleave_and_run_once() {
    const UNITS: usize = 40;
    const PHASES: usize = 12;
    let runner = Runner::new(3, &[]).unwrap();
    let turn: &'static Turn = Box::leak(Box::new(Turn::new()));
    turn.set_end(Some(std::time::Duration::ZERO));
    // Each phase of a graph counts the units of the phase before in scratch, which the other
    // graphs must not touch.
    let graph = |name: usize| -> Vec<Phase> {
        (0..PHASES)
            .map(|round| {
                phase(move |w| {
                    // SAFETY: each run has `8 * UNITS` bytes of scratch memory, aligned to 64
                    // bytes. The bytes are accessed as atomics only.
                    let cells = unsafe {
                        std::slice::from_raw_parts(w.scratch().cast::<AtomicUsize>(), UNITS)
                    };
                    let visit = |range: std::ops::Range<usize>| {
                        for cell in &cells[range] {
                            let found = cell.swap(name * 1000 + round, Ordering::Relaxed);
                            assert!(round == 0 || found == name * 1000 + round - 1);
                        }
                    };
                    match round % 3 {
                        0 => w.range_of(UNITS).for_each(|i| visit(i..i + 1)),
                        1 => w.runs(UNITS, 8).for_each(visit),
                        _ => w.chunks(UNITS, 3).for_each(visit),
                    }
                    Ok(())
                })
            })
            .collect()
    };
    let graphs = [graph(1), graph(2), graph(3)];
    let mut states: Vec<_> = graphs
        .iter()
        .map(|_| Some(runner.start(8 * UNITS, 0, 0).unwrap()))
        .collect();
    let mut turns = 0;
    while states.iter().any(Option::is_some) {
        for (graph, slot) in graphs.iter().zip(&mut states) {
            if let Some(state) = slot.take() {
                // SAFETY: the kernels need the bytes that the state was made with.
                *slot = unsafe { runner.run(graph, state, turn) }.unwrap();
                turns += 1;
            }
        }
    }
    assert!(
        turns > graphs.len() * PHASES,
        "no phase was cut: {turns} turns"
    );
    assert!(
        lock(&runner.scratch).len() == graphs.len(),
        "scratch memory is lost"
    );
}

#[test]
fn scratch_memory_that_does_not_exist_is_an_error_and_large_memory_is_not_kept() {
    let runner = Runner::new(1, &[]).unwrap();
    let error = runner.start(usize::MAX, 64, 0).err();
    assert!(
        matches!(error, Some(RunError::OutOfMemory { .. })),
        "{error:?}"
    );
    for (bytes, kept) in [(2 * MAX_KEPT_BYTES, 0), (MAX_KEPT_BYTES, 1)] {
        runner.with_free(Vec::clear);
        let state = runner.start(bytes, 0, 0).unwrap();
        assert_eq!(runner.kept_bytes(), 0, "a run owns it");
        // SAFETY: the kernel needs no memory.
        let left = unsafe { runner.run(&[phase(|_| Ok(()))], state, &Turn::new()) };
        assert!(left.unwrap().is_none());
        assert_eq!(lock(&runner.scratch).len(), kept, "{bytes}");
        assert_eq!(runner.kept_bytes(), kept * bytes);
        runner.trim();
        assert_eq!(runner.kept_bytes(), 0);
        assert!(
            lock(&runner.scratch).is_empty(),
            "{bytes}: the plan is gone"
        );
    }
}

#[test]
fn large_memory_is_freed_in_turns_also_after_a_failure() {
    let runner = Runner::new(1, &[]).unwrap();
    let over = Turn::new();
    over.set_end(Some(Duration::ZERO));
    let fault = phase(|_| Err(Fault::Index { index: 9, count: 1 }));
    for (phases, is_ok) in [([phase(|_| Ok(()))], true), ([fault], false)] {
        let state = runner.start(4 * FREED_AT_ONCE, 0, 0).unwrap();
        let mut left = Some(state);
        let mut turns = 0;
        let outcome = loop {
            let state = left.take().unwrap();
            // SAFETY: the kernel needs no memory.
            match unsafe { runner.run(&phases, state, &over) } {
                Ok(Some(state)) => left = Some(state),
                ended => break ended,
            }
            turns += 1;
        };
        // The last part is unmapped at once.
        assert_eq!((turns, outcome.is_ok()), (3, is_ok));
    }
}

#[test]
fn several_sessions_do_not_make_more_threads_run() {
    const THREADS: usize = 2;
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    static MAX_RUNNING: AtomicUsize = AtomicUsize::new(0);
    let runner = Runner::new(THREADS, &[]).unwrap();
    let work = |_: &Worker<'_>| {
        MAX_RUNNING.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_micros(200));
        RUNNING.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let phases: Vec<Phase> = (0..20).map(|_| phase(work)).collect();
                run(&runner, &phases).unwrap();
            });
        }
    });
    assert_eq!(MAX_RUNNING.load(Ordering::SeqCst), THREADS);
}

#[test]
fn failure_during_barrier_exit_does_not_block_other_threads() {
    let runner = Runner::new(4, &[]).unwrap();
    let fault = |w: &Worker<'_>| match w.index() {
        0 => Ok(()),
        _ => Err(Fault::Index { index: 9, count: 1 }),
    };
    for _ in 0..2000 {
        let phases = [phase(|_| Ok(())), phase(fault), phase(|_| unreachable!())];
        run(&runner, &phases).unwrap_err();
    }
}
