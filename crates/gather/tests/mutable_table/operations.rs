//! Any sequence of calls leaves the rows that a map would have.

use std::path::Path;
use std::sync::Arc;

use penstock_gather::{Error, MutableTable, Storage};
use penstock_io::engine::EngineChoice;
use penstock_io::faulty::{Failure, Faults, FaultyFileSystem, OpClass, Repeat};
use penstock_io::file::Direct;
use penstock_io::file_system::Native;
use proptest::prelude::*;

use crate::world::{
    NEVER, create, directory, executor, form, open, open_with, storage, update, versions,
    versions_in,
};

const EIO: i32 = 5;

#[derive(Clone, Debug)]
enum Call {
    Update(Vec<prop::sample::Index>),
    LookUp(Vec<prop::sample::Index>),
    Flush,
    Compact,
    Freeze,
    Reopen,
}

fn call() -> impl Strategy<Value = Call> {
    let ids = || prop::collection::vec(any::<prop::sample::Index>(), 0..40);
    prop_oneof![
        4 => ids().prop_map(Call::Update),
        4 => ids().prop_map(Call::LookUp),
        2 => Just(Call::Flush),
        1 => Just(Call::Compact),
        1 => Just(Call::Freeze),
        1 => Just(Call::Reopen),
    ]
}

fn all(table: &MutableTable, latest: u64) -> Vec<u64> {
    let ids: Vec<u64> = (0..table.form().rows).collect();
    versions(table, &ids, latest).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn rows_are_those_that_were_written_last(
        count in 1..60_u64,
        value_bytes in prop_oneof![Just(9_u64), Just(20), Just(512), Just(1000), Just(4096)],
        piece_rows in prop_oneof![Just(1_u64), Just(7), Just(1000)],
        record_bytes in prop_oneof![Just(0_u64), Just(16 << 10), Just(1 << 20)],
        log_bytes in prop_oneof![Just(0_u64), Just(32 << 10), Just(1 << 20)],
        seed in any::<u64>(),
        short in 0..60_u64,
        is_uring in any::<bool>(),
        is_direct in any::<bool>(),
        slots in proptest::option::of(1..40_u32),
        calls in prop::collection::vec(call(), 1..40),
    ) {
        let directory = directory();
        let home = directory.path().join("table");
        let engine = if is_uring { EngineChoice::Auto } else { EngineChoice::Threads };
        let direct = if is_direct { Direct::Auto } else { Direct::Off };
        let faults = Arc::new(Faults::new(seed).short_transfers(short).late_completions(30));
        let executor = executor(engine, &faults);
        let storage = || storage(&executor, Arc::new(Native), direct);
        create(&home, form(count, value_bytes, piece_rows), storage()).unwrap();
        let mut table = open_with(&home, storage(), slots, log_bytes, record_bytes).unwrap();
        let mut expected = vec![NEVER; count as usize];
        let mut latest = NEVER;
        for call in calls {
            let pick = |ids: &[prop::sample::Index]| -> Vec<u64> {
                ids.iter().map(|one| one.index(count as usize) as u64).collect()
            };
            match call {
                Call::Update(ids) => {
                    let written: Vec<(u64, u64)> =
                        pick(&ids).into_iter().zip(latest + 1..).collect();
                    latest += written.len() as u64;
                    update(&table, &written).unwrap();
                    for (id, version) in written {
                        expected[id as usize] = version;
                    }
                }
                Call::LookUp(ids) => {
                    let ids = pick(&ids);
                    let wanted: Vec<u64> = ids.iter().map(|&id| expected[id as usize]).collect();
                    prop_assert_eq!(versions(&table, &ids, latest).unwrap(), wanted);
                }
                Call::Flush => table.flush().unwrap(),
                Call::Compact => {
                    table.freeze().unwrap().compact().unwrap();
                    prop_assert_eq!(table.logged().unwrap(), (0, 0));
                }
                Call::Freeze => {
                    let frozen = table.freeze().unwrap();
                    let written: Vec<(u64, u64)> = (0..count).zip(latest + 1..).collect();
                    update(&table, &written).unwrap();
                    let mut found = Vec::new();
                    for piece in 0..frozen.pieces() {
                        let ids: Vec<u64> =
                            (piece * piece_rows..count.min((piece + 1) * piece_rows)).collect();
                        let memory = frozen.rows_of(piece).unwrap();
                        let (step, width) = (table.form().row_bytes, value_bytes as usize);
                        let rows = &memory.as_slice()[..ids.len() * step as usize];
                        found.extend(
                            versions_in(rows, step as usize, width, &ids, latest).unwrap(),
                        );
                    }
                    prop_assert_eq!(&found, &expected);
                    latest += count;
                    for (id, version) in written {
                        expected[id as usize] = version;
                    }
                }
                Call::Reopen => {
                    table.flush().unwrap();
                    drop(table);
                    table = open_with(&home, storage(), slots, log_bytes, record_bytes).unwrap();
                }
            }
        }
        prop_assert_eq!(&all(&table, latest), &expected);
        table.flush().unwrap();
        drop(table);
        let table = open(&home, storage(), None, log_bytes).unwrap();
        prop_assert_eq!(&all(&table, latest), &expected);
    }
}

/// After a failed write or sync nothing is written any more; acknowledged rows are there, and
/// lookups meanwhile return the latest rows.
#[test]
fn a_failed_write_ends_all_writing_and_loses_nothing_that_was_flushed() {
    for class in [OpClass::Write, OpClass::Change] {
        for nth in 1..40 {
            let directory = directory();
            let home = directory.path().join("table");
            let fine = Arc::new(Faults::new(0));
            let fine = executor(EngineChoice::Threads, &fine);
            let native = || storage(&fine, Arc::new(Native), Direct::Auto);
            create(&home, form(8, 100, 4), native()).unwrap();
            let failure = Failure {
                class: Some(class),
                nth,
                repeat: Repeat::Once,
                errno: EIO,
            };
            let faults = Arc::new(Faults::new(0).fail(failure));
            let broken = executor(EngineChoice::Threads, &faults);
            let file_system = FaultyFileSystem::new(Arc::new(Native), faults);
            let storage = storage(&broken, Arc::new(file_system), Direct::Auto);
            let table = open(&home, storage, Some(4), 0).unwrap();
            let (mut flushed, mut written, mut failed) = (NEVER, NEVER, None);
            for version in 1..6 {
                let those: Vec<(u64, u64)> = (0..8).map(|id| (id, version)).collect();
                let done = update(&table, &those).and_then(|()| {
                    written = version;
                    table.flush()
                });
                match done {
                    Ok(()) if failed.is_none() => flushed = version,
                    Ok(()) => panic!("{class:?} {nth}: a flush after a failure"),
                    Err(error) => {
                        if let Some(first) = &failed {
                            assert!(
                                matches!(error, Error::Failed { .. }),
                                "{first}, then {error}"
                            );
                        }
                        failed.get_or_insert(error.to_string());
                    }
                }
                if version == 3 {
                    drop(table.freeze().and_then(|frozen| frozen.compact()));
                }
            }
            let found = all(&table, 6);
            assert!(
                found.iter().all(|&one| one >= written),
                "{class:?} {nth}: {found:?}"
            );
            drop(table);
            let table = open(&home, native(), None, 0).unwrap();
            let found = all(&table, 6);
            assert!(
                found.iter().all(|&one| one >= flushed),
                "{class:?} {nth}: {found:?}"
            );
        }
    }
}

#[test]
fn a_table_is_open_once_and_what_is_none_is_refused() {
    let directory = directory();
    let home = directory.path().join("table");
    let executor = executor(EngineChoice::Auto, &Arc::new(Faults::new(0)));
    let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
    let refused = |home| open(home, storage(), None, 0).unwrap_err();
    assert!(matches!(refused(&home), Error::NoTable { .. }));
    assert!(matches!(refused(directory.path()), Error::NoTable { .. }));
    create(&home, form(10, 16, 4), storage()).unwrap();
    let again = create(&home, form(10, 16, 4), storage()).unwrap_err();
    assert!(matches!(again, Error::Exists { .. }), "{again}");
    let table = open(&home, storage(), None, 0).unwrap();
    assert!(matches!(refused(&home), Error::Busy { .. }));
    let beyond = update(&table, &[(3, 1), (10, 1)]).unwrap_err();
    assert!(
        matches!(
            beyond,
            Error::OutOfRange {
                position: 1,
                id: 10,
                rows: 10
            }
        ),
        "{beyond}"
    );
    assert_eq!(all(&table, 1), [NEVER; 10]);
}

/// Flips a bit at places all over every file of a table: a read returns the rows, or an error.
#[test]
fn no_flipped_bit_is_read_as_a_row() {
    let directory = directory();
    let home = directory.path().join("table");
    let executor = executor(EngineChoice::Auto, &Arc::new(Faults::new(0)));
    let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
    create(&home, form(600, 24, 300), storage()).unwrap();
    let table = open(&home, storage(), None, 64 << 10).unwrap();
    let mut expected = vec![NEVER; 600];
    for (version, range) in (1..).zip([0..600, 0..300, 100..150, 7..8]) {
        if version == 2 {
            table.freeze().unwrap().compact().unwrap();
        }
        let written: Vec<(u64, u64)> = range.map(|id| (id, version)).collect();
        update(&table, &written).unwrap();
        table.flush().unwrap();
        written
            .iter()
            .for_each(|&(id, version)| expected[id as usize] = version);
    }
    drop(table);
    let (mut reported, mut unread) = (0, 0);
    for entry in std::fs::read_dir(&home).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by((bytes.len() / 40).max(1)) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            std::fs::write(&path, &flipped).unwrap();
            let opened = open(&home, storage(), None, 64 << 10).map_err(|error| error.to_string());
            let ids: Vec<u64> = (0..600).collect();
            match opened.and_then(|table| versions(&table, &ids, 4)) {
                Ok(found) => {
                    assert_eq!(found, expected, "byte {at} of {path:?}");
                    unread += 1;
                }
                Err(_) => reported += 1,
            }
        }
        std::fs::write(&path, &bytes).unwrap();
    }
    // Bytes after the last record, and padding between parts of a file, are never read.
    assert!(
        reported > 80 && unread > 0,
        "{reported} told, {unread} unread"
    );
}

/// Writes row 1 of a new table with versions 1, 2 and 3, each flushed, and zeros blocks of the
/// log.
fn flush_thrice_and_lose(home: &Path, storage: impl Fn() -> Storage, lost: &[usize]) {
    create(home, form(8, 16, 8), storage()).unwrap();
    let table = open(home, storage(), None, 1 << 20).unwrap();
    for version in 1..4 {
        update(&table, &[(1, version)]).unwrap();
        table.flush().unwrap();
    }
    drop(table);
    let log = home.join("log-0");
    let mut bytes = std::fs::read(&log).unwrap();
    for &block in lost {
        bytes[4096 * block..4096 * (block + 1)].fill(0);
    }
    std::fs::write(&log, &bytes).unwrap();
}

/// A torn record followed by an older whole one: updates after the next opening count, then and
/// after another opening.
#[test]
fn records_from_before_a_tear_never_come_back() {
    let directory = directory();
    let home = directory.path().join("table");
    let executor = executor(EngineChoice::Auto, &Arc::new(Faults::new(0)));
    let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
    // The mark, and the second record: as a cut before both flushes could leave them.
    flush_thrice_and_lose(&home, storage, &[1, 4]);
    let table = open(&home, storage(), None, 1 << 20).unwrap();
    assert_eq!(all(&table, 9)[1], 1);
    update(&table, &[(1, 9)]).unwrap();
    table.flush().unwrap();
    drop(table);
    let table = open(&home, storage(), None, 1 << 20).unwrap();
    assert_eq!(all(&table, 9)[1], 9);
}

/// With an intact mark, the same is damage: the records were acknowledged as durable.
#[test]
fn a_lost_record_that_was_flushed_is_reported() {
    let directory = directory();
    let home = directory.path().join("table");
    let executor = executor(EngineChoice::Auto, &Arc::new(Faults::new(0)));
    let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
    flush_thrice_and_lose(&home, storage, &[4]);
    let refused = open(&home, storage(), None, 1 << 20).unwrap_err();
    assert!(matches!(refused, Error::Broken { .. }), "{refused}");
    assert!(refused.to_string().contains("bytes 16384 to"), "{refused}");
}

/// Compaction reports log rows that were damaged meanwhile, and writes them nowhere.
#[test]
fn a_compaction_compares_what_it_puts_back() {
    let directory = directory();
    let home = directory.path().join("table");
    let executor = executor(EngineChoice::Auto, &Arc::new(Faults::new(0)));
    let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
    create(&home, form(3000, 24, 1000), storage()).unwrap();
    let table = open(&home, storage(), None, 1 << 20).unwrap();
    // Every other row, backwards, some of them twice: gaps, in an order other than that of the
    // ids.
    let mut written: Vec<(u64, u64)> = (0..1500).rev().map(|id| (2 * id, 1)).collect();
    written.extend((0..500).map(|id| (6 * id, 2)));
    update(&table, &written).unwrap();
    table.flush().unwrap();
    let log = home.join("log-0");
    let bytes = std::fs::read(&log).unwrap();
    let mut damaged = bytes.clone();
    damaged[8192 + 4096 + 30_000] ^= 1;
    std::fs::write(&log, &damaged).unwrap();
    let refused = table.freeze().unwrap().compact().unwrap_err();
    assert!(matches!(refused, Error::Damaged { .. }), "{refused}");
    std::fs::write(&log, &bytes).unwrap();
    let compacted = table.freeze().unwrap().compact().unwrap();
    assert_eq!((compacted.rows, compacted.pieces), (1500, 3));
    let wanted = |id: u64| u64::from(id.is_multiple_of(2)) + u64::from(id.is_multiple_of(6));
    let expected: Vec<u64> = (0..3000).map(wanted).collect();
    assert_eq!(all(&table, 2), expected);
}
