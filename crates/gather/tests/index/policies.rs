use penstock_gather::{Index, Policy, replay};
use proptest::prelude::*;

use crate::models::{Model, S3Fifo, Sieve};
use crate::traces::{Numbers, degrees, scans, zipf};

fn model(policy: Policy, slots: usize) -> Box<dyn Model> {
    match policy {
        Policy::S3Fifo => Box::new(S3Fifo::new(slots)),
        _ => Box::new(Sieve::new(slots)),
    }
}

fn get(index: &mut Index, key: u64) -> bool {
    let found = index.find(key);
    if found.is_none() {
        assert!(index.admit(key, |_| true).is_some());
    }
    found.is_some()
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Get(u64),
    Forget(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..24_u64).prop_map(Step::Get),
        6 => (0..6_u64).prop_map(Step::Get),
        1 => (0..24_u64).prop_map(Step::Forget),
    ];
    prop::collection::vec(step, 0..300)
}

proptest! {
    #[test]
    fn each_row_stays_as_long_as_in_the_paper(
        steps in steps(),
        slots in 1..16_usize,
        policy in prop_oneof![Just(Policy::Sieve), Just(Policy::S3Fifo)],
    ) {
        let mut index = Index::new(slots as u32, policy);
        let mut model = model(policy, slots);
        for (at, &step) in steps.iter().enumerate() {
            match step {
                Step::Get(key) => prop_assert_eq!(get(&mut index, key), model.get(key), "{}", at),
                Step::Forget(key) => {
                    index.forget(key);
                    model.forget(key);
                }
            }
            prop_assert!(index.len() <= slots);
        }
    }
}

#[test]
fn hits_of_long_traces_are_those_of_the_paper() {
    let traces = [
        zipf(2_000, 30_000, 1),
        degrees(2_000, 30_000, 2),
        scans(400, 20, 3),
    ];
    for policy in [Policy::Sieve, Policy::S3Fifo] {
        for (number, trace) in traces.iter().enumerate() {
            for slots in [20, 300] {
                let mut model = model(policy, slots);
                let expected: u64 = trace.iter().map(|&key| u64::from(model.get(key))).sum();
                let mut index = Index::new(slots as u32, policy);
                let hits = replay(&mut index, trace, 64, 0);
                assert_eq!(hits, expected, "{policy:?}, trace {number}, {slots} slots");
            }
        }
    }
}

#[test]
fn a_key_that_comes_is_a_hit_and_one_that_failed_is_not() {
    for policy in [Policy::Sieve, Policy::S3Fifo] {
        let mut index = Index::new(2, policy);
        let slot = index.admit(5, |_| true);
        assert!(slot.is_some());
        assert_eq!(index.find(5), slot);
        index.forget(5);
        index.forget(5);
        assert_eq!(index.find(5), None);
        assert!(index.is_empty());
        assert!(index.admit(6, |_| true).is_some());
        assert!(index.admit(7, |_| true).is_some());
        assert!(index.find(6).is_some());
    }
}

#[test]
fn nothing_is_kept_where_nothing_is_to_be() {
    let mut index = Index::new(8, Policy::None);
    index.pin(&[1]);
    index.hint(&[1, 1]);
    index.reach(0);
    assert_eq!(index.find(1), None);
    assert_eq!(index.admit(1, |_| true), None);
    for policy in [Policy::Sieve, Policy::S3Fifo, Policy::Static] {
        let mut index = Index::new(0, policy);
        assert_eq!(index.pin(&[1]), 0);
        assert_eq!(index.hint(&[1]), 0);
        assert_eq!(index.admit(1, |_| true), None);
    }
}

#[test]
fn a_static_cache_has_what_is_pinned_and_nothing_else() {
    let mut index = Index::new(2, Policy::Static);
    assert_eq!(index.pin(&[3, 4]), 2);
    index.hint(&[9]);
    assert_eq!(index.admit(9, |_| true), None);
    assert!(index.admit(3, |_| true).is_some());
    assert!(index.admit(4, |_| true).is_some());
    index.unpin(&[3]);
    assert_eq!(index.pin(&[5]), 1);
    assert!(
        index.find(3).is_some(),
        "it stays as long as nobody else comes"
    );
    assert!(index.admit(5, |_| true).is_some());
    assert_eq!(index.find(3), None);
    assert!(index.find(4).is_some());
}

#[test]
fn pinned_rows_stay_and_no_more_are_pinned_than_there_are_slots() {
    for policy in [Policy::Sieve, Policy::S3Fifo, Policy::Static] {
        let mut index = Index::new(100, policy);
        let keys: Vec<u64> = (0..250).collect();
        assert_eq!(index.pin(&keys[..40]), 40);
        for &key in &keys[..40] {
            assert!(index.admit(key, |_| true).is_some());
        }
        replay(&mut index, &(1000..5000).collect::<Vec<_>>(), 50, 4);
        assert!(keys[..40].iter().all(|&key| index.find(key).is_some()));
        assert_eq!(index.pin(&keys), 100);
        for &key in &keys[40..100] {
            assert!(index.admit(key, |_| true).is_some(), "{policy:?} {key}");
        }
        assert_eq!(index.admit(200, |_| true), None);
        assert_eq!(index.len(), 100);
        index.forget(7);
        assert_eq!(index.admit(7, |_| false), None);
        assert!(index.admit(7, |_| true).is_some(), "it is pinned still");
        replay(&mut index, &(1000..5000).collect::<Vec<_>>(), 50, 4);
        assert!(keys[..100].iter().all(|&key| index.find(key).is_some()));
    }
}

#[test]
fn who_may_not_go_stays_and_few_are_asked() {
    for policy in [Policy::Sieve, Policy::S3Fifo] {
        for window in [0, 3] {
            let mut index = Index::new(1_000, policy);
            let mut numbers = Numbers(4);
            let mut key_of = vec![None; 1_000];
            let trace = zipf(4_000, 20_000, 5);
            for batch in trace.chunks(100) {
                if window > 0 {
                    let number = index.hint(batch);
                    index.reach(number);
                }
                // All, none, or some of them may not be evicted.
                let busy = numbers.next() % 3;
                for &key in batch {
                    if index.find(key).is_some() {
                        continue;
                    }
                    let mut asked = 0;
                    let salt = numbers.next();
                    let may_go = |slot: u32| match busy {
                        0 => false,
                        1 => true,
                        _ => (u64::from(slot) ^ salt).count_ones().is_multiple_of(4),
                    };
                    let slot = index.admit(key, |slot| {
                        asked += 1;
                        may_go(slot)
                    });
                    assert!(asked <= 100, "{policy:?}: {asked}");
                    if let Some(slot) = slot {
                        let gone = key_of[slot as usize].replace(key);
                        assert!(gone.is_none() || may_go(slot), "{policy:?}");
                    }
                }
            }
            let there = key_of
                .iter()
                .flatten()
                .filter(|&&key| index.find(key).is_some());
            assert_eq!(there.count(), 1_000);
        }
    }
}
