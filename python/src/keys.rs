//! Keys of sealed checkpoints: recipients, identities and the key of one attempt.
//!
//! A data key is no Python object: it stays in [`AttemptKey`], and goes between ranks as a wrap.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_keys::{DataKey, KeyError, Keyring, Kms, NewKey, Unwrap, Wrap};
use penstock_store::care::wraps::{self, Rewrap};
use penstock_store::seal::Sealing;
use penstock_store::tier;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use zeroize::Zeroizing;

use crate::errors::{raise, raise_key};
use crate::owner::detached;

/// Keys by their name in errors, the kind of the value, and the value: `text`, a key or a path;
/// `path`; `content`, of the form of a file; `passphrase`.
type GivenKeys = Vec<(String, String, Vec<u8>)>;

/// Clients of key management services, called by URI.
struct PythonKms(Py<PyAny>);

impl PythonKms {
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread is that of the call from Python, which released the GIL"
    )]
    fn call(&self, method: &str, uri: &str, data: &[u8]) -> Result<Vec<u8>, KeyError> {
        Python::attach(|py| {
            let arguments = (uri, PyBytes::new(py, data));
            let result = self.0.call_method1(py, method, arguments)?;
            result.extract::<Vec<u8>>(py)
        })
        .map_err(|error: PyErr| {
            // The variables of its frames are keys.
            Python::attach(|py| error.set_traceback(py, None));
            KeyError::Kms {
                uri: uri.to_owned(),
                reason: error.to_string(),
                source: Some(Box::new(error)),
            }
        })
    }
}

impl Kms for PythonKms {
    fn encrypt(&self, uri: &str, key: &[u8; 32]) -> Result<Vec<u8>, KeyError> {
        self.call("encrypt", uri, key)
    }

    fn decrypt(&self, uri: &str, encrypted: &[u8]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
        self.call("decrypt", uri, encrypted).map(Zeroizing::new)
    }
}

/// The keys that data keys are wrapped for.
#[pyclass(frozen, module = "penstock._native")]
pub struct Recipients {
    recipients: penstock_keys::Recipients,
}

#[pymethods]
impl Recipients {
    #[new]
    fn new(py: Python<'_>, keys: GivenKeys, kms: Option<Py<PyAny>>) -> PyResult<Recipients> {
        let recipients = raised(py, move || {
            penstock_keys::Recipients::new(keyring(keys)?, clients(kms))
        })?;
        Ok(Recipients { recipients })
    }

    /// The recipients in public, in their order.
    fn names(&self) -> Vec<String> {
        self.recipients.names()
    }

    /// A new data key, wrapped for each recipient.
    fn draw(&self, py: Python<'_>) -> PyResult<AttemptKey> {
        raised(py, || {
            let key = DataKey::generate()?;
            let wraps = self.recipients.wrap(&key)?;
            Ok(AttemptKey {
                key: Arc::new(key),
                wraps,
            })
        })
    }

    /// The wraps of a data key for each recipient, as JSON.
    fn wrap(&self, py: Python<'_>, key: Py<AttemptKey>) -> PyResult<String> {
        let key = &key.get().key;
        raised(py, || self.recipients.wrap(key)).map(|wraps| to_json(&wraps))
    }
}

/// The keys that data keys are unwrapped with.
#[pyclass(frozen, module = "penstock._native")]
pub struct Identities {
    /// The keys that a load unwraps with.
    pub(crate) unwrap: Arc<dyn Unwrap>,
    count: usize,
}

#[pymethods]
impl Identities {
    #[new]
    fn new(py: Python<'_>, keys: GivenKeys, kms: Option<Py<PyAny>>) -> PyResult<Identities> {
        let identities = raised(py, move || {
            penstock_keys::Identities::new(keyring(keys)?, clients(kms))
        })?;
        let count = identities.count();
        Ok(Identities {
            unwrap: Arc::new(Detached(identities)),
            count,
        })
    }

    /// Number of keys.
    fn count(&self) -> usize {
        self.count
    }

    /// The data key of these wraps, as JSON.
    fn open(&self, py: Python<'_>, wraps: &str) -> PyResult<AttemptKey> {
        let wraps = from_json(wraps)?;
        raised(py, move || {
            let key = self.unwrap.unwrap(&wraps)?;
            Ok(AttemptKey {
                key: Arc::new(key),
                wraps,
            })
        })
    }
}

/// Identities that are used without the GIL, as services are called under a lock.
struct Detached(penstock_keys::Identities);

impl Unwrap for Detached {
    #[expect(
        clippy::disallowed_methods,
        reason = "the thread is that of the call from Python, with the GIL or without it"
    )]
    fn unwrap(&self, wraps: &[Wrap]) -> Result<DataKey, KeyError> {
        Python::attach(|py| detached(py, || self.0.unwrap(wraps)))
    }
}

/// The data key of one attempt, with its wraps.
#[pyclass(frozen, module = "penstock._native")]
pub struct AttemptKey {
    /// The key that seals.
    pub(crate) key: Arc<DataKey>,
    /// The wraps of the manifest.
    pub(crate) wraps: Vec<Wrap>,
}

impl AttemptKey {
    /// The key and the wraps that seal an attempt.
    pub(crate) fn sealing(&self) -> Sealing {
        Sealing::new(Arc::clone(&self.key), self.wraps.clone())
    }
}

#[pymethods]
impl AttemptKey {
    /// The wraps, as JSON.
    fn wraps(&self) -> String {
        to_json(&self.wraps)
    }

    /// A wrap for the ephemeral key of another rank, as JSON.
    fn wrap_for(&self, py: Python<'_>, recipient: &str) -> PyResult<String> {
        let mut keyring = Keyring::new();
        raised(py, || {
            keyring.add_content("a rank", recipient.as_bytes())?;
            penstock_keys::Recipients::new(keyring, None)?.wrap(&self.key)
        })
        .map(|wraps| to_json(&wraps))
    }

    fn __repr__(&self) -> &'static str {
        "AttemptKey(..)"
    }
}

/// An X25519 key of one process and one save.
#[pyclass(frozen, module = "penstock._native")]
pub struct EphemeralKey {
    identities: penstock_keys::Identities,
    recipient: String,
}

#[pymethods]
impl EphemeralKey {
    #[new]
    fn new(py: Python<'_>) -> PyResult<EphemeralKey> {
        let mut keyring = Keyring::new();
        let recipient = keyring.add_ephemeral();
        let identities = raised(py, || penstock_keys::Identities::new(keyring, None))?;
        Ok(EphemeralKey {
            identities,
            recipient,
        })
    }

    /// The public key: `age1…`.
    #[getter]
    fn recipient(&self) -> &str {
        &self.recipient
    }

    /// The data key that another rank has wrapped for this key, with the wraps of the manifest.
    fn open(&self, py: Python<'_>, wrap: &str, wraps: &str) -> PyResult<AttemptKey> {
        let (wrap, wraps) = (from_json(wrap)?, from_json(wraps)?);
        raised(py, move || {
            let key = self.identities.unwrap(&wrap)?;
            Ok(AttemptKey {
                key: Arc::new(key),
                wraps,
            })
        })
    }

    fn __repr__(&self) -> &'static str {
        "EphemeralKey(..)"
    }
}

/// Makes a key of a kind, `x25519` or `key-file`, in a new file; returns its name in public.
#[pyfunction]
pub fn generate_key(py: Python<'_>, path: PathBuf, kind: &str) -> PyResult<String> {
    let kind = match kind {
        "x25519" => NewKey::X25519,
        "key-file" => NewKey::KeyFile,
        _ => return Err(PyValueError::new_err("kind is x25519 or key-file")),
    };
    raised(py, || penstock_keys::generate(&path, kind))
}

/// Kind and recipient of each wrap of a sealed checkpoint.
#[pyfunction]
pub fn read_recipients(py: Python<'_>, path: PathBuf) -> PyResult<Vec<(String, String)>> {
    let read = || wraps::read(&path, tier::file_system(&path)?.as_ref());
    detached(py, read)
        .map(public)
        .map_err(|error| raise(py, &error))
}

/// Changes the recipients of a sealed checkpoint, and returns them as `read_recipients` does:
/// removes those of the names, or adds those given, or puts them in the place of all.
#[pyfunction]
#[pyo3(signature = (path, identities=None, recipients=None, *, removed=Vec::new(), replaces=false))]
pub fn rewrap(
    py: Python<'_>,
    path: PathBuf,
    identities: Option<Py<Identities>>,
    recipients: Option<Py<Recipients>>,
    removed: Vec<String>,
    replaces: bool,
) -> PyResult<Vec<(String, String)>> {
    let change = match (&identities, &recipients) {
        (Some(identities), Some(recipients)) => {
            let (unwrap, recipients) = (&*identities.get().unwrap, &recipients.get().recipients);
            match replaces {
                true => Rewrap::Replace(unwrap, recipients),
                false => Rewrap::Add(unwrap, recipients),
            }
        }
        _ => Rewrap::Remove(&removed),
    };
    let change = || wraps::rewrap(&path, tier::file_system(&path)?.as_ref(), &change);
    detached(py, change)
        .map(public)
        .map_err(|error| raise(py, &error))
}

fn public(wraps: Vec<Wrap>) -> Vec<(String, String)> {
    let name = |wrap: Wrap| (wrap.kind, wrap.recipient);
    wraps.into_iter().map(name).collect()
}

fn keyring(keys: GivenKeys) -> Result<Keyring, KeyError> {
    use std::os::unix::ffi::OsStringExt;
    let mut keyring = Keyring::new();
    for (name, kind, value) in keys {
        let value = Zeroizing::new(value);
        match kind.as_str() {
            "passphrase" => keyring.add_passphrase(&name, value)?,
            "content" => keyring.add_content(&name, &value)?,
            "path" => {
                let path = std::ffi::OsString::from_vec(value.to_vec());
                keyring.add_file(&PathBuf::from(path))?;
            }
            _ => keyring.add_text(&name, &String::from_utf8_lossy(&value))?,
        }
    }
    Ok(keyring)
}

fn clients(kms: Option<Py<PyAny>>) -> Option<Arc<dyn Kms>> {
    kms.map(|clients| Arc::new(PythonKms(clients)) as Arc<dyn Kms>)
}

fn raised<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, KeyError> + Send,
) -> PyResult<T> {
    detached(py, work).map_err(|error| raise_key(py, &error))
}

fn to_json(wraps: &[Wrap]) -> String {
    serde_json::to_string(wraps).expect("wraps are text and bytes")
}

fn from_json(wraps: &str) -> PyResult<Vec<Wrap>> {
    serde_json::from_str(wraps)
        .map_err(|error| PyValueError::new_err(format!("these are no wraps: {error}")))
}
