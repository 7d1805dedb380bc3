//! Batches have their rows whether reads are short, late, failing, damaged, shared or cached.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use penstock_gather::{BLOCK_BYTES, Batch, Error, OpenBlocks, Reader, Segment, Table};
use penstock_io::buffer::{Memory, MemoryHandle};
use penstock_io::engine::EngineChoice;
use penstock_io::executor::Target;
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_io::file::{Direct, File};
use proptest::prelude::*;

use crate::common::{EIO, HANG, Shape, byte, directory, executor, reader, table};

fn begin(reader: &Reader, ids: &[u64]) -> (Batch, MemoryHandle) {
    let bytes = ids.len() * reader.table().value_bytes() as usize;
    let (handle, out) = Memory::allocate(bytes).unwrap().share();
    (reader.gather(ids, out).unwrap(), handle)
}

/// Waits, and compares the rows.
fn end(ids: &[u64], value_bytes: u64, batch: Batch, handle: MemoryHandle) -> Result<(), Error> {
    assert!(batch.wait(Some(HANG))?, "it hangs");
    drop(batch);
    let memory = handle.reclaim().expect("nobody has it any more");
    let rows = memory.as_slice().chunks(value_bytes as usize);
    assert_eq!(rows.len(), ids.len());
    for (row, &id) in rows.zip(ids) {
        let mut pairs = row.iter().zip(0..);
        assert!(pairs.all(|(&one, at)| one == byte(id, at)), "row {id}");
    }
    Ok(())
}

fn gather(reader: &Reader, ids: &[u64]) -> Result<(), Error> {
    let (batch, handle) = begin(reader, ids);
    end(ids, reader.table().value_bytes(), batch, handle)
}

fn shape() -> impl Strategy<Value = Shape> {
    let sizes = prop_oneof![
        Just(1_u64),
        Just(100),
        Just(512),
        Just(1536),
        Just(4096),
        Just(5000)
    ];
    let offsets = prop_oneof![Just(0_u64), Just(8), Just(128), Just(4096)];
    let directs = prop_oneof![Just(Direct::Auto), Just(Direct::Off)];
    (
        1..200_u64,
        sizes,
        0..3_u64,
        offsets,
        1..4_u64,
        any::<bool>(),
        directs,
    )
        .prop_map(
            |(rows, row_bytes, padding, offset, parts, is_checked, direct)| Shape {
                rows,
                row_bytes,
                value_bytes: row_bytes.saturating_sub(padding).max(1),
                offset,
                parts,
                is_checked,
                direct,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn batches_have_their_rows(
        shape in shape(),
        seed in any::<u64>(),
        short in 0..60_u64,
        is_uring in any::<bool>(),
        cached in proptest::option::of(1..100_u32),
        gap_bytes in prop_oneof![Just(0_u64), Just(4096), Just(1 << 20)],
        batches in prop::collection::vec(
            prop::collection::vec(any::<prop::sample::Index>(), 0..150), 1..6
        ),
    ) {
        let directory = directory();
        let engine = if is_uring { EngineChoice::Auto } else { EngineChoice::Threads };
        let faults = Faults::new(seed).short_transfers(short).late_completions(30);
        let executor = executor(engine, faults);
        let table = table(directory.path(), shape);
        let reader = reader(table, &executor, cached, gap_bytes);
        let row = |one: &prop::sample::Index| one.index(shape.rows as usize) as u64;
        let batches: Vec<Vec<u64>> =
            batches.iter().map(|batch| batch.iter().map(row).collect()).collect();
        // All at once, so that batches wait for each other's rows.
        let begun: Vec<_> = batches.iter().map(|ids| begin(&reader, ids)).collect();
        for (ids, (batch, handle)) in batches.iter().zip(begun) {
            end(ids, shape.value_bytes, batch, handle).unwrap();
        }
        let asked: usize = batches.iter().map(Vec::len).sum();
        let counts = reader.counts();
        prop_assert_eq!(counts.rows.load(Relaxed), asked as u64);
        prop_assert_eq!(counts.read_again.load(Relaxed), 0);
    }
}

#[test]
fn a_failed_read_is_an_error_and_the_next_one_is_not() {
    let directory = directory();
    let failure = Failure {
        class: Some(OpClass::Read),
        nth: 3,
        repeat: Repeat::Once,
        errno: EIO,
    };
    for cached in [None, Some(64)] {
        let executor = executor(EngineChoice::Auto, Faults::new(1).fail(failure));
        let table = table(directory.path(), Shape::plain(64, 4096));
        let reader = reader(table, &executor, cached, 0);
        let ids: Vec<u64> = (0..64).step_by(2).collect();
        let (batch, _handle) = begin(&reader, &ids);
        for _ in 0..2 {
            match batch.wait(Some(HANG)) {
                Err(Error::Io(penstock_io::Error::Transfer { path, source, .. })) => {
                    assert_eq!(path, directory.path().join("part-0"));
                    assert_eq!(source.raw_os_error(), Some(EIO));
                }
                other => panic!("{other:?}"),
            }
        }
        drop(batch);
        gather(&reader, &ids).unwrap();
    }
}

#[test]
fn who_waits_for_a_row_that_fails_reads_it() {
    let directory = directory();
    let failure = Failure {
        class: Some(OpClass::Read),
        nth: 1,
        repeat: Repeat::Once,
        errno: EIO,
    };
    let faults = Faults::new(1).fail(failure).late_completions(100);
    let executor = executor(EngineChoice::Auto, faults);
    let table = table(directory.path(), Shape::plain(8, 4096));
    let reader = reader(table, &executor, Some(8), 0);
    let (first, _handle) = begin(&reader, &[5]);
    let (second, handle) = begin(&reader, &[5, 5]);
    assert!(matches!(first.wait(Some(HANG)), Err(Error::Io(_))));
    end(&[5, 5], 4096, second, handle).unwrap();
    // The second batch waited and read again, or came later and read it first.
    let counts = reader.counts();
    let shared = counts.shared.load(Relaxed);
    assert_eq!(counts.read_again.load(Relaxed), shared);
}

#[test]
fn a_damaged_block_is_reported_by_row_and_place_and_never_kept() {
    let directory = directory();
    let cases = [
        (4096, None),
        (4096, Some(40)),
        (512, Some(400)),
        (3000, None),
    ];
    for (row_bytes, cached) in cases {
        let shape = Shape {
            is_checked: true,
            offset: 128,
            ..Shape::plain(40, row_bytes)
        };
        let executor = executor(EngineChoice::Auto, Faults::new(1));
        let reader = reader(table(directory.path(), shape), &executor, cached, 0);
        let path = directory.path().join("part-0");
        let options = fs::OpenOptions::new().read(true).write(true).to_owned();
        let file = options.open(&path).unwrap();
        let (row, at) = (17, 5);
        let place = shape.offset + row * row_bytes + at;
        file.write_all_at(&[!byte(row, at)], place).unwrap();
        let all: Vec<u64> = (0..40).collect();
        for ids in [&[row][..], &all] {
            let (batch, _handle) = begin(&reader, ids);
            match batch.wait(Some(HANG)) {
                Err(Error::Damaged {
                    row: reported,
                    path: of,
                    offset,
                    bytes,
                }) => {
                    assert_eq!(of, path);
                    assert!((offset..offset + bytes).contains(&place));
                    // Another row may begin in the block.
                    let first = (offset - shape.offset) / row_bytes;
                    assert!((first..=row).contains(&reported), "{reported}");
                }
                other => panic!("{other:?}"),
            }
        }
        // Rows in other blocks are good.
        gather(&reader, &[0, 39]).unwrap();
        file.write_all_at(&[byte(row, at)], place).unwrap();
        gather(&reader, &all).unwrap();
    }
}

/// A sealing that can be seen through: each block is changed by its number, and some do not open.
#[derive(Debug)]
struct Masked {
    closed: Mutex<HashSet<u64>>,
    is_damage: bool,
}

impl Masked {
    fn turn(block: u64, bytes: &mut [u8]) {
        let mask = (block as u8).wrapping_mul(37) ^ 0xA5;
        bytes.iter_mut().for_each(|byte| *byte ^= mask);
    }
}

impl OpenBlocks for Masked {
    fn open(&self, block: u64, sealed: &[u8], text: &mut [u8]) -> bool {
        text.copy_from_slice(sealed);
        self.open_in_place(block, text)
    }

    fn open_in_place(&self, block: u64, text: &mut [u8]) -> bool {
        let is_closed = self.closed.lock().unwrap().contains(&block);
        match is_closed {
            true => text.fill(0),
            false => Masked::turn(block, text),
        }
        !is_closed
    }

    fn is_damaged(&self, _: u64) -> bool {
        self.is_damage
    }
}

/// A table of one segment whose blocks are masked.
fn masked(path: &Path, shape: Shape, opener: &Arc<Masked>) -> Table {
    let bytes = (0..shape.rows).flat_map(|row| (0..shape.row_bytes).map(move |at| byte(row, at)));
    let mut bytes: Vec<u8> = bytes.collect();
    for (block, bytes) in (0..).zip(bytes.chunks_mut(BLOCK_BYTES as usize)) {
        Masked::turn(block, bytes);
    }
    let mut content = vec![0xee; shape.offset as usize];
    content.extend(bytes);
    fs::write(path, content).unwrap();
    let segment = Segment {
        target: Target {
            file: Arc::new(File::open(path, shape.direct).unwrap()),
            edges: None,
        },
        offset: shape.offset,
        rows: shape.rows,
        checks: None,
        opener: Some(Arc::clone(opener) as Arc<dyn OpenBlocks>),
    };
    Table::new(vec![segment], shape.row_bytes, shape.value_bytes)
}

/// Rows within a block, over several, and with the shorter last one; alone, which are opened in
/// their place, and together, which are opened on the way.
#[test]
fn sealed_blocks_are_opened_by_their_number_in_the_segment() {
    let directory = directory();
    let sizes = [1_u64, 512, 3000, 4096, 5000];
    let cases = sizes
        .iter()
        .flat_map(|&size| [(size, None), (size, Some(16))]);
    for (number, (row_bytes, cached)) in cases.enumerate() {
        for direct in [Direct::Auto, Direct::Off] {
            let opener = Arc::new(Masked {
                closed: Mutex::default(),
                is_damage: false,
            });
            let shape = Shape {
                offset: 4096,
                direct,
                ..Shape::plain(37, row_bytes)
            };
            let path = directory.path().join(format!("{number}-{direct:?}"));
            let executor = executor(EngineChoice::Auto, Faults::new(1));
            let reader = reader(masked(&path, shape, &opener), &executor, cached, 4096);
            for ids in [&[36][..], &[5], &[5, 36, 0, 5, 17], &[30, 31, 32, 1, 2]] {
                gather(&reader, ids).unwrap();
            }
            gather(&reader, &(0..37).rev().collect::<Vec<u64>>()).unwrap();
        }
    }
}

#[test]
fn a_block_that_does_not_open_is_no_row_of_anybody() {
    let directory = directory();
    let cases = [(512, None), (3000, None), (4096, Some(16)), (4096, None)];
    for (is_damage, (row_bytes, cached)) in [false, true]
        .into_iter()
        .flat_map(|is_damage| cases.map(|case| (is_damage, case)))
    {
        let opener = Arc::new(Masked {
            closed: Mutex::default(),
            is_damage,
        });
        let shape = Shape {
            offset: 4096,
            ..Shape::plain(40, row_bytes)
        };
        let path = directory
            .path()
            .join(format!("{is_damage}-{row_bytes}-{cached:?}"));
        let executor = executor(EngineChoice::Auto, Faults::new(1));
        let reader = reader(masked(&path, shape, &opener), &executor, cached, 0);
        opener.closed.lock().unwrap().insert(2);
        let row = (2 * BLOCK_BYTES + 1) / row_bytes;
        let all: Vec<u64> = (0..40).collect();
        for ids in [&[row][..], &all] {
            let (batch, handle) = begin(&reader, ids);
            let (of, offset) = match batch.wait(Some(HANG)) {
                Err(Error::Damaged { path, offset, .. }) if is_damage => (path, offset),
                Err(Error::Tampered { path, offset, .. }) if !is_damage => (path, offset),
                other => panic!("{other:?}"),
            };
            assert_eq!((of, offset), (path.clone(), shape.offset + 2 * BLOCK_BYTES));
            drop(batch);
            let memory = handle.reclaim().expect("nobody has it any more");
            let rows = memory.as_slice().chunks(row_bytes as usize).zip(ids);
            for (bytes, &id) in rows {
                // A row over two blocks may have the part that opened, and zeros.
                let clear: Vec<u8> = (0..row_bytes).map(|at| byte(id, at)).collect();
                let mut pairs = bytes.iter().zip(&clear);
                assert!(
                    pairs.all(|(one, clear)| one == clear || *one == 0),
                    "row {id}"
                );
            }
        }
        gather(&reader, &[0, 39]).unwrap();
        opener.closed.lock().unwrap().clear();
        gather(&reader, &all).unwrap();
    }
}

#[test]
fn a_block_that_comes_damaged_once_is_read_again() {
    let directory = directory();
    let shape = Shape {
        is_checked: true,
        direct: Direct::Off,
        ..Shape::plain(16, 4096)
    };
    let table = table(directory.path(), shape);
    let path = directory.path().join("part-0");
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let good = byte(3, 77);
    // The second read finds the right bytes.
    let faults = Faults::new(1).call(move |number, _, _| {
        let now = if number == 1 { !good } else { good };
        file.write_all_at(&[now], 3 * 4096 + 77).unwrap();
    });
    let executor = executor(EngineChoice::Threads, faults);
    let reader = reader(table, &executor, Some(16), 0);
    gather(&reader, &[3]).unwrap();
    assert_eq!(reader.counts().read_again.load(Relaxed), 1);
}

#[test]
fn ids_beyond_the_table_are_refused() {
    let directory = directory();
    let executor = executor(EngineChoice::Auto, Faults::new(1));
    let table = table(directory.path(), Shape::plain(5, 100));
    let reader = reader(table, &executor, None, 0);
    let (_, out) = Memory::allocate(200).unwrap().share();
    let refused = reader.gather(&[4, 5], out).map(drop);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "ids[1] is 5: the table has rows 0 to 4"
    );
}

/// A small batch is copied without cutting its result into pieces, a large one piece by piece.
#[test]
fn cached_rows_are_there_at_once_in_batches_of_any_size() {
    let directory = directory();
    let executor = executor(EngineChoice::Auto, Faults::new(1));
    let table = table(directory.path(), Shape::plain(4096, 512));
    let reader = reader(table, &executor, Some(4096), 4096);
    let hits = || reader.counts().hits.load(Relaxed);
    for rows in [1, 63, 64, 65, 1024, 2047, 2048, 4096] {
        let ids: Vec<u64> = (0..rows).map(|at| at * 2_467 % 4096).collect();
        gather(&reader, &ids).unwrap();
        let before = (hits(), reader.counts().read_rows.load(Relaxed));
        let (batch, handle) = begin(&reader, &ids);
        assert!(batch.is_done(), "nothing is to be read");
        let (told, heard) = std::sync::mpsc::channel();
        batch.on_done(Box::new(move || told.send(()).unwrap()));
        assert!(heard.try_recv().is_ok(), "it is told at once");
        end(&ids, 512, batch, handle).unwrap();
        let after = (hits(), reader.counts().read_rows.load(Relaxed));
        assert_eq!(after, (before.0 + rows, before.1));
    }
}

/// Hits are copied before slots are claimed for the rest, which may take the slots of these hits.
#[test]
fn rows_that_a_batch_evicts_are_still_its_own() {
    let directory = directory();
    let executor = executor(EngineChoice::Auto, Faults::new(1));
    let table = table(directory.path(), Shape::plain(512, 512));
    let reader = reader(table, &executor, Some(8), 4096);
    for first in 0..64 {
        // Eight rows fill the cache; the next batch has some of them, others, and some twice.
        gather(&reader, &(first..first + 8).collect::<Vec<_>>()).unwrap();
        let ids: Vec<u64> = (first + 4..first + 100).chain(first..first + 8).collect();
        gather(&reader, &ids).unwrap();
    }
    assert!(reader.counts().hits.load(Relaxed) > 64 * 4);
}
