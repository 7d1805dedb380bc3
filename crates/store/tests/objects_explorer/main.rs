//! Every way in which a request to an object store can go wrong, at every request of what is done there.
//!
//! A scenario runs on a server in memory, once without faults, which tells its requests, then again with each
//! fault at each request, and then with several at once, and in other orders, which are drawn from a seed.
//! One who looks on loads every step between any two requests. What is seen and what everybody is told has to
//! be explained by a register ([`history`]): that is all there is to check.
//!
//! That the explorer bites is shown by mutants: the same scenarios, saved and deleted in a wrong way. Each of
//! them has to be caught.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod history;
mod mutate;
mod scenario;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use common::Rng;
use mutate::{MUTANTS, Mutation};
use scenario::{Job, Ran, SCENARIOS, Scenario, run};

/// What all that is drawn is drawn from.
fn seed() -> u64 {
    common::number("PENSTOCK_TORTURE_SEED", 0x5eed)
}

/// Violations are alike: some say it all.
const VIOLATIONS_SHOWN: usize = 8;

fn without_faults(scenario: &'static Scenario, mutation: Option<Mutation>) -> Ran {
    run(&Job {
        scenario,
        seed: 0,
        faults: Vec::new(),
        mutation,
    })
}

/// Makes runs on all cores, until one is wrong where that is enough; tells what was.
fn run_all(jobs: &[Job], is_one_enough: bool) -> Vec<String> {
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let violations = Mutex::new(Vec::new());
    let work = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            for violation in run(job).violations {
                violations
                    .lock()
                    .unwrap()
                    .push(format!("{job}: {violation}"));
                is_over.store(is_one_enough, Ordering::Relaxed);
            }
            if is_over.load(Ordering::Relaxed) {
                break;
            }
        }
    };
    let cores = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        // Half of the time a run waits for a repetition, or for an answer.
        for _ in 0..2 * cores {
            scope.spawn(work);
        }
    });
    violations.into_inner().unwrap()
}

#[test]
fn no_fault_breaks_a_scenario() {
    let mut random = Rng::new(seed());
    // Of the long scenarios every so many of the runs with one fault, unless there is time for all.
    let stride = common::number("PENSTOCK_TORTURE_STRIDE", 8) as usize;
    // Runs of each scenario with what is drawn.
    let count = common::number("PENSTOCK_TORTURE_FAULTS", 16);
    let mut violations = Vec::new();
    for scenario in SCENARIOS {
        let ran = without_faults(scenario, None);
        assert_eq!(ran.violations, Vec::<String>::new(), "{}", scenario.name);
        let mut jobs = faults::drawn(scenario, &ran, None, count, &mut random);
        if scenario.clients.len() == 1 {
            let stride = if scenario.is_long { stride } else { 1 };
            jobs.extend(
                faults::each(scenario, &ran, None)
                    .into_iter()
                    .step_by(stride),
            );
        }
        let found = run_all(&jobs, false);
        eprintln!(
            "{:<32} {:>3} requests {:>5} runs, {} violations",
            scenario.name,
            ran.journal.len(),
            jobs.len(),
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
    // Runs with what is drawn before a mutant is said to survive.
    let count = common::number("PENSTOCK_TORTURE_FAULTS", 256);
    let mut survivors = Vec::new();
    for (name, mutation) in MUTANTS {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == *name);
        let scenario = scenario.unwrap_or_else(|| panic!("there is no scenario {name:?}"));
        let ran = without_faults(scenario, Some(*mutation));
        let mut found = ran.violations.clone();
        let mut jobs = faults::drawn(scenario, &ran, Some(*mutation), count, &mut random);
        if scenario.clients.len() == 1 {
            jobs.extend(faults::each(scenario, &ran, Some(*mutation)));
        }
        if found.is_empty() {
            found = run_all(&jobs, true);
        }
        match found.pop() {
            Some(violation) => eprintln!("{violation}"),
            None => survivors.push(format!("{name}: {mutation:?}")),
        }
    }
    assert_eq!(survivors, Vec::<String>::new());
}
