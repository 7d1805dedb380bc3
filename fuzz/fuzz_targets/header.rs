//! Any bytes as the start of a shard.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::{bounded, checks};

fuzz_target!(|input: &[u8]| bounded(input.len(), || checks::header(input)));
