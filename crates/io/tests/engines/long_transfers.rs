//! Transfers longer than one kernel call moves: cut by the backend, resumed above it.

use std::sync::Arc;
use std::time::Duration;

use penstock_io::buffer::Memory;
use penstock_io::engine::{Engine, EngineChoice, EngineConfig, Op, OpKind, open};
use penstock_io::faulty::{Faults, Faulty};
use penstock_io::file::{Direct, File};
use penstock_io::transfer::WholeTransfers;

/// The most bytes of one operation; the kernel's own bound is just under 2 GiB.
const AT_ONCE: usize = 1 << 30;
const LEN: usize = AT_ONCE + 8192;

#[test]
fn a_long_read_is_cut_and_carried_on() {
    // A sparse file: nothing is stored and the device is not read.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("file");
    File::create(&path, Direct::Off)
        .unwrap()
        .truncate(LEN as u64)
        .unwrap();
    let file = Arc::new(File::open(&path, Direct::Auto).unwrap());
    // One buffer for all: most of this test's time goes into touching its pages first.
    let mut buf = Memory::allocate(LEN).unwrap().share().1;
    for choice in [EngineChoice::Auto, EngineChoice::Threads] {
        let bare = open(&EngineConfig {
            choice,
            queue_depth: 2,
        })
        .unwrap()
        .engine;
        let operations = Arc::new(Faults::new(0));
        let counting = Faulty::new(bare, Arc::clone(&operations));
        let mut engine = WholeTransfers::new(Box::new(counting));

        buf.as_mut_slice()[AT_ONCE] = 0xff;
        let kind = OpKind::Read { offset: 0, buf };
        engine
            .submit(Op {
                token: 0,
                file: Arc::clone(&file),
                kind,
            })
            .unwrap();
        let mut completed = Vec::new();
        engine
            .poll(1, Some(Duration::from_secs(60)), &mut completed)
            .unwrap();
        let completion = completed.pop().expect("a completion within a minute");
        assert_eq!(completion.result.unwrap(), LEN);
        assert_eq!(operations.operations(), 2);
        buf = completion.buf.unwrap();
        assert_eq!(buf.as_slice()[AT_ONCE], 0, "the rest was read too");
    }
}
