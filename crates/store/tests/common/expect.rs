//! The permitted contents of a store after a power cut or a kill, derived from earlier promises.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;

use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, Progress};

use super::{Sample, check_sidecars, sealed};

/// A program's report of an operation that it begins or has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A save of a step began; a state is given by the seeds of its ranks.
    Saving(u64, Vec<u64>),
    /// The save was acknowledged.
    Saved(u64, Vec<u64>),
    /// A caller received the answer that a step is already complete.
    There(u64),
    /// A removal of a step may begin.
    Deleting(u64),
    /// The removal was acknowledged.
    Deleted(u64),
    /// Retention may delete a step, as long as another one stays.
    Retaining(u64),
    /// Retention has deleted a step.
    Gone(u64),
    /// A step was damaged without a change of size.
    Damaged(u64),
    /// A step is about to be marked as read back whole, or as damaged.
    Marking(u64, bool),
    /// The mark was acknowledged.
    Marked(u64, bool),
    /// A step is about to be protected, or to lose its protection.
    Protecting(u64, bool),
    /// The change of protection was acknowledged.
    Protected(u64, bool),
    /// A step that is marked as damaged is about to be quarantined.
    Quarantining(u64),
    /// The quarantine was acknowledged.
    Quarantined(u64),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, step, seeds) = match self {
            Note::Saving(step, seeds) => ("saving", step, &seeds[..]),
            Note::Saved(step, seeds) => ("saved", step, &seeds[..]),
            Note::There(step) => ("there", step, &[][..]),
            Note::Deleting(step) => ("deleting", step, &[][..]),
            Note::Deleted(step) => ("deleted", step, &[][..]),
            Note::Retaining(step) => ("retaining", step, &[][..]),
            Note::Gone(step) => ("gone", step, &[][..]),
            _ => return write!(f, "{self:?}"),
        };
        write!(f, "{word} {step}")?;
        seeds.iter().try_for_each(|seed| write!(f, " {seed}"))
    }
}

impl FromStr for Note {
    type Err = String;

    fn from_str(text: &str) -> Result<Note, String> {
        let mut words = text.split(' ');
        let word = words.next().unwrap_or_default();
        let numbers: Option<Vec<u64>> = words.map(|word| word.parse().ok()).collect();
        match (word, numbers.as_deref()) {
            ("saving", Some([step, seeds @ ..])) => Ok(Note::Saving(*step, seeds.to_vec())),
            ("saved", Some([step, seeds @ ..])) => Ok(Note::Saved(*step, seeds.to_vec())),
            ("there", Some([step])) => Ok(Note::There(*step)),
            ("deleting", Some([step])) => Ok(Note::Deleting(*step)),
            ("deleted", Some([step])) => Ok(Note::Deleted(*step)),
            ("retaining", Some([step])) => Ok(Note::Retaining(*step)),
            ("gone", Some([step])) => Ok(Note::Gone(*step)),
            _ => Err(format!("{text:?} is no note")),
        }
    }
}

/// The permitted contents of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Allowed {
    /// The permitted states, each given by the seeds of its ranks.
    pub states: BTreeSet<Vec<u64>>,
    /// Whether a complete checkpoint may be missing.
    pub may_be_absent: bool,
    /// Whether even the directory must be gone.
    pub must_be_gone: bool,
    /// Whether its bytes were damaged after they were saved.
    pub is_damaged: bool,
}

/// The permitted contents of the store, step by step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Expected {
    pub steps: BTreeMap<u64, Allowed>,
    /// Permitted marks, by step: good, damaged; both while one is about to replace the other.
    pub marks: BTreeMap<u64, BTreeSet<Option<bool>>>,
    pub protections: BTreeMap<u64, BTreeSet<bool>>,
    /// States that must be at a step or quarantined, and whether they must be quarantined.
    pub quarantined: BTreeMap<u64, (BTreeSet<Vec<u64>>, bool)>,
    /// Whether a complete checkpoint must exist: one was acknowledged, and nobody requested its
    /// deletion.
    pub needs_one: bool,
}

impl Expected {
    /// The promises that follow from some notes.
    pub fn after<'a>(notes: impl IntoIterator<Item = &'a Note>) -> Expected {
        let mut expected = Expected::default();
        for note in notes {
            if let Note::Saving(step, _) | Note::Deleting(step) = note {
                // A damaged step that is not quarantined yet is replaced or deleted in place.
                expected
                    .quarantined
                    .retain(|at, (_, is_decided)| at != step || *is_decided);
            }
            match note {
                Note::Saving(step, state) => {
                    let nothing = || Allowed {
                        may_be_absent: true,
                        ..Allowed::default()
                    };
                    let allowed = expected.steps.entry(*step).or_insert_with(nothing);
                    allowed.states.insert(state.clone());
                    allowed.must_be_gone = false;
                    if let Some(marks) = expected.marks.get_mut(step) {
                        marks.insert(None);
                    }
                }
                Note::Saved(step, state) => {
                    let states = BTreeSet::from([state.clone()]);
                    let only = Allowed {
                        states,
                        ..Allowed::default()
                    };
                    expected.steps.insert(*step, only);
                    // Another checkpoint does not inherit a mark.
                    expected.marks.remove(step);
                    expected.needs_one = true;
                }
                Note::There(step) => {
                    let allowed = expected.steps.entry(*step).or_default();
                    allowed.may_be_absent = false;
                    expected.needs_one = true;
                }
                Note::Deleting(step) => {
                    expected.needs_one = false;
                    let allowed = expected.steps.entry(*step).or_default();
                    allowed.may_be_absent = true;
                }
                Note::Deleted(step) | Note::Gone(step) => {
                    let gone = Allowed {
                        may_be_absent: true,
                        must_be_gone: true,
                        ..Allowed::default()
                    };
                    expected.steps.insert(*step, gone);
                }
                Note::Retaining(step) => {
                    let allowed = expected.steps.entry(*step).or_default();
                    allowed.may_be_absent = true;
                }
                note => expected.add_sidecars(note),
            }
        }
        expected
    }

    /// Adds promises about a step other than its state: damage, marks, protection, quarantine.
    fn add_sidecars(&mut self, note: &Note) {
        match note {
            Note::Damaged(step) => {
                self.steps.entry(*step).or_default().is_damaged = true;
            }
            Note::Marking(step, is_damaged) => {
                let unmarked = || BTreeSet::from([None]);
                let marks = self.marks.entry(*step).or_insert_with(unmarked);
                marks.insert(Some(*is_damaged));
            }
            Note::Marked(step, is_damaged) => {
                let only = BTreeSet::from([Some(*is_damaged)]);
                self.marks.insert(*step, only);
            }
            Note::Protecting(step, on) => {
                let before = || BTreeSet::from([false]);
                let found = self.protections.entry(*step).or_insert_with(before);
                found.insert(*on);
            }
            Note::Quarantining(step) => {
                let allowed = self.steps.entry(*step).or_default();
                allowed.may_be_absent = true;
                let moved = (allowed.states.clone(), false);
                self.quarantined.insert(*step, moved);
            }
            Note::Quarantined(step) => {
                self.quarantined.entry(*step).or_default().1 = true;
                let gone = Allowed {
                    may_be_absent: true,
                    must_be_gone: true,
                    ..Allowed::default()
                };
                self.steps.insert(*step, gone);
            }
            Note::Protected(step, on) => {
                self.protections.insert(*step, BTreeSet::from([*on]));
            }
            _ => unreachable!("it is about what a step holds"),
        }
    }

    /// Reads the store's contents, step by step, or describes the broken promise.
    pub fn check(
        &self,
        store: &Store,
        samples: &HashMap<u64, Sample>,
        options: &Options,
    ) -> Result<BTreeMap<u64, Vec<u64>>, String> {
        let mut found = BTreeMap::new();
        let there = store.steps().map_err(|error| error.full_message())?;
        let steps: BTreeSet<u64> = self.steps.keys().chain(&there).copied().collect();
        for step in steps {
            let allowed = self.steps.get(&step);
            let allowed = allowed.ok_or_else(|| format!("nobody made step {step}"))?;
            if allowed.must_be_gone && there.contains(&step) {
                return Err(format!("step {step} was deleted and came back"));
            }
            match store.state(step) {
                Ok(StepState::Complete(_)) if allowed.is_damaged => {
                    found.extend(allowed.states.first().map(|state| (step, state.clone())));
                }
                Ok(StepState::Complete(checkpoint)) => {
                    check_sidecars(&store.step_path(step), &checkpoint)
                        .map_err(|why| format!("step {step}: {why}"))?;
                    let state = identify(&checkpoint, &allowed.states, samples, options);
                    found.insert(step, state.map_err(|why| format!("step {step}: {why}"))?);
                }
                Ok(StepState::Incomplete) | Err(Error::NotFound { .. }) => {
                    if !allowed.may_be_absent {
                        return Err(format!("step {step} was promised and is not there"));
                    }
                }
                Ok(
                    StepState::Damaged(error)
                    | StepState::Newer(error)
                    | StepState::Unreadable(error),
                )
                | Err(error) => {
                    return Err(format!("step {step}: {}", error.full_message()));
                }
            }
        }
        self.check_quarantined(store, &found, samples, options)?;
        let is_good = |step: &u64| !self.steps[step].is_damaged;
        if self.needs_one && !found.keys().any(is_good) {
            return Err("nothing is left".to_owned());
        }
        self.check_marks(store, &found)?;
        Ok(found)
    }

    /// A quarantined state must exist whole, under its old name or the new one.
    fn check_quarantined(
        &self,
        store: &Store,
        found: &BTreeMap<u64, Vec<u64>>,
        samples: &HashMap<u64, Sample>,
        options: &Options,
    ) -> Result<(), String> {
        let there = store.quarantined().map_err(|error| error.full_message())?;
        for (step, (states, is_decided)) in &self.quarantined {
            let is_here = !is_decided && found.get(step).is_some_and(|at| states.contains(at));
            let mut there = there.iter().filter(|quarantined| quarantined.step == *step);
            let is_quarantined = there.any(|quarantined| {
                let checkpoint = Checkpoint::open(&quarantined.path);
                checkpoint.is_ok_and(|one| identify(&one, states, samples, options).is_ok())
            });
            if !is_here && !is_quarantined {
                return Err(format!("step {step} was being quarantined and is lost"));
            }
        }
        Ok(())
    }

    fn check_marks(&self, store: &Store, found: &BTreeMap<u64, Vec<u64>>) -> Result<(), String> {
        let marks = store.marks().map_err(|error| error.full_message())?;
        for (step, allowed) in self
            .marks
            .iter()
            .filter(|(step, _)| found.contains_key(step))
        {
            let mark = marks.iter().find(|mark| mark.step == *step);
            if !allowed.contains(&mark.map(|mark| mark.is_damaged)) {
                return Err(format!("the mark of step {step} is not the last: {mark:?}"));
            }
        }
        // The newest checkpoint known to be good survives retention.
        let mut good = self
            .marks
            .iter()
            .filter(|(_, allowed)| allowed.iter().eq([&Some(false)]));
        if let Some((step, _)) = good.next_back()
            && self.needs_one
            && !found.contains_key(step)
        {
            return Err(format!(
                "step {step} was the newest verified one, and is gone"
            ));
        }
        for (step, allowed) in self
            .protections
            .iter()
            .filter(|(s, _)| found.contains_key(s))
        {
            if !allowed.contains(&store.is_protected(*step)) {
                return Err(format!("the protection of step {step} is not the last"));
            }
        }
        Ok(())
    }
}

/// Loads a checkpoint and finds which of the states it holds.
fn identify(
    checkpoint: &Checkpoint,
    allowed: &BTreeSet<Vec<u64>>,
    samples: &HashMap<u64, Sample>,
    options: &Options,
) -> Result<Vec<u64>, String> {
    let unsealed = sealed::opened(checkpoint, options).map_err(|error| error.full_message())?;
    let checkpoint = unsealed.as_ref().unwrap_or(checkpoint);
    let loaded = checkpoint.load(None, HashMap::new(), options, &Progress::default());
    let loaded = loaded.map_err(|error| error.full_message())?;
    let is = |state: &&Vec<u64>| {
        let bytes = state.iter().flat_map(|seed| samples[seed].bytes.clone());
        let specs = state.iter().flat_map(|seed| samples[seed].specs.clone());
        let whole = Sample {
            specs: specs.collect(),
            bytes: bytes.collect(),
            aliases: Vec::new(),
        };
        let names = checkpoint.part().tensors.iter().map(|tensor| &tensor.name);
        whole.is(&loaded) && names.eq(whole.specs.iter().map(|spec| &spec.name))
    };
    let state = allowed.iter().find(is).cloned();
    state.ok_or_else(|| "it is a state that nobody saved there, or not the last".to_owned())
}
