//! Saved data is loaded bit for bit, with every engine, mode and kind of request.

use std::collections::HashMap;

use crate::common::{self, Sample, options_matrix};
use penstock_store::Progress;
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;

#[test]
fn everything_comes_back_on_every_engine() {
    let sample = Sample::mixed();
    for (name, options) in options_matrix() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let saved = sample.save(&path, &options).unwrap();
        assert_eq!(saved.tensors, sample.specs.len(), "{name}");

        let checkpoint = Checkpoint::open(&path).unwrap();
        let loaded = checkpoint
            .load(None, HashMap::new(), &options, &Progress::default())
            .unwrap();
        for (index, bytes) in sample.bytes.iter().enumerate() {
            assert_eq!(
                common::bytes_of(&loaded, index, bytes.len()),
                &bytes[..],
                "{name} {index}"
            );
        }
        let report = verify(&path, &options, &Progress::default()).unwrap();
        assert!(report.problems.is_empty(), "{name}: {:?}", report.problems);
        assert_eq!(report.bytes_checked, saved.bytes, "{name}");
    }
}

#[test]
fn a_selection_reads_little_more_than_it_asks_for() {
    let sample = Sample::of_sizes(&[40 << 20, 100, 9 << 20, 300]);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample.save(&path, &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for selection in [vec![2], vec![1, 3], vec![3], vec![]] {
        let progress = Progress::default();
        let loaded = checkpoint
            .load(
                Some(&selection),
                HashMap::new(),
                &Options::default(),
                &progress,
            )
            .unwrap();
        let asked: u64 = selection
            .iter()
            .map(|&index| sample.bytes[index].len() as u64)
            .sum();
        assert!(
            loaded.report.bytes_read <= asked + (2 << 20),
            "{:?}",
            loaded.report
        );
        for (place, &index) in selection.iter().enumerate() {
            let bytes = &sample.bytes[index];
            assert_eq!(common::bytes_of(&loaded, place, bytes.len()), &bytes[..]);
        }
    }
}

#[test]
fn an_aligned_load_copies_nothing() {
    let sample = Sample::of_sizes(&[8 << 20, 4096, 5 << 20]);
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample.save(&path, &Options::default()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let progress = Progress::default();
    let loaded = checkpoint
        .load(None, HashMap::new(), &Options::default(), &progress)
        .unwrap();
    // The page-sized tensor is read with the end of its neighbour, or copied.
    assert!(loaded.report.bounced_bytes <= 4096, "{:?}", loaded.report);
}

#[test]
fn several_shards_hold_what_one_does() {
    let sample = Sample::of_sizes(&[3 << 20, 3 << 20, 3 << 20, 77]);
    let options = Options {
        shard_bytes: Some(4 << 20),
        ..Options::default()
    };
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let saved = sample.save(&path, &options).unwrap();
    assert_eq!(saved.files, 5, "three shards, a part, the manifest");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let progress = Progress::default();
    let loaded = checkpoint
        .load(None, HashMap::new(), &options, &progress)
        .unwrap();
    for (index, bytes) in sample.bytes.iter().enumerate() {
        assert_eq!(common::bytes_of(&loaded, index, bytes.len()), &bytes[..]);
    }
}
