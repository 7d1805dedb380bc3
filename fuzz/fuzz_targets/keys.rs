//! Any bytes as a file of keys.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::bounded_beside;
use penstock_fuzz::checks::keys;

/// Numbers of an RSA key.
const FIXED_BYTES: usize = 256 << 10;

fuzz_target!(|input: &[u8]| bounded_beside(FIXED_BYTES, input.len(), || keys::keys(input)));
