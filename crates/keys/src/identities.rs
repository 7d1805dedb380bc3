//! Identities: the keys that open checkpoints.

use std::sync::Arc;

use crate::keyring::Key;
use crate::kms::Kms;
use crate::passphrase::COST_KIB_MAX;
use crate::wrap::{Opened, bad_wrap};
use crate::{DataKey, KeyError, Keyring, RECIPIENTS_MAX, Result, Unwrap, Wrap};

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

    /// Tries one identity at each wrap, within bounds: nothing of a manifest is authenticated yet.
    fn open_one(&self, identity: &Key, wraps: &[Wrap]) -> Opened {
        let (mut failure, mut spent_kib, mut kms_failures) = (None, 0, 0);
        for wrap in wraps {
            if let Key::Passphrase(passphrase) = identity {
                spent_kib += passphrase.cost_kib(wrap);
                if spent_kib > COST_KIB_MAX {
                    let reason = "the derivations of all passphrases take too long";
                    return Opened::Failed(bad_wrap(wrap, reason));
                }
            }
            match self.open(identity, wrap) {
                Opened::Key(key) => return Opened::Key(key),
                Opened::NotMine => {}
                Opened::Failed(error) => {
                    failure = failure.or(Some(error));
                    kms_failures += usize::from(matches!(identity, Key::Kms(_)));
                    if kms_failures == KMS_FAILURES_MAX {
                        break;
                    }
                }
            }
        }
        failure.map_or(Opened::NotMine, Opened::Failed)
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

/// Wraps that a service fails to open before the others are left: each takes a call, and a manifest
/// can hold any.
const KMS_FAILURES_MAX: usize = 16;

impl Unwrap for Identities {
    fn unwrap(&self, wraps: &[Wrap]) -> Result<DataKey> {
        if let Some(surplus) = wraps.get(RECIPIENTS_MAX) {
            let reason = format!("there are {} wraps: at most {RECIPIENTS_MAX}", wraps.len());
            return Err(bad_wrap(surplus, reason));
        }
        let mut failure = None;
        for level in 0..=2 {
            for identity in self.keys.iter().filter(|key| cost(key) == level) {
                match self.open_one(identity, wraps) {
                    Opened::Key(key) => return Ok(key),
                    Opened::NotMine => {}
                    // Another identity may open it: the first failure is reported.
                    Opened::Failed(error) => failure = failure.or(Some(error)),
                }
            }
        }
        Err(failure.unwrap_or_else(|| KeyError::NoIdentity {
            identities: self.keys.len(),
            recipients: wraps.iter().map(|wrap| wrap.recipient.clone()).collect(),
        }))
    }
}
