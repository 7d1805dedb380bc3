//! A transfer that fails once is no damage: bytes are read a second time before they are reported
//! as damaged, bypassing the page cache, which would return the same bytes again.

use std::mem::discriminant;

use crate::common::flaky::{EIO, Fault, flaky};
use crate::common::{self, Sample, engines, read_engines, skip};
use penstock_io::file::{Direct, File};
use penstock_store::care::salvage::salvage;
use penstock_store::care::survey::survey;
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::{Error, Progress};

/// Tensors with all kinds of destinations: in segments, through staging, across extents.
fn sample() -> Sample {
    Sample::of_sizes(&[3 << 20, 17, 70_001, 4096, 1 << 20, 300, 2_345_678])
}

#[test]
fn what_was_wrong_once_loads_and_verifies() {
    for engine in read_engines() {
        for direct in [Direct::Auto, Direct::Off] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            let sample = sample();
            sample.save(&path, &Options::default()).unwrap();
            let (options, _) = flaky(engine, direct, Fault::Once);
            let loaded = common::load(&path, &options).unwrap();
            assert!(sample.is(&loaded), "{engine:?} {direct:?}");
            let (options, _) = flaky(engine, direct, Fault::Once);
            let report = verify(&path, &options, &Progress::default()).unwrap();
            assert_eq!(report.problems, []);
        }
    }
}

#[test]
fn what_is_wrong_twice_is_damage() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample().save(&path, &Options::default()).unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        let (options, _) = flaky(engines()[0], direct, Fault::Always);
        let error = common::load(&path, &options).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

#[test]
fn a_buffered_reading_is_repeated_past_the_page_cache() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = sample();
    sample.save(&path, &Options::default()).unwrap();
    let shard = common::forge::shard_path(&path);
    if !File::open(&shard, Direct::Auto).unwrap().is_direct() {
        let reason = "this file system has no direct I/O";
        return skip("a_buffered_reading_is_repeated_past_the_page_cache", reason);
    }
    let (options, reads) = flaky(engines()[0], Direct::Off, Fault::Once);
    let loaded = common::load(&path, &options).unwrap();
    assert!(sample.is(&loaded));
    let reads = reads.lock().unwrap();
    let items = std::fs::metadata(&shard).unwrap().len().div_ceil(1 << 20) as usize;
    assert!(reads.direct >= items, "a second reading for each item");
    assert!(reads.buffered >= items);
}

/// Bytes that are damaged in every read, or unreadable, are read from a replica.
#[test]
fn what_cannot_be_read_right_is_read_from_another_copy() {
    let root = tempfile::tempdir().unwrap();
    let (path, copy) = (root.path().join("ckpt"), root.path().join("copy"));
    let sample = sample();
    sample.save(&path, &Options::default()).unwrap();
    std::fs::create_dir(&copy).unwrap();
    for name in common::names(&path) {
        std::fs::copy(path.join(&name), copy.join(&name)).unwrap();
    }
    for engine in read_engines() {
        for direct in [Direct::Auto, Direct::Off] {
            for fault in [Fault::Always, Fault::Lost(1 << 20)] {
                let (options, _) = flaky(engine, direct, fault);
                let refused = common::load(&path, &options);
                let with_copy = Options {
                    replica: Some(copy.clone()),
                    ..options.clone()
                };
                let loaded = common::load(&path, &with_copy).unwrap();
                assert!(sample.is(&loaded), "{engine:?} {direct:?}");
                // Without a replica, or with one that lacks the bytes too, the error is the same.
                let without = Options {
                    replica: Some(root.path().join("nothing")),
                    ..options
                };
                let again = common::load(&path, &without);
                let (refused, again) = (refused.unwrap_err(), again.unwrap_err());
                assert_eq!(common::errno(&refused), common::errno(&again));
                assert_eq!(discriminant(&refused), discriminant(&again));
            }
        }
    }
}

/// A sector is lost for good: data in other chunks can still be read.
#[test]
fn what_the_device_cannot_give_back_costs_its_chunk_and_no_more() {
    let sample = Sample::of_sizes(&[1 << 20, 1 << 20, 1 << 20, 4096, 1 << 20]);
    for engine in read_engines() {
        for direct in [Direct::Auto, Direct::Off] {
            let root = tempfile::tempdir().unwrap();
            let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
            sample.save(&path, &Options::default()).unwrap();
            let lost = {
                let checkpoint = Checkpoint::open(&path).unwrap();
                let tensors = &checkpoint.part().tensors;
                // In the middle of the second tensor; its chunk begins in the first.
                tensors[1].range.0 + (1 << 18)
            };
            let (options, _) = flaky(engine, direct, Fault::Lost(lost));
            let progress = Progress::default();
            let found = survey(&path, &options, &progress).unwrap();
            let hit = |index: usize| found.hits[index].is_some();
            assert!(hit(1), "{engine:?} {direct:?}");
            assert!(!hit(4), "a chunk that can be read is not lost with it");
            assert!(found.problems[0].detail.contains("cannot be read"));
            // Another host may be able to read it, so it is not recorded as damaged.
            assert!(!found.problems[0].is_proven);
            let refused = verify(&path, &options, &progress).unwrap_err();
            assert_eq!(common::errno(&refused), Some(EIO));

            let report = salvage(&path, &out, false, &options, &options, &progress).unwrap();
            let kept = found.intact();
            assert_eq!(report.tensors, kept.len());
            let loaded = common::load(&out, &Options::default()).unwrap();
            for (place, &index) in kept.iter().enumerate() {
                let expected = &sample.bytes[index];
                assert_eq!(
                    common::bytes_of(&loaded, place, expected.len()),
                    &expected[..]
                );
            }
        }
    }
}
