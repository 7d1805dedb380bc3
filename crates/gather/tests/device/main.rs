//! Rows gathered into device memory: a stream that waits for them finds them there, in whatever
//! order the driver works and whatever call fails.

mod collecting;
mod coming;
mod machine;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use machine::{Machine, machine};
use penstock_gather::{
    BLOCK_BYTES, Cache, Checks, DeviceReader, Error, Merging, Policy, Reader, Segment, Table,
};
use penstock_io::buffer::RowGatherKernel;
use penstock_io::engine::{self, EngineChoice, EngineConfig};
use penstock_io::executor::{Executor, ExecutorConfig, OpenEngine, Target};
use penstock_io::faulty::{Failure, Faults, Faulty, LentDevice, OpClass, Repeat};
use penstock_io::file::{Direct, File};

/// Nothing here takes nearly that long, so a test that does hangs.
const HANG: Duration = Duration::from_secs(120);
const MIB: usize = 1 << 20;
const WIDTH: u64 = 4096;
const ROWS: u64 = 3000;

/// A byte of a row, which differs between tables of different seeds.
fn byte(seed: u64, row: u64, at: u64) -> u8 {
    let mixed = (row + 1000 * seed).wrapping_mul(2_654_435_761);
    (mixed.wrapping_add(at * 131) >> 5) as u8
}

fn executor(faults: Faults) -> Executor {
    let faults = Arc::new(faults);
    let config = ExecutorConfig {
        queue_depth: 32,
        ..ExecutorConfig::default()
    };
    let engine = EngineConfig {
        choice: EngineChoice::Auto,
        queue_depth: config.queue_depth,
    };
    let open: OpenEngine = Arc::new(move || {
        let inner = engine::open(&engine)?.engine;
        Ok(Box::new(Faulty::new(inner, Arc::clone(&faults))))
    });
    Executor::open_with(&config, &open).unwrap()
}

/// A table with checksums, and its reader.
struct World {
    _directory: tempfile::TempDir,
    _executor: Executor,
    path: std::path::PathBuf,
    reader: Reader,
}

fn world(seed: u64, slots: Option<u32>, faults: Faults) -> World {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("table");
    let row = |row| (0..WIDTH).map(move |at| byte(seed, row, at));
    let content: Vec<u8> = (0..ROWS).flat_map(row).collect();
    fs::write(&path, &content).unwrap();
    let sums = content.chunks(BLOCK_BYTES as usize).map(Checks::of);
    let segment = Segment {
        target: Target {
            file: Arc::new(File::open(&path, Direct::Auto).unwrap()),
            edges: None,
        },
        offset: 0,
        rows: ROWS,
        checks: Some(Arc::new(Checks::new(sums))),
        opener: None,
    };
    let cache =
        slots.map(|slots| Arc::new(Cache::new(slots, WIDTH as usize, Policy::Sieve).unwrap()));
    let executor = executor(faults);
    let merging = Merging {
        gap_bytes: 16 << 10,
        run_bytes_max: 256 << 10,
    };
    let share = Arc::new(executor.share(1).unwrap());
    World {
        reader: Reader::new(
            Table::new(vec![segment], WIDTH, WIDTH),
            share,
            cache,
            merging,
        ),
        _directory: directory,
        _executor: executor,
        path,
    }
}

fn ids_of(count: usize, seed: u64) -> Vec<u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % ROWS
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Memory for rows, filled with another byte.
fn lent(machine: &Machine, rows: usize) -> LentDevice {
    machine.lent(&vec![0xee; rows * WIDTH as usize])
}

#[track_caller]
fn assert_has(lent: &LentDevice, seed: u64, ids: &[u64]) {
    let content = lent.content().unwrap();
    for (row, &id) in content.chunks(WIDTH as usize).zip(ids) {
        let mut pairs = row.iter().zip(0..);
        assert!(
            pairs.all(|(&one, at)| one == byte(seed, id, at)),
            "row {id}"
        );
    }
}

/// Waits until no reference to the device memory is left.
#[track_caller]
fn assert_returned(lent: &LentDevice) {
    let until = Instant::now() + HANG;
    while !lent.is_returned() {
        assert!(Instant::now() < until, "somebody keeps it");
        thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn rows_are_there_whatever_the_order() {
    let mut machine = machine();
    for (slots, seed) in [None, Some(500)].into_iter().zip(1..) {
        let faults = Faults::new(seed).short_transfers(30).late_completions(20);
        let world = world(seed, slots, faults);
        for turn in 0..30 {
            machine.draw(turn, 300 * (turn % 2));
            let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
            let counts = [1, 77, 5000, 12_000];
            let batches: Vec<Vec<u64>> = (0..4)
                .map(|index| {
                    ids_of(
                        counts[index % (1 + turn as usize % 4)],
                        turn * 10 + index as u64,
                    )
                })
                .collect();
            let lents: Vec<LentDevice> = batches
                .iter()
                .map(|ids| lent(&machine, ids.len()))
                .collect();
            let begin = |(ids, lent): (&Vec<u64>, &LentDevice)| {
                let stream = lent.foreign();
                device
                    .gather(ids.clone(), lent.target(), &stream, None)
                    .unwrap()
            };
            let begun: Vec<_> = batches.iter().zip(&lents).map(begin).collect();
            for ((batch, lent), ids) in begun.iter().zip(&lents).zip(&batches) {
                assert!(batch.wait(Some(HANG)).unwrap(), "it hangs");
                batch.hold(&lent.foreign()).unwrap();
                assert_has(lent, seed, ids);
            }
            device.finish();
            lents.iter().for_each(assert_returned);
        }
        let counts = world.reader.counts();
        let bytes = counts.rows.load(Relaxed) * WIDTH;
        assert_eq!(counts.device_bytes.load(Relaxed), bytes);
    }
}

#[test]
fn nothing_is_released_before_it_is_copied() {
    let machine = machine();
    let world = world(3, Some(4000), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    // From the cache, so that the host is faster than the device in any case.
    let every: Vec<u64> = (0..ROWS).collect();
    let first = lent(&machine, every.len());
    let batch = device
        .gather(every, first.target(), &first.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    let lents: Vec<LentDevice> = (0..4).map(|_| lent(&machine, 4000)).collect();
    lents.iter().for_each(|lent| drop(lent.content()));
    let held = machine.control.hold();
    let batches: Vec<Vec<u64>> = (0..4).map(|seed| ids_of(4000, seed)).collect();
    let begun: Vec<_> = batches
        .iter()
        .zip(&lents)
        .map(|(ids, lent)| {
            device
                .gather(ids.clone(), lent.target(), &lent.foreign(), None)
                .unwrap()
        })
        .collect();
    for (batch, lent) in begun.iter().zip(&lents) {
        // The copies are queued, and the host does not wait for them.
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&lent.foreign()).unwrap();
    }
    thread::sleep(Duration::from_millis(20));
    assert!(lents.iter().all(|lent| !lent.is_returned()));
    drop(held);
    for (lent, ids) in lents.iter().zip(&batches) {
        assert_has(lent, 3, ids);
        assert_returned(lent);
    }
}

#[test]
fn more_than_the_memory_holds_waits_for_the_device() {
    let machine = machine();
    let world = world(4, Some(4000), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let lents: Vec<LentDevice> = (0..5).map(|_| lent(&machine, 10_000)).collect();
    lents.iter().for_each(|lent| drop(lent.content()));
    let held = machine.control.hold();
    let batches: Vec<Vec<u64>> = (0..5).map(|seed| ids_of(10_000, seed)).collect();
    let begun: Vec<_> = batches
        .iter()
        .zip(&lents)
        .map(|(ids, lent)| {
            device
                .gather(ids.clone(), lent.target(), &lent.foreign(), None)
                .unwrap()
        })
        .collect();
    // Eight pieces have room, and each of these batches is three.
    assert!(begun[1].wait(Some(HANG)).unwrap());
    assert!(!begun[4].wait(Some(Duration::from_millis(50))).unwrap());
    assert!(machine.control.leaks().pinned_bytes <= (128 + 256 + 5 * 40) * MIB as u64);
    drop(held);
    for ((batch, lent), ids) in begun.iter().zip(&lents).zip(&batches) {
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&lent.foreign()).unwrap();
        assert_has(lent, 4, ids);
    }
}

#[test]
fn tables_share_the_memory_and_none_starves() {
    let machine = machine();
    let worlds = [
        world(11, Some(4000), Faults::new(1)),
        world(12, Some(4000), Faults::new(1)),
    ];
    let devices = worlds
        .each_ref()
        .map(|world| DeviceReader::new(&world.reader, &machine.device_streams).unwrap());
    let lents: Vec<LentDevice> = (0..6).map(|_| lent(&machine, 10_000)).collect();
    lents.iter().for_each(|lent| drop(lent.content()));
    let held = machine.control.hold();
    let batches: Vec<Vec<u64>> = (0..6).map(|seed| ids_of(10_000, seed)).collect();
    let begin = |index: usize| {
        let (ids, lent) = (batches[index].clone(), &lents[index]);
        devices[index / 3]
            .gather(ids, lent.target(), &lent.foreign(), None)
            .unwrap()
    };
    let mut begun: Vec<_> = (0..3).map(begin).collect();
    // Then the first table has all of the memory.
    assert!(begun[1].wait(Some(HANG)).unwrap());
    thread::sleep(Duration::from_millis(100));
    begun.extend((3..6).map(begin));
    assert!(!begun[3].wait(Some(Duration::from_millis(100))).unwrap());
    drop(held);
    for (index, ((batch, lent), ids)) in begun.iter().zip(&lents).zip(&batches).enumerate() {
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&lent.foreign()).unwrap();
        assert_has(lent, 11 + index as u64 / 3, ids);
    }
}

#[test]
fn a_table_that_is_idle_keeps_nothing() {
    let machine = machine();
    let world = world(13, Some(4000), Faults::new(1));
    let device = || DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let (idle, busy) = (device(), device());
    let small = lent(&machine, 10);
    let ids = ids_of(10, 1);
    let batch = idle
        .gather(ids, small.target(), &small.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    assert_returned(&small);
    let lents: Vec<LentDevice> = (0..8).map(|_| lent(&machine, 4000)).collect();
    lents.iter().for_each(|lent| drop(lent.content()));
    let held = machine.control.hold();
    let begun: Vec<_> = lents
        .iter()
        .map(|lent| {
            let ids = ids_of(4000, 5);
            busy.gather(ids, lent.target(), &lent.foreign(), None)
                .unwrap()
        })
        .collect();
    // Each batch uses one buffer, and there are no more than eight.
    for batch in &begun {
        assert!(batch.wait(Some(Duration::from_secs(30))).unwrap());
    }
    drop(held);
}

#[test]
fn what_is_damaged_is_not_copied() {
    let machine = machine();
    let world = world(5, Some(100), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    spoil(&world.path, 1234);
    let ids = vec![5, 1234, 7];
    let memory = lent(&machine, 3);
    let batch = device
        .gather(ids, memory.target(), &memory.foreign(), None)
        .unwrap();
    for _ in 0..2 {
        match batch.wait(Some(HANG)) {
            Err(Error::Damaged {
                row: 1234, path, ..
            }) => assert_eq!(*path, world.path),
            other => panic!("{other:?}"),
        }
    }
    assert_returned(&memory);
    assert!(memory.content().unwrap().iter().all(|&byte| byte == 0xee));
    // The next batch has its rows.
    let batch = device
        .gather(vec![7, 8, 9], memory.target(), &memory.foreign(), None)
        .unwrap();
    assert!(batch.wait(Some(HANG)).unwrap());
    batch.hold(&memory.foreign()).unwrap();
    assert_has(&memory, 5, &[7, 8, 9]);
}

fn spoil(path: &Path, row: u64) {
    use std::os::unix::fs::FileExt;
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(b"\0damage\0", row * WIDTH + 50).unwrap();
}

#[test]
fn a_read_that_fails_is_reported_and_the_rest_goes_on() {
    let machine = machine();
    let failure = Failure {
        class: Some(OpClass::Read),
        nth: 2,
        repeat: Repeat::Once,
        errno: 5,
    };
    let world = world(6, None, Faults::new(1).fail(failure));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let ids = ids_of(200, 1);
    let lents = [lent(&machine, 200), lent(&machine, 200)];
    let begun: Vec<_> = lents
        .iter()
        .map(|lent| {
            device
                .gather(ids.clone(), lent.target(), &lent.foreign(), None)
                .unwrap()
        })
        .collect();
    let failed = begun.iter().filter(|batch| batch.wait(Some(HANG)).is_err());
    assert_eq!(failed.count(), 1);
    for (batch, lent) in begun.iter().zip(&lents) {
        if batch.wait(None).is_ok() {
            batch.hold(&lent.foreign()).unwrap();
            assert_has(lent, 6, &ids);
        }
        assert_returned(lent);
    }
}

#[test]
fn whatever_call_fails_nobody_has_other_rows() {
    const CALLS: [&str; 15] = [
        "cuMemcpyBatchAsync_v2",
        "cuLaunchKernel",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemHostRegister_v2",
        "cuMemAlloc_v2",
        "cuStreamIsCapturing",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync_v2",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
    ];
    let mut machine = machine();
    // Rows of the first cache are evicted and read again; the second one has all of them.
    let worlds = [1000, 4000].map(|slots| world(7, Some(slots), Faults::new(1)));
    // If one of these fails, the host gathers the rows instead.
    let dispensable = [
        "cuModule",
        "cuMemHostR",
        "cuMemAlloc",
        "cuEventQ",
        "cuEventS",
    ];
    for call in CALLS {
        let mut value = 0;
        for nth in 1..12 {
            let world = &worlds[nth as usize % 2];
            let nth = nth / 2 + 1;
            machine.draw(nth, 50);
            let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
            let ids = ids_of(4500, nth);
            let memory = lent(&machine, ids.len());
            drop(memory.content());
            machine.control.fail_call(call, nth, 999);
            let came = device
                .gather(ids.clone(), memory.target(), &memory.foreign(), None)
                .and_then(|batch| match batch.wait(Some(HANG)) {
                    Ok(is_there) => {
                        assert!(is_there, "it hangs");
                        batch.hold(&memory.foreign())
                    }
                    Err(Error::Io(penstock_io::Error::Cuda(error))) => {
                        Err(penstock_io::Error::Cuda(error.clone()).into())
                    }
                    Err(other) => panic!("{other:?}"),
                });
            match came {
                Ok(()) => {
                    machine.control.clear_faults();
                    assert_has(&memory, 7, &ids);
                }
                Err(Error::Io(penstock_io::Error::Cuda(error))) => {
                    value += 1;
                    assert_eq!(error.code(), Some(999));
                }
                Err(other) => panic!("{other:?}"),
            }
            device.finish();
            machine.control.clear_faults();
            assert_returned(&memory);
        }
        assert!(
            value > 0 || dispensable.iter().any(|prefix| call.starts_with(prefix)),
            "{call}"
        );
    }
}

#[test]
fn what_is_dropped_comes_all_the_same_and_leaves_nothing() {
    let mut machine = machine();
    let world = world(8, Some(100), Faults::new(1));
    machine.draw(3, 200);
    // The kernel stays loaded as long as the streams exist.
    RowGatherKernel::of(&machine.device_streams).unwrap();
    let before = machine.control.leaks();
    for seed in 0..5 {
        let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
        let memory = lent(&machine, 9000);
        let ids = ids_of(9000, seed);
        drop(
            device
                .gather(ids.clone(), memory.target(), &memory.foreign(), None)
                .unwrap(),
        );
        // The reader is dropped after finishing, or while batches are in flight.
        if seed % 2 == 0 {
            device.finish();
        }
        drop(device);
        assert_returned(&memory);
        assert_has(&memory, 8, &ids);
    }
    let after = machine.control.leaks();
    assert_eq!(
        (before.events, before.streams),
        (after.events, after.streams)
    );
    assert_eq!(before.allocations, after.allocations);
}

#[test]
fn parts_of_a_hinted_batch_are_one_to_the_cache() {
    let machine = machine();
    let world = world(9, Some(2500), Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let batches: Vec<Vec<u64>> = (0..4).map(|seed| ids_of(9000, seed)).collect();
    let known: Vec<_> = batches
        .iter()
        .map(|ids| world.reader.hint(ids).unwrap())
        .collect();
    for (ids, hinted) in batches.iter().zip(known) {
        let memory = lent(&machine, ids.len());
        let batch = device
            .gather(ids.clone(), memory.target(), &memory.foreign(), hinted)
            .unwrap();
        assert!(batch.wait(Some(HANG)).unwrap());
        batch.hold(&memory.foreign()).unwrap();
        assert_has(&memory, 9, ids);
    }
    // 2500 of 3000 rows fit, and every batch needs nearly all.
    let counts = world.reader.counts();
    assert!(counts.read_rows.load(Relaxed) < 2 * ROWS, "{counts:?}");
}

#[test]
fn ids_and_streams_are_looked_at_before_anything_is_read() {
    let machine = machine();
    let world = world(10, None, Faults::new(1));
    let device = DeviceReader::new(&world.reader, &machine.device_streams).unwrap();
    let memory = lent(&machine, 2);
    let refused = device.gather(vec![1, ROWS], memory.target(), &memory.foreign(), None);
    assert!(matches!(
        refused,
        Err(Error::OutOfRange { position: 1, .. })
    ));
    let nothing = lent(&machine, 0);
    let array = nothing.array(0, WIDTH as usize, &[0], &[WIDTH as isize]);
    let batch = device
        .gather(vec![], array, &nothing.foreign(), None)
        .unwrap();
    assert!(batch.is_done() && batch.wait(None).unwrap());
    batch.hold(&nothing.foreign()).unwrap();
    assert_eq!(world.reader.counts().requests.load(Relaxed), 0);
    device.finish();
    let late = device.gather(vec![1, 2], memory.target(), &memory.foreign(), None);
    assert!(matches!(
        late,
        Err(Error::Io(penstock_io::Error::Cancelled))
    ));
    assert_returned(&memory);
}
