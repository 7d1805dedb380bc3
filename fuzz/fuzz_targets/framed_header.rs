//! Any JSON as a shard's header, preceded by its length.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::{bounded, checks, json};

fuzz_target!(|input: &[u8]| bounded(input.len(), || checks::framed_header(input)));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 8)
});
