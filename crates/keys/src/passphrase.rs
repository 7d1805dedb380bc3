//! Passphrases: argon2id makes a key-encryption key of them.
//!
//! The recipient is the PHC string of the derivation, `$argon2id$v=19$m=65536,t=3,p=4$SALT`: it
//! states parameters and salt, as other tools write them. A manifest can name any parameters before
//! it is authenticated, so those that take more than [`MEMORY_KIB_MAX`] or [`COST_KIB_MAX`] are
//! refused.

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use argon2::{Algorithm, Argon2, Params, Version};
use aws_lc_rs::rand;
use base64::Engine;
use base64::prelude::BASE64_STANDARD_NO_PAD;
use zeroize::Zeroizing;

use crate::kek::{KEK_BYTES, Kek};
use crate::wrap::{Opened, PASSPHRASE, bad_wrap, wrong_key};
use crate::{DataKey, KeyError, Result, Wrap, file};

// RFC 9106, section 4, the second recommended choice: 64 MiB, three passes, four lanes.
const MEMORY_KIB: u32 = 64 << 10;
const PASSES: u32 = 3;
const LANES: u32 = 4;
const SALT_BYTES: usize = 16;

/// Memory that a derivation named by a manifest may take: 1 GiB.
const MEMORY_KIB_MAX: u32 = 1 << 20;
/// Memory times passes that all derivations of one manifest may take: 4 GiB, about 7 seconds. It is
/// twenty times that of a wrap of ours.
pub(crate) const COST_KIB_MAX: u64 = 4 << 20;
const LANES_MAX: u32 = 64;
const SALT_BYTES_MAX: usize = 64;

/// Keys that a passphrase keeps, as one derivation takes a tenth of a second.
const KEPT_MAX: usize = 16;
/// Bytes of a passphrase.
pub(crate) const PASSPHRASE_BYTES_MAX: usize = 4 << 10;

const FILE: &str = "passphrase-file:";
const ENV: &str = "passphrase-env:";

/// The passphrase that `passphrase-file:PATH` or `passphrase-env:NAME` names; `None` for any other
/// text.
pub(crate) fn of_text(name: &str, text: &str) -> Result<Option<Zeroizing<Vec<u8>>>> {
    use std::os::unix::ffi::OsStringExt;
    if let Some(path) = text.strip_prefix(FILE) {
        return file::read(Path::new(path)).map(Some);
    }
    let Some(variable) = text.strip_prefix(ENV) else {
        return Ok(None);
    };
    let secret = std::env::var_os(variable).ok_or_else(|| KeyError::BadText {
        name: name.to_owned(),
        reason: format!("the environment variable {variable} is not set"),
    })?;
    Ok(Some(Zeroizing::new(secret.into_vec())))
}

/// A passphrase, with the keys that were derived from it.
#[derive(Clone)]
pub(crate) struct Passphrase(Arc<Inner>);

struct Inner {
    secret: Zeroizing<Vec<u8>>,
    /// The derivation of all wraps of this process, drawn with the first one.
    own: Mutex<Option<Derivation>>,
    kept: Mutex<VecDeque<(Derivation, Arc<Kek>)>>,
}

/// Parameters and salt of argon2id.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Derivation {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
    salt: Vec<u8>,
}

impl Passphrase {
    /// A passphrase, without the line end that files of it have; `None` if it is empty or long.
    pub(crate) fn new(mut secret: Zeroizing<Vec<u8>>) -> Option<Passphrase> {
        while matches!(secret.last(), Some(b'\n' | b'\r')) {
            secret.pop();
        }
        if secret.is_empty() || secret.len() > PASSPHRASE_BYTES_MAX {
            return None;
        }
        let (own, kept) = (Mutex::new(None), Mutex::new(VecDeque::new()));
        Some(Passphrase(Arc::new(Inner { secret, own, kept })))
    }

    /// As [`Passphrase::new`]; the error names the argument.
    pub(crate) fn named(name: &str, secret: Zeroizing<Vec<u8>>) -> Result<Passphrase> {
        Passphrase::new(secret).ok_or_else(|| KeyError::BadText {
            name: name.to_owned(),
            reason: "the passphrase is empty, or longer than 4 KiB".to_owned(),
        })
    }

    /// The bytes, for keys of others that are protected with it.
    pub(crate) fn expose(&self) -> &[u8] {
        &self.0.secret
    }

    pub(crate) fn wrap(&self, key: &DataKey) -> Result<Wrap> {
        let derivation = self.own_derivation()?;
        let kek = self.kek(&derivation)?;
        Ok(Wrap {
            kind: PASSPHRASE.to_owned(),
            recipient: derivation.to_string(),
            key: kek.wrap(key).to_vec(),
        })
    }

    pub(crate) fn open(&self, wrap: &Wrap) -> Opened {
        if wrap.kind != PASSPHRASE {
            return Opened::NotMine;
        }
        let derivation = match Derivation::parse(&wrap.recipient) {
            Ok(derivation) => derivation,
            Err(reason) => return Opened::Failed(bad_wrap(wrap, reason)),
        };
        let Ok(wrapped) = wrap.key.as_slice().try_into() else {
            return Opened::Failed(bad_wrap(
                wrap,
                "its key has another length than AES key wrap",
            ));
        };
        match self.kek(&derivation) {
            Err(error) => Opened::Failed(error),
            Ok(kek) => match kek.unwrap(wrapped) {
                Some(key) => Opened::Key(key),
                None => Opened::Failed(wrong_key(wrap)),
            },
        }
    }

    /// Memory times passes of the derivation that opening a wrap takes; 0 where the key is kept.
    pub(crate) fn cost_kib(&self, wrap: &Wrap) -> u64 {
        let parsed = (wrap.kind == PASSPHRASE).then(|| Derivation::parse(&wrap.recipient));
        let Some(Ok(derivation)) = parsed else {
            return 0;
        };
        let kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.iter().any(|(of, _)| *of == derivation) {
            true => 0,
            false => derivation.cost_kib(),
        }
    }

    fn own_derivation(&self) -> Result<Derivation> {
        let mut own = self.0.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(derivation) = &*own {
            return Ok(derivation.clone());
        }
        let mut salt = vec![0; SALT_BYTES];
        rand::fill(&mut salt).map_err(|_| KeyError::Entropy)?;
        let derivation = Derivation {
            memory_kib: MEMORY_KIB,
            passes: PASSES,
            lanes: LANES,
            salt,
        };
        *own = Some(derivation.clone());
        Ok(derivation)
    }

    fn kek(&self, derivation: &Derivation) -> Result<Arc<Kek>> {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kek)) = kept.iter().find(|(of, _)| of == derivation) {
            return Ok(Arc::clone(kek));
        }
        let kek = Arc::new(derivation.derive(&self.0.secret)?);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back((derivation.clone(), Arc::clone(&kek)));
        Ok(kek)
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Passphrase(..)")
    }
}

impl Derivation {
    fn parse(text: &str) -> std::result::Result<Derivation, &'static str> {
        let form = "its recipient is no PHC string of argon2id, version 19";
        let rest = text.strip_prefix("$argon2id$v=19$m=").ok_or(form)?;
        let (memory_kib, rest) = rest.split_once(",t=").ok_or(form)?;
        let (passes, rest) = rest.split_once(",p=").ok_or(form)?;
        let (lanes, salt) = rest.split_once('$').ok_or(form)?;
        let [memory_kib, passes, lanes] = [memory_kib, passes, lanes].map(str::parse::<u32>);
        let derivation = Derivation {
            memory_kib: memory_kib.map_err(|_| form)?,
            passes: passes.map_err(|_| form)?,
            lanes: lanes.map_err(|_| form)?,
            salt: BASE64_STANDARD_NO_PAD.decode(salt).map_err(|_| form)?,
        };
        if derivation.memory_kib > MEMORY_KIB_MAX
            || derivation.cost_kib() > COST_KIB_MAX
            || derivation.lanes > LANES_MAX
            || derivation.salt.len() > SALT_BYTES_MAX
        {
            return Err("its derivation takes more than 1 GiB, 4 GiB with all passes, or 64 lanes");
        }
        Ok(derivation)
    }

    fn cost_kib(&self) -> u64 {
        u64::from(self.memory_kib) * u64::from(self.passes)
    }

    fn derive(&self, secret: &[u8]) -> Result<Kek> {
        let parameters = Params::new(self.memory_kib, self.passes, self.lanes, Some(KEK_BYTES));
        let parameters = parameters.map_err(|error| self.refused(&error))?;
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, parameters);
        Kek::derive(|key| {
            argon2
                .hash_password_into(secret, &self.salt, key)
                .map_err(|error| self.refused(&error))
        })
    }

    fn refused(&self, error: &argon2::Error) -> KeyError {
        KeyError::BadWrap {
            kind: PASSPHRASE.to_owned(),
            recipient: self.to_string(),
            reason: error.to_string(),
        }
    }
}

impl fmt::Display for Derivation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Derivation {
            memory_kib,
            passes,
            lanes,
            salt,
        } = self;
        let salt = BASE64_STANDARD_NO_PAD.encode(salt);
        write!(
            formatter,
            "$argon2id$v=19$m={memory_kib},t={passes},p={lanes}${salt}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passphrase(text: &str) -> Passphrase {
        Passphrase::new(Zeroizing::new(text.as_bytes().to_vec())).unwrap()
    }

    #[test]
    fn the_same_passphrase_opens_and_another_one_does_not() {
        let key = DataKey::generate().unwrap();
        let wrap = passphrase("correct horse").wrap(&key).unwrap();
        assert!(
            wrap.recipient
                .starts_with("$argon2id$v=19$m=65536,t=3,p=4$")
        );
        let Opened::Key(opened) = passphrase("correct horse\r\n").open(&wrap) else {
            panic!("not opened")
        };
        assert_eq!(opened.expose(), key.expose());
        let failed = passphrase("Correct horse").open(&wrap);
        assert!(matches!(failed, Opened::Failed(KeyError::WrongKey { .. })));
    }

    /// The reference implementation's `argon2 somesalt -id -t 2 -m 16 -p 1`, password `password`.
    #[test]
    fn derives_as_the_reference_implementation() {
        let derivation = Derivation {
            memory_kib: 1 << 16,
            passes: 2,
            lanes: 1,
            salt: b"somesalt".to_vec(),
        };
        let expected = "09316115d5cf24ed5a15a31a3ba326e5cf32edc24702987c02b6566f61913cf7";
        let kek = derivation.derive(b"password").unwrap();
        let hex: String = kek
            .expose()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, expected);
    }

    #[test]
    fn wraps_of_one_process_share_a_derivation() {
        let passphrase = passphrase("correct horse");
        let one = passphrase.wrap(&DataKey::generate().unwrap()).unwrap();
        let other = passphrase.wrap(&DataKey::generate().unwrap()).unwrap();
        assert_eq!(one.recipient, other.recipient);
        assert_ne!(one.key, other.key);
    }

    #[test]
    fn derivations_without_bound_are_refused() {
        for recipient in [
            "$argon2id$v=19$m=1048577,t=3,p=4$c29tZXNhbHQ",
            "$argon2id$v=19$m=65536,t=65,p=4$c29tZXNhbHQ",
            "$argon2id$v=19$m=1048576,t=5,p=4$c29tZXNhbHQ",
            "$argon2id$v=19$m=65536,t=3,p=65$c29tZXNhbHQ",
            "$argon2id$v=19$m=4294967296,t=3,p=4$c29tZXNhbHQ",
            "$argon2id$v=19$m=0,t=0,p=0$",
            "$argon2i$v=19$m=65536,t=3,p=4$c29tZXNhbHQ",
            "",
        ] {
            let wrap = Wrap {
                kind: PASSPHRASE.into(),
                recipient: recipient.into(),
                key: vec![0; 40],
            };
            let opened = passphrase("p").open(&wrap);
            assert!(
                matches!(opened, Opened::Failed(KeyError::BadWrap { .. })),
                "{recipient}"
            );
        }
    }

    #[test]
    fn empty_and_endless_passphrases_are_none() {
        for secret in [vec![], b"\n".to_vec(), vec![b'x'; PASSPHRASE_BYTES_MAX + 1]] {
            assert!(Passphrase::new(Zeroizing::new(secret)).is_none());
        }
    }
}
