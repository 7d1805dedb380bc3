//! Explores every state that a power cut can leave: flushed rows are there, no row is torn, and
//! the last updates are lost first. The model of a cut is that of `penstock_io::faulty::crash`.

use penstock_gather::Error;
use penstock_io::engine::EngineChoice;
use penstock_io::file::Direct;

use crate::explore::{Sizes, World, explore};
use crate::mutant::Step;

/// A sequence of calls, and the state before it.
struct Scenario {
    name: &'static str,
    /// Bytes of a log and of a record; 0 stands for the smallest possible, a record of one row.
    sizes: Sizes,
    set_up: fn(&mut World) -> Result<(), Error>,
    run: fn(&mut World) -> Result<(), Error>,
}

const MANY: u64 = 64 << 10;

fn made(world: &mut World) -> Result<(), Error> {
    world.create()?;
    world.open()
}

fn written(world: &mut World) -> Result<(), Error> {
    made(world)?;
    world.update(&[0, 3])?;
    world.flush()
}

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "create",
        sizes: (MANY, MANY),
        set_up: |_| Ok(()),
        run: World::create,
    },
    Scenario {
        name: "first flush",
        sizes: (MANY, MANY),
        set_up: made,
        run: |world| {
            world.update(&[0, 2])?;
            world.flush()
        },
    },
    Scenario {
        name: "next flushes",
        sizes: (MANY, MANY),
        set_up: written,
        run: |world| {
            world.update(&[0, 1])?;
            world.flush()?;
            world.update(&[0])?;
            world.flush()
        },
    },
    Scenario {
        name: "flush after opening",
        sizes: (MANY, MANY),
        set_up: |world| {
            written(world)?;
            world.open()
        },
        run: |world| {
            world.update(&[0, 1])?;
            world.flush()
        },
    },
    Scenario {
        name: "opening after what was not flushed",
        sizes: (MANY, 0),
        // Most of its records are in the log, durable or not.
        set_up: written,
        run: |world| {
            world.update(&[2, 3, 1])?;
            world.open()?;
            world.update(&[2])?;
            world.flush()
        },
    },
    Scenario {
        name: "flush of what was found",
        sizes: (MANY, 0),
        set_up: written,
        // The writer did not sync the log; the process that finds it makes it durable.
        run: |world| {
            world.update(&[2, 3, 1])?;
            world.open()?;
            world.flush()
        },
    },
    Scenario {
        name: "a log a row",
        sizes: (0, 0),
        set_up: made,
        run: |world| {
            world.update(&[0, 1, 0])?;
            world.flush()
        },
    },
    Scenario {
        name: "compact",
        sizes: (MANY, MANY),
        set_up: written,
        run: World::compact,
    },
    Scenario {
        name: "compact of several logs",
        sizes: (0, 0),
        set_up: written,
        run: World::compact,
    },
    Scenario {
        name: "compact beside writes",
        sizes: (MANY, MANY),
        set_up: written,
        run: |world| world.compact_during_writes(&[0, 1]),
    },
    Scenario {
        name: "writes after a compaction",
        sizes: (MANY, MANY),
        set_up: |world| {
            written(world)?;
            world.compact()
        },
        run: |world| {
            world.update(&[3])?;
            world.flush()
        },
    },
];

fn world(scenario: &Scenario, turn: usize, skipped: Option<Step>) -> World {
    let (engine, direct) = [
        (EngineChoice::Auto, Direct::Auto),
        (EngineChoice::Threads, Direct::Off),
    ][turn];
    let mut world = World::new(engine, direct, scenario.sizes);
    (scenario.set_up)(&mut world).expect("the set-up is not mutated");
    world.begin();
    world.mutant.arm(skipped);
    let done = (scenario.run)(&mut world);
    if let Some(step) = skipped {
        assert!(
            world.mutant.is_done(),
            "{}: {step:?} never came",
            scenario.name
        );
    }
    done.unwrap_or_else(|error| panic!("{}: {error}", scenario.name));
    world
}

#[test]
fn no_cut_loses_what_was_flushed_or_tears_a_row() {
    for scenario in SCENARIOS {
        for turn in 0..2 {
            let found = explore(&world(scenario, turn, None));
            eprintln!(
                "{:<36} {:>3} moments {:>6} states {:>5} distinct",
                scenario.name, found.moments, found.states, found.distinct
            );
            assert_eq!(found.violations, Vec::<String>::new(), "{}", scenario.name);
        }
    }
}

/// Mutants that must be caught, by the scenario that catches each.
const MUTANTS: &[(&str, Step)] = &[
    ("create", ("sync piece", 1)),
    ("create", ("sync piece", 2)),
    ("create", ("sync manifest", 1)),
    ("create", ("sync above", 1)),
    ("create", ("sync home", 1)),
    ("create", ("sync home", 2)),
    ("create", ("sync home", 3)),
    ("flush of what was found", ("sync log", 1)),
    // The log's first block, the manifest that names the log, and the records.
    ("first flush", ("sync log", 1)),
    ("first flush", ("sync log", 2)),
    ("first flush", ("sync manifest", 1)),
    ("first flush", ("sync home", 1)),
    ("first flush", ("sync home", 2)),
    ("next flushes", ("sync log", 1)),
    ("next flushes", ("sync log", 2)),
    ("flush after opening", ("sync log", 2)),
    ("flush after opening", ("sync log", 3)),
    ("flush after opening", ("sync manifest", 1)),
    ("opening after what was not flushed", ("sync log", 1)),
    ("flush after opening", ("publish", 2)),
    ("a log a row", ("sync log", 2)),
    ("a log a row", ("sync log", 4)),
    ("a log a row", ("sync manifest", 2)),
    ("compact", ("sync piece", 1)),
    ("compact", ("sync piece", 2)),
    ("compact", ("sync manifest", 2)),
    ("compact", ("sync manifest", 3)),
    ("compact", ("publish", 2)),
    ("compact", ("publish", 4)),
    ("compact", ("sync home", 3)),
    ("compact beside writes", ("sync log", 1)),
    ("writes after a compaction", ("sync log", 1)),
];

#[test]
fn no_mutant_survives() {
    let survives = |(name, step): &&(&str, Step)| {
        let scenario = SCENARIOS.iter().find(|one| one.name == *name);
        let found = explore(&world(scenario.expect("it is there"), 0, Some(*step)));
        found.violations.is_empty()
    };
    let survivors: Vec<_> = MUTANTS.iter().filter(survives).collect();
    assert!(survivors.is_empty(), "{survivors:?}");
}
