//! What has to be found after a cut or a kill, by what was promised before it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;

use penstock_store::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::store::{StepState, Store};
use penstock_store::{Error, Progress};

use super::Sample;

/// What a program says that it is about to do or has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A save of a step began; a state is given by the seeds of its ranks.
    Saving(u64, Vec<u64>),
    /// It was acknowledged.
    Saved(u64, Vec<u64>),
    /// A removal of a step may begin.
    Deleting(u64),
    /// It was acknowledged.
    Deleted(u64),
    /// A step was marked as read back whole.
    Marked(u64),
    /// A step was protected.
    Protected(u64),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, step, seeds) = match self {
            Note::Saving(step, seeds) => ("saving", step, &seeds[..]),
            Note::Saved(step, seeds) => ("saved", step, &seeds[..]),
            Note::Deleting(step) => ("deleting", step, &[][..]),
            Note::Deleted(step) => ("deleted", step, &[][..]),
            Note::Marked(step) => ("marked", step, &[][..]),
            Note::Protected(step) => ("protected", step, &[][..]),
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
            ("deleting", Some([step])) => Ok(Note::Deleting(*step)),
            ("deleted", Some([step])) => Ok(Note::Deleted(*step)),
            ("marked", Some([step])) => Ok(Note::Marked(*step)),
            ("protected", Some([step])) => Ok(Note::Protected(*step)),
            _ => Err(format!("{text:?} is no note")),
        }
    }
}

/// What may be at a step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Allowed {
    /// The states, each given by the seeds of its ranks.
    pub states: BTreeSet<Vec<u64>>,
    /// Whether there need not be a complete checkpoint.
    pub may_be_absent: bool,
    /// Whether not even the directory may be there.
    pub must_be_gone: bool,
}

/// What may be in the store, step by step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Expected {
    pub steps: BTreeMap<u64, Allowed>,
    pub marked: BTreeSet<u64>,
    pub protected: BTreeSet<u64>,
}

impl Expected {
    /// What some notes promise.
    pub fn after<'a>(notes: impl IntoIterator<Item = &'a Note>) -> Expected {
        let mut expected = Expected::default();
        for note in notes {
            match note {
                Note::Saving(step, state) => {
                    let nothing = || Allowed {
                        may_be_absent: true,
                        ..Allowed::default()
                    };
                    let allowed = expected.steps.entry(*step).or_insert_with(nothing);
                    allowed.states.insert(state.clone());
                    allowed.must_be_gone = false;
                }
                Note::Saved(step, state) => {
                    let states = BTreeSet::from([state.clone()]);
                    let only = Allowed {
                        states,
                        ..Allowed::default()
                    };
                    expected.steps.insert(*step, only);
                }
                Note::Deleting(step) => {
                    let allowed = expected.steps.entry(*step).or_default();
                    allowed.may_be_absent = true;
                }
                Note::Deleted(step) => {
                    let gone = Allowed {
                        may_be_absent: true,
                        must_be_gone: true,
                        ..Allowed::default()
                    };
                    expected.steps.insert(*step, gone);
                }
                Note::Marked(step) => {
                    expected.marked.insert(*step);
                }
                Note::Protected(step) => {
                    expected.protected.insert(*step);
                }
            }
        }
        expected
    }

    /// What the store holds, step by step, or how it breaks a promise.
    pub fn check(
        &self,
        store: &Store,
        samples: &HashMap<u64, Sample>,
    ) -> Result<BTreeMap<u64, Vec<u64>>, String> {
        let marks: BTreeSet<u64> = store.marks().iter().map(|mark| mark.step).collect();
        if let Some(step) = self.marked.difference(&marks).next() {
            return Err(format!("the mark of step {step} is lost"));
        }
        if let Some(step) = self
            .protected
            .iter()
            .find(|&&step| !store.is_protected(step))
        {
            return Err(format!("step {step} is not protected any more"));
        }
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
                Ok(StepState::Complete(checkpoint)) => {
                    let state = identify(&checkpoint, &allowed.states, samples);
                    found.insert(step, state.map_err(|why| format!("step {step}: {why}"))?);
                }
                Ok(StepState::Incomplete) | Err(Error::NotFound { .. }) => {
                    if !allowed.may_be_absent {
                        return Err(format!("step {step} was promised and is not there"));
                    }
                }
                Ok(StepState::Damaged(error) | StepState::Newer(error)) | Err(error) => {
                    return Err(format!("step {step}: {}", error.full_message()));
                }
            }
        }
        Ok(found)
    }
}

/// Loads a checkpoint and tells which of the states it is.
fn identify(
    checkpoint: &Checkpoint,
    allowed: &BTreeSet<Vec<u64>>,
    samples: &HashMap<u64, Sample>,
) -> Result<Vec<u64>, String> {
    let options = Options::default();
    let loaded = checkpoint.load(None, HashMap::new(), &options, &Progress::default());
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
