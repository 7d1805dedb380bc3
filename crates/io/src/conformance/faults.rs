//! Promises under faults: short transfers, interruptions, errors.
//!
//! Each case wraps the subject's engine, which has to be a bare one, first in [`Faulty`] and then
//! in [`WholeTransfers`].

use std::sync::Arc;

use super::subject::{Subject, assert_pattern, pieces, read, run, run_one, sync, wait, write};
use crate::engine::Engine;
use crate::faulty::{Failure, Faults, Faulty, OpClass, Repeat};
use crate::transfer::WholeTransfers;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOSPC: i32 = 28;

fn open(subject: &Subject, depth: usize, faults: Faults) -> (Box<dyn Engine>, Arc<Faults>) {
    let faults = Arc::new(faults);
    let faulty = Faulty::new((subject.open)(depth), Arc::clone(&faults));
    (Box::new(WholeTransfers::new(Box::new(faulty))), faults)
}

fn failing(class: OpClass, nth: u64, repeat: Repeat, errno: i32) -> Faults {
    Faults::new(0).fail(Failure {
        class: Some(class),
        nth,
        repeat,
        errno,
    })
}

/// Short transfers are resumed: every count is whole, every byte is in place, and buffers come back
/// unchanged.
pub fn short_transfers_are_resumed(subject: &Subject) {
    const TOTAL: usize = 1 << 20;
    for (seed, percent, depth) in [(1, 100, 1), (2, 100, 16), (3, 30, 16), (4, 70, 3)] {
        let faults = Faults::new(seed).short_transfers(percent);
        let (mut engine, faults) = open(subject, depth, faults);
        let name = format!("seed-{seed}");
        let file = subject.create(&name);
        let unit = file.alignment().offset;
        let cuts = pieces(TOTAL, unit, &[100_000, 4096, 1, 65_536]);
        let ops = (0..)
            .zip(&cuts)
            .map(|(token, &(offset, len))| write(token, &file, offset, len));
        for (completion, &(offset, len)) in run(engine.as_mut(), ops).iter().zip(&cuts) {
            assert_eq!(*completion.result.as_ref().unwrap(), len, "seed {seed}");
            let buf = completion.buf.as_ref().unwrap();
            assert_eq!(buf.len(), len, "seed {seed}");
            assert_pattern(buf.as_slice(), offset);
        }
        let found = std::fs::read(subject.directory.join(&name)).unwrap();
        assert_pattern(&found, 0);

        let file = subject.reopen(&name);
        let cuts = pieces(TOTAL, unit, &[40_000, 200_000]);
        let ops = (0..)
            .zip(&cuts)
            .map(|(token, &(offset, len))| read(token, &file, offset, len));
        for (completion, &(offset, len)) in run(engine.as_mut(), ops).iter().zip(&cuts) {
            assert_eq!(*completion.result.as_ref().unwrap(), len, "seed {seed}");
            assert_pattern(completion.buf.as_ref().unwrap().as_slice(), offset);
        }
        assert!(faults.operations() > 30, "seed {seed}: nothing was resumed");
    }
}

/// With transfers cut short at random, a read still ends exactly at the end of the file.
pub fn short_reads_end_at_the_end(subject: &Subject) {
    const LEN: usize = 50_001;
    let file = subject.file_with_pattern("file", LEN);
    for seed in 0..20 {
        let (mut engine, _) = open(subject, 2, Faults::new(seed).short_transfers(80));
        for offset in [0, 4096, 40_960] {
            let completion = run_one(engine.as_mut(), read(0, &file, offset, 65_536));
            let count = completion.result.unwrap();
            assert_eq!(count, LEN - offset as usize, "seed {seed}");
            assert_pattern(&completion.buf.unwrap().as_slice()[..count], offset);
        }
    }
}

/// `EINTR` and `EAGAIN` are retried, wherever they occur.
pub fn interruptions_are_retried(subject: &Subject) {
    for errno in [EINTR, EAGAIN] {
        for nth in 1..=4 {
            let faults = failing(OpClass::Write, nth, Repeat::Once, errno).short_transfers(50);
            let (mut engine, _) = open(subject, 4, faults);
            let file = subject.create(&format!("file-{errno}-{nth}"));
            let ops = (0..4).map(|token| write(token, &file, token * 65_536, 65_536));
            for completion in run(engine.as_mut(), ops) {
                assert_eq!(completion.result.unwrap(), 65_536);
            }
            assert_pattern(&std::fs::read(file.path()).unwrap(), 0);
        }
    }
}

/// Endless interruptions become an error with the kernel's number.
pub fn endless_interruptions_end(subject: &Subject) {
    for errno in [EINTR, EAGAIN] {
        let (mut engine, _) = open(
            subject,
            4,
            failing(OpClass::Read, 1, Repeat::Forever, errno),
        );
        let file = subject.file_with_pattern(&format!("file-{errno}"), 8192);
        let completion = run_one(engine.as_mut(), read(5, &file, 0, 8192));
        assert_eq!(completion.token, 5);
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(errno));
        assert_eq!(completion.buf.unwrap().len(), 8192);
    }
}

/// Any other error ends its own operation, with its number and its buffer, and no other.
pub fn errors_surface(subject: &Subject) {
    for errno in [EIO, ENOSPC] {
        let (mut engine, _) = open(subject, 4, failing(OpClass::Write, 3, Repeat::Once, errno));
        let file = subject.create(&format!("file-{errno}"));
        let ops = (1..=8).map(|token| write(token, &file, token * 4096, 4096));
        for completion in run(engine.as_mut(), ops) {
            match completion.token {
                3 => assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(errno)),
                _ => assert_eq!(completion.result.unwrap(), 4096),
            }
            assert_eq!(completion.buf.unwrap().len(), 4096);
        }
    }
}

/// An error in the middle of a transfer that was resumed surfaces, and the buffer comes back whole.
pub fn errors_surface_after_a_short_transfer(subject: &Subject) {
    let faults = failing(OpClass::Write, 2, Repeat::Forever, ENOSPC).short_transfers(100);
    let (mut engine, _) = open(subject, 1, faults);
    let file = subject.create("file");
    let completion = run_one(engine.as_mut(), write(1, &file, 0, 65_536));
    assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(ENOSPC));
    assert_pattern(completion.buf.unwrap().as_slice(), 0);
}

/// A failed sync is reported and never repeated: the second one could lie.
pub fn a_failed_sync_is_final(subject: &Subject) {
    let (mut engine, faults) = open(subject, 4, failing(OpClass::Sync, 1, Repeat::Once, EIO));
    let file = subject.create("file");
    let completion = run_one(engine.as_mut(), sync(1, &file));
    assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(EIO));
    assert_eq!(faults.operations(), 1);
}

/// The same seed makes the same faults.
pub fn faults_repeat(subject: &Subject) {
    let file = subject.file_with_pattern("file", 1 << 20);
    let mut counts = (0..2).map(|_| {
        let (mut engine, faults) = open(subject, 1, Faults::new(42).short_transfers(60));
        run_one(engine.as_mut(), read(0, &file, 0, 1 << 20))
            .result
            .unwrap();
        faults.operations()
    });
    assert_eq!(counts.next(), counts.next());
}

/// Decorated engines are full when the bare one is, and return the operation untouched.
pub fn decorated_queue_full(subject: &Subject) {
    let faults = failing(OpClass::Write, 2, Repeat::Once, EIO).short_transfers(100);
    let (mut engine, _) = open(subject, 2, faults);
    let file = subject.create("file");
    for token in 0..2 {
        engine
            .submit(write(token, &file, token * 65_536, 65_536))
            .unwrap();
    }
    let rejected = engine.submit(write(9, &file, 0, 4096)).unwrap_err();
    assert_eq!(rejected.op.token, 9);
    assert_eq!(engine.in_flight(), 2);
    let mut completed = wait(engine.as_mut(), 2);
    completed.sort_by_key(|completion| completion.token);
    assert_eq!(completed[0].result.as_ref().unwrap(), &65_536);
    assert_eq!(
        completed[1].result.as_ref().unwrap_err().raw_os_error(),
        Some(EIO)
    );
}
