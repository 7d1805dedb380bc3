//! A load of any requests from any files that contain them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_fuzz::bounded;
use penstock_fuzz::checks::read_plan::Load;

fuzz_target!(|input: &[u8]| {
    let load = Load::decode(input);
    bounded(load.part_bytes(), || load.check());
});
