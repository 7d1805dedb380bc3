//! Every state that a power cut can leave: the store opens, acknowledged data exists bit for bit,
//! nothing is a mix, and nothing is damaged.
//!
//! A scenario runs on real files, while the decorators of `penstock_io::faulty` log its operations
//! on storage. For each moment of that log, every state that a power cut then could leave is laid
//! out as files and checked as a user would: with `Store`, `Checkpoint`, `load`, `sweep`, and the
//! next save. The model of a power cut is that of `penstock_io::faulty::crash`, weaker than any
//! file system in use.
//!
//! Mutants prove that the explorer detects violations: the same scenario with one sync left out, or
//! one step of the commit carried out too late. Each of them must be caught.

#[path = "../common/mod.rs"]
mod common;
mod explore;
mod mutate;
mod scenario;

use std::sync::Arc;

use common::Rng;
use explore::{Limits, explore};
use mutate::{Mutant, Mutation, Step, step};
use penstock_store::{Error, Result};
use scenario::{SCENARIOS, Scenario, States, World};

/// Number of states per moment, more than any moment of the small scenarios has.
const EVERY_STATE: Limits = Limits {
    states_per_moment: 1 << 16,
    seed: 0,
    must_be_exhaustive: true,
    stop_at_violation: false,
};

/// The seed of all random options.
fn seed() -> u64 {
    common::number("PENSTOCK_TORTURE_SEED", 0x5eed)
}

/// Runs a scenario, mutated or not, with the next random options.
fn run(scenario: &Scenario, mutation: Option<Mutation>, random: &mut Rng) -> Result<World> {
    let mut world = World::new(Arc::new(Mutant::default()), random);
    (scenario.set_up)(&mut world).expect("the set-up is not mutated");
    world.begin();
    if let Some(mutation) = mutation {
        world.mutant.arm(mutation);
    }
    (scenario.run)(&mut world)?;
    if let Some(mutation) = mutation {
        let is_done = world.mutant.is_done();
        assert!(is_done, "{}: {mutation} never came to be", scenario.name);
    }
    Ok(world)
}

#[test]
fn no_cut_breaks_a_small_scenario() {
    let mut random = Rng::new(seed());
    let draws = common::number("PENSTOCK_TORTURE_DRAWS", 1);
    // A limit per moment, unless there is time for all: except in saves, most moments have fewer.
    let states_max = common::number("PENSTOCK_TORTURE_SMALL_STATES", 32);
    let each = SCENARIOS
        .iter()
        .flat_map(|scenario| (0..draws).map(move |_| scenario));
    for scenario in each {
        let world = run(scenario, None, &mut random);
        let world = world.unwrap_or_else(|e| panic!("{}: {}", scenario.name, e.full_message()));
        let limits = match scenario.states {
            States::Every if scenario.name == "first save" => EVERY_STATE,
            States::Every => Limits {
                states_per_moment: EVERY_STATE.states_per_moment.min(states_max),
                must_be_exhaustive: states_max >= EVERY_STATE.states_per_moment,
                ..EVERY_STATE
            },
            States::Sampled(states_per_moment) => Limits {
                states_per_moment: states_per_moment.min(states_max),
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
        let options = &world.options;
        let what = format!("{} with {options:?}", scenario.name);
        assert_eq!(found.violations, Vec::<String>::new(), "{what}");
    }
}

/// Several shards of more than one extent, two workers with several requests in flight, completions
/// late and in any order: too many states to check all.
#[test]
fn no_cut_of_a_sample_breaks_a_large_scenario() {
    let seed = seed();
    let states_per_moment = common::number("PENSTOCK_TORTURE_STATES", 2);
    let mut random = Rng::new(seed);
    for &engine in common::engines() {
        let mut world = World::large(engine, seed, &mut random);
        world.save(1, 1, false).unwrap();
        world.begin();
        world.save(2, 2, false).unwrap();
        world.save(1, 3, true).unwrap();
        world.hold(6).unwrap();
        world.save_held(4, 6, false).unwrap();
        world.release_file(6).unwrap();
        world.retain(1, 2).unwrap();
        world.save_ranks(3, &[4, 5], false).unwrap();
        world.delete(2).unwrap();
        let limits = Limits {
            states_per_moment,
            seed,
            must_be_exhaustive: false,
            stop_at_violation: false,
        };
        let found = explore(&world, limits);
        eprintln!(
            "large, {:?}: {} moments, {} states, seed {seed:#x}",
            world.options, found.moments, found.states
        );
        assert_eq!(found.violations, Vec::<String>::new(), "{engine}");
    }
}

/// A save itself detects before it publishes that a part does not have its name yet.
const REFUSED: Mutation = Mutation::Late {
    held: step("rename part", 1),
    after: step("publish", 1),
};

/// The mutants that must be caught, each with the scenario that catches it.
fn mutants() -> Vec<(&'static str, Mutation)> {
    let mut mutants = mutants_of_names();
    mutants.extend(mutants_of_saves());
    mutants.extend(mutants_without_locks());
    mutants
}

const fn late(held: Step, after: Step) -> Mutation {
    Mutation::Late { held, after }
}

/// Mutants of saves: each of their syncs, and each step before the publication.
fn mutants_of_saves() -> Vec<(&'static str, Mutation)> {
    use Mutation::Skip;
    let mut mutants = Vec::new();
    let (shard, part, manifest) = (
        step("sync shard", 1),
        step("sync part", 1),
        step("sync manifest", 1),
    );
    let (named, publish) = (step("rename part", 1), step("publish", 1));
    let (first_sync, last_sync) = (step("sync step", 1), step("sync step", 2));
    let saves = [
        "first save",
        "second save",
        "overwrite",
        "retention",
        "save after a dead one",
    ];
    for scenario in saves {
        for skipped in [shard, part, manifest, first_sync, last_sync] {
            mutants.push((scenario, Skip(skipped)));
        }
        for held in [shard, part, named, first_sync, manifest] {
            mutants.push((scenario, late(held, publish)));
        }
    }
    // Sidecars, and their copies before there is a manifest.
    let placed = step("place copy", 1);
    mutants.push(("save of a model", Skip(step("sync beside", 1))));
    mutants.push(("save of a model", Skip(step("sync copy", 2))));
    mutants.push(("save of a model", Skip(placed)));
    mutants.push(("save of a model", late(placed, publish)));
    mutants.push(("save of a model", late(step("sync step", 3), publish)));
    mutants.push(("delete of a model", Skip(step("remove copy", 1))));
    mutants.push(("overwrite of a model", Skip(step("sync beside", 1))));
    mutants.push(("overwrite of a model", late(step("sync step", 2), publish)));
    mutants.push(("overwrite where nothing is", late(placed, publish)));
    // A linked file is already durable, and its new name becomes durable with the part's.
    let of_files = [
        "save of a file",
        "save of a file that goes at once",
        "overwrite by a file",
    ];
    for scenario in of_files {
        mutants.push((scenario, Skip(first_sync)));
        mutants.push((scenario, late(first_sync, publish)));
    }
    // Each rank syncs its own files; the last sync of the step is the coordinator's.
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
    // The second change of the manifest's name is the one that succeeds.
    let renamed = step("publish", 2);
    for held in [shard, part, first_sync, manifest] {
        mutants.push(("save without links", late(held, renamed)));
    }
    mutants
}

/// Mutants of directories, removals and marks.
fn mutants_of_names() -> Vec<(&'static str, Mutation)> {
    use Mutation::Skip;
    let (first_sync, last_sync) = (step("sync step", 1), step("sync step", 2));
    let (store, above) = (step("sync store", 1), step("sync above", 1));
    let removed = step("remove data", 1);
    vec![
        // Each level of the path to the directory, whoever created it.
        ("first save", Skip(above)),
        ("first save", Skip(store)),
        ("second save", Skip(store)),
        ("save after a dead one", Skip(store)),
        ("save below a dead one's root", Skip(above)),
        // Removal: the manifest first, and durably.
        ("delete", Skip(last_sync)),
        ("delete", Skip(store)),
        ("delete", late(step("remove manifest", 1), removed)),
        ("delete", late(last_sync, removed)),
        ("delete a protected one", Skip(step("sync step", 3))),
        ("delete after a lost unprotect", Skip(first_sync)),
        ("retention", late(step("remove manifest", 1), removed)),
        // A replaced checkpoint is removed after its replacement is durable.
        ("overwrite", late(last_sync, removed)),
        (
            "overwrite by two ranks",
            late(step("sync step", 3), removed),
        ),
        // Data that is only visible is made durable before something else is removed in its favour,
        // or before a caller learns that it exists or is gone.
        ("sweep after a lost sync", Skip(first_sync)),
        ("sweep after a lost sync", late(first_sync, removed)),
        ("retention after a lost sync", Skip(first_sync)),
        (
            "retention after a lost sync",
            late(first_sync, step("remove manifest", 1)),
        ),
        ("save again after a lost sync", Skip(first_sync)),
        ("delete again after a lost sync", Skip(store)),
        ("mark again after a lost sync", Skip(store)),
        // Marks of checkpoints.
        ("mark", Skip(step("sync marks", 1))),
        ("mark", Skip(store)),
        ("mark", late(step("sync marks", 1), step("rename marks", 1))),
        ("mark as damaged", Skip(step("sync marks", 1))),
        ("mark as damaged", Skip(store)),
        ("protect", Skip(last_sync)),
        ("unprotect", Skip(first_sync)),
        ("scrub beside damage", Mutation::Unread),
        // A damaged step stays, whatever takes its place.
        ("quarantine", Skip(store)),
        ("save over a damaged one", Skip(store)),
        ("save over one half quarantined", Skip(store)),
    ]
}

/// Mutants of deletions where locks are not visible to everybody.
fn mutants_without_locks() -> Vec<(&'static str, Mutation)> {
    use Mutation::Skip;
    let removed = step("remove data", 1);
    let (taken_is_synced, put_back) = (step("sync step", 2), step("put back", 1));
    vec![
        ("delete without locks", Skip(taken_is_synced)),
        ("delete without locks", Skip(step("sync store", 1))),
        ("delete without locks", late(taken_is_synced, removed)),
        (
            "retention without locks",
            late(step("sync step", 5), removed),
        ),
        // The save that comes in between has its own syncs.
        ("delete beside an overwrite", Skip(put_back)),
        ("delete beside an overwrite", Skip(step("sync step", 4))),
    ]
}

#[test]
fn every_mutant_is_caught() {
    let mut survivors = Vec::new();
    let mut random = Rng::new(seed());
    let mutants = mutants();
    for (name, mutation) in &mutants {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == *name);
        let scenario = scenario.unwrap_or_else(|| panic!("there is no scenario {name:?}"));
        let world = match run(scenario, Some(*mutation), &mut random) {
            Ok(world) => world,
            Err(Error::Storage { operation, .. }) if *mutation == REFUSED => {
                assert_eq!(operation, "publish", "{name}: {mutation}");
                eprintln!("{name}: {mutation}: not published");
                continue;
            }
            Err(error) => panic!("{name}: {mutation}: {}", error.full_message()),
        };
        // A few states of each moment usually suffice; all are checked before a mutant counts as
        // undetected.
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
            None => survivors.push(format!("{name}: {mutation}, {:?}", world.options)),
        }
    }
    eprintln!("{} mutants, {} survive", mutants.len(), survivors.len());
    assert_eq!(survivors, Vec::<String>::new());
}

type Call = fn(&mut World) -> Result<()>;

/// The calls of a run that continues after a crash of its process.
const NEXT: &[(&str, Call)] = &[
    ("save", |world| world.save(2, 7, false)),
    ("save over", |world| world.save_over(2, 7)),
    ("overwrite", |world| world.save(2, 7, true)),
    ("overwrite the first", |world| world.save(1, 7, true)),
    ("save by ranks", |world| world.save_ranks(3, &[7, 8], false)),
    ("save and retain", |world| {
        world.save(3, 7, false)?;
        world.retain(1, 3)
    }),
    ("retain", |world| world.retain(1, u64::MAX)),
    ("delete", |world| world.delete(2)),
    ("delete the first", |world| world.delete_protected(1)),
    ("mark", |world| world.mark(2, false)),
    ("mark and retain", |world| {
        world.mark(2, false)?;
        world.retain(1, u64::MAX)
    }),
    ("protect", |world| world.protect(1, true)),
    ("sweep", |world| world.sweep()),
];

/// A process or its disk dies before each change in turn: the stored data is visible but not
/// durable. Another process continues from there, and then the power is cut.
#[test]
fn no_cut_breaks_what_goes_on_after_a_death() {
    let dying = [
        "first save",
        "second save",
        "overwrite",
        "retention",
        "two ranks",
        "delete",
        "mark",
        "unprotect",
        "delete without locks",
        "quarantine",
    ];
    // A fixed fraction of them, unless there is time for all.
    let stride = common::number("PENSTOCK_TORTURE_STRIDE", 83);
    let (mut counted, mut runs, mut states, mut violations) = (0, 0, 0, Vec::new());
    let mut random = Rng::new(seed());
    for scenario in SCENARIOS
        .iter()
        .filter(|scenario| dying.contains(&scenario.name))
    {
        for (next, call) in NEXT {
            for nth in 1.. {
                let mut world = World::in_memory(Arc::new(Mutant::default()), &mut random);
                (scenario.set_up)(&mut world).unwrap();
                world.mutant.die(nth);
                let _ = (scenario.run)(&mut world);
                let has_died = world.mutant.is_done();
                world.mutant.revive();
                counted += 1;
                if has_died && counted % stride > 0 {
                    continue;
                }
                world.begin();
                let result = call(&mut world);
                let what = format!("{}, dead from change {nth} on, then {next}", scenario.name);
                match result {
                    Ok(()) | Err(Error::NotFound { .. } | Error::Incomplete { .. }) => {}
                    Err(error) => panic!("{what}: {}", error.full_message()),
                }
                let limits = Limits {
                    states_per_moment: 16,
                    seed: nth as u64,
                    must_be_exhaustive: false,
                    stop_at_violation: true,
                };
                let mut found = explore(&world, limits);
                runs += 1;
                states += found.states;
                violations.extend(found.violations.pop().map(|v| format!("{what}: {v}")));
                if !has_died {
                    break;
                }
            }
        }
    }
    eprintln!("{runs} runs, {states} states");
    assert_eq!(violations, Vec::<String>::new());
}
