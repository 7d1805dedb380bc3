//! Identities: the keys that open checkpoints.

use std::sync::Arc;

use crate::keyring::Key;
use crate::kms::Kms;
use crate::wrap::Opened;
use crate::{DataKey, KeyError, Keyring, Result, Unwrap, Wrap};

/// The keys that data keys are unwrapped with.
pub struct Identities {
    keys: Vec<Key>,
    kms: Option<Arc<dyn Kms>>,
}

impl Identities {
    /// Identities from all keys of a keyring.
    ///
    /// # Errors
    ///
    /// [`KeyError::BadText`] if there is no key, if one is a public key, if a URI names no host
    /// where one is needed, or if there are URIs and no `kms`.
    pub fn new(keyring: Keyring, kms: Option<Arc<dyn Kms>>) -> Result<Identities> {
        let mut keys = Vec::new();
        for (name, key) in keyring.into_keys() {
            let reason = match &key {
                Key::Public(_) => "a public key opens nothing: give the secret one",
                Key::Kms(_) if kms.is_none() => "no client for this URI",
                // Its clients send a token to the host.
                Key::Kms(scope) if scope.uri() == "hcvault://" => {
                    "this URI names no host: give hcvault://HOST/ at least"
                }
                _ => {
                    keys.push(key);
                    continue;
                }
            };
            return Err(KeyError::BadText {
                name,
                reason: reason.to_owned(),
            });
        }
        if keys.is_empty() {
            let reason = "there are none: give one at least".to_owned();
            return Err(KeyError::BadText {
                name: "identities".to_owned(),
                reason,
            });
        }
        Ok(Identities { keys, kms })
    }

    /// Number of keys.
    #[must_use]
    pub fn count(&self) -> usize {
        self.keys.len()
    }

    fn open(&self, identity: &Key, wrap: &Wrap) -> Opened {
        match identity {
            Key::KeyFile(key_file) => key_file.open(wrap),
            Key::Passphrase(passphrase) => passphrase.open(wrap),
            Key::Pair(identity) => identity.open(wrap),
            Key::Public(_) => Opened::NotMine,
            Key::Kms(scope) => {
                let kms = self
                    .kms
                    .as_deref()
                    .expect("a client was demanded with the URI");
                scope.open(wrap, kms)
            }
        }
    }
}

/// How long an identity takes: nothing, a derivation, a call to a service.
fn cost(identity: &Key) -> u8 {
    match identity {
        Key::KeyFile(_) | Key::Pair(_) | Key::Public(_) => 0,
        Key::Passphrase(_) => 1,
        Key::Kms(_) => 2,
    }
}

impl Unwrap for Identities {
    fn unwrap(&self, wraps: &[Wrap]) -> Result<DataKey> {
        let mut failure = None;
        for level in 0..=2 {
            for identity in self.keys.iter().filter(|key| cost(key) == level) {
                for wrap in wraps {
                    match self.open(identity, wrap) {
                        Opened::Key(key) => return Ok(key),
                        Opened::NotMine => {}
                        // Another identity may open it: the first failure is reported.
                        Opened::Failed(error) => failure = failure.or(Some(error)),
                    }
                }
            }
        }
        Err(failure.unwrap_or_else(|| KeyError::NoIdentity {
            identities: self.keys.len(),
            recipients: wraps.iter().map(|wrap| wrap.recipient.clone()).collect(),
        }))
    }
}
