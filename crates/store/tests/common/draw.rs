//! Options drawn from a seed: what a promise must not depend on.

use std::path::Path;

use penstock_io::engine::EngineChoice;
use penstock_io::file::{Direct, File};
use penstock_store::options::Options;

use super::{Rng, engines};

/// Options for a checkpoint in a directory, each member drawn for itself; they tell what they are by
/// their `Debug`. One with a file system or an engine of its own takes that over with `..`.
pub fn options(random: &mut Rng, directory: &Path) -> Options {
    let mut engines = engines().to_vec();
    engines.push(EngineChoice::Auto);
    // The same draws wherever it is; what cannot be there is left to choose.
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
