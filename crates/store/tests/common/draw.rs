//! Random options: promises must hold for all of them.

use std::path::Path;

use penstock_io::engine::EngineChoice;
use penstock_io::file::{Direct, File};
use penstock_store::options::Options;

use super::{Rng, engines};

/// Random options for a checkpoint in a directory, each member drawn independently; their `Debug`
/// output shows them. Options with another file system or engine take over the rest with `..`.
pub fn options(random: &mut Rng, directory: &Path) -> Options {
    let mut engines = engines().to_vec();
    engines.push(EngineChoice::Auto);
    // The same draws on every file system; an unsupported choice is replaced by `Auto`.
    let direct = match one_of(random, &[Direct::Auto, Direct::Off, Direct::On]) {
        Direct::On if !can_be_direct(directory) => Direct::Auto,
        direct => direct,
    };
    Options {
        engine: one_of(random, &engines),
        direct,
        queue_depth: one_of(random, &[None, Some(1), Some(2), Some(64)]),
        extent_bytes: one_of(random, &[None, Some(1 << 20), Some(3 << 20)]),
        io_threads: one_of(random, &[None, Some(1), Some(2), Some(5)]),
        staging_bytes: one_of(random, &[None, Some(1), Some(5 << 20)]),
        shard_bytes: one_of(random, &[None, Some(4096), Some(1 << 20)]),
        verify: one_of(random, &[true, false]),
        nice: one_of(random, &[None, Some(5)]),
        zero_copy: one_of(random, &[true, true, false]),
        lends_all: true,
        ..Options::default()
    }
}

fn one_of<T: Clone>(random: &mut Rng, choices: &[T]) -> T {
    choices[random.below(choices.len() as u64) as usize].clone()
}

fn can_be_direct(directory: &Path) -> bool {
    let probe = tempfile::tempdir_in(directory).unwrap();
    File::create(&probe.path().join("probe"), Direct::On).is_ok()
}
