//! A power cut on a real file system: acknowledged data loads afterwards, bit for bit.
//!
//! Three promises, each on ext4 and on XFS: a save that returned survives; a cut during a save
//! leaves the earlier data; and a cut at any moment of a saver's life loses nothing that was
//! acknowledged, damages nothing, and does not hinder later calls. `make torture` makes hundreds of
//! the last kind; an ordinary run makes ten.

use std::thread;
use std::time::Duration;

use crate::common::disk::{Disk, on_each_disk};
use crate::common::hook::hooked;
use crate::common::ledger::Ledger;
use crate::common::saver::{Saver, Tally, operation_of};
use crate::common::{self, Rng, Sample, engines, number};
use penstock_store::options::Options;
use penstock_store::steps::store::Store;

#[test]
fn an_acknowledged_save_survives() {
    on_each_disk("an_acknowledged_save_survives", |disk| {
        let path = disk.path().join("new/store/ckpt");
        for seed in 1..6 {
            let sample = Sample::seeded(seed);
            let options = Options {
                engine: engines()[seed as usize % engines().len()],
                ..Options::default()
            };
            let publication = penstock_store::save::Publication {
                overwrite: true,
                ..common::publication(&path)
            };
            let progress = penstock_store::Progress::default();
            penstock_store::save::save(sample.state(), &publication, &options, &progress).unwrap();
            disk.switch().cut().unwrap();
            disk.restore();
            sample.assert_at(&path);
        }
    });
}

#[test]
fn a_cut_during_a_save_leaves_the_one_before() {
    on_each_disk("a_cut_during_a_save_leaves_the_one_before", |disk| {
        let store = Store::new(disk.path().join("store"));
        let old = Sample::seeded(1);
        old.save_step(&store.step_path(1), Some(1), false).unwrap();
        for nth in 1..=3 {
            for path in [store.step_path(1), store.step_path(2)] {
                let switch = disk.switch();
                let options = hooked(engines()[0], move |operation| {
                    if operation == nth {
                        switch.cut().unwrap();
                    }
                });
                let publication = penstock_store::save::Publication {
                    overwrite: true,
                    ..common::publication(&path)
                };
                let progress = penstock_store::Progress::default();
                let state = Sample::seeded(2).state();
                penstock_store::save::save(state, &publication, &options, &progress)
                    .expect_err("the disk is gone");
                disk.restore();
                old.assert_at(&store.step_path(1));
                store.sweep().unwrap();
                assert_eq!(store.steps().unwrap(), [1]);
                assert_eq!(common::names(&store.step_path(1)).len(), 3);
            }
        }
    });
}

/// The saver runs until the disk is gone, at any point.
#[test]
fn cuts_at_random_moments_lose_nothing_acknowledged() {
    let test = "cuts_at_random_moments_lose_nothing_acknowledged";
    let cuts = number("PENSTOCK_TORTURE_CUTS", 10);
    let seed = number("PENSTOCK_TORTURE_SEED", 0xc07);
    on_each_disk(test, |disk| cut_at_random(disk, cuts, seed));
}

/// The latest moment of a cut: a few saves after the saver began.
const MOMENT_MAX: Duration = Duration::from_millis(60);

fn cut_at_random(disk: &Disk, cuts: u64, seed: u64) {
    let mut rng = Rng::new(seed);
    let store = Store::new(disk.path().join("store"));
    let mut ledger = Ledger::default();
    let (mut activities, mut operations) = (Tally::default(), Tally::default());
    let mut acknowledged = 0;
    for cut in 0..cuts {
        let first_seed = (1 + cut) << 20;
        let rng_of_saver = Rng::quiet(rng.below(u64::MAX));
        let mut saver = Saver::new(&store, ledger, rng_of_saver, first_seed);
        let saving = thread::spawn(move || {
            let mut acknowledged = 0;
            let error = saver.run(|news| acknowledged += u64::from(news.is_acknowledged()));
            (saver, error, acknowledged)
        });
        // The random moment itself; nothing is synchronized by it.
        thread::sleep(Duration::from_micros(
            rng.below(MOMENT_MAX.as_micros() as u64),
        ));
        disk.switch().cut().unwrap();
        let name = disk.file_system.name;
        let saved = saving.join();
        let (mut saver, error, done) =
            saved.unwrap_or_else(|_| panic!("{name}, cut {cut} of seed {seed}: the saver panics"));
        disk.restore();

        let activity = saver.ledger.begun().expect("something was cut off");
        let activity = activity.name();
        let when = format!("{name}, cut {cut} of seed {seed}, in {activity}: {error}");
        activities.count(activity);
        operations.count(operation_of(&error));
        acknowledged += done;
        saver.ledger.check(&store, &when);
        // A save must work with the remains of a dead one, as well as after a sweep.
        if cut % 2 == 0 {
            saver.ledger.sweep(&store, &when);
        }
        saver
            .save_next()
            .unwrap_or_else(|error| panic!("{when}; then {error}"));
        saver.ledger.check(&store, &when);
        saver.ledger.sweep(&store, &when);
        ledger = saver.ledger;
    }
    let name = disk.file_system.name;
    eprintln!("{name}: {cuts} power cuts, seed {seed}, {acknowledged} acknowledged, 0 lost");
    eprintln!("{name}: cut in {activities}; seen by {operations}");
}
