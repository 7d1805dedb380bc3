//! Functions that call or mark a checkpoint good have always checked its digests, whatever the
//! options: `Options::verify` concerns the data returned by a load.

use std::fs;
use std::path::Path;

use crate::common::{Rng, Sample, draw, forge, number};
use penstock_store::Progress;
use penstock_store::care::salvage::salvage;
use penstock_store::care::survey::survey;
use penstock_store::care::verify::verify;
use penstock_store::options::Options;
use penstock_store::steps::scrub::{Outcome, Scrub};
use penstock_store::steps::store::Store;

const SIZES: [usize; 3] = [1000, (2 << 20) + 5, 70_000];

fn flip(file: &Path, at: impl Fn(usize) -> usize) {
    let mut bytes = fs::read(file).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 0x10;
    fs::write(file, bytes).unwrap();
}

/// Two steps, the newer one damaged without a change of size.
fn store_with_damage(root: &Path, options: &Options) -> Store {
    let store = Store::new(root.join("store"));
    for step in [1, 2] {
        let sample = Sample::seeded_sizes(step, &SIZES);
        sample.save(&store.step_path(step), options).unwrap();
    }
    flip(&forge::shard_path(&store.step_path(2)), |bytes| bytes - 1);
    store
}

fn check_verdicts(options: &Options) {
    let root = tempfile::tempdir().unwrap();
    let store = store_with_damage(root.path(), options);
    let (good, bad) = (store.step_path(1), store.step_path(2));
    let progress = Progress::default();

    let is_whole = |path| {
        verify(path, options, &progress)
            .unwrap()
            .problems
            .is_empty()
    };
    assert!(is_whole(&good) && !is_whole(&bad), "verify");

    let found = survey(&good, options, &progress).unwrap();
    assert!(found.problems.is_empty(), "{:?}", found.problems);
    let found = survey(&bad, options, &progress).unwrap();
    assert!(!found.problems.is_empty(), "a survey sees no damage");
    assert!(found.intact().len() < SIZES.len());

    let out = root.path().join("out");
    let report = salvage(&bad, &out, false, options, options, &progress).unwrap();
    assert!(!report.missing.is_empty(), "damage was taken over");

    let report = store.scrub(&Scrub::default(), options, &progress).unwrap();
    let outcomes: Vec<Outcome> = report.steps.iter().map(|step| step.outcome).collect();
    assert_eq!(outcomes, [Outcome::Verified, Outcome::Damaged]);
    let marks = store.marks().unwrap();
    let marks: Vec<_> = marks
        .iter()
        .map(|mark| (mark.step, mark.is_damaged))
        .collect();
    assert_eq!(marks, [(1, false), (2, true)]);
    // Retention relies on this: the good step is the last one left.
    assert_eq!(store.retain(Some(1), None, Some(2)).unwrap(), [0; 0]);
    Sample::seeded_sizes(1, &SIZES).assert_at(&good);
}

/// The only option that concerns digests, tested alone.
#[test]
fn without_digests_for_loads_verdicts_have_them() {
    check_verdicts(&Options {
        verify: false,
        ..Options::default()
    });
}

#[test]
fn no_options_keep_a_verdict_from_its_digests() {
    let mut random = Rng::new(number("PENSTOCK_TORTURE_SEED", 0x5eed));
    let root = tempfile::tempdir().unwrap();
    for _ in 0..number("PENSTOCK_TORTURE_DRAWS", 6) {
        let options = draw::options(&mut random, root.path());
        eprintln!("{options:?}");
        check_verdicts(&options);
    }
}
