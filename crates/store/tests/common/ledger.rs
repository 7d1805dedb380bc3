//! The permitted contents of every step of a store, wherever its saver was stopped: the promises as
//! a table.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::str::FromStr;

use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::steps::store::{StepState, Store};
use serde_json::Value;

use super::{Sample, names, sealed};

/// How many steps retention keeps.
pub const KEPT: usize = 3;

/// One operation of a saver on a store. A seed identifies the saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    Save { step: u64, seed: u64 },
    Overwrite { step: u64, seed: u64 },
    Delete { step: u64 },
    Retain { saved: u64 },
    Sweep,
}

impl Activity {
    pub fn name(&self) -> &'static str {
        match self {
            Activity::Save { .. } => "save",
            Activity::Overwrite { .. } => "overwrite",
            Activity::Delete { .. } => "delete",
            Activity::Retain { .. } => "retain",
            Activity::Sweep => "sweep",
        }
    }
}

/// The line in which a saver in another process reports its activity.
impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, second) = match *self {
            Activity::Save { step, seed } | Activity::Overwrite { step, seed } => (step, seed),
            Activity::Delete { step } => (step, 0),
            Activity::Retain { saved } => (saved, 0),
            Activity::Sweep => (0, 0),
        };
        write!(f, "{} {first} {second}", self.name())
    }
}

impl FromStr for Activity {
    type Err = String;

    fn from_str(line: &str) -> Result<Activity, String> {
        let words: Vec<_> = line.split(' ').collect();
        let &[name, first, second] = &words[..] else {
            return Err(format!("{line:?} is no activity"));
        };
        let number = |word: &str| word.parse().map_err(|error| format!("{line:?}: {error}"));
        let (step, seed) = (number(first)?, number(second)?);
        match name {
            "save" => Ok(Activity::Save { step, seed }),
            "overwrite" => Ok(Activity::Overwrite { step, seed }),
            "delete" => Ok(Activity::Delete { step }),
            "retain" => Ok(Activity::Retain { saved: step }),
            "sweep" => Ok(Activity::Sweep),
            _ => Err(format!("{line:?} is no activity")),
        }
    }
}

/// Acknowledged operations, and the one begun but not acknowledged.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    seeds: BTreeMap<u64, u64>,
    begun: Option<Activity>,
}

impl Ledger {
    /// The ledger of an idle store.
    pub fn of(store: &Store) -> Ledger {
        let mut seeds = BTreeMap::new();
        for step in store.steps().unwrap() {
            if let StepState::Complete(checkpoint) = store.state(step).unwrap() {
                seeds.insert(step, seed_of(&checkpoint));
            }
        }
        let begun = None;
        Ledger { seeds, begun }
    }

    /// The complete steps, ascending.
    pub fn steps(&self) -> Vec<u64> {
        self.seeds.keys().copied().collect()
    }

    pub fn newest(&self) -> u64 {
        self.seeds.keys().last().copied().unwrap_or(0)
    }

    pub fn begun(&self) -> Option<Activity> {
        self.begun
    }

    pub fn begin(&mut self, activity: Activity) {
        let before = self.begun.replace(activity);
        assert_eq!(before, None, "one thing after the other");
    }

    /// The operation begun is done, and promised from now on.
    pub fn acknowledge(&mut self) {
        let done = self.begun.take();
        match done.expect("only what was begun is acknowledged") {
            Activity::Save { step, seed } | Activity::Overwrite { step, seed } => {
                self.seeds.insert(step, seed);
            }
            Activity::Delete { step } => {
                self.seeds.remove(&step);
            }
            Activity::Retain { saved } => {
                for step in self.beyond(saved) {
                    self.seeds.remove(&step);
                }
            }
            Activity::Sweep => {}
        }
    }

    /// The steps that retention deletes after a step was saved.
    pub fn beyond(&self, saved: u64) -> Vec<u64> {
        let steps: Vec<u64> = self.seeds.range(..=saved).map(|(&step, _)| step).collect();
        steps[..steps.len().saturating_sub(KEPT)].to_vec()
    }

    /// Panics unless every step holds a permitted state, bit for bit; adopts the states found.
    ///
    /// An acknowledged step holds that state, or the one that was about to replace it. It may be
    /// gone if it was about to be removed. A deleted step stays deleted, and nothing is ever
    /// damaged.
    #[track_caller]
    pub fn check(&mut self, store: &Store, when: &str) {
        let mut found = BTreeMap::new();
        for step in store.steps().unwrap() {
            let place = format!("{when}: step {step}");
            let checkpoint = match store.state(step).unwrap() {
                StepState::Complete(checkpoint) => checkpoint,
                StepState::Incomplete => continue,
                StepState::Damaged(error)
                | StepState::Newer(error)
                | StepState::Unreadable(error) => panic!("{place}: {error}"),
            };
            let seed = seed_of(&checkpoint);
            let allowed = self.allowed(step);
            assert!(
                allowed.contains(&seed),
                "{place} holds the state {seed}, and not one of {allowed:?}"
            );
            Sample::small(seed).assert_at(&store.step_path(step));
            found.insert(step, seed);
        }
        for step in self.seeds.keys() {
            assert!(
                found.contains_key(step) || self.may_be_gone(*step),
                "{when}: step {step} was acknowledged and is gone"
            );
        }
        self.seeds = found;
        self.begun = None;
    }

    fn allowed(&self, step: u64) -> Vec<u64> {
        let acknowledged = self.seeds.get(&step).copied();
        let begun = match self.begun {
            Some(Activity::Save { step: at, seed } | Activity::Overwrite { step: at, seed }) => {
                (at == step).then_some(seed)
            }
            _ => None,
        };
        acknowledged.into_iter().chain(begun).collect()
    }

    fn may_be_gone(&self, step: u64) -> bool {
        match self.begun {
            Some(Activity::Delete { step: at }) => at == step,
            Some(Activity::Retain { saved }) => self.beyond(saved).contains(&step),
            _ => false,
        }
    }

    /// Sweeps, and panics unless only the files of the complete checkpoints are left.
    #[track_caller]
    pub fn sweep(&self, store: &Store, when: &str) {
        store.sweep().unwrap();
        let swept = store.sweep().unwrap();
        assert!(swept.is_empty(), "{when}: {swept:?} after a sweep");
        assert_eq!(
            store.steps().unwrap(),
            self.steps(),
            "{when}: after a sweep"
        );
        for step in self.steps() {
            let path = store.step_path(step);
            let checkpoint = Checkpoint::open(&path).unwrap();
            let files = checkpoint.files();
            let referenced: HashSet<_> = files.iter().map(|&(name, _)| name.to_owned()).collect();
            let found: HashSet<_> = names(&path).into_iter().collect();
            assert_eq!(found, referenced, "{when}: step {step} after a sweep");
        }
    }
}

/// The seed recorded in a checkpoint's metadata.
fn seed_of(checkpoint: &Checkpoint) -> u64 {
    let unsealed = sealed::opened(checkpoint, &Options::default()).unwrap();
    let checkpoint = unsealed.as_ref().unwrap_or(checkpoint);
    let metadata: Value = serde_json::from_str(checkpoint.manifest().metadata.get()).unwrap();
    metadata["seed"].as_u64().expect("the saver records a seed")
}
