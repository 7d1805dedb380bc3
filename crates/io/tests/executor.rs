//! The executor: whole transfers of any alignment, errors with their place, shares, and shutdown.

#![allow(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use penstock_io::Error;
use penstock_io::buffer::{HostArrayMut, HostRegion, IoBuf, Memory, MemoryHandle};
use penstock_io::engine::{
    self, Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, Rejected, Wake,
};
use penstock_io::executor::{
    Arrived, Executor, ExecutorConfig, Kind, Landing, OpenEngine, ParallelWork, Request, Share,
    Source, Target, Transfer, Visit, Visitor,
};
use penstock_io::faulty::{Failure, Faults, Faulty, OpClass, Repeat};
use penstock_io::file::{Direct, File};
use proptest::prelude::*;

/// Far more than any test takes: a test that needs it hangs.
const HANG: Duration = Duration::from_secs(120);

const SMALL: ExecutorConfig = ExecutorConfig {
    engine: EngineChoice::Auto,
    workers: 2,
    queue_depth: 4,
    in_flight_bytes: 4 * (16 << 10),
    block_bytes: 16 << 10,
    staging_bytes: 1 << 20,
    queued_max: 8,
};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Opens workers over wrapped engines.
fn with_engine(
    config: &ExecutorConfig,
    wrap: impl Fn(Box<dyn Engine>) -> Box<dyn Engine> + Send + Sync + 'static,
) -> Executor {
    let engine = EngineConfig {
        choice: config.engine,
        queue_depth: config.queue_depth,
    };
    let open: OpenEngine = Arc::new(move || Ok(wrap(engine::open(&engine)?.engine)));
    Executor::open_with(config, &open).unwrap()
}

fn with_faults(config: &ExecutorConfig, faults: &Arc<Faults>) -> Executor {
    let faults = Arc::clone(faults);
    with_engine(config, move |inner| {
        Box::new(Faulty::new(inner, Arc::clone(&faults)))
    })
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Creates a file with this content, opened for reads and writes, with its buffered twin.
fn target(path: &Path, content: &[u8], direct: Direct) -> Target {
    std::fs::write(path, content).unwrap();
    let file = Arc::new(File::open_to_write(path, direct).unwrap());
    let edges = file
        .is_direct()
        .then(|| Arc::new(File::open_to_write(path, Direct::Off).unwrap()));
    Target { file, edges }
}

/// A window that begins `behind` bytes after a page boundary, and the handle that returns its
/// memory.
fn window(len: usize, behind: usize) -> (MemoryHandle, IoBuf) {
    let (handle, mut buf) = Memory::allocate(len + behind).unwrap().share();
    let window = buf.split_off(behind);
    (handle, window)
}

fn finish(transfer: &Transfer) -> Result<u64, Error> {
    transfer
        .wait(Some(HANG))
        .map(|moved| moved.expect("it hangs").bytes)
}

fn read(target: &Target, offset: u64, buf: IoBuf) -> Request {
    Request {
        target: target.clone(),
        offset,
        kind: Kind::Read(Landing::Window(buf)),
    }
}

fn write(target: &Target, offset: u64, content: &[u8], behind: usize) -> Request {
    let (_, mut buf) = window(content.len(), behind);
    buf.as_mut_slice().copy_from_slice(content);
    Request {
        target: target.clone(),
        offset,
        kind: Kind::Write(Source::Window(buf)),
    }
}

/// A read whose content is checked when its memory is returned.
struct Wanted {
    handle: MemoryHandle,
    behind: usize,
    offset: usize,
    len: usize,
}

impl Wanted {
    fn of(target: &Target, offset: usize, len: usize, behind: usize) -> (Request, Wanted) {
        let (handle, buf) = window(len, behind);
        let wanted = Wanted {
            handle,
            behind,
            offset,
            len,
        };
        (read(target, offset as u64, buf), wanted)
    }

    fn check(self, content: &[u8]) {
        let memory = self
            .handle
            .reclaim()
            .expect("memory is let go of at the end");
        let found = &memory.as_slice()[self.behind..self.behind + self.len];
        assert!(
            found == &content[self.offset..self.offset + self.len],
            "{} bytes at {}",
            self.len,
            self.offset
        );
    }
}

fn ends() -> impl Strategy<Value = Vec<usize>> {
    let edge = prop_oneof![
        (0_usize..40).prop_map(|page| page * 4096),
        (0_usize..40).prop_map(|page| page * 512),
        0_usize..160_000,
    ];
    prop::collection::vec(edge, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Concurrent writes from many shares, without a common byte, all arrive, and all other bytes
    /// stay as they were; reads of any alignment return them.
    #[test]
    fn what_is_written_side_by_side_is_all_there(
        mut ends in ends(),
        behind in prop::collection::vec(prop_oneof![Just(0_usize), 0_usize..5000], 24),
        skips in prop::collection::vec(any::<bool>(), 24),
        is_direct in any::<bool>(),
        is_threads in any::<bool>(),
        short in prop_oneof![Just(0_u64), Just(50)],
        seed in any::<u64>(),
    ) {
        const LEN: usize = 170_000;
        let directory = directory();
        let mut content = bytes(LEN, seed);
        let direct = if is_direct { Direct::Auto } else { Direct::Off };
        let target = target(&directory.path().join("file"), &content, direct);
        let engine = if is_threads { EngineChoice::Threads } else { EngineChoice::Auto };
        let config = ExecutorConfig { engine, ..SMALL };
        let faults = Arc::new(Faults::new(seed).short_transfers(short).late_completions(30));
        let executor = with_faults(&config, &faults);
        let shares: Vec<Share> = (1..4).map(|weight| executor.share(weight).unwrap()).collect();
        ends.sort_unstable();
        let mut transfers = Vec::new();
        for (index, pair) in ends.windows(2).enumerate() {
            if skips[index] {
                continue;
            }
            let new = bytes(pair[1] - pair[0], seed ^ index as u64);
            content[pair[0]..pair[1]].copy_from_slice(&new);
            let request = write(&target, pair[0] as u64, &new, behind[index]);
            transfers.push((shares[index % 3].submit(vec![request]).unwrap(), new.len()));
        }
        for (transfer, len) in transfers {
            prop_assert_eq!(finish(&transfer).unwrap(), len as u64);
        }
        prop_assert!(std::fs::read(directory.path().join("file")).unwrap() == content);
        let (requests, wanted): (Vec<_>, Vec<_>) = ends
            .windows(2)
            .zip(&behind)
            .map(|(pair, &behind)| Wanted::of(&target, pair[0], pair[1] - pair[0], behind))
            .unzip();
        finish(&shares[0].submit(requests).unwrap()).unwrap();
        drop(executor);
        wanted.into_iter().for_each(|one| one.check(&content));
    }
}

#[test]
fn strided_memory_is_filled_and_written_in_row_major_order() {
    let directory = directory();
    let content = bytes(1 << 20, 7);
    let target = target(&directory.path().join("file"), &content, Direct::Auto);
    let executor = Executor::open(&SMALL).unwrap();
    let share = executor.share(1).unwrap();
    // A transposed matrix of 4-byte items.
    let (rows, columns) = (300_usize, 211_usize);
    let mut memory = vec![0_u8; rows * columns * 4];
    let strides = [4_isize, 4 * rows as isize];
    let address = memory.as_mut_ptr().expose_provenance();
    // SAFETY: the vector has all items, and is not read before the transfer has ended.
    let array =
        unsafe { HostArrayMut::new(address, 4, &[rows, columns], Some(&strides), Box::new(())) };
    let scatter = array.unwrap().into_scatter(&[4 * columns, 4]);
    let request = Request {
        target: target.clone(),
        offset: 1234,
        kind: Kind::Read(Landing::Scattered(scatter)),
    };
    finish(&share.submit(vec![request]).unwrap()).unwrap();
    for row in [0, 1, 150, rows - 1] {
        for column in [0, 1, 100, columns - 1] {
            let at = 1234 + (row * columns + column) * 4;
            let found = (column * rows + row) * 4;
            assert_eq!(memory[found..found + 4], content[at..at + 4]);
        }
    }
    // SAFETY: the vector lives to the end of the test, and is not changed any more.
    let region = unsafe { HostRegion::new(address, 4, &[rows, columns], &strides, Box::new(())) };
    let request = Request {
        target: target.clone(),
        offset: 777,
        kind: Kind::Write(Source::Gathered(Arc::new(region))),
    };
    finish(&share.submit(vec![request]).unwrap()).unwrap();
    let mut expected = content.clone();
    let moved = content[1234..1234 + rows * columns * 4].to_vec();
    expected[777..777 + moved.len()].copy_from_slice(&moved);
    assert!(std::fs::read(directory.path().join("file")).unwrap() == expected);
}

#[test]
fn a_file_that_ends_before_is_an_error_that_says_where() {
    let directory = directory();
    let path = directory.path().join("file");
    for direct in [Direct::Auto, Direct::Off] {
        let target = target(&path, &bytes(10_000, 1), direct);
        let executor = Executor::open(&SMALL).unwrap();
        let share = executor.share(1).unwrap();
        for (offset, len) in [(0, 16_384), (9_000, 2_000), (20_000, 10), (4096, 8192)] {
            let (handle, buf) = window(len, 0);
            let transfer = share.submit(vec![read(&target, offset, buf)]).unwrap();
            let error = finish(&transfer).unwrap_err();
            let Error::Transfer {
                operation: "read",
                path: named,
                offset: at,
                source,
            } = error
            else {
                panic!("{error:?}")
            };
            assert_eq!(source.kind(), io::ErrorKind::UnexpectedEof);
            assert_eq!((named, at), (path.clone(), offset.max(10_000)));
            assert!(finish(&transfer).is_err(), "as often as it is asked");
            assert!(handle.reclaim().is_ok());
        }
        let (_, buf) = window(100, 0);
        let transfer = share.submit(vec![read(&target, 9_900, buf)]).unwrap();
        assert_eq!(finish(&transfer).unwrap(), 100);
    }
}

#[test]
fn every_operation_that_fails_is_reported_with_its_place_and_no_other_suffers() {
    let directory = directory();
    let content = bytes(1 << 20, 3);
    for (class, operation) in [
        (OpClass::Read, "read"),
        (OpClass::Write, "write"),
        (OpClass::Sync, "fdatasync"),
    ] {
        for errno in [5, 22, 28] {
            for nth in [1, 3] {
                let path = directory.path().join("file");
                let target = target(&path, &content, Direct::Auto);
                let failure = Failure {
                    class: Some(class),
                    nth,
                    repeat: Repeat::Once,
                    errno,
                };
                let faults = Arc::new(Faults::new(1).fail(failure));
                let executor = with_faults(&SMALL, &faults);
                let share = executor.share(1).unwrap();
                let mut failed = 0;
                for index in 0..8_u64 {
                    let offset = index * 16_384;
                    let transfer = match class {
                        OpClass::Read => {
                            let (_, buf) = window(16_384, 0);
                            share.submit(vec![read(&target, offset, buf)])
                        }
                        _ => {
                            let from = offset as usize;
                            let same = &content[from..from + 16_384];
                            let files = vec![Arc::clone(&target.file)];
                            share.submit_synced(vec![write(&target, offset, same, 0)], files)
                        }
                    };
                    match finish(&transfer.unwrap()) {
                        Ok(moved) => assert_eq!(moved, 16_384),
                        Err(Error::Transfer {
                            operation: reported,
                            path: named,
                            offset: at,
                            source,
                        }) => {
                            assert_eq!(source.raw_os_error(), Some(errno));
                            let expected = if class == OpClass::Sync { 0 } else { offset };
                            assert_eq!((reported, named, at), (operation, path.clone(), expected));
                            failed += 1;
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                }
                assert_eq!(failed, 1);
                drop(executor);
                assert!(std::fs::read(&path).unwrap() == content);
            }
        }
    }
}

#[test]
fn of_many_requests_the_first_failure_is_reported_and_the_memory_comes_back() {
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(1 << 20, 3),
        Direct::Auto,
    );
    let failure = Failure {
        class: Some(OpClass::Read),
        nth: 5,
        repeat: Repeat::Forever,
        errno: 5,
    };
    let executor = with_faults(&SMALL, &Arc::new(Faults::new(1).fail(failure)));
    let share = executor.share(1).unwrap();
    let mut handles = Vec::new();
    let mut requests = Vec::new();
    for index in 0..200 {
        let (handle, buf) = window(4096, 0);
        handles.push(handle);
        requests.push(read(&target, index * 4096, buf));
    }
    let transfer = share.submit(requests).unwrap();
    assert!(matches!(finish(&transfer), Err(Error::Transfer { .. })));
    assert!(handles.into_iter().all(|handle| handle.reclaim().is_ok()));
}

#[test]
fn what_is_synced_was_written_before() {
    let directory = directory();
    let order = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&order);
    let faults = Faults::new(1).call(move |_, what, _| noted.lock().unwrap().push(what));
    let target = target(
        &directory.path().join("file"),
        &bytes(1 << 18, 3),
        Direct::Auto,
    );
    let executor = with_faults(&SMALL, &Arc::new(faults));
    let share = executor.share(1).unwrap();
    let request = write(&target, 100, &bytes(200_000, 4), 3);
    let files = vec![Arc::clone(&target.file)];
    finish(&share.submit_synced(vec![request], files).unwrap()).unwrap();
    let order = order.lock().unwrap();
    assert_eq!(
        order.iter().filter(|what| **what == "fdatasync").count(),
        1,
        "{order:?}"
    );
    assert_eq!(order.last(), Some(&"fdatasync"));
}

#[test]
fn a_transfer_that_is_cancelled_ends_and_lets_its_memory_go() {
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(1 << 20, 3),
        Direct::Auto,
    );
    let executor = Executor::open(&ExecutorConfig {
        queued_max: 4096,
        ..SMALL
    })
    .unwrap();
    let share = executor.share(1).unwrap();
    for round in 0..50 {
        let mut handles = Vec::new();
        let mut requests = Vec::new();
        for index in 0..round * 8 {
            let (handle, buf) = window(5000, 0);
            handles.push(handle);
            requests.push(read(&target, index * 999, buf));
        }
        let transfer = share.submit(requests).unwrap();
        transfer.cancel().unwrap();
        match transfer.wait(Some(HANG)) {
            Ok(Some(_)) | Err(Error::Cancelled) => {}
            other => panic!("{other:?}"),
        }
        assert!(handles.into_iter().all(|handle| handle.reclaim().is_ok()));
    }
}

#[test]
fn an_executor_that_is_dropped_finishes_what_was_handed_over() {
    let directory = directory();
    let path = directory.path().join("file");
    let target = target(&path, &vec![0; 1 << 20], Direct::Auto);
    let content = bytes(1 << 20, 9);
    let executor = Executor::open(&SMALL).unwrap();
    let share = executor.share(1).unwrap();
    let transfers: Vec<Transfer> = content
        .chunks(70_001)
        .enumerate()
        .map(|(index, part)| {
            let request = write(&target, index as u64 * 70_001, part, 0);
            share.submit(vec![request]).unwrap()
        })
        .collect();
    drop(share);
    drop(executor);
    assert!(transfers.iter().all(Transfer::is_done));
    assert!(std::fs::read(&path).unwrap() == content);
}

#[test]
fn what_is_handed_over_too_late_is_an_error() {
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(8192, 3),
        Direct::Auto,
    );
    let executor = Executor::open(&SMALL).unwrap();
    let share = executor.share(1).unwrap();
    drop(executor);
    let (handle, buf) = window(4096, 0);
    let late = share.submit(vec![read(&target, 0, buf)]).unwrap();
    assert!(matches!(finish(&late), Err(Error::Transfer { .. })));
    assert!(handle.reclaim().is_ok());
    let files = vec![Arc::clone(&target.file)];
    let synced = share.submit_synced(Vec::new(), files).unwrap();
    assert!(matches!(finish(&synced), Err(Error::Transfer { .. })));
}

#[test]
fn whoever_watches_hears_of_the_end_once() {
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(1 << 20, 3),
        Direct::Auto,
    );
    let executor = Executor::open(&SMALL).unwrap();
    let share = executor.share(1).unwrap();
    let heard = Arc::new(AtomicUsize::new(0));
    for _ in 0..100 {
        let (_, buf) = window(300_000, 0);
        let transfer = share.submit(vec![read(&target, 11, buf)]).unwrap();
        let counted = Arc::clone(&heard);
        let watcher = move || {
            counted.fetch_add(1, Ordering::SeqCst);
        };
        transfer.on_done(Box::new(watcher)).unwrap();
        finish(&transfer).unwrap();
    }
    let nothing = share.submit(Vec::new()).unwrap();
    assert_eq!(finish(&nothing).unwrap(), 0);
    drop(executor);
    assert_eq!(heard.load(Ordering::SeqCst), 100);
}

#[test]
fn one_operation_at_a_time_is_enough() {
    let directory = directory();
    let content = bytes(1 << 20, 17);
    let target = target(&directory.path().join("file"), &content, Direct::Auto);
    for engine in [EngineChoice::Auto, EngineChoice::Threads] {
        let executor = Executor::open(&ExecutorConfig {
            engine,
            workers: 1,
            queue_depth: 1,
            ..SMALL
        })
        .unwrap();
        let share = executor.share(1).unwrap();
        for round in 0..100 {
            let (request, wanted) = Wanted::of(&target, round * 5_000, 60_000, round % 2);
            finish(&share.submit(vec![request]).unwrap()).unwrap();
            wanted.check(&content);
        }
    }
}

#[test]
fn many_threads_hand_over_more_than_may_wait() {
    let directory = directory();
    let content = bytes(1 << 20, 3);
    let target = target(&directory.path().join("file"), &content, Direct::Auto);
    let executor = Executor::open(&ExecutorConfig {
        queued_max: 2,
        staging_bytes: 0,
        ..SMALL
    })
    .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let (executor, target, content) = (&executor, &target, &content);
            scope.spawn(move || {
                let share = executor.share(thread as u32).unwrap();
                for round in 0..60 {
                    let offset = (round * 7919 + thread * 104_729) % 900_000;
                    let (request, wanted) = Wanted::of(target, offset, 9_000, 1);
                    let transfer = share.submit(vec![request]).unwrap();
                    finish(&transfer).unwrap();
                    wanted.check(content);
                }
            });
        }
    });
}

/// An engine whose operations end only when a test releases them.
struct Held {
    hand: Arc<Hand>,
    flying: Vec<Op>,
}

/// Holds and releases the operations of an engine.
#[derive(Default)]
struct Hand {
    state: Mutex<HandState>,
    changed: Condvar,
}

#[derive(Default)]
struct HandState {
    is_woken: bool,
    is_waited_for: bool,
    /// Operations from this offset on are released.
    held_below: u64,
}

impl Wake for Hand {
    fn wake(&self) {
        self.state.lock().unwrap().is_woken = true;
        self.changed.notify_all();
    }
}

impl Engine for Held {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        self.flying.push(op);
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        _: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<(), Error> {
        let mut state = self.hand.state.lock().unwrap();
        loop {
            let mut index = 0;
            while index < self.flying.len() {
                let OpKind::Read { offset, .. } = self.flying[index].kind else {
                    panic!("only reads are asked for")
                };
                if offset < state.held_below {
                    index += 1;
                    continue;
                }
                let Op { token, kind, .. } = self.flying.remove(index);
                let buf = kind.into_buf();
                let result = Ok(buf.as_ref().map_or(0, IoBuf::len));
                completed.push(Completion { token, buf, result });
            }
            if completed.len() >= min || std::mem::take(&mut state.is_woken) {
                return Ok(());
            }
            state.is_waited_for = true;
            self.hand.changed.notify_all();
            state = self.hand.changed.wait(state).unwrap();
        }
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        Ok(Arc::clone(&self.hand) as Arc<dyn Wake>)
    }

    fn capabilities(&self) -> Capabilities {
        let opened = engine::open(&EngineConfig::default()).unwrap();
        opened.engine.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }
}

/// With one worker, a request that arrives while it waits for another one does not wait for that.
#[test]
fn a_worker_that_waits_takes_on_what_comes() {
    let directory = directory();
    let target = target(&directory.path().join("file"), &bytes(8192, 3), Direct::Off);
    let hand = Arc::new(Hand::default());
    hand.state.lock().unwrap().held_below = 4096;
    let held = Arc::clone(&hand);
    let open: OpenEngine = Arc::new(move || {
        Ok(Box::new(Held {
            hand: Arc::clone(&held),
            flying: Vec::new(),
        }))
    });
    let config = ExecutorConfig {
        workers: 1,
        ..SMALL
    };
    let executor = Executor::open_with(&config, &open).unwrap();
    let share = executor.share(1).unwrap();
    let submit = |offset: u64| {
        let (_, buf) = window(4096, 0);
        share.submit(vec![read(&target, offset, buf)]).unwrap()
    };
    let first = submit(0);
    let mut state = hand.state.lock().unwrap();
    while !state.is_waited_for {
        state = hand.changed.wait(state).unwrap();
    }
    drop(state);
    assert_eq!(finish(&submit(4096)).unwrap(), 4096);
    assert!(!first.is_done());
    hand.state.lock().unwrap().held_below = 0;
    hand.wake();
    assert_eq!(finish(&first).unwrap(), 4096);
}

/// A fork has no worker threads, and perhaps locked locks: it gets an error, and exits without
/// waiting.
#[test]
fn a_fork_is_reported_that_the_threads_are_not_its_own() {
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(4096, 3),
        Direct::Auto,
    );
    let executor = Executor::open(&SMALL).unwrap();
    let share = executor.share(1).unwrap();
    let (_, buf) = window(4096, 0);
    let transfer = share.submit(vec![read(&target, 0, buf)]).unwrap();
    // SAFETY: the child calls functions that need no lock of another thread, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_told = [
            share.submit(Vec::new()).err(),
            executor.share(1).err(),
            transfer.wait(None).err(),
            transfer.cancel().err(),
        ]
        .iter()
        .all(|error| matches!(error, Some(Error::Forked { .. })));
        let is_told = is_told && !transfer.is_done();
        drop((transfer, share, executor));
        // SAFETY: it never returns.
        unsafe { libc::_exit(if is_told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is this thread's own.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    assert_eq!(finish(&transfer).unwrap(), 4096);
}

/// Records the most bytes that were in flight.
struct Weighed {
    inner: Box<dyn Engine>,
    in_flight: HashMap<u64, u64>,
    bytes_max: Arc<AtomicU64>,
}

impl Engine for Weighed {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        if let OpKind::Read { buf, .. } = &op.kind {
            self.in_flight.insert(op.token, buf.len() as u64);
        }
        self.bytes_max
            .fetch_max(self.in_flight.values().sum(), Ordering::Relaxed);
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<(), Error> {
        let polled = self.inner.poll(min, timeout, completed);
        for completion in completed {
            self.in_flight.remove(&completion.token);
        }
        polled
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        self.inner.waker()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

#[test]
fn many_small_reads_are_in_flight_and_few_large_ones() {
    let directory = directory();
    let content = bytes(1 << 20, 5);
    let target = target(&directory.path().join("file"), &content, Direct::Auto);
    // Whole blocks, a block larger than all bytes allowed in flight, and pages.
    for (block, in_flight_bytes, expected) in [
        (64 << 10, 128 << 10, 128 << 10),
        (64 << 10, 1, 64 << 10),
        (4 << 10, 32 << 10, 32 << 10),
    ] {
        let config = ExecutorConfig {
            workers: 1,
            queue_depth: 16,
            in_flight_bytes,
            block_bytes: block,
            queued_max: 1 << 10,
            ..SMALL
        };
        let bytes_max = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&bytes_max);
        let executor = with_engine(&config, move |inner| {
            Box::new(Weighed {
                inner,
                in_flight: HashMap::new(),
                bytes_max: Arc::clone(&noted),
            })
        });
        let share = executor.share(1).unwrap();
        let (requests, wanted): (Vec<_>, Vec<_>) = (0..content.len() / block)
            .map(|index| Wanted::of(&target, index * block, block, 0))
            .unzip();
        finish(&share.submit(requests).unwrap()).unwrap();
        wanted.into_iter().for_each(|one| one.check(&content));
        assert_eq!(
            bytes_max.load(Ordering::Relaxed),
            expected,
            "{block} {in_flight_bytes}"
        );
    }
}

/// Counts operations that were sent to the device: some engines hold them until a poll.
struct Counted {
    inner: Box<dyn Engine>,
    held: usize,
    sent: Arc<AtomicUsize>,
}

impl Engine for Counted {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        self.held += 1;
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<(), Error> {
        let held = std::mem::take(&mut self.held);
        self.sent.fetch_add(held, Ordering::Relaxed);
        self.inner.poll(min, timeout, completed)
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        self.inner.waker()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Records how many operations had been sent when its bytes were delivered.
struct Noting {
    sent: Arc<AtomicUsize>,
    noted: Arc<Mutex<Vec<usize>>>,
}

impl Visitor for Noting {
    fn arrived(self: Box<Self>, _: Arrived<'_>) {
        let sent = self.sent.load(Ordering::Relaxed);
        self.noted.lock().unwrap().push(sent);
    }
}

/// The device has the next request before the bytes of the last one are delivered.
#[test]
fn requests_are_sent_before_bytes_are_delivered() {
    const REQUESTS: usize = 8;
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(REQUESTS * 4096, 9),
        Direct::Auto,
    );
    // Bytes that are read into their memory, and bytes that pass through staging.
    for behind in [0, 1] {
        let config = ExecutorConfig {
            workers: 1,
            queue_depth: 1,
            queued_max: REQUESTS,
            ..SMALL
        };
        let sent = Arc::new(AtomicUsize::new(0));
        let noted = Arc::new(Mutex::new(Vec::new()));
        let counter = Arc::clone(&sent);
        let executor = with_engine(&config, move |inner| {
            Box::new(Counted {
                inner,
                held: 0,
                sent: Arc::clone(&counter),
            })
        });
        let share = executor.share(1).unwrap();
        let request = |index: usize| Request {
            target: target.clone(),
            offset: (index * 4096) as u64,
            kind: Kind::Read(Landing::Visited(Visit {
                bytes: 4096,
                memory: (behind == 0).then(|| window(4096, 0).1),
                visitor: Box::new(Noting {
                    sent: Arc::clone(&sent),
                    noted: Arc::clone(&noted),
                }),
            })),
        };
        finish(&share.submit((0..REQUESTS).map(request).collect()).unwrap()).unwrap();
        let sent_before: Vec<usize> = (1..=REQUESTS).map(|one| (one + 1).min(REQUESTS)).collect();
        assert_eq!(*noted.lock().unwrap(), sent_before, "behind {behind}");
    }
}

/// Workers whose operations end when a test releases them, and which worker has which.
#[derive(Default)]
struct Crowd {
    state: Mutex<CrowdState>,
    changed: Condvar,
}

#[derive(Default)]
struct CrowdState {
    workers: usize,
    woken: HashSet<usize>,
    released: HashSet<u64>,
    /// Worker of each operation, by the offset that it reads at.
    sent: HashMap<u64, usize>,
}

impl Crowd {
    /// Opens workers over its engines, with room for two operations each.
    fn executor(self: &Arc<Self>, workers: usize) -> Executor {
        let joined = Arc::clone(self);
        let open: OpenEngine = Arc::new(move || {
            let mut state = joined.state.lock().unwrap();
            state.workers += 1;
            Ok(Box::new(Member {
                crowd: Arc::clone(&joined),
                index: state.workers,
                flying: Vec::new(),
            }))
        });
        let config = ExecutorConfig {
            workers,
            queue_depth: 2,
            queued_max: 64,
            ..SMALL
        };
        Executor::open_with(&config, &open).unwrap()
    }

    /// Waits until the read of a page has been sent.
    fn wait_until_sent(&self, page: u64) {
        let mut state = self.state.lock().unwrap();
        while !state.sent.contains_key(&(page * 4096)) {
            let (next, waited) = self.changed.wait_timeout(state, HANG).unwrap();
            assert!(!waited.timed_out(), "the read of page {page} is not sent");
            state = next;
        }
    }

    /// Lets the reads of these pages end.
    fn release(&self, pages: std::ops::Range<u64>) {
        let mut state = self.state.lock().unwrap();
        state.released.extend(pages.map(|page| page * 4096));
        drop(state);
        self.changed.notify_all();
    }
}

/// An engine of one of them.
struct Member {
    crowd: Arc<Crowd>,
    index: usize,
    flying: Vec<Op>,
}

struct MemberWaker {
    crowd: Arc<Crowd>,
    index: usize,
}

impl Wake for MemberWaker {
    fn wake(&self) {
        self.crowd.state.lock().unwrap().woken.insert(self.index);
        self.crowd.changed.notify_all();
    }
}

fn read_offset(op: &Op) -> u64 {
    match op.kind {
        OpKind::Read { offset, .. } => offset,
        _ => panic!("only reads are asked for"),
    }
}

impl Engine for Member {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        let mut state = self.crowd.state.lock().unwrap();
        state.sent.insert(read_offset(&op), self.index);
        self.crowd.changed.notify_all();
        drop(state);
        self.flying.push(op);
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<(), Error> {
        let mut state = self.crowd.state.lock().unwrap();
        loop {
            for op in std::mem::take(&mut self.flying) {
                if !state.released.contains(&read_offset(&op)) {
                    self.flying.push(op);
                    continue;
                }
                let buf = op.kind.into_buf();
                let result = Ok(buf.as_ref().map_or(0, IoBuf::len));
                completed.push(Completion {
                    token: op.token,
                    buf,
                    result,
                });
            }
            let is_over = min == 0 || timeout == Some(Duration::ZERO);
            if is_over || !completed.is_empty() || state.woken.remove(&self.index) {
                return Ok(());
            }
            state = self.crowd.changed.wait(state).unwrap();
        }
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        Ok(Arc::new(MemberWaker {
            crowd: Arc::clone(&self.crowd),
            index: self.index,
        }))
    }

    fn capabilities(&self) -> Capabilities {
        let config = EngineConfig {
            choice: EngineChoice::Threads,
            queue_depth: 2,
        };
        engine::open(&config).unwrap().engine.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }
}

/// Submits further requests when its bytes are delivered.
struct Following(Box<dyn FnOnce() + Send>);

impl Visitor for Following {
    fn arrived(self: Box<Self>, _: Arrived<'_>) {
        (self.0)();
    }
}

/// A request goes to a worker that has room, not to one that filled up while it delivered.
#[test]
fn a_full_worker_takes_no_wake_from_others() {
    const WORKERS: usize = 4;
    let directory = directory();
    let target = target(
        &directory.path().join("file"),
        &bytes(16 * 4096, 3),
        Direct::Off,
    );
    // Which worker takes the two requests that follow is chance; often the one that delivers.
    for _ in 0..40 {
        let crowd = Arc::new(Crowd::default());
        let executor = crowd.executor(WORKERS);
        let share = Arc::new(executor.share(1).unwrap());
        let begun = Arc::new(Mutex::new(Vec::new()));
        let (again, following) = (Arc::clone(&share), Arc::clone(&begun));
        let later = [1, 2].map(|number: u64| read(&target, number * 4096, window(4096, 0).1));
        let first = Request {
            target: target.clone(),
            offset: 0,
            kind: Kind::Read(Landing::Visited(Visit {
                bytes: 4096,
                memory: Some(window(4096, 0).1),
                visitor: Box::new(Following(Box::new(move || {
                    for request in later {
                        let transfer = again.submit(vec![request]).unwrap();
                        following.lock().unwrap().push(transfer);
                    }
                }))),
            })),
        };
        begun
            .lock()
            .unwrap()
            .push(share.submit(vec![first]).unwrap());
        crowd.wait_until_sent(0);
        crowd.release(0..1);
        // The workers have room for two each, and nothing ends.
        for number in 1..=2 * WORKERS as u64 {
            if number > 2 {
                let request = read(&target, number * 4096, window(4096, 0).1);
                begun
                    .lock()
                    .unwrap()
                    .push(share.submit(vec![request]).unwrap());
            }
            crowd.wait_until_sent(number);
        }
        crowd.release(0..16);
        for transfer in std::mem::take(&mut *begun.lock().unwrap()) {
            finish(&transfer).unwrap();
        }
    }
}

/// Parts that are counted down, each of which waits until the test releases it.
struct Parts {
    left: AtomicUsize,
    helped: AtomicUsize,
    goes_on: AtomicBool,
}

impl ParallelWork for Parts {
    fn run_part(&self) -> bool {
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
        if taken.is_ok() {
            self.helped.fetch_add(1, Ordering::Relaxed);
            while !self.goes_on.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
        taken.is_ok()
    }
}

/// A thread without requests helps, and still begins requests that arrive meanwhile.
#[test]
fn who_is_asked_helps_and_reads_go_on() {
    let directory = directory();
    let content = bytes(1 << 20, 7);
    let target = target(&directory.path().join("file"), &content, Direct::Auto);
    let config = ExecutorConfig {
        workers: 1,
        ..SMALL
    };
    let executor = Executor::open(&config).unwrap();
    let share = executor.share(1).unwrap();
    for round in 0..20 {
        let parts = Arc::new(Parts {
            left: AtomicUsize::new(8),
            helped: AtomicUsize::new(0),
            goes_on: AtomicBool::new(false),
        });
        let run_part: Arc<dyn ParallelWork> = Arc::clone(&parts) as _;
        let (before, behind) = (round * 4096, round % 2);
        let (early, early_wanted) = Wanted::of(&target, before, 40_000, behind);
        let early = (round % 3 == 0).then(|| share.submit(vec![early]).unwrap());
        share.offer(&run_part, 3);
        while parts.helped.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        let (late, late_wanted) = Wanted::of(&target, before, 50_000, behind);
        let late = share.submit(vec![late]).unwrap();
        parts.goes_on.store(true, Ordering::Relaxed);
        finish(&late).unwrap();
        late_wanted.check(&content);
        if let Some(early) = early {
            finish(&early).unwrap();
            early_wanted.check(&content);
        }
    }
    // Nobody has to accept an invitation, and an executor ends regardless.
    let parts = Arc::new(Parts {
        left: AtomicUsize::new(0),
        helped: AtomicUsize::new(0),
        goes_on: AtomicBool::new(true),
    });
    let run_part: Arc<dyn ParallelWork> = parts;
    (0..1000).for_each(|_| share.offer(&run_part, 2));
    drop(share);
    drop(executor);
}
