use std::collections::{HashMap, HashSet, VecDeque};

use penstock_gather::{Index, Policy, replay};
use proptest::prelude::*;

use crate::models::belady_hits;
use crate::traces::{degrees, scans, zipf};

/// A naive model of a cache with a window: the rows in slots, and the announced uses.
struct Watched {
    index: Index,
    slots: usize,
    key_of: HashMap<u32, u64>,
    /// Batches that have not ended: their numbers, and their remaining uses with their keys.
    ahead: VecDeque<(u64, Vec<(u64, u64)>)>,
    /// The number of the first use of each batch.
    firsts: Vec<u64>,
    /// Number of uses of each batch.
    counts: Vec<usize>,
    uses: u64,
    reached: Option<u64>,
    pinned: HashSet<u64>,
}

impl Watched {
    fn new(slots: usize, policy: Policy) -> Watched {
        Watched {
            index: Index::new(slots as u32, policy),
            slots,
            key_of: HashMap::new(),
            ahead: VecDeque::new(),
            firsts: Vec::new(),
            counts: Vec::new(),
            uses: 0,
            reached: None,
            pinned: HashSet::new(),
        }
    }

    /// The next use of a key; uses count from 1.
    fn next(&self, key: u64) -> u64 {
        let mut uses = self.ahead.iter().flat_map(|(_, uses)| uses);
        uses.find(|&&(_, one)| one == key)
            .map_or(u64::MAX, |&(at, _)| at)
    }

    /// Looks up a key, and checks which row was evicted for it.
    fn get(&mut self, key: u64, busy: &HashSet<u32>) -> Result<(), TestCaseError> {
        let has_it = |uses: &[(u64, u64)]| uses.iter().position(|&(_, one)| one == key);
        let mut batches = self.ahead.iter_mut();
        if let Some((number, uses)) = batches.find(|(_, uses)| has_it(uses).is_some())
            && Some(*number) == self.reached
        {
            uses.remove(has_it(uses).unwrap());
        }
        let is_there = self.key_of.values().any(|&one| one == key);
        let found = self.index.find(key);
        prop_assert_eq!(found.is_some(), is_there);
        if let Some(slot) = found {
            prop_assert_eq!(self.key_of[&slot], key);
            return Ok(());
        }
        let next = self.next(key);
        let slot = self.index.admit(key, |slot| !busy.contains(&slot));
        let others: Vec<_> = self
            .key_of
            .iter()
            .filter(|(slot, key)| !busy.contains(slot) && !self.pinned.contains(key))
            .map(|(_, &key)| self.next(key))
            .collect();
        let farthest = others.iter().copied().max();
        let wanted = if self.pinned.contains(&key) { 0 } else { next };
        let Some(slot) = slot else {
            let has_row = |slot: &u32| self.key_of.contains_key(slot);
            let mut slots = 0..self.slots as u32;
            let is_full = slots.all(|slot| has_row(&slot) || busy.contains(&slot));
            prop_assert!(is_full, "a slot is free");
            // Rows without a next use are evicted for any row.
            let is_worth = farthest.is_some_and(|one| one > wanted || one == u64::MAX);
            prop_assert!(!is_worth, "{key} should have come");
            return Ok(());
        };
        if let Some(gone) = self.key_of.insert(slot, key) {
            prop_assert!(!busy.contains(&slot) && !self.pinned.contains(&gone));
            let went = self.next(gone);
            prop_assert_eq!(Some(went), farthest, "{} went", gone);
            prop_assert!(went > wanted || went == u64::MAX);
        }
        Ok(())
    }

    fn cancel(&mut self, batch: u64) {
        self.index.cancel(batch);
        self.ahead.retain(|&(number, _)| number != batch);
        self.reached.take_if(|reached| *reached == batch);
    }

    fn step(&mut self, step: Step, known: &mut u64) -> Result<(), TestCaseError> {
        match step {
            Step::Hint(keys) => {
                prop_assert_eq!(self.index.hint(&keys), *known);
                self.firsts.push(self.uses);
                self.counts.push(keys.len());
                let uses = keys.into_iter().map(|key| {
                    self.uses += 1;
                    (self.uses, key)
                });
                self.ahead.push_back((*known, uses.collect()));
                *known += 1;
            }
            Step::Reach(back) => {
                let batch = known.saturating_sub(back);
                if let Some(reached) = self.reached
                    && reached != batch
                {
                    self.cancel(reached);
                }
                self.index.reach(batch);
                let is_ahead = self.ahead.iter().any(|&(number, _)| number == batch);
                self.reached = is_ahead.then_some(batch);
            }
            Step::Cancel(back) => self.cancel(known.saturating_sub(back)),
            Step::Get(keys, busy) => {
                for key in keys {
                    self.get(key, &busy)?;
                }
            }
            Step::Forget(key) => {
                self.index.forget(key);
                self.key_of.retain(|_, one| *one != key);
            }
            Step::Pin(key) => {
                let count = self.index.pin(&[key]);
                let is_room = self.pinned.len() < self.slots || self.pinned.contains(&key);
                prop_assert_eq!(count == 1, is_room);
                if is_room {
                    self.pinned.insert(key);
                }
            }
            Step::Unpin(key) => {
                self.index.unpin(&[key]);
                self.pinned.remove(&key);
            }
        }
        prop_assert_eq!(self.index.len(), self.key_of.len());
        let oldest = self.ahead.front();
        let first = oldest.map_or(self.uses, |&(number, _)| self.firsts[number as usize]);
        // Ended batches may be kept while an earlier one has not ended.
        let known: usize = self
            .ahead
            .iter()
            .map(|(number, _)| self.counts[*number as usize])
            .sum();
        let kept = self.index.len_ahead() as u64;
        prop_assert!(
            (known as u64..=self.uses - first).contains(&kept),
            "{} keys",
            kept
        );
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Hint(Vec<u64>),
    /// The batch this far before the last one.
    Reach(u64),
    Cancel(u64),
    /// Keys, and slots that may not be evicted.
    Get(Vec<u64>, HashSet<u32>),
    Forget(u64),
    Pin(u64),
    Unpin(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let keys = || prop::collection::vec(0..20_u64, 0..6);
    let busy = prop::collection::hash_set(0..8_u32, 0..4);
    let step = prop_oneof![
        4 => keys().prop_map(Step::Hint),
        4 => (0..8_u64).prop_map(Step::Reach),
        1 => (0..8_u64).prop_map(Step::Cancel),
        10 => (keys(), busy).prop_map(|(keys, busy)| Step::Get(keys, busy)),
        1 => (0..20_u64).prop_map(Step::Forget),
        1 => (0..20_u64).prop_map(Step::Pin),
        1 => (0..20_u64).prop_map(Step::Unpin),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_row_that_is_needed_last_goes_first(
        steps in steps(),
        slots in 1..9_usize,
        policy in prop_oneof![Just(Policy::Sieve), Just(Policy::S3Fifo)],
    ) {
        let mut watched = Watched::new(slots, policy);
        let mut known = 0;
        for step in steps {
            watched.step(step, &mut known)?;
        }
    }

    #[test]
    fn who_knows_everything_has_the_hits_of_belady(
        trace in prop::collection::vec(0..30_u64, 1..400),
        batch_keys in 1..40_usize,
        slots in 1..20_usize,
    ) {
        let mut index = Index::new(slots as u32, Policy::Sieve);
        let hits = replay(&mut index, &trace, batch_keys, usize::MAX);
        prop_assert_eq!(hits, belady_hits(&trace, slots));
    }
}

#[test]
fn misses_of_long_traces_are_those_of_belady() {
    let traces = [
        zipf(2_000, 30_000, 1),
        degrees(2_000, 30_000, 2),
        scans(400, 20, 3),
    ];
    for (number, trace) in traces.iter().enumerate() {
        for slots in [20, 300] {
            let least = trace.len() as u64 - belady_hits(trace, slots);
            for batch_keys in [1, 50, 1_000] {
                let mut index = Index::new(slots as u32, Policy::Sieve);
                let misses = trace.len() as u64 - replay(&mut index, trace, batch_keys, usize::MAX);
                assert_eq!(
                    misses, least,
                    "trace {number}, {slots} slots, {batch_keys} a batch"
                );
            }
        }
    }
}

#[test]
fn the_more_is_known_ahead_the_fewer_misses() {
    let traces = [
        zipf(8_000, 60_000, 1),
        degrees(8_000, 60_000, 2),
        scans(2_000, 20, 3),
    ];
    for policy in [Policy::Sieve, Policy::S3Fifo] {
        for (number, trace) in traces.iter().enumerate() {
            let slots = 1_000;
            let misses = [0, 1, 2, 4, 8, 16, 80].map(|window| {
                let mut index = Index::new(slots, policy);
                trace.len() as u64 - replay(&mut index, trace, 1_000, window)
            });
            let message = format!("{policy:?}, trace {number}: {misses:?}");
            assert!(
                misses.is_sorted_by(|more, fewer| more >= fewer),
                "{message}"
            );
            let least = trace.len() as u64 - belady_hits(trace, slots as usize);
            assert_eq!(misses[6], least, "{message}");
        }
    }
}
