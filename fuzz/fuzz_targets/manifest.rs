//! Any bytes as a manifest: refused or parsed, never a panic.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use penstock_store::manifest::Manifest;

fuzz_target!(|text: &[u8]| {
    drop(Manifest::parse(text, Path::new("ckpt")));
});
