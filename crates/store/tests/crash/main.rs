//! Every state that a power cut can leave: the store opens, what was acknowledged is there bit for
//! bit, nothing is a mix, and nothing is damaged.
//!
//! A scenario runs for real, on real files, while the decorators of `penstock_io::faulty` write down
//! what it does to storage. For each moment of that log every state that a cut then could leave is
//! laid out as files and looked at as a user would: `Store`, `Checkpoint`, `load`, `sweep`, and the
//! next save. The model of a cut is that of `penstock_io::faulty::crash`, weaker than any file
//! system in use.
//!
//! That the explorer bites is shown by mutants: the same scenario with one sync left out or one step
//! of the commit carried out too late. Each of them has to be caught.

#[path = "../common/mod.rs"]
mod common;
mod explore;
mod mutate;
mod scenario;

use std::sync::Arc;

use explore::{Limits, explore};
use mutate::{Mutant, Mutation, step};
use scenario::{SCENARIOS, Scenario, States, World};

/// States of one moment: more than any moment of the small scenarios has.
const EVERY_STATE: Limits = Limits {
    states_per_moment: 1 << 16,
    seed: 0,
    must_be_exhaustive: true,
    stop_at_violation: false,
};

/// Runs a scenario, mutated or not; `None` if the mutant was refused by the store itself.
fn run(scenario: &Scenario, mutation: Option<Mutation>) -> Option<World> {
    let mut world = World::new(Arc::new(Mutant::default()));
    (scenario.set_up)(&mut world).expect("the set-up is not mutated");
    world.begin();
    if let Some(mutation) = mutation {
        world.mutant.arm(mutation);
    }
    let result = (scenario.run)(&mut world);
    match mutation {
        None => {
            result.unwrap_or_else(|error| panic!("{}: {}", scenario.name, error.full_message()))
        }
        Some(mutation) => {
            let is_refused = result.is_err();
            if is_refused {
                return None;
            }
            assert!(
                world.mutant.is_done(),
                "{}: {mutation} never came to be",
                scenario.name
            );
        }
    }
    Some(world)
}

#[test]
fn no_cut_breaks_a_small_scenario() {
    for scenario in SCENARIOS {
        let world = run(scenario, None).expect("it is no mutant");
        let limits = match scenario.states {
            States::Every => EVERY_STATE,
            States::Sampled(states_per_moment) => Limits {
                states_per_moment,
                must_be_exhaustive: false,
                ..EVERY_STATE
            },
        };
        let found = explore(&world, limits);
        eprintln!(
            "{:<28} {:>3} moments {:>7} states {:>7} distinct, {} violations",
            scenario.name,
            found.moments,
            found.states,
            found.distinct,
            found.violations.len()
        );
        assert_eq!(found.violations, Vec::<String>::new(), "{}", scenario.name);
    }
}

/// Several shards of more than one extent, two workers with several requests in flight, completions
/// late and in any order: too many states for all of them.
#[test]
fn no_cut_of_a_sample_breaks_a_large_scenario() {
    let seed = common::seed("PENSTOCK_TORTURE_SEED", 0x5eed);
    let states_per_moment = common::count("PENSTOCK_TORTURE_STATES", 6);
    for &engine in common::engines() {
        let mut world = World::large(engine, seed);
        world.save(1, 1, false).unwrap();
        world.begin();
        world.save(2, 2, false).unwrap();
        world.save(1, 3, true).unwrap();
        world.retain(1, 2).unwrap();
        world.save_ranks(3, &[4, 5]).unwrap();
        world.delete(2).unwrap();
        let limits = Limits {
            states_per_moment,
            seed,
            must_be_exhaustive: false,
            stop_at_violation: false,
        };
        let found = explore(&world, limits);
        eprintln!(
            "large, {engine}: {} moments, {} states, seed {seed:#x}",
            found.moments, found.states
        );
        assert_eq!(found.violations, Vec::<String>::new(), "{engine}");
    }
}

/// What has to be caught, by the scenario that catches it.
fn mutants() -> Vec<(&'static str, Mutation)> {
    use Mutation::{Late, Skip};
    let late = |held, after| Late { held, after };
    let (shard, part, manifest) = (
        step("sync shard", 1),
        step("sync part", 1),
        step("sync manifest", 1),
    );
    let (named, publish) = (step("rename part", 1), step("publish", 1));
    let (first_sync, last_sync) = (step("sync step", 1), step("sync step", 2));
    let mut mutants = vec![
        // The way to the directory, each level of it.
        ("first save", Skip(step("sync above", 1))),
        ("first save", Skip(step("sync store", 1))),
        ("second save", Skip(step("sync store", 1))),
        ("save after a dead one", Skip(step("sync store", 1))),
        // Removal: the manifest first, and durably.
        ("delete", Skip(step("sync step", 1))),
        ("delete", Skip(step("sync store", 1))),
        (
            "delete",
            late(step("remove manifest", 1), step("remove data", 1)),
        ),
        ("delete", late(step("sync step", 1), step("remove data", 1))),
        (
            "retention",
            late(step("remove manifest", 1), step("remove data", 1)),
        ),
        // What is remembered of checkpoints.
        ("mark", Skip(step("sync marks", 1))),
        ("mark", Skip(step("sync store", 1))),
        ("mark", late(step("sync marks", 1), step("rename marks", 1))),
        ("protect", Skip(step("sync step", 1))),
        // Retention before the new checkpoint is durable.
        ("retention", late(last_sync, step("remove manifest", 1))),
        (
            "retention",
            late(step("sync store", 1), step("remove manifest", 1)),
        ),
        // What was replaced goes after its replacement is durable.
        ("overwrite", late(last_sync, step("remove data", 1))),
        ("overwrite", late(publish, step("remove data", 1))),
        ("sweep after a lost sync", Skip(step("sync step", 1))),
        (
            "sweep after a lost sync",
            late(step("sync step", 1), step("remove data", 1)),
        ),
    ];
    for scenario in [
        "first save",
        "second save",
        "overwrite",
        "retention",
        "save after a dead one",
    ] {
        for skipped in [shard, part, manifest, first_sync, last_sync] {
            mutants.push((scenario, Skip(skipped)));
        }
        for held in [shard, part, named, first_sync, manifest] {
            mutants.push((scenario, late(held, publish)));
        }
    }
    // Both ranks sync their own; the last sync of the step is the coordinator's.
    let of_ranks = [
        shard,
        step("sync shard", 2),
        part,
        step("sync part", 2),
        step("sync step", 2),
        manifest,
    ];
    for held in of_ranks {
        mutants.push(("two ranks", Skip(held)));
        mutants.push(("two ranks", late(held, publish)));
    }
    mutants.push(("two ranks", late(step("rename part", 2), publish)));
    mutants.push(("two ranks", Skip(step("sync step", 3))));
    mutants
}

#[test]
fn every_mutant_is_caught() {
    let mut survivors = Vec::new();
    let mutants = mutants();
    for (name, mutation) in &mutants {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == *name);
        let scenario = scenario.unwrap_or_else(|| panic!("there is no scenario {name:?}"));
        let Some(world) = run(scenario, Some(*mutation)) else {
            eprintln!("{name}: {mutation}: the store refuses");
            continue;
        };
        // A few states of each moment mostly do; before one is said to survive, all of them.
        let violation = [1 << 6, 1 << 16].into_iter().find_map(|states_per_moment| {
            let limits = Limits {
                states_per_moment,
                must_be_exhaustive: false,
                stop_at_violation: true,
                ..EVERY_STATE
            };
            explore(&world, limits).violations.pop()
        });
        match violation {
            Some(violation) => eprintln!("{name}: {mutation}: {violation}"),
            None => survivors.push(format!("{name}: {mutation}")),
        }
    }
    eprintln!("{} mutants, {} survive", mutants.len(), survivors.len());
    assert_eq!(survivors, Vec::<String>::new());
}
