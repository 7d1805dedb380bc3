//! Any bytes as the start of a shard: refused, or a layout that fills the file exactly.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_store::shard::parse_header;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = parse_header(file, file.len() as u64) else {
        return;
    };
    let held: u64 = header
        .tensors
        .iter()
        .map(|(_, tensor)| tensor.data_offsets.1 - tensor.data_offsets.0)
        .sum();
    assert_eq!(header.data_start + held, file.len() as u64);
});
