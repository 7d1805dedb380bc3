//! Any JSON under a right digest: what an attacker who can compute a CRC would write.
//!
//! The digest stands before everything else in [`Manifest::parse`], and a fuzzer never guesses it.
//! What is accepted must seal into a manifest that says the same.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use penstock_store::digest::Digest;
use penstock_store::manifest::Manifest;

fuzz_target!(|unsealed: &[u8]| {
    let body = unsealed.strip_suffix(b"}").unwrap_or(unsealed);
    let mut text = body.to_vec();
    text.extend_from_slice(format!(",\"digest\":\"{}\"}}\n", Digest::of(body)).as_bytes());
    let Ok(manifest) = Manifest::parse(&text, Path::new("ckpt")) else {
        return;
    };
    for part in &manifest.parts {
        assert!(
            !part.file.contains('/'),
            "{:?} leaves the directory",
            part.file
        );
    }
    let again = Manifest::parse(&manifest.seal(), Path::new("ckpt")).expect("its own text");
    assert_eq!(again.seal(), manifest.seal());
});
