//! Any bytes as an ssh signature.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::bounded_beside;
use penstock_fuzz::checks::signing;

/// Public keys and their messages, and a field of the length that it gives, which the parser allocates before it reads:
/// up to 1 MiB.
const FIXED_BYTES: usize = (256 << 10) + (1 << 20);

fuzz_target!(
    |input: &[u8]| bounded_beside(FIXED_BYTES, input.len(), || signing::ssh_signature(input))
);
