//! Any JSON as a shard's header, with the length in front and a file that is as long as the
//! header wants: the code behind those checks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_store::shard::{encode_header, parse_header};

fuzz_target!(|input: (u64, &[u8])| {
    let (data_bytes, text) = input;
    let mut start = (text.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(text);
    let file_bytes = (start.len() as u64).saturating_add(data_bytes);
    let Ok(header) = parse_header(&start, file_bytes) else {
        return;
    };
    // What was accepted can be written, and says the same.
    let tensors = || {
        header
            .tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor.clone()))
    };
    let again = encode_header(tensors());
    let data_bytes = file_bytes - header.data_start;
    let Some(file_bytes) = data_bytes.checked_add(again.len() as u64) else {
        return;
    };
    let again = parse_header(&again, file_bytes).expect("its own text");
    assert_eq!(again.tensors, header.tensors);
});
