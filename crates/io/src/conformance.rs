//! The suite that every engine has to pass.
//!
//! Each function states one promise of the engine contract and panics where a [`Subject`] breaks
//! it. The cases here run on any engine, bare or decorated; those in [`faults`] wrap a bare engine
//! in the decorators for faults and whole transfers. `tests/engines/conformance.rs` runs them on
//! every backend, buffered and direct; other crates can run them on their engines.

pub mod faults;
mod subject;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::buffer::{IoBuf, Memory, MemoryHandle, Pool};
use crate::engine::{Completion, Op, OpKind, Rejected};
pub use subject::Subject;
use subject::{HANG, assert_pattern, byte_at, fill, pieces, read, run, run_one, sync, wait, write};

/// A read returns the bytes written, at any offset, length and queue depth, even where it is cut
/// differently; each completion carries its token, its buffer and its count.
pub fn round_trip(subject: &Subject) {
    const TOTAL: usize = 2 << 20;
    for depth in [1, 3, 32] {
        let mut engine = (subject.open)(depth);
        let name = format!("depth-{depth}");
        let file = subject.create(&name);
        let unit = file.alignment().offset;
        let cuts = pieces(TOTAL, unit, &[1, 511, 4096, 70_001, 12_288, 262_144]);
        let ops = (0..)
            .zip(&cuts)
            .map(|(token, &(offset, len))| write(token, &file, offset, len));
        for (completion, &(offset, len)) in run(engine.as_mut(), ops).iter().zip(&cuts) {
            assert_eq!(*completion.result.as_ref().unwrap(), len);
            assert_pattern(completion.buf.as_ref().unwrap().as_slice(), offset);
        }
        let file = subject.reopen(&name);
        let cuts = pieces(TOTAL, file.alignment().offset, &[300_000, 3, 8192, 99_999]);
        let ops = (0..)
            .zip(&cuts)
            .map(|(token, &(offset, len))| read(token, &file, offset, len));
        let completed = run(engine.as_mut(), ops);
        assert_eq!(completed.len(), cuts.len());
        for (index, (completion, &(offset, len))) in completed.iter().zip(&cuts).enumerate() {
            assert_eq!(completion.token, index as u64);
            assert_eq!(*completion.result.as_ref().unwrap(), len);
            assert_pattern(completion.buf.as_ref().unwrap().as_slice(), offset);
        }
    }
}

/// Signals the end of the test, even where a promise is broken.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Wakes from other threads, at any moment, take no room from operations, lose none, and every poll
/// can be repeated. An engine without a waker reports that.
pub fn woken(subject: &Subject) {
    const OPERATIONS: u64 = 400;
    let file = subject.file_with_pattern("file", 1 << 20);
    for depth in [1, 3, 4, 32] {
        let mut engine = (subject.open)(depth);
        let waker = match engine.waker() {
            Ok(waker) => waker,
            Err(error) => return assert_eq!(error.kind(), std::io::ErrorKind::Unsupported),
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    waker.wake();
                    std::thread::yield_now();
                }
            });
            let _end = End(&is_over);
            let (mut submitted, mut completed) = (0, Vec::new());
            while (completed.len() as u64) < OPERATIONS {
                while submitted < OPERATIONS && engine.in_flight() < depth {
                    let op = read(submitted, &file, submitted % 256 * 4096, 4096);
                    assert!(engine.submit(op).is_ok(), "there is room");
                    submitted += 1;
                }
                engine.poll(1, Some(HANG), &mut completed).unwrap();
            }
            completed.sort_by_key(|completion| completion.token);
            for (token, completion) in (0..).zip(&completed) {
                assert_eq!(completion.token, token);
                assert_eq!(*completion.result.as_ref().unwrap(), 4096);
                let bytes = completion.buf.as_ref().unwrap().as_slice();
                assert_pattern(bytes, token % 256 * 4096);
            }
        });
    }
}

/// One operation more than the queue holds comes back untouched; a completion makes room.
pub fn queue_full(subject: &Subject) {
    let mut engine = (subject.open)(4);
    let depth = engine.capabilities().queue_depth_max;
    let file = subject.create("file");
    for token in 0..depth as u64 {
        engine
            .submit(write(token, &file, token * 4096, 4096))
            .unwrap();
    }
    assert_eq!(engine.in_flight(), depth);
    let Rejected { op } = engine.submit(write(99, &file, 8192, 4096)).unwrap_err();
    assert_eq!(op.token, 99);
    let OpKind::Write { offset, buf } = &op.kind else {
        panic!("{op:?} was a write")
    };
    assert_eq!((*offset, buf.len()), (8192, 4096));
    assert_pattern(buf.as_slice(), 8192);
    assert_eq!(engine.in_flight(), depth);

    let completed = wait(engine.as_mut(), 1);
    engine.submit(op).unwrap();
    let rest = run(engine.as_mut(), []);
    assert_eq!(completed.len() + rest.len(), depth + 1);
    assert!(
        completed
            .iter()
            .chain(&rest)
            .all(|completion| completion.result.is_ok())
    );
}

/// A read that reaches past the end of the file is short, one that starts there or later is empty.
pub fn read_past_the_end(subject: &Subject) {
    const LEN: usize = 10_000;
    let mut engine = (subject.open)(8);
    let file = subject.file_with_pattern("file", LEN);
    let expected: [(u64, usize); 5] = [
        (0, LEN),
        (4096, LEN - 4096),
        (8192, LEN - 8192),
        (12_288, 0),
        (1 << 40, 0),
    ];
    for (offset, count) in expected {
        let completion = run_one(engine.as_mut(), read(1, &file, offset, 16_384));
        assert_eq!(completion.result.unwrap(), count, "from offset {offset}");
        let buf = completion.buf.unwrap();
        assert_eq!(buf.len(), 16_384, "the buffer keeps its length");
        assert_pattern(&buf.as_slice()[..count], offset);
    }
}

/// Dropping an engine ends every operation: all buffers are returned, nothing writes to them any
/// more, and each byte of the writes is on the file or is not.
pub fn dropped_in_flight(subject: &Subject) {
    const COUNT: usize = 32;
    const LEN: usize = 256 << 10;
    let pool = Pool::new(LEN, COUNT * LEN);
    let source = subject.file_with_pattern("source", COUNT * LEN);
    for _ in 0..8 {
        let mut engine = (subject.open)(COUNT);
        for index in 0..COUNT as u64 {
            let kind = OpKind::Read {
                offset: index * LEN as u64,
                buf: pool.take().unwrap(),
            };
            let op = Op {
                token: index,
                file: Arc::clone(&source),
                kind,
            };
            engine.submit(op).unwrap();
        }
        drop(engine);
        let back = || pool.try_take().unwrap().expect("every buffer is back");
        let mut bufs: Vec<IoBuf> = (0..COUNT).map(|_| back()).collect();
        bufs.iter_mut()
            .for_each(|buf| buf.as_mut_slice().fill(0xa5));
        // A read that was still in flight would change its former buffer.
        std::thread::sleep(Duration::from_millis(5));
        assert!(
            bufs.iter()
                .all(|buf| buf.as_slice().iter().all(|&byte| byte == 0xa5))
        );
    }
    assert_eq!(
        Arc::strong_count(&source),
        1,
        "an operation keeps its file after its engine"
    );

    let target = subject.create("target");
    target.truncate((COUNT * LEN) as u64).unwrap();
    let mut engine = (subject.open)(COUNT);
    let mut handles: Vec<MemoryHandle> = Vec::new();
    for offset in (0..COUNT as u64).map(|index| index * LEN as u64) {
        let (handle, mut buf) = Memory::allocate(LEN).unwrap().share();
        fill(buf.as_mut_slice(), offset);
        handles.push(handle);
        let kind = OpKind::Write { offset, buf };
        engine
            .submit(Op {
                token: 0,
                file: Arc::clone(&target),
                kind,
            })
            .unwrap();
    }
    drop(engine);
    assert!(handles.into_iter().all(|handle| handle.reclaim().is_ok()));
    let found = std::fs::read(subject.directory.join("target")).unwrap();
    assert!(
        found
            .iter()
            .zip(0..)
            .all(|(&byte, at)| byte == 0 || byte == byte_at(at))
    );
}

/// A sync completes with count 0 and no buffer, among other operations or alone.
pub fn sync_data(subject: &Subject) {
    let mut engine = (subject.open)(8);
    let file = subject.create("file");
    assert_eq!(run_one(engine.as_mut(), sync(7, &file)).result.unwrap(), 0);
    let ops = (0..16).map(|token| match token % 4 {
        3 => sync(token, &file),
        _ => write(token, &file, token * 4096, 4096),
    });
    for completion in run(engine.as_mut(), ops) {
        let synced = completion.token % 4 == 3;
        assert_eq!(completion.result.unwrap(), if synced { 0 } else { 4096 });
        assert_eq!(completion.buf.is_none(), synced);
    }
}

/// Thousands of operations of mixed sizes and kinds: each completes once, with its own buffer and
/// its own data, in any order.
pub fn many_out_of_order(subject: &Subject) {
    const TOTAL: usize = 1 << 20;
    let file = subject.file_with_pattern("file", TOTAL);
    let unit = file.alignment().offset;
    let mut engine = (subject.open)(64);
    let mut seen = vec![false; 3000];
    let place = |token: u64| {
        let offset = (token * 7919 * 512) as usize % (TOTAL - 65_536) / unit * unit;
        let len = [512, 4096, 65_536, 8192][token as usize % 4].max(unit);
        (offset as u64, len)
    };
    let mut completed: Vec<Completion> = Vec::new();
    for token in 0..seen.len() as u64 {
        let (offset, len) = place(token);
        let mut op = read(token, &file, offset, len);
        while let Err(Rejected { op: back }) = engine.submit(op) {
            completed.extend(wait(engine.as_mut(), 1 + token as usize % 17));
            op = back;
        }
    }
    let left = engine.in_flight();
    completed.extend(wait(engine.as_mut(), left));
    for completion in completed {
        let (offset, len) = place(completion.token);
        assert_eq!(completion.result.unwrap(), len);
        assert_pattern(completion.buf.unwrap().as_slice(), offset);
        let seen = &mut seen[completion.token as usize];
        assert!(
            !std::mem::replace(seen, true),
            "token {} twice",
            completion.token
        );
    }
    assert!(seen.iter().all(|&seen| seen));
}

/// An operation that the kernel refuses completes with the kernel's error number and its buffer,
/// and the engine continues.
pub fn errors_carry_errno(subject: &Subject) {
    const EBADF: i32 = 9;
    const EINVAL: i32 = 22;
    let mut engine = (subject.open)(4);
    let read_only = subject.file_with_pattern("file", 8192);
    let completion = run_one(engine.as_mut(), write(1, &read_only, 0, 4096));
    assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(EBADF));
    assert_eq!(completion.token, 1);
    assert_pattern(completion.buf.unwrap().as_slice(), 0);
    for offset in [u64::MAX, u64::MAX - 1, 1 << 63] {
        let completion = run_one(engine.as_mut(), read(2, &read_only, offset, 4096));
        let error = completion.result.unwrap_err();
        assert_eq!(
            error.raw_os_error(),
            Some(EINVAL),
            "at offset {offset:#x}: {error}"
        );
        assert_eq!(completion.buf.unwrap().len(), 4096);
    }
    assert_eq!(
        run_one(engine.as_mut(), read(3, &read_only, 0, 4096))
            .result
            .unwrap(),
        4096
    );
}

/// A transfer of zero bytes succeeds and does nothing.
pub fn zero_length(subject: &Subject) {
    let mut engine = (subject.open)(4);
    let file = subject.create("file");
    assert_eq!(
        run_one(engine.as_mut(), write(1, &file, 0, 0))
            .result
            .unwrap(),
        0
    );
    assert_eq!(
        run_one(engine.as_mut(), read(2, &file, 0, 0))
            .result
            .unwrap(),
        0
    );
    assert_eq!(file.len().unwrap(), 0);
}

/// `poll` returns at least `min` completions, does not wait for more operations than are in flight,
/// does not wait at all for none, and appends to the caller's list.
pub fn poll_minimum(subject: &Subject) {
    let mut engine = (subject.open)(16);
    let mut completed = Vec::new();
    engine.poll(0, None, &mut completed).unwrap();
    engine.poll(5, None, &mut completed).unwrap();
    engine.poll(1, Some(Duration::MAX), &mut completed).unwrap();
    assert!(completed.is_empty());

    let file = subject.file_with_pattern("file", 65_536);
    for token in 0..16 {
        engine
            .submit(read(token, &file, token * 4096, 4096))
            .unwrap();
    }
    let mut before = 0;
    // A century stands in for "no bound".
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    for (min, timeout) in [(0, None), (1, Some(century)), (4, None), (100, Some(HANG))] {
        let left = engine.in_flight();
        engine.poll(min, timeout, &mut completed).unwrap();
        assert!(
            completed.len() >= before + min.min(left),
            "poll({min}) with {left} in flight"
        );
        assert_eq!(completed.len() + engine.in_flight(), 16);
        before = completed.len();
    }
    assert_eq!(before, 16);
}

/// A poll without waiting submits queued operations and eventually finds their completions.
pub fn poll_without_waiting(subject: &Subject) {
    let mut engine = (subject.open)(16);
    let file = subject.file_with_pattern("file", 65_536);
    for token in 0..16 {
        engine
            .submit(read(token, &file, token * 4096, 4096))
            .unwrap();
    }
    let mut completed = Vec::new();
    let begun = std::time::Instant::now();
    while completed.len() < 16 {
        assert!(
            begun.elapsed() < HANG,
            "{} of 16 completions after a minute",
            completed.len()
        );
        engine.poll(0, None, &mut completed).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A padded last block is written whole and then truncated: the file is as long as its content.
pub fn padded_tail(subject: &Subject) {
    const LEN: u64 = 4096 + 77;
    let mut engine = (subject.open)(4);
    let file = subject.create("file");
    assert_eq!(
        run_one(engine.as_mut(), write(1, &file, 0, 8192))
            .result
            .unwrap(),
        8192
    );
    file.truncate(LEN).unwrap();
    file.sync_data().unwrap();
    assert_eq!(file.len().unwrap(), LEN);
    file.drop_cache().unwrap();
    let found = std::fs::read(subject.directory.join("file")).unwrap();
    assert_eq!(found.len() as u64, LEN);
    assert_pattern(&found, 0);
}
