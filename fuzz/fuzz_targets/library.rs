//! Any JSON as the header of a safetensors file, for our parser and the library's.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::{checks, json};

// The library's use of the heap is not bounded.
fuzz_target!(|input: &[u8]| checks::library::same(input));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 8)
});
