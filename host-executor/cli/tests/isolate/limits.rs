//! How many guests there may be, and what isolation requires.

use std::time::Instant;

use rustix::process::Signal;
use vgpu_transport::wire::{DeviceIndex, Offer, Reply, Request};

use crate::common::{Guest, TIMEOUT};
use crate::compute;
use crate::served::workers::guest;
use crate::served::{Scratch, Serve, vgpu};

#[test]
fn each_guest_has_its_partition_and_partitions_limit_the_guests() {
    let scratch = Scratch::new("isolate-parts");
    // 64M in all.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "30M"]);
    let (mut first, _) = guest(&serve, &scratch);
    let (mut second, _) = guest(&serve, &scratch);
    for guest in [&mut first, &mut second] {
        guest.alloc(20 << 20);
        let buffer = guest.new_buffer();
        let refused = guest.ask(&Request::Alloc {
            buffer,
            size: 20 << 20,
        });
        let Reply::Refused { reason, .. } = refused else {
            panic!("{refused:?}");
        };
        assert!(reason.contains("31457280"), "{reason}");
    }
    let mut third = serve.connect(&scratch.socket());
    third.send(&Request::Fence {});
    let reason = third.ended();
    assert!(
        reason.contains("already serves 2 guests, its limit is 2"),
        "{reason}"
    );
    drop(first);
    // The place becomes free when the process has ended.
    let start = Instant::now();
    let mut next = loop {
        let mut next = serve.connect(&scratch.socket());
        next.send(&Request::Hello {
            offer: Offer::SERVED,
            name: "next".into(),
            device: DeviceIndex(0),
        });
        match next.receive().0 {
            Reply::Welcome { .. } => break next,
            Reply::Ended { .. } if start.elapsed() < TIMEOUT => {}
            other => panic!("{other:?}"),
        }
    };
    compute(&mut next);
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    for said in ["files: ", "not dumpable"] {
        assert!(log.contains(said), "{said:?} is not in {log}");
    }
    let keeps_files = log.contains("files: all files of the user");
    assert!(!keeps_files || std::env::var_os("CI").is_none(), "{log}");
}

/// A user who connects again and again starts no process for three quarters of the places and more.
#[test]
fn one_user_cannot_take_all_workers() {
    let scratch = Scratch::new("isolate-user");
    // Six places in 64M.
    let serve = Serve::start(&scratch.socket(), &["--isolate", "--guest-memory", "10M"]);
    let mut guests: Vec<Guest> = (0..5).map(|_| guest(&serve, &scratch).0).collect();
    let reason = serve.connect(&scratch.socket()).ended();
    assert!(
        reason.contains("has 5 programs here, its limit is 5"),
        "{reason}"
    );
    guests.iter_mut().for_each(compute);
    serve.signal(Signal::TERM);
    drop(guests);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn missing_requirements_are_reported() {
    for (more, wanted) in [
        (&["--isolate"][..], "--guest-memory"),
        (&["--guest-memory", "1G"], "--isolate"),
        (
            &["--isolate", "--guest-memory", "10M", "--pin"],
            "--isolate and --pin exclude each other",
        ),
        (
            &["--isolate", "--memory", "1G", "--guest-memory", "2G"],
            "not enough for one guest",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--share-weights",
                "all",
            ],
            "the weights of each guest are in its own process",
        ),
        (
            &[
                "--isolate",
                "--guest-memory",
                "1G",
                "--weights-cache",
                "/tmp/weights,size=1G",
            ],
            "several processes would write to one folder",
        ),
    ] {
        let scratch = Scratch::new("isolate-wrong");
        let endpoint = format!("unix:{}", scratch.socket().display());
        let output = vgpu(&["serve", "--listen", &endpoint])
            .args(more)
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(wanted),
            "{more:?}: {said}"
        );
    }
}
