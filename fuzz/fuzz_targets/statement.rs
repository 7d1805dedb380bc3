//! Any JSON as the statement of a signature.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::checks::signing;
use penstock_fuzz::{bounded_beside, json};

/// Public keys and their messages.
const FIXED_BYTES: usize = 256 << 10;

fuzz_target!(|input: &[u8]| bounded_beside(FIXED_BYTES, input.len(), || signing::statement(input)));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 0)
});
