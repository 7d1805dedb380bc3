//! The operations on a step and the observations of it, checked against the model of a register.
//!
//! A step holds one state or none. A save or a deletion changes it atomically at one moment between
//! its start and its end, and every read returns the present value: this is linearizability, and
//! all promises of the store about a step follow from it. A save that was refused found another
//! state there; one that failed has changed nothing and will not do so later; one with an unknown
//! outcome may have taken effect, or may yet. There is one limit: an operation that was undecided
//! when an acknowledged save began no longer takes effect after it, or a newer state would be lost
//! to an older one.
//!
//! A save whose response was lost puts its manifest again. If the first request arrives after all,
//! while the step is being deleted, the manifest reappears without its data: no store can be made
//! to forget a request. Nothing is lost by that, a load reports it, and a sweep removes it.
//!
//! A request may be carried out although its response denies it. If another save has replaced the
//! state by then, nothing shows that it was there. A save that overwrites puts its manifest once
//! more, and so takes effect twice; a save that creates returns that another state exists, which is
//! true.
//!
//! A save that was taken for dead is a separate case. Its state may be visible for a moment, whole
//! or without its data, and is then revoked; the state that it had replaced is restored. The save
//! has failed once that is over.

use std::collections::BTreeSet;
use std::fmt;

/// An operation on a step; a state is given by its seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// A save that requires an empty step.
    Create(u64),
    /// A save that replaces an existing state.
    Overwrite(u64),
    Delete,
    /// A deletion of this state only.
    Retire(u64),
    Load,
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was acknowledged.
    Done,
    /// Refused: another state exists, or none does.
    Refused,
    /// Failed without a change.
    Failed,
    /// Failed because it was taken for dead; its changes are revoked.
    Swept,
    /// Unknown.
    Open,
    /// The state found by a load.
    FileStat(Option<u64>),
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Begin(usize),
    End(usize, Outcome),
    Seen(Option<u64>),
    /// A state without its data was observed.
    SeenBroken,
}

/// The progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Unasked,
    /// It may take effect at any moment.
    Pending,
    Done,
    Refused,
    /// A deletion has taken this state, and puts it back if it cannot continue.
    Tombstone(u64),
    /// A save that will be revoked has replaced this state.
    Replaced(Option<u64>),
    /// It can no longer take effect.
    Closed,
    FileStat(Option<u64>),
}

/// Faults of requests that put manifests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Happened {
    /// Whether one may have arrived late.
    pub(crate) is_late: bool,
    /// Whether one was carried out although its response denied it.
    pub(crate) is_disowned: bool,
}

/// The events of one step, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    ops: Vec<Op>,
    events: Vec<Event>,
}

/// A possible value of a step, with the possible progress of its operations.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Possible {
    value: Option<u64>,
    statuses: Vec<Status>,
}

impl History {
    pub(crate) fn begin(&mut self, op: Op) -> usize {
        self.ops.push(op);
        let index = self.ops.len() - 1;
        self.events.push(Event::Begin(index));
        index
    }

    pub(crate) fn end(&mut self, index: usize, outcome: Outcome) {
        self.events.push(Event::End(index, outcome));
    }

    /// Records an observation of the step's value.
    pub(crate) fn saw(&mut self, value: Option<u64>) {
        self.events.push(Event::Seen(value));
    }

    /// Records an observation of a state without its data.
    pub(crate) fn saw_broken(&mut self) {
        self.events.push(Event::SeenBroken);
    }

    /// Checks that a register explains the history; the error is the first event that it cannot
    /// explain.
    pub(crate) fn check(&self, what: Happened) -> Result<(), String> {
        let mut is_running = vec![false; self.ops.len()];
        let mut possible = BTreeSet::from([Possible {
            value: None,
            statuses: vec![Status::Unasked; self.ops.len()],
        }]);
        for (place, event) in self.events.iter().enumerate() {
            if let Event::Begin(op) = event {
                is_running[*op] = true;
                let begun = possible.into_iter().map(|mut one| {
                    one.statuses[*op] = Status::Pending;
                    one
                });
                possible = begun.collect();
            }
            possible = self.closure(possible, |op| what.is_disowned && is_running[op]);
            possible = possible
                .into_iter()
                .filter_map(|one| self.after(one, event, place, what))
                .collect();
            if let Event::End(op, _) = event {
                is_running[*op] = false;
            }
            if possible.is_empty() {
                return Err(format!("{self} (no state explains event {place})"));
            }
        }
        Ok(())
    }

    /// All values reachable when pending operations take effect, once or, if they are repeated,
    /// several times.
    fn closure(
        &self,
        mut possible: BTreeSet<Possible>,
        is_repeated: impl Fn(usize) -> bool,
    ) -> BTreeSet<Possible> {
        let mut open: Vec<Possible> = possible.iter().cloned().collect();
        while let Some(one) = open.pop() {
            for (index, status) in one.statuses.iter().enumerate() {
                let (value, status) = match (status, one.value) {
                    (Status::Pending, value) if self.is_swept(index) => {
                        match effect(self.ops[index], value) {
                            (placed, Status::Done) => (placed, Status::Replaced(value)),
                            refused => refused,
                        }
                    }
                    (Status::Replaced(before), Some(placed)) if self.places(index, placed) => {
                        (*before, Status::Closed)
                    }
                    (Status::Pending, value) => effect(self.ops[index], value),
                    (Status::Tombstone(value), None) => (Some(*value), Status::Pending),
                    (Status::Done, value)
                        if matches!(self.ops[index], Op::Overwrite(_)) && is_repeated(index) =>
                    {
                        effect(self.ops[index], value)
                    }
                    _ => continue,
                };
                let mut next = one.clone();
                next.value = value;
                next.statuses[index] = status;
                if possible.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        possible
    }

    /// Whether a save finally returns that it was taken for dead.
    fn is_swept(&self, index: usize) -> bool {
        let is_it = |event: &Event| matches!(event, Event::End(op, Outcome::Swept) if *op == index);
        self.events.iter().any(is_it)
    }

    /// Whether an operation saves this state.
    fn places(&self, index: usize, value: u64) -> bool {
        matches!(self.ops[index], Op::Create(seed) | Op::Overwrite(seed) if seed == value)
    }

    fn after(
        &self,
        mut one: Possible,
        event: &Event,
        place: usize,
        what: Happened,
    ) -> Option<Possible> {
        let (index, outcome) = match *event {
            Event::Begin(_) => return Some(one),
            Event::Seen(value) => return (value == one.value).then_some(one),
            Event::SeenBroken => {
                let is_explained = one.statuses.iter().enumerate().any(|(index, status)| {
                    let places = |value| self.places(index, value);
                    let is_back = matches!(self.ops[index], Op::Create(_))
                        && *status == Status::Done
                        && one.value.is_none_or(places);
                    let is_taken_back = matches!(status, Status::Replaced(_));
                    (what.is_late && is_back) || (is_taken_back && one.value.is_some_and(places))
                });
                return is_explained.then_some(one);
            }
            Event::End(index, outcome) => (index, outcome),
        };
        let status = one.statuses[index];
        match outcome {
            Outcome::Open => return Some(one),
            // Or somebody has deleted it, or replaced it in turn.
            Outcome::Swept if !one.value.is_some_and(|value| self.places(index, value)) => {
                one.statuses[index] = Status::Closed;
            }
            Outcome::Failed if status != Status::Done => one.statuses[index] = Status::Closed,
            // The step is empty: it does not matter whether through this request or somebody
            // else's.
            Outcome::Done | Outcome::Refused if matches!(status, Status::Tombstone(_)) => {
                one.statuses[index] = Status::Done;
            }
            Outcome::Done if status == Status::Done => {
                if matches!(self.ops[index], Op::Create(_) | Op::Overwrite(_)) {
                    self.close_ended(&mut one, index, place);
                }
            }
            Outcome::Refused if status == Status::Refused => {}
            Outcome::Refused if status == Status::Done && what.is_disowned => {
                let is_others = one.value.is_some_and(|value| !self.places(index, value));
                if !(is_others && matches!(self.ops[index], Op::Create(_))) {
                    return None;
                }
            }
            Outcome::Done if status == Status::Refused && self.ops[index] == Op::Delete => {}
            Outcome::FileStat(value) if status == Status::FileStat(value) => {}
            _ => return None,
        }
        Some(one)
    }

    /// Operations that ended before an acknowledged save began take no effect after it.
    fn close_ended(&self, one: &mut Possible, index: usize, place: usize) {
        let mut ended = Vec::new();
        for event in &self.events[..place] {
            match event {
                Event::Begin(begun) if *begun == index => break,
                Event::End(other, _) => ended.push(*other),
                _ => {}
            }
        }
        for other in ended {
            if matches!(one.statuses[other], Status::Pending | Status::Tombstone(_)) {
                one.statuses[other] = Status::Closed;
            }
        }
    }
}

/// The value of a step after an operation took effect, and the status of the operation.
fn effect(op: Op, value: Option<u64>) -> (Option<u64>, Status) {
    match (op, value) {
        (Op::Create(seed), None) | (Op::Overwrite(seed), _) => (Some(seed), Status::Done),
        (Op::Create(_), Some(_)) | (Op::Delete, None) => (value, Status::Refused),
        (Op::Delete, Some(seed)) => (None, Status::Tombstone(seed)),
        (Op::Retire(meant), Some(seed)) if meant == seed => (None, Status::Tombstone(seed)),
        (Op::Retire(_), _) => (value, Status::Refused),
        (Op::Load, _) => (value, Status::FileStat(value)),
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, event) in self.events.iter().enumerate() {
            if place > 0 {
                f.write_str(", ")?;
            }
            match event {
                Event::Begin(index) => write!(f, "{:?} begins", self.ops[*index])?,
                Event::End(index, outcome) => write!(f, "{:?}: {outcome:?}", self.ops[*index])?,
                Event::Seen(value) => write!(f, "seen {value:?}")?,
                Event::SeenBroken => write!(f, "seen without data")?,
            }
        }
        Ok(())
    }
}
