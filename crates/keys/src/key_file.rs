//! Key files: a symmetric key that wraps and unwraps.
//!
//! The text of a key is `PENSTOCK-SECRET-KEY-1` and 64 hexadecimal digits, which scanners for
//! secrets can find, or the digits alone, as `openssl rand -hex 32` writes them.

use std::fmt::Write as _;
use std::sync::Arc;

use aws_lc_rs::digest;
use zeroize::Zeroizing;

use crate::kek::{KEK_BYTES, Kek};
use crate::wrap::{KEY_FILE, Opened, bad_wrap, wrong_key};
use crate::{DataKey, Result, Wrap};

/// Start of the text of a key.
pub(crate) const SECRET_PREFIX: &str = "PENSTOCK-SECRET-KEY-1";
/// Start of the name of a key in public.
pub(crate) const FINGERPRINT_PREFIX: &str = "penstock-key:";
const FINGERPRINT_BYTES: usize = 16;

/// A symmetric key and its name in public.
#[derive(Clone, Debug)]
pub(crate) struct KeyFile {
    kek: Arc<Kek>,
    fingerprint: String,
}

impl KeyFile {
    pub(crate) fn generate() -> Result<KeyFile> {
        Ok(KeyFile::new(Kek::generate()?))
    }

    /// The key of a text; `None` if the text is not that of a key.
    pub(crate) fn parse(text: &str) -> Option<KeyFile> {
        let digits = text.strip_prefix(SECRET_PREFIX).unwrap_or(text).as_bytes();
        if digits.len() != 2 * KEK_BYTES {
            return None;
        }
        let mut key = Zeroizing::new([0; KEK_BYTES]);
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Some(KeyFile::new(Kek::from_bytes(&key)))
    }

    // A key has 256 random bits, so its hash tells nothing of it.
    fn new(kek: Kek) -> KeyFile {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(b"penstock key file, version 1");
        context.update(kek.expose());
        let digest = context.finish();
        let mut fingerprint = FINGERPRINT_PREFIX.to_owned();
        push_hex(&mut fingerprint, &digest.as_ref()[..FINGERPRINT_BYTES]);
        KeyFile {
            kek: Arc::new(kek),
            fingerprint,
        }
    }

    pub(crate) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    pub(crate) fn to_text(&self) -> Zeroizing<String> {
        // The string has its final size: one that grows leaves copies in freed memory.
        let mut text = String::with_capacity(SECRET_PREFIX.len() + 2 * KEK_BYTES);
        text.push_str(SECRET_PREFIX);
        push_hex(&mut text, self.kek.expose());
        Zeroizing::new(text)
    }

    pub(crate) fn wrap(&self, key: &DataKey) -> Wrap {
        Wrap {
            kind: KEY_FILE.to_owned(),
            recipient: self.fingerprint.clone(),
            key: self.kek.wrap(key).to_vec(),
        }
    }

    pub(crate) fn open(&self, wrap: &Wrap) -> Opened {
        if wrap.kind != KEY_FILE || wrap.recipient != self.fingerprint {
            return Opened::NotMine;
        }
        let Ok(wrapped) = wrap.key.as_slice().try_into() else {
            return Opened::Failed(bad_wrap(
                wrap,
                "its key has another length than AES key wrap",
            ));
        };
        match self.kek.unwrap(wrapped) {
            Some(key) => Opened::Key(key),
            None => Opened::Failed(wrong_key(wrap)),
        }
    }
}

fn hex_digit(digit: u8) -> Option<u8> {
    Some(match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        b'A'..=b'F' => digit - b'A' + 10,
        _ => return None,
    })
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes all text");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KeyError;

    #[test]
    fn a_key_survives_its_text() {
        let key_file = KeyFile::generate().unwrap();
        let again = KeyFile::parse(&key_file.to_text()).unwrap();
        let digits = KeyFile::parse(&key_file.to_text()[SECRET_PREFIX.len()..]).unwrap();
        assert_eq!(key_file.fingerprint(), again.fingerprint());
        assert_eq!(key_file.fingerprint(), digits.fingerprint());
        let key = DataKey::generate().unwrap();
        let Opened::Key(opened) = again.open(&key_file.wrap(&key)) else {
            panic!("not opened")
        };
        assert_eq!(opened.expose(), key.expose());
    }

    #[test]
    fn texts_of_another_form_are_none() {
        let text = KeyFile::generate().unwrap().to_text();
        for bad in [
            &text[1..],
            &text[..text.len() - 1],
            "",
            &format!("{}g", &text[..84]),
        ] {
            assert!(KeyFile::parse(bad).is_none());
        }
        assert!(KeyFile::parse(&"é".repeat(32)).is_none());
    }

    #[test]
    fn another_key_does_not_own_the_wrap_and_a_forged_name_does_not_open_it() {
        let (mine, other) = (KeyFile::generate().unwrap(), KeyFile::generate().unwrap());
        let mut wrap = mine.wrap(&DataKey::generate().unwrap());
        assert!(matches!(other.open(&wrap), Opened::NotMine));
        wrap.recipient = other.fingerprint().to_owned();
        assert!(matches!(
            other.open(&wrap),
            Opened::Failed(KeyError::WrongKey { .. })
        ));
        wrap.key.pop();
        assert!(matches!(
            other.open(&wrap),
            Opened::Failed(KeyError::BadWrap { .. })
        ));
    }

    #[test]
    fn debug_shows_no_secret() {
        let key_file = KeyFile::generate().unwrap();
        let secret = &key_file.to_text()[SECRET_PREFIX.len()..];
        assert!(!format!("{key_file:?}").contains(secret));
    }
}
