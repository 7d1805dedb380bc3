//! Keys of key management services, named by URI.
//!
//! Wrapping is double, as in Parquet: the service encrypts a *process key* once, and the process
//! key wraps data keys. So a process asks the service once for each of its keys in
//! [`PROCESS_KEY_LIFETIME`], however many checkpoints it saves, and saves continue while the
//! service is not reachable.
//!
//! The service is a [`Kms`], which the caller gives: this crate speaks no network protocol. A call
//! runs under the lock of its key, so an implementation takes no lock that callers of this crate
//! hold, such as Python's.
//!
//! A wrap is two bytes of length (big-endian), the encrypted process key, and the data key by AES
//! key wrap.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::kek::{KEK_BYTES, Kek, WRAPPED_BYTES};
use crate::wrap::{KMS, Opened, bad_wrap, wrong_key};
use crate::{DataKey, KeyError, Result, Wrap};

/// Time for which a process uses a key that the service has encrypted or decrypted: a day.
pub const PROCESS_KEY_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

/// Bytes of an encrypted process key; services return a few hundred.
const ENCRYPTED_BYTES_MAX: usize = 8 << 10;
const URI_BYTES_MAX: usize = 2 << 10;
/// Decrypted process keys that are kept.
const OPENED_MAX: usize = 256;

/// A key management service.
pub trait Kms: Send + Sync {
    /// Encrypts a process key.
    ///
    /// # Errors
    ///
    /// [`KeyError::Kms`] if the service refuses or is not reachable.
    fn encrypt(&self, uri: &str, key: &[u8; 32]) -> Result<Vec<u8>>;

    /// Decrypts a process key.
    ///
    /// # Errors
    ///
    /// [`KeyError::Kms`] if the service refuses or is not reachable.
    fn decrypt(&self, uri: &str, encrypted: &[u8]) -> Result<Zeroizing<Vec<u8>>>;
}

/// The keys of services that an identity may use: one key, or all that begin with a prefix.
///
/// A manifest names the key, so without this limit it could send credentials to any host.
#[derive(Clone, Debug)]
pub(crate) struct KmsScope(String);

impl KmsScope {
    pub(crate) fn new(uri: String) -> KmsScope {
        KmsScope(uri)
    }

    pub(crate) fn uri(&self) -> &str {
        &self.0
    }

    fn covers(&self, uri: &str) -> bool {
        // A path that climbs would leave what the prefix names once a client normalises it.
        let climbs = uri.contains("..") || uri.contains('%') || uri.contains("/./");
        uri == self.0 || (self.0.ends_with('/') && uri.starts_with(&self.0) && !climbs)
    }

    pub(crate) fn open(&self, wrap: &Wrap, kms: &dyn Kms) -> Opened {
        if wrap.kind != KMS || !self.covers(&wrap.recipient) {
            return Opened::NotMine;
        }
        match PROCESS_KEYS.open(wrap, kms) {
            Ok(key) => Opened::Key(key),
            Err(error) => Opened::Failed(error),
        }
    }
}

/// Whether a text is the URI of a key, as far as its form says so.
pub(crate) fn is_uri(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once("://") else {
        return false;
    };
    !scheme.is_empty()
        && scheme
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        && text.len() <= URI_BYTES_MAX
        && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// The wrap of a data key for a key of a service.
pub(crate) fn wrap(uri: &str, key: &DataKey, kms: &dyn Kms) -> Result<Wrap> {
    PROCESS_KEYS.wrap(uri, key, kms)
}

static PROCESS_KEYS: LazyLock<ProcessKeys> =
    LazyLock::new(|| ProcessKeys::new(PROCESS_KEY_LIFETIME));

/// A process key, with what the service made of it.
struct ProcessKey {
    kek: Arc<Kek>,
    encrypted: Vec<u8>,
    since: Instant,
}

/// Process keys of this process.
struct ProcessKeys {
    lifetime: Duration,
    /// Keys that this process has drawn, by URI. Each has a lock of its own, as one call of a
    /// service takes seconds.
    own: Mutex<HashMap<String, Arc<Mutex<Option<ProcessKey>>>>>,
    /// Keys that a service has decrypted, and own ones: the newest last.
    opened: Mutex<VecDeque<(String, ProcessKey)>>,
}

impl ProcessKeys {
    fn new(lifetime: Duration) -> ProcessKeys {
        let (own, opened) = (Mutex::default(), Mutex::default());
        ProcessKeys {
            lifetime,
            own,
            opened,
        }
    }

    fn wrap(&self, uri: &str, key: &DataKey, kms: &dyn Kms) -> Result<Wrap> {
        let slot = {
            let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(own.entry(uri.to_owned()).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let process_key = match slot.take() {
            Some(process_key) if process_key.since.elapsed() < self.lifetime => process_key,
            _ => self.draw(uri, kms)?,
        };
        let process_key = slot.insert(process_key);
        Ok(Wrap {
            kind: KMS.to_owned(),
            recipient: uri.to_owned(),
            key: join(&process_key.encrypted, &process_key.kek.wrap(key)),
        })
    }

    fn draw(&self, uri: &str, kms: &dyn Kms) -> Result<ProcessKey> {
        let kek = Arc::new(Kek::generate()?);
        let encrypted = kms.encrypt(uri, kek.expose())?;
        if encrypted.is_empty() || encrypted.len() > ENCRYPTED_BYTES_MAX {
            return Err(KeyError::Kms {
                uri: uri.to_owned(),
                reason: format!("it returned {} bytes for a key", encrypted.len()),
                source: None,
            });
        }
        self.keep(uri, &encrypted, &kek);
        Ok(ProcessKey {
            kek,
            encrypted,
            since: Instant::now(),
        })
    }

    fn open(&self, wrap: &Wrap, kms: &dyn Kms) -> Result<DataKey> {
        let Some((encrypted, wrapped)) = split(&wrap.key) else {
            return Err(bad_wrap(wrap, "its key is cut, or too long"));
        };
        let kek = match self.kept(&wrap.recipient, encrypted) {
            Some(kek) => kek,
            None => {
                let bytes = kms.decrypt(&wrap.recipient, encrypted)?;
                let bytes: &[u8; KEK_BYTES] =
                    bytes.as_slice().try_into().map_err(|_| wrong_key(wrap))?;
                let kek = Arc::new(Kek::from_bytes(bytes));
                self.keep(&wrap.recipient, encrypted, &kek);
                kek
            }
        };
        kek.unwrap(wrapped).ok_or_else(|| wrong_key(wrap))
    }

    fn kept(&self, uri: &str, encrypted: &[u8]) -> Option<Arc<Kek>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|(_, key)| key.since.elapsed() < self.lifetime);
        opened
            .iter()
            .find(|(of, key)| of == uri && key.encrypted == encrypted)
            .map(|(_, key)| Arc::clone(&key.kek))
    }

    fn keep(&self, uri: &str, encrypted: &[u8], kek: &Arc<Kek>) {
        let (kek, encrypted) = (Arc::clone(kek), encrypted.to_vec());
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if opened.len() == OPENED_MAX {
            opened.pop_front();
        }
        opened.push_back((
            uri.to_owned(),
            ProcessKey {
                kek,
                encrypted,
                since: Instant::now(),
            },
        ));
    }
}

fn join(encrypted: &[u8], wrapped: &[u8; WRAPPED_BYTES]) -> Vec<u8> {
    let length = u16::try_from(encrypted.len()).expect("the length was checked");
    [&length.to_be_bytes(), encrypted, wrapped].concat()
}

fn split(key: &[u8]) -> Option<(&[u8], &[u8; WRAPPED_BYTES])> {
    let (length, rest) = key.split_first_chunk()?;
    let (encrypted, wrapped) = rest.split_at_checked(u16::from_be_bytes(*length).into())?;
    let is_sensible = !encrypted.is_empty() && encrypted.len() <= ENCRYPTED_BYTES_MAX;
    Some((encrypted, wrapped.try_into().ok()?)).filter(|_| is_sensible)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    /// A service that "encrypts" by inverting bits, and counts its calls.
    #[derive(Default)]
    struct Service {
        calls: AtomicUsize,
        is_down: AtomicBool,
    }

    impl Service {
        fn call(&self, uri: &str) -> Result<()> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.is_down.load(Ordering::Relaxed) {
                return Err(KeyError::Kms {
                    uri: uri.into(),
                    reason: "not reachable".into(),
                    source: None,
                });
            }
            Ok(())
        }
    }

    impl Kms for Service {
        fn encrypt(&self, uri: &str, key: &[u8; 32]) -> Result<Vec<u8>> {
            self.call(uri)?;
            Ok(key.iter().map(|byte| !byte).collect())
        }

        fn decrypt(&self, uri: &str, encrypted: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
            self.call(uri)?;
            Ok(Zeroizing::new(encrypted.iter().map(|byte| !byte).collect()))
        }
    }

    const URI: &str = "test-kms://key";

    #[test]
    fn a_process_calls_the_service_once() {
        let (service, keys) = (Service::default(), ProcessKeys::new(PROCESS_KEY_LIFETIME));
        let wraps: Vec<_> = (0..100)
            .map(|_| {
                let key = DataKey::generate().unwrap();
                (keys.wrap(URI, &key, &service).unwrap(), key)
            })
            .collect();
        assert_eq!(service.calls.load(Ordering::Relaxed), 1);
        // Another process, which loads all of them.
        let keys = ProcessKeys::new(PROCESS_KEY_LIFETIME);
        for (wrap, key) in wraps {
            assert_eq!(keys.open(&wrap, &service).unwrap().expose(), key.expose());
        }
        assert_eq!(service.calls.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn saves_continue_while_the_service_is_down_and_end_with_the_lifetime() {
        let (service, keys) = (
            Service::default(),
            ProcessKeys::new(Duration::from_millis(50)),
        );
        let key = DataKey::generate().unwrap();
        keys.wrap(URI, &key, &service).unwrap();
        service.is_down.store(true, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(60));
        assert!(matches!(
            keys.wrap(URI, &key, &service),
            Err(KeyError::Kms { .. })
        ));
        service.is_down.store(false, Ordering::Relaxed);
        keys.wrap(URI, &key, &service).unwrap();

        let keys = ProcessKeys::new(PROCESS_KEY_LIFETIME);
        keys.wrap(URI, &key, &service).unwrap();
        service.is_down.store(true, Ordering::Relaxed);
        let wrap = keys.wrap(URI, &key, &service).unwrap();
        assert_eq!(keys.open(&wrap, &service).unwrap().expose(), key.expose());
    }

    #[test]
    fn threads_share_the_one_call() {
        let (service, keys) = (Service::default(), ProcessKeys::new(PROCESS_KEY_LIFETIME));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    keys.wrap(URI, &DataKey::generate().unwrap(), &service)
                        .unwrap()
                });
            }
        });
        assert_eq!(service.calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn cut_and_flipped_wraps_are_refused() {
        let (service, keys) = (Service::default(), ProcessKeys::new(PROCESS_KEY_LIFETIME));
        let wrap = keys
            .wrap(URI, &DataKey::generate().unwrap(), &service)
            .unwrap();
        for length in 0..wrap.key.len() {
            let cut = Wrap {
                key: wrap.key[..length].to_vec(),
                ..wrap.clone()
            };
            assert!(matches!(
                keys.open(&cut, &service),
                Err(KeyError::BadWrap { .. })
            ));
        }
        for byte in 0..wrap.key.len() {
            let mut flipped = wrap.clone();
            flipped.key[byte] ^= 1;
            assert!(keys.open(&flipped, &service).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn an_identity_asks_for_its_own_keys_alone() {
        let scope = |text: &str| KmsScope::new(text.into());
        assert!(scope("aws-kms://").covers("aws-kms://arn:aws:kms:eu-west-1:1:key/2"));
        assert!(scope("hcvault://vault:8200/").covers("hcvault://vault:8200/transit/keys/a"));
        assert!(!scope("hcvault://vault:8200/").covers("hcvault://vault:8200.evil/keys/a"));
        for climbing in [
            "team/../sys/keys/a",
            "team/%2e%2e/sys/keys/a",
            "team/./keys/a",
        ] {
            let uri = format!("hcvault://vault/{climbing}");
            assert!(!scope("hcvault://vault/team/").covers(&uri), "{uri}");
        }
        assert!(!scope("hcvault://vault/keys/a").covers("hcvault://vault/keys/ab"));
        let wrap = Wrap {
            kind: KMS.into(),
            recipient: URI.into(),
            key: vec![],
        };
        let service = Service::default();
        assert!(matches!(
            scope("aws-kms://").open(&wrap, &service),
            Opened::NotMine
        ));
        assert_eq!(service.calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn uris_have_a_scheme_and_printable_characters() {
        assert!(is_uri("aws-kms://alias/a") && is_uri("hcvault://"));
        for text in [
            "://a",
            "a",
            "C:/a",
            "a b://c",
            "aws-kms://a b",
            "aws-kms://é",
        ] {
            assert!(!is_uri(text), "{text}");
        }
        assert!(!is_uri(&format!("aws-kms://{}", "a".repeat(URI_BYTES_MAX))));
    }
}
