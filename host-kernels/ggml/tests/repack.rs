//! Copies of weights in a layout for which ggml's CPU backend has faster kernels.

#[path = "../../../tests/common/mod.rs"]
mod common;
mod graphs;
mod products;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use graphs::{PRODUCT, floats, graph, memory, put};
use products::{
    BLOCK, COLUMNS, Quota, ROWS, TENSORS, WEIGHTS, check, compile, even, odd, start, taken,
    write_weights,
};
use vgpu_engine::{Engine, EngineError, Memory, Plan, RunStatus, Turn};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::{Op, Precision, Type};

#[test]
fn products_read_copies_of_weights_until_the_guest_writes_to_them() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    let before = taken(&engine);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let mut first = compile(&engine, &buffers);
    let copied = engine.repacked_bytes();
    assert!(copied > WEIGHTS, "ggml repacks no Q4_0 on this machine");
    assert_eq!(taken(&engine) - before, copied);
    check(&mut *first, &buffers, odd);
    // A second plan reads the same copy.
    let mut second = compile(&engine, &buffers);
    assert_eq!(engine.repacked_bytes(), copied);
    check(&mut *second, &buffers, odd);
    // A write to bytes that are not weights of the product changes nothing.
    buffers[0].fill(WEIGHTS, 64, 1).unwrap();
    check(&mut *second, &buffers, odd);
    assert_eq!(engine.repacked_bytes(), copied);
    // The copy is freed at once, also if no plan runs again. Both plans see the new weights.
    write_weights(&*buffers[0], even);
    assert_eq!(engine.repacked_bytes(), 0);
    assert_eq!(taken(&engine), before);
    check(&mut *first, &buffers, even);
    check(&mut *second, &buffers, even);
    // A plan that is compiled now reads a copy again.
    let mut third = compile(&engine, &buffers);
    assert_eq!(engine.repacked_bytes(), copied);
    check(&mut *third, &buffers, even);
    // The last row alone, by each of the calls that write.
    let last = |value: i8| move |row| if row == ROWS - 1 { value } else { even(row) };
    let row = WEIGHTS - COLUMNS / 32 * BLOCK;
    buffers[1].fill(8192, 1024, 0).unwrap();
    { buffers[0].copy_from(row, &*buffers[1], 8192, COLUMNS / 32 * BLOCK) }.unwrap();
    check(&mut *third, &buffers, last(0));
    assert_eq!(engine.repacked_bytes(), 0);
    drop((first, second, third));
    drop(buffers);
    assert_eq!(taken(&engine), 0);
}

#[test]
fn filling_ends_a_copy() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let mut plan = compile(&engine, &buffers);
    assert!(engine.repacked_bytes() > 0);
    buffers[0].fill(0, WEIGHTS, 0).unwrap();
    check(&mut *plan, &buffers, |_| 0);
    assert_eq!(engine.repacked_bytes(), 0);
}

#[test]
fn a_guest_that_writes_its_weights_again_and_again_gets_no_further_copies() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    buffers[0].mark_weights();
    let mut copies = 0;
    for round in 0..10 {
        write_weights(&*buffers[0], odd);
        let mut plan = compile(&engine, &buffers);
        copies += u64::from(engine.repacked_bytes() > 0);
        check(&mut *plan, &buffers, odd);
        assert!(round > 0 || copies == 1);
    }
    // The memory takes 68 KiB and a copy 41, so that four copies are less than three times that.
    assert_eq!(copies, 4);
}

#[test]
fn memory_that_is_no_weights_has_no_copies() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    write_weights(&*buffers[0], odd);
    let mut plan = compile(&engine, &buffers);
    check(&mut *plan, &buffers, odd);
    assert_eq!(engine.repacked_bytes(), 0);
    // A graph that writes to weights ends the copies of others, and those that would follow.
    buffers[0].mark_weights();
    let mut reads = compile(&engine, &buffers);
    assert!(engine.repacked_bytes() > 0);
    let mut writes = compile_write(&engine, &buffers);
    assert_eq!(writes.launch(&Turn::new()), Ok(RunStatus::Done));
    check(&mut *reads, &buffers, odd_but_the_first);
    assert_eq!(engine.repacked_bytes(), 0);
    compile(&engine, &buffers);
    assert_eq!(engine.repacked_bytes(), 0);
}

/// As [`odd`], after a graph of [`compile_write`].
fn odd_but_the_first(row: u64) -> i8 {
    if row == 0 { 0 } else { odd(row) }
}

/// A graph that writes zeros to the first row.
fn compile_write(engine: &dyn Engine, memory: &[Arc<dyn Memory>; 2]) -> Box<dyn Plan> {
    let row = [COLUMNS / 32 * BLOCK / 4, 1, 1, 1];
    let tensors = [(Type::I32, row, 1, 8192), (Type::I32, row, 0, 0)];
    let graph = graph(engine, &tensors, &[(Op::Copy {}, 1, &[0])]);
    memory[1].fill(8192, 1024, 0).unwrap();
    engine.compile(&graph, memory, &|| false).unwrap()
}

#[test]
fn memory_that_a_graph_writes_to_has_no_copies_also_if_it_is_marked_later() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    let mut writes = compile_write(&engine, &buffers);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let mut reads = compile(&engine, &buffers);
    assert_eq!(engine.repacked_bytes(), 0);
    assert_eq!(writes.launch(&Turn::new()), Ok(RunStatus::Done));
    check(&mut *reads, &buffers, odd_but_the_first);
}

#[test]
fn copies_leave_as_much_memory_free_as_the_weights_take() {
    // Each buffer takes 68 KiB, and a copy 41.
    for (less, copied) in [(0, 41 << 10), (1, 0)] {
        let engine = start(Some(((3 * 68 + 41) << 10) - less), true);
        let buffers = memory(&engine);
        buffers[0].mark_weights();
        write_weights(&*buffers[0], odd);
        let mut plan = compile(&engine, &buffers);
        assert_eq!(engine.repacked_bytes(), copied);
        check(&mut *plan, &buffers, odd);
    }
}

#[test]
fn repacking_can_be_turned_off() {
    let engine = start(None, false);
    let buffers = memory(&engine);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let mut plan = compile(&engine, &buffers);
    assert_eq!(engine.repacked_bytes(), 0);
    check(&mut *plan, &buffers, odd);
}

#[test]
fn a_compilation_that_is_cancelled_copies_nothing() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let graph = graph(&engine, &TENSORS, &[(PRODUCT, 2, &[0, 1])]);
    // The first question comes before the first node.
    let questions = AtomicU64::new(0);
    let is_cancelled = || questions.fetch_add(1, Ordering::Relaxed) >= 1;
    let plan = engine.compile(&graph, &buffers, &is_cancelled);
    let error = plan.map(|_| ()).unwrap_err();
    assert!(matches!(error, EngineError::Cancelled), "{error}");
    assert_eq!(engine.repacked_bytes(), 0);
}

#[test]
fn copies_are_charged_to_the_guest_and_products_work_without() {
    let engine = start(None, true);
    let quota = |bytes| {
        let left = Arc::new(AtomicU64::new(bytes));
        let buffers = memory(&engine);
        buffers[0].charge_copies(Arc::new(Quota(Arc::clone(&left))));
        buffers[0].mark_weights();
        write_weights(&*buffers[0], odd);
        (buffers, left)
    };
    let (buffers, left) = quota(1 << 20);
    let mut plan = compile(&engine, &buffers);
    let copied = engine.repacked_bytes();
    assert!(copied > 0);
    assert_eq!(left.load(Ordering::Relaxed), (1 << 20) - copied);
    check(&mut *plan, &buffers, odd);
    drop((plan, buffers));
    assert_eq!(left.load(Ordering::Relaxed), 1 << 20);
    // As much as the weights take stays free for the guest.
    for (more, expected) in [(68 << 10, copied), ((68 << 10) - 1, 0)] {
        let (buffers, left) = quota(copied + more);
        let mut plan = compile(&engine, &buffers);
        assert_eq!(engine.repacked_bytes(), expected);
        assert_eq!(left.load(Ordering::Relaxed), copied + more - expected);
        check(&mut *plan, &buffers, odd);
    }
}

/// Four experts and one token, which names one of them twice. `CPU_REPACK` would write behind its
/// memory.
#[test]
fn products_with_experts_read_the_bytes_of_the_guest() {
    let engine = start(None, true);
    let buffers = memory(&engine);
    buffers[0].mark_weights();
    write_weights(&*buffers[0], odd);
    let tensors = [
        (Type::Q4_0, [COLUMNS, ROWS / 4, 4, 1], 0, 0),
        (Type::F32, [COLUMNS, 1, 1, 1], 1, 0),
        (Type::I32, [2, 1, 1, 1], 1, 4096),
        (Type::F32, [ROWS / 4, 2, 1, 1], 1, 8192),
    ];
    let product = Op::MulMatId {
        accumulator: Precision::Default,
        activation: Precision::Default,
    };
    let graph = graph(&engine, &tensors, &[(product, 3, &[0, 1, 2])]);
    let mut plan = engine.compile(&graph, &buffers, &|| false).unwrap();
    assert_eq!(engine.repacked_bytes(), 0);
    let ids = [3u32.to_le_bytes(); 2].concat();
    buffers[1].write(4096, Bytes::from(&*ids)).unwrap();
    put(&*buffers[1], 0, &[1.0; COLUMNS as usize]);
    assert_eq!(plan.launch(&Turn::new()), Ok(RunStatus::Done));
    let products = floats(&*buffers[1], 8192, 128);
    for (at, product) in (0..).zip(products) {
        let wanted = f32::from(odd(192 + at % 64)) * COLUMNS as f32;
        assert!(
            (product - wanted).abs() < 2.0,
            "{at}: {product}, not {wanted}"
        );
    }
}
