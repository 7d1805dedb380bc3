//! Any bytes as a part: refused, or every number in it keeps its promise.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use penstock_store::part::Part;

/// The attempt that the seeds belong to.
const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

fuzz_target!(|text: &[u8]| {
    let Ok(part) = Part::parse(text, Path::new("ckpt"), "part", ATTEMPT, 0) else {
        return;
    };
    for file in &part.files {
        assert!(
            !file.name.contains('/'),
            "{:?} leaves the directory",
            file.name
        );
        assert_eq!(
            file.chunks.len() as u64,
            file.bytes.div_ceil(file.chunk_bytes)
        );
    }
    for tensor in &part.tensors {
        assert!(tensor.range.0 <= tensor.range.1);
        assert!(tensor.range.1 <= part.files[tensor.file].bytes);
    }
    for alias in &part.aliases {
        assert!(alias.tensor < part.tensors.len());
    }
});
