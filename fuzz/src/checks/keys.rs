//! Wraps, which a reader tries before anything of a manifest is authenticated, and texts of keys.

use std::sync::{Arc, LazyLock};

use penstock_keys::{Identities, KeyError, Keyring, Kms, Unwrap, Wrap};
use zeroize::Zeroizing;

/// Identities of each kind that needs no derivation: one of those takes a tenth of a second.
const IDENTITIES: &str = "\
PENSTOCK-SECRET-KEY-15e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e
AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX
fake-kms://team/
";

/// A service that knows no key.
struct Refusing;

impl Kms for Refusing {
    fn encrypt(&self, uri: &str, _: &[u8; 32]) -> Result<Vec<u8>, KeyError> {
        Err(refused(uri))
    }

    fn decrypt(&self, uri: &str, _: &[u8]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
        assert!(uri.starts_with("fake-kms://team/"), "{uri} is in no scope");
        Err(refused(uri))
    }
}

fn refused(uri: &str) -> KeyError {
    KeyError::Kms {
        uri: uri.to_owned(),
        reason: "refused".to_owned(),
        source: None,
    }
}

/// Any JSON as the wraps of a manifest: they hold no key for these identities.
pub fn wraps(text: &[u8]) {
    static READER: LazyLock<Identities> = LazyLock::new(|| {
        let mut keyring = Keyring::new();
        let added = keyring.add_content("identities", IDENTITIES.as_bytes());
        added.expect("three keys");
        Identities::new(keyring, Some(Arc::new(Refusing))).expect("secret keys")
    });
    let Ok(wraps) = serde_json::from_slice::<Vec<Wrap>>(text) else {
        return;
    };
    let again = serde_json::to_vec(&wraps).expect("wraps are text and bytes");
    let again: Vec<Wrap> = serde_json::from_slice(&again).expect("its own text");
    assert!(wraps == again);
    let Err(error) = READER.unwrap(&wraps) else {
        panic!("nobody has wrapped a key for these identities");
    };
    // The text of a stranger is not repeated at length, nor with characters of control.
    let shown = error.to_string();
    assert!(shown.len() < 16 << 10, "{} bytes of error", shown.len());
    assert!(!shown.chars().any(char::is_control), "{shown:?}");
}

/// Any bytes as a file of keys: refused without a part of it, or read.
pub fn keys(content: &[u8]) {
    let mut keyring = Keyring::new();
    if let Err(error) = keyring.add_content("given", content) {
        let shown = error.to_string();
        let text = String::from_utf8_lossy(content);
        let words = text.split_ascii_whitespace().filter(|word| word.len() > 40);
        for word in words {
            assert!(!shown.contains(word), "{shown} holds what may be a key");
        }
    }
}
