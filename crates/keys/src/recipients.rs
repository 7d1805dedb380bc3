//! Recipients: who can open a checkpoint.

use std::collections::HashSet;
use std::sync::Arc;

use crate::keyring::Key;
use crate::kms::{self, Kms};
use crate::{DataKey, KeyError, Keyring, Result, Wrap};

/// Recipients of one checkpoint.
pub const RECIPIENTS_MAX: usize = 256;

/// The keys that data keys are wrapped for.
pub struct Recipients {
    keys: Vec<Key>,
    kms: Option<Arc<dyn Kms>>,
}

impl Recipients {
    /// Recipients from all keys of a keyring. A pair of keys serves as its public one.
    ///
    /// # Errors
    ///
    /// [`KeyError::BadText`] if there is no key, if there are more than [`RECIPIENTS_MAX`], if a
    /// URI names no single key, or if there are URIs and no `kms`.
    pub fn new(keyring: Keyring, kms: Option<Arc<dyn Kms>>) -> Result<Recipients> {
        let mut seen = HashSet::new();
        let mut keys = Vec::new();
        for (name, key) in keyring.into_keys() {
            let bad = |reason: &str| KeyError::BadText {
                name,
                reason: reason.to_owned(),
            };
            let key = match key {
                Key::Pair(identity) => Key::Public(identity.public().clone()),
                Key::Kms(scope) if scope.uri().ends_with('/') => {
                    return Err(bad("this URI names no key: give the whole one"));
                }
                Key::Kms(_) if kms.is_none() => return Err(bad("no client for this URI")),
                key => key,
            };
            let is_new = match &key {
                Key::KeyFile(key_file) => seen.insert(key_file.fingerprint().to_owned()),
                Key::Public(recipient) => seen.insert(recipient.to_string()),
                Key::Kms(scope) => seen.insert(scope.uri().to_owned()),
                Key::Passphrase(_) | Key::Pair(_) => true,
            };
            if is_new {
                keys.push(key);
            }
        }
        if keys.is_empty() || keys.len() > RECIPIENTS_MAX {
            let reason = format!("there are {}: give 1 to {RECIPIENTS_MAX}", keys.len());
            return Err(KeyError::BadText {
                name: "recipients".to_owned(),
                reason,
            });
        }
        Ok(Recipients { keys, kms })
    }

    /// The recipients in public, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.keys
            .iter()
            .map(|key| match key {
                Key::KeyFile(key_file) => key_file.fingerprint().to_owned(),
                Key::Public(recipient) => recipient.to_string(),
                Key::Kms(scope) => scope.uri().to_owned(),
                Key::Passphrase(_) | Key::Pair(_) => "passphrase".to_owned(),
            })
            .collect()
    }

    /// The data key, wrapped for each recipient.
    ///
    /// A passphrase takes a tenth of a second, once for each of these objects. A key of a service
    /// takes one call to it, once a process.
    ///
    /// # Errors
    ///
    /// [`KeyError::Kms`] if a service refuses or is not reachable, [`KeyError::Entropy`].
    pub fn wrap(&self, key: &DataKey) -> Result<Vec<Wrap>> {
        self.keys
            .iter()
            .map(|recipient| self.wrap_for(recipient, key))
            .collect()
    }

    fn wrap_for(&self, recipient: &Key, key: &DataKey) -> Result<Wrap> {
        match recipient {
            Key::KeyFile(key_file) => Ok(key_file.wrap(key)),
            Key::Passphrase(passphrase) => passphrase.wrap(key),
            Key::Public(recipient) => Ok(recipient.wrap(key)),
            Key::Pair(identity) => Ok(identity.public().wrap(key)),
            Key::Kms(scope) => {
                let kms = self
                    .kms
                    .as_deref()
                    .expect("a client was demanded with the URI");
                kms::wrap(scope.uri(), key, kms)
            }
        }
    }
}
