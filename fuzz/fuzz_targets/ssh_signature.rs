//! Any bytes as an ssh signature.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::bounded_beside;
use penstock_fuzz::checks::signing;

/// Public keys and their messages.
const FIXED_BYTES: usize = 256 << 10;

fuzz_target!(
    |input: &[u8]| bounded_beside(FIXED_BYTES, input.len(), || signing::ssh_signature(input))
);
