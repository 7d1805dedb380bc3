//! Concurrent updates, lookups and compaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use penstock_io::engine::EngineChoice;
use penstock_io::faulty::Faults;
use penstock_io::file::Direct;
use penstock_io::file_system::Native;

use crate::world::{create, directory, executor, form, open, storage, update, versions};

const ROWS: u64 = 64;
const VERSIONS: u64 = 150;
const WRITERS: u64 = 2;

/// No lookup returns a torn row, or one older than an update that preceded the lookup.
#[test]
fn readers_see_rows_that_only_grow() {
    for slots in [None, Some(8), Some(48)] {
        let directory = directory();
        let home = directory.path().join("table");
        let faults = Arc::new(Faults::new(3).late_completions(40));
        let executor = executor(EngineChoice::Auto, &faults);
        let storage = || storage(&executor, Arc::new(Native), Direct::Auto);
        create(&home, form(ROWS, 200, 16), storage()).unwrap();
        let table = open(&home, storage(), slots, 64 << 10).unwrap();
        let written: [AtomicU64; WRITERS as usize] = Default::default();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let writers = (0..WRITERS).map(|writer| {
                let (table, written) = (&table, &written[writer as usize]);
                scope.spawn(move || {
                    for version in 1..=VERSIONS {
                        let mine = (0..ROWS).filter(|id| id % WRITERS == writer);
                        let those: Vec<(u64, u64)> = mine.map(|id| (id, version)).collect();
                        update(table, &those).unwrap();
                        written.store(version, Ordering::SeqCst);
                        if version % 7 == writer {
                            table.flush().unwrap();
                        }
                    }
                })
            });
            let writers: Vec<_> = writers.collect();
            for reader in 0..2 {
                let (table, written, is_over) = (&table, &written, &is_over);
                scope.spawn(move || {
                    let ids: Vec<u64> = (0..ROWS).filter(|id| id % 3 != reader).collect();
                    while !is_over.load(Ordering::SeqCst) {
                        let least = |id: u64| &written[(id % WRITERS) as usize];
                        let before: Vec<u64> = ids
                            .iter()
                            .map(|&id| least(id).load(Ordering::SeqCst))
                            .collect();
                        let found = versions(table, &ids, VERSIONS).unwrap();
                        for ((id, before), found) in ids.iter().zip(before).zip(found) {
                            assert!(found >= before, "row {id}: {found} after {before}");
                        }
                    }
                });
            }
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    table.freeze().unwrap().compact().unwrap();
                }
            });
            let ended: Vec<_> = writers.into_iter().map(|one| one.join()).collect();
            is_over.store(true, Ordering::SeqCst);
            ended.into_iter().for_each(|one| one.unwrap());
        });
        table.flush().unwrap();
        drop(table);
        let table = open(&home, storage(), None, 0).unwrap();
        let ids: Vec<u64> = (0..ROWS).collect();
        assert_eq!(
            versions(&table, &ids, VERSIONS).unwrap(),
            [VERSIONS; ROWS as usize]
        );
    }
}
