//! A saver that performs all of its operations in random order until it is stopped: saves,
//! overwrites, retention, deletions and sweeps, with either engine, direct and buffered, in one
//! shard and several.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use penstock_io::file::Direct;
use penstock_store::options::Options;
use penstock_store::save::Publication;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, Progress, Result};
use serde_json::value::RawValue;

use super::ledger::{Activity, KEPT, Ledger};
use super::{Rng, Sample, engines, forge, noise, publication, sealed};

/// More steps than this trigger retention.
const STEPS_MAX: usize = 2 * KEPT;

/// Messages from a saver while it works.
#[derive(Clone, Copy, Debug)]
pub enum News {
    Begun(Activity),
    /// The last operation begun is done.
    Acknowledged,
}

impl News {
    pub fn is_acknowledged(&self) -> bool {
        matches!(self, News::Acknowledged)
    }
}

pub struct Saver {
    pub ledger: Ledger,
    store: Store,
    rng: Rng,
    next_seed: u64,
}

impl Saver {
    /// Continues from the ledger. Its states have seeds from `first_seed` on.
    pub fn new(store: &Store, ledger: Ledger, rng: Rng, first_seed: u64) -> Saver {
        Saver {
            ledger,
            store: store.clone(),
            rng,
            next_seed: first_seed,
        }
    }

    /// Works until something fails.
    pub fn run(&mut self, mut report: impl FnMut(News)) -> Error {
        loop {
            let activity = self.choose();
            if let Err(error) = self.perform(activity, &mut report) {
                return error;
            }
        }
    }

    /// Saves the next step.
    pub fn save_next(&mut self) -> Result<()> {
        let (step, seed) = (self.ledger.newest() + 1, self.draw_seed());
        self.perform(Activity::Save { step, seed }, &mut |_| {})
    }

    fn perform(&mut self, activity: Activity, report: &mut impl FnMut(News)) -> Result<()> {
        self.ledger.begin(activity);
        report(News::Begun(activity));
        match activity {
            Activity::Save { step, seed } => self.save(step, seed, false)?,
            Activity::Overwrite { step, seed } => self.save(step, seed, true)?,
            Activity::Delete { step } => drop(self.store.delete(step)?),
            Activity::Retain { saved } => {
                let deleted = self.store.retain(Some(KEPT as u64), None, Some(saved))?;
                let expected = self.ledger.beyond(saved);
                if deleted != expected {
                    // Retention skips unreadable steps without an error, and on a dying disk no
                    // step can be read.
                    self.read_all()?;
                    assert_eq!(deleted, expected);
                }
            }
            Activity::Sweep => {
                self.leave_orphans()?;
                drop(self.store.sweep()?);
            }
        }
        self.ledger.acknowledge();
        report(News::Acknowledged);
        Ok(())
    }

    /// # Errors
    /// A step cannot be read.
    fn read_all(&self) -> Result<()> {
        for step in self.ledger.steps() {
            if let StepState::Unreadable(error) = self.store.state(step)? {
                return Err(error);
            }
        }
        Ok(())
    }

    fn choose(&mut self) -> Activity {
        let steps = self.ledger.steps();
        let saved = self.ledger.newest();
        if steps.len() > STEPS_MAX {
            return Activity::Retain { saved };
        }
        let next = Activity::Save {
            step: saved + 1,
            seed: self.draw_seed(),
        };
        if steps.is_empty() {
            return next;
        }
        let any = steps[self.rng.below(steps.len() as u64) as usize];
        match self.rng.below(10) {
            0..3 => next,
            3..5 => Activity::Overwrite {
                step: any,
                seed: self.draw_seed(),
            },
            5..7 => Activity::Delete { step: any },
            7..9 => Activity::Sweep,
            _ => Activity::Retain { saved },
        }
    }

    fn draw_seed(&mut self) -> u64 {
        self.next_seed += 1;
        self.next_seed
    }

    fn save(&mut self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        let path = self.store.step_path(step);
        let publication = Publication {
            step: Some(step),
            metadata: RawValue::from_string(format!("{{\"seed\":{seed}}}")).unwrap(),
            overwrite,
            ..publication(&path)
        };
        let options = self.draw_options();
        let state = Sample::small(seed).state();
        sealed::save(state, &publication, &options, &Progress::default()).map(drop)
    }

    fn draw_options(&mut self) -> Options {
        let mut below = |bound: usize| self.rng.below(bound as u64) as usize;
        Options {
            engine: engines()[below(engines().len())],
            direct: [Direct::Auto, Direct::Off][below(2)],
            shard_bytes: [None, Some(16 << 10), Some(256 << 10)][below(3)],
            io_threads: Some(1 + below(3)),
            queue_depth: Some(1 + below(8)),
            extent_bytes: Some(1 << 20),
            is_sealed: below(2) == 1,
            ..Options::default()
        }
    }

    /// Leaves files as a dead save does: with the newest checkpoint, and in a step of their own.
    fn leave_orphans(&mut self) -> Result<()> {
        let newest = self.ledger.newest();
        for step in [newest, newest + 1] {
            let path = self.store.step_path(step);
            let orphan = path.join(format!("shard-00000-00.{}.safetensors", forge::ATTEMPT));
            let written = fs::create_dir_all(&path).and_then(|()| fs::write(&orphan, "orphan"));
            written.map_err(|source| Error::Storage {
                operation: "leave",
                path: orphan,
                source,
            })?;
        }
        Ok(())
    }
}

impl Sample {
    /// A few tensors, from empty to a little more than a chunk: quick to save, and different in
    /// everything for each seed.
    pub fn small(seed: u64) -> Sample {
        const SIZES: [usize; 8] = [0, 1, 300, 4096, 5001, 65_536, 77_777, 1_234_567];
        let draws = noise(seed, 8);
        let count = 1 + usize::from(draws[0]) % (draws.len() - 1);
        let sizes: Vec<usize> = draws[1..=count]
            .iter()
            .map(|&draw| SIZES[usize::from(draw) % SIZES.len()])
            .collect();
        Sample::seeded_sizes(seed, &sizes)
    }
}

/// The operation on a file that failed.
pub fn operation_of(error: &Error) -> &'static str {
    match error {
        Error::Storage { operation, .. }
        | Error::Io(penstock_io::Error::Storage { operation, .. }) => operation,
        _ => "something else",
    }
}

/// Counts the operations at which a store was interrupted.
#[derive(Default)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = self
            .0
            .iter()
            .map(|(what, n)| format!("{what} {n}"))
            .collect();
        f.write_str(&counts.join(", "))
    }
}
