//! Any bytes as a manifest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::{bounded, checks};

fuzz_target!(|input: &[u8]| bounded(input.len(), || checks::manifest(input)));
