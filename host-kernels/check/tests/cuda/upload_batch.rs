//! Batched uploads: with any calls in between, memory is as if each upload had been made at once.

use std::sync::Arc;

use vgpu_engine::{Engine, Memory};

use crate::engine_on;
use crate::fusion::random;
use crate::spy::{Call, Spy};

fn bytes_of(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.size() as usize];
    memory.read(0, bytes.as_mut_slice().into()).unwrap();
    bytes
}

#[test]
fn writes_arrive_at_any_offset() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let (a, b) = (engine.alloc(5000).unwrap(), engine.alloc(70_000).unwrap());
    let mut want = [vec![0u8; 5000], vec![0u8; 70_000]];
    let mut random = random(1);
    for round in 0..400 {
        let which = random(2);
        let (memory, want) = ([&a, &b][which], &mut want[which]);
        let at = random(want.len());
        let most = [40, 3000, 70_000][random(3)];
        let len = random(most.min(want.len() - at)) + 1;
        let data: Vec<u8> = (0..len).map(|i| (round * 7 + i) as u8).collect();
        match random(8) {
            0 => {
                memory.fill(at as u64, len as u64, round as u8).unwrap();
                want[at..at + len].fill(round as u8);
            }
            1 => {
                let to = random(want.len() - len + 1);
                memory
                    .copy_from(to as u64, &**memory, at as u64, len as u64)
                    .unwrap();
                want.copy_within(at..at + len, to);
            }
            _ => {
                memory.write(at as u64, data.as_slice().into()).unwrap();
                want[at..at + len].copy_from_slice(&data);
            }
        }
        if random(20) == 0 {
            assert_eq!(bytes_of(&**memory), *want, "round {round}");
        }
    }
    assert_eq!(bytes_of(&*a), want[0]);
    assert_eq!(bytes_of(&*b), want[1]);
}

#[test]
fn several_writes_are_one_launch() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let memory = engine.alloc(4096).unwrap();
    device.take_whole_log();
    for i in 0..10u8 {
        memory
            .write(u64::from(i) * 100, [i; 50][..].into())
            .unwrap();
    }
    let got = bytes_of(&*memory);
    assert!((0..10u8).all(|i| got[usize::from(i) * 100 + 49] == i));
    assert_eq!(
        device.take_whole_log(),
        [Call::UploadBatch, Call::Download(4096)]
    );
    // Overlapping uploads, one after the other.
    memory.write(0, [1; 50][..].into()).unwrap();
    memory.write(40, [2; 50][..].into()).unwrap();
    assert_eq!(bytes_of(&*memory)[38..42], [1, 1, 2, 2]);
    assert_eq!(
        device.take_whole_log(),
        [Call::UploadBatch, Call::UploadBatch, Call::Download(4096)]
    );
}

#[test]
fn pending_writes_to_freed_memory_do_not_reach_its_next_owner() {
    let device = Arc::new(Spy::with_memory(256 << 20));
    let engine = engine_on(&device);
    for _ in 0..3 {
        let memory = engine.alloc(1024).unwrap();
        memory.write(0, [9; 1024][..].into()).unwrap();
        drop(memory);
        let next = engine.alloc(1024).unwrap();
        assert!(bytes_of(&*next).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn full_batch_is_uploaded_before_the_next_write() {
    let device = Arc::new(Spy::running());
    let engine = engine_on(&device);
    let memory = engine.alloc(4 << 20).unwrap();
    let chunk = 60_000;
    for i in 0..60u64 {
        let bytes = vec![i as u8 + 1; chunk];
        memory
            .write(i * chunk as u64, bytes.as_slice().into())
            .unwrap();
    }
    let got = bytes_of(&*memory);
    for i in 0..60 {
        let part = &got[i * chunk..(i + 1) * chunk];
        assert!(part.iter().all(|&byte| byte == i as u8 + 1), "part {i}");
    }
}
