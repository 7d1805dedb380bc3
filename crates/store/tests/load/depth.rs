//! How many requests a load keeps in flight: as many as the storage needs to stay busy.

use penstock_store::options::Options;

use crate::common::answering::answering;
use crate::common::{Sample, load};

const MIB: usize = 1 << 20;
const DEPTH: usize = 8;

/// Number of requests in flight at each poll, while one worker loaded tensors of these sizes.
fn looks(sizes: &[usize], eager: usize) -> Vec<usize> {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(sizes);
    sample.save(&path, &Options::default()).unwrap();
    let options = Options {
        extent_bytes: Some(MIB),
        io_threads: Some(1),
        queue_depth: Some(DEPTH),
        ..Options::default()
    };
    let (options, seen) = answering(options, eager);
    let loaded = load(&path, &options).unwrap();
    assert!(sample.is(&loaded));
    seen.lock().unwrap().clone()
}

#[test]
fn storage_that_answers_at_once_is_asked_for_one_thing_at_a_time() {
    let looks = looks(&[40 * MIB], usize::MAX);
    assert_eq!(looks[0], DEPTH);
    assert!(looks[4..].iter().all(|&count| count == 1), "{looks:?}");
}

#[test]
fn storage_that_takes_its_time_is_kept_busy() {
    let all = looks(&[40 * MIB], 0);
    assert!(all[..all.len() / 2].contains(&DEPTH), "{all:?}");
    // And if the storage answered during submission before: the cached part of a file may end.
    let later = looks(&[40 * MIB], 20);
    let tail = &later[later.len() / 2..];
    assert!(later.contains(&1) && tail.contains(&DEPTH), "{later:?}");
}

/// Some items take several requests, which are not all submitted at once.
#[test]
fn whatever_is_under_way_everything_is_read() {
    let sizes: Vec<usize> = (1..60)
        .map(|number| number * 70_001 % 2_345_678 + number)
        .collect();
    for eager in [0, 1, 7, 30, usize::MAX] {
        looks(&sizes, eager);
    }
}
