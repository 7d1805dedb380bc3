//! Any JSON with a correct digest as a manifest.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::{bounded, checks, json};

fuzz_target!(|input: &[u8]| bounded(input.len(), || checks::stamped_manifest(input)));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 0)
});
