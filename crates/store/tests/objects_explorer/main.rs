//! Every fault of a request to an object store, at every request of the scenarios.
//!
//! A scenario runs on an in-memory server, once without faults to record its requests, then again
//! with each fault at each request, and then with several faults at once and in other orders, which
//! are drawn from a seed. For two clients that conflict, each point where they can meet is tried as
//! well: some requests of the one, some of the other, and then the rest of both.
//!
//! An observer loads every step between any two requests. A register must explain its observations
//! and all results ([`history`]): that is the only check.
//!
//! Mutants prove that the explorer detects violations: the same scenarios, with wrong ways to save
//! and delete. Each of them must be caught.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod history;
mod meetings;
mod mutate;
mod scenario;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use common::Rng;
use meetings::{Meeting, meetings};
use mutate::{MUTANTS, Mutation};
use penstock_object_server::{Call, Entry, Fault};
use scenario::{Job, Order, Planned, Ran, SCENARIOS, Scenario, run};

/// The seed of all random choices.
fn seed() -> u64 {
    common::number("PENSTOCK_TORTURE_SEED", 0x5eed)
}

/// Violations are similar: a few suffice.
const VIOLATIONS_SHOWN: usize = 8;

/// Short scenarios try this many times as many faults.
const SHORT: usize = 8;

fn without_faults(scenario: &'static Scenario, mutation: Option<Mutation>) -> Ran {
    run(&Job {
        scenario,
        order: Order::Drawn(0),
        faults: Vec::new(),
        mutation,
    })
}

/// Makes runs on all cores, until the first violation if one suffices; returns their number, and
/// the violations.
fn run_all(jobs: &[Job], is_one_enough: bool) -> (usize, Vec<String>) {
    each_of(jobs, is_one_enough, |job| {
        let violations = run(job).violations.into_iter();
        let violations = violations.map(|violation| format!("{job}: {violation}"));
        (1, violations.collect())
    })
}

/// Explores meeting points of two clients as [`run_all`] explores faults.
fn meet_all(meetings: &[Meeting], is_one_enough: bool) -> (usize, Vec<String>) {
    each_of(meetings, is_one_enough, |meeting| {
        meeting.explore(is_one_enough)
    })
}

fn each_of<T: Sync>(
    all: &[T],
    is_one_enough: bool,
    explore: impl Fn(&T) -> (usize, Vec<String>) + Sync,
) -> (usize, Vec<String>) {
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let explored = Mutex::new((0, Vec::new()));
    let work = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (runs, violations) = explore(one);
            is_over.fetch_or(is_one_enough && !violations.is_empty(), Ordering::Relaxed);
            let mut explored = explored.lock().unwrap();
            explored.0 += runs;
            explored.1.extend(violations);
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
    };
    let cores = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        // Runs spend half of their time waiting for retries or responses.
        for _ in 0..2 * cores {
            scope.spawn(work);
        }
    });
    explored.into_inner().unwrap()
}

#[test]
fn no_fault_breaks_a_scenario() {
    let mut random = Rng::new(seed());
    // A fraction of the runs with one fault, more for short scenarios, and of the meeting points,
    // unless there is time for all.
    let stride = common::number("PENSTOCK_TORTURE_STRIDE", 64) as usize;
    // Number of random runs per scenario.
    let count = common::number("PENSTOCK_TORTURE_FAULTS", 3);
    let mut violations = Vec::new();
    // For debugging: only scenarios whose names contain this.
    let wanted = std::env::var("PENSTOCK_TORTURE_SCENARIO").unwrap_or_default();
    let explored = SCENARIOS
        .iter()
        .filter(|scenario| scenario.name.contains(&wanted));
    for scenario in explored {
        let ran = without_faults(scenario, None);
        assert_eq!(ran.violations, Vec::<String>::new(), "{}", scenario.name);
        let mut jobs = faults::drawn(scenario, &ran, None, count, &mut random);
        if scenario.clients.len() == 1 {
            let stride = match scenario.is_long {
                true => stride,
                false => stride.div_ceil(SHORT),
            };
            jobs.extend(
                faults::each(scenario, &ran, None)
                    .into_iter()
                    .step_by(stride),
            );
        }
        let (mut runs, mut found) = run_all(&jobs, false);
        if scenario.clients.len() > 1 {
            // If a client is taken for dead, all of its points are tried, and many of the other's:
            // there is only one point between a sweep's last check and its removal.
            let strides = match scenario.stalls {
                true => (1, stride.div_ceil(SHORT)),
                false => (stride, stride),
            };
            let meetings = meetings(scenario, None, strides);
            let met = meet_all(&meetings, false);
            runs += met.0;
            found.extend(met.1);
        }
        eprintln!(
            "{:<32} {:>3} requests {:>5} runs, {} violations",
            scenario.name,
            ran.journal.len(),
            runs,
            found.len()
        );
        violations.extend(found);
    }
    let count = violations.len();
    violations.truncate(VIOLATIONS_SHOWN);
    assert_eq!(violations, Vec::<String>::new(), "{count} violations");
}

#[test]
fn every_mutant_is_caught() {
    let mut random = Rng::new(seed());
    // Number of random runs before a mutant counts as undetected.
    let count = common::number("PENSTOCK_TORTURE_FAULTS", 256);
    let mut survivors = Vec::new();
    for (name, mutation) in MUTANTS {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == *name);
        let scenario = scenario.unwrap_or_else(|| panic!("there is no scenario {name:?}"));
        let ran = without_faults(scenario, Some(*mutation));
        let mut found = ran.violations.clone();
        let mut jobs = Vec::new();
        if scenario.clients.len() == 1 {
            jobs = faults::each(scenario, &ran, Some(*mutation));
        }
        let drawn = faults::drawn(scenario, &ran, Some(*mutation), count, &mut random);
        jobs.extend(drawn);
        if found.is_empty() && scenario.stalls {
            found = meet_all(&meetings(scenario, Some(*mutation), (1, 1)), true).1;
        } else if found.is_empty() {
            found = run_all(&jobs, true).1;
        }
        match found.pop() {
            Some(violation) => eprintln!("{violation}"),
            None => survivors.push(format!("{name}: {mutation:?}")),
        }
    }
    assert_eq!(survivors, Vec::<String>::new());
}

/// Marks are read and written back with another one, and no digest protects them.
#[test]
fn a_bit_that_changes_in_marks_that_are_written_back_loses_none() {
    let scenario = SCENARIOS.iter().find(|one| one.name == "two that mark");
    let planned = |(client, nth, fault)| Planned { client, nth, fault };
    let faults = [("a", 5, Fault::Held(1)), ("b", 7, Fault::Flipped(777))];
    let ran = run(&Job {
        scenario: scenario.unwrap(),
        order: Order::Drawn(610_486),
        faults: faults.map(planned).into(),
        mutation: None,
    });
    assert_eq!(ran.violations, Vec::<String>::new());
}

/// A manifest is replaced before its response, which denies that it was put: its saver cannot know.
#[test]
fn what_was_done_and_denied_is_repeated_or_lost_to_a_newer_one() {
    let another = "a saver taken for dead, and another";
    for (name, order, faults) in [
        (
            "two that overwrite",
            271_932,
            [("b", 5, Fault::Killed), ("a", 4, Fault::Disowned(409))],
        ),
        (
            another,
            687_982,
            [("a", 4, Fault::Doubled), ("c", 7, Fault::Killed)],
        ),
        (
            another,
            761_184,
            [("a", 4, Fault::Late(1)), ("b", 1, Fault::Killed)],
        ),
    ] {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name);
        let planned = |(client, nth, fault)| Planned { client, nth, fault };
        let ran = run(&Job {
            scenario: scenario.unwrap(),
            order: Order::Drawn(order),
            faults: faults.map(planned).into(),
            mutation: None,
        });
        assert_eq!(ran.violations, Vec::<String>::new(), "{name}, {order}");
    }
}

#[test]
fn a_manifest_that_comes_after_its_deletion_is_swept() {
    let is_it = |scenario: &&Scenario| scenario.name == "two deleters and a saver";
    let scenario = SCENARIOS.iter().find(is_it).unwrap();
    let job = |second, faults| Job {
        scenario,
        // The first deletion, then the save, before which the second deletion may have begun.
        order: Order::Directed {
            first: usize::MAX,
            second,
        },
        faults,
        mutation: None,
    };
    let is_commit = |entry: &&Entry| {
        entry.client == "c" && entry.call == Call::Put && entry.key.ends_with("/manifest.json")
    };
    for second in 0..3 {
        let ran = run(&job(second, Vec::new()));
        assert_eq!(ran.violations, Vec::<String>::new());
        let commit = ran.journal.iter().find(is_commit).unwrap().nth;
        // Between any two requests of the deletion, and after its end.
        for after in (2..16).chain([usize::MAX]) {
            let late = Planned {
                client: "c",
                nth: commit,
                fault: Fault::Late(after),
            };
            let ran = run(&job(second, vec![late]));
            assert_eq!(ran.violations, Vec::<String>::new(), "{after} later");
        }
    }
}
