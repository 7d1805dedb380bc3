//! Ranges of any lengths come in their order, whether they touch, overlap, repeat or are empty.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_gather::{Merging, RangeReader};
use penstock_io::buffer::Memory;
use penstock_io::engine::EngineChoice;
use penstock_io::executor::{Executor, Target};
use penstock_io::faulty::Faults;
use penstock_io::file::{Direct, File};
use proptest::prelude::*;

use crate::common::{HANG, byte, directory, executor};

const FILE_BYTES: u64 = 200_000;

fn open(path: &Path, executor: &Executor, direct: Direct, gap_bytes: u64) -> RangeReader {
    let content: Vec<u8> = (0..FILE_BYTES).map(|at| byte(0, at)).collect();
    fs::write(path, content).unwrap();
    let target = Target {
        file: Arc::new(File::open(path, direct).unwrap()),
        edges: None,
    };
    let merging = Merging {
        gap_bytes,
        run_bytes_max: 16 << 10,
    };
    RangeReader::new(target, Arc::new(executor.share(1).unwrap()), merging)
}

fn read(reader: &RangeReader, ranges: &[Range<u64>]) -> Vec<u8> {
    let bytes: u64 = ranges.iter().map(|one| one.end - one.start).sum();
    let (handle, out) = Memory::allocate(bytes as usize).unwrap().share();
    let transfer = reader.read(ranges, out).unwrap();
    transfer.wait(Some(HANG)).unwrap().expect("it hangs");
    drop(transfer);
    let memory = handle.reclaim().expect("nobody has it any more");
    memory.as_slice().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn ranges_come_in_their_order(
        seed in any::<u64>(),
        short in 0..60_u64,
        is_uring in any::<bool>(),
        is_direct in any::<bool>(),
        gap_bytes in prop_oneof![Just(0_u64), Just(4096), Just(1 << 20)],
        batches in prop::collection::vec(
            // Some are longer than a request of the executor, which has 32 KiB.
            prop::collection::vec((0..FILE_BYTES, prop_oneof![0..3_u64, 0..9000_u64, 0..80_000_u64]), 0..60),
            1..4,
        ),
    ) {
        let directory = directory();
        let engine = if is_uring { EngineChoice::Auto } else { EngineChoice::Threads };
        let executor = executor(engine, Faults::new(seed).short_transfers(short).late_completions(30));
        let direct = if is_direct { Direct::Auto } else { Direct::Off };
        let reader = open(&directory.path().join("file"), &executor, direct, gap_bytes);
        for batch in &batches {
            let ranges: Vec<Range<u64>> = batch
                .iter()
                .map(|&(start, bytes)| start..(start + bytes).min(FILE_BYTES))
                .collect();
            let expected: Vec<u8> =
                ranges.iter().cloned().flatten().map(|at| byte(0, at)).collect();
            prop_assert!(read(&reader, &ranges) == expected);
        }
        let asked: usize = batches.iter().map(Vec::len).sum();
        prop_assert_eq!(reader.counts().rows.load(Relaxed), asked as u64);
    }
}

#[test]
fn neighbours_are_one_request_and_distant_ranges_are_not() {
    let directory = directory();
    let executor = executor(EngineChoice::Auto, Faults::new(0));
    let reader = open(
        &directory.path().join("file"),
        &executor,
        Direct::Auto,
        4096,
    );
    read(&reader, &[500..900, 100..500, 300..700]);
    assert_eq!(reader.counts().requests.load(Relaxed), 1);
    read(&reader, &[0..100, 150_000..150_100]);
    assert_eq!(reader.counts().requests.load(Relaxed), 3);
}

#[test]
fn a_file_that_ends_before_a_range_does_is_an_error() {
    let directory = directory();
    let executor = executor(EngineChoice::Auto, Faults::new(0));
    let reader = open(
        &directory.path().join("file"),
        &executor,
        Direct::Auto,
        4096,
    );
    let (_handle, out) = Memory::allocate(4096).unwrap().share();
    let behind = FILE_BYTES - 10..FILE_BYTES - 10 + 4096;
    let transfer = reader.read(&[behind], out).unwrap();
    assert!(transfer.wait(Some(HANG)).is_err());
}
