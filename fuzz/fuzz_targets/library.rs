//! Any JSON as a header of a safetensors file, for our parser and for the library's.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::{checks, json};

// The library's heap is not ours to bound.
fuzz_target!(|input: &[u8]| checks::library::same(input));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 8)
});
