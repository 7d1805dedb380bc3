//! Signing checkpoints, and the keys whose signatures are accepted.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_keys::{KeyError, SigningKeyring};
use penstock_store::care;
use penstock_store::sign::SigningKey;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use zeroize::Zeroizing;

use crate::call::{self, Callback};
use crate::errors::raise_key;
use crate::options::NativeOptions;
use crate::owner::detached;

/// Keys by their name in errors, the kind of the value, and the value: `path`, or `content` of such
/// a file; `passphrase`, or `passphrase-of` for the text that names one.
type GivenKeys = Vec<(String, String, Vec<u8>)>;

/// Private keys that sign checkpoints.
#[pyclass(frozen, module = "penstock._native")]
pub struct SigningKeys {
    /// The keys that a save signs with.
    pub(crate) keys: Arc<[SigningKey]>,
}

#[pymethods]
impl SigningKeys {
    #[new]
    fn new(py: Python<'_>, keys: GivenKeys) -> PyResult<SigningKeys> {
        let read = || -> Result<_, KeyError> {
            let mut keyring = SigningKeyring::new();
            for (name, kind, value) in keys {
                let value = Zeroizing::new(value);
                match kind.as_str() {
                    "passphrase" => keyring.add_passphrase(&name, value)?,
                    "passphrase-of" => {
                        keyring.add_named_passphrase(&name, &String::from_utf8_lossy(&value))?;
                    }
                    "path" => keyring.add_file(&path(&value))?,
                    _ => keyring.add_content(&name, &value)?,
                }
            }
            keyring.into_keys("key")
        };
        let keys = detached(py, read).map_err(|error| raise_key(py, &error))?;
        Ok(SigningKeys { keys: keys.into() })
    }

    /// The keys in public.
    fn signers(&self) -> Vec<String> {
        self.keys.iter().map(SigningKey::signer).collect()
    }
}

/// Public keys of those whose signature is accepted.
#[pyclass(frozen, module = "penstock._native")]
pub struct Signers {
    /// The keys that a load checks signatures with.
    pub(crate) signers: Arc<penstock_keys::Signers>,
}

#[pymethods]
impl Signers {
    #[new]
    fn new(py: Python<'_>, keys: GivenKeys) -> PyResult<Signers> {
        let read = || -> Result<_, KeyError> {
            let mut signers = penstock_keys::Signers::new();
            for (name, kind, value) in &keys {
                match kind.as_str() {
                    "path" => signers.add_file(&path(value))?,
                    _ => signers.add_content(name, value)?,
                }
            }
            Ok(signers)
        };
        let signers = detached(py, read).map_err(|error| raise_key(py, &error))?;
        Ok(Signers {
            signers: Arc::new(signers),
        })
    }

    /// Number of keys.
    fn count(&self) -> usize {
        self.signers.count()
    }
}

/// Signs a checkpoint; see `penstock.sign`.
#[pyfunction]
#[pyo3(signature = (path, keys, *, options, progress))]
pub fn sign<'py>(
    py: Python<'py>,
    path: PathBuf,
    keys: PyRef<'_, SigningKeys>,
    options: NativeOptions,
    progress: Callback,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options.at(py, &path)?;
    let keys = Arc::clone(&keys.keys);
    let signed = call::run(py, &progress, |progress| {
        care::sign::sign(&path, &keys, &options, progress)
    })?;
    let dict = PyDict::new(py);
    dict.set_item("path", path.as_os_str())?;
    dict.set_item("checkpoint_id", signed.id)?;
    dict.set_item("signers", signed.signers)?;
    dict.set_item("files", signed.files)?;
    dict.set_item("bytes_hashed", signed.bytes)?;
    dict.set_item("seconds", signed.seconds)?;
    Ok(dict)
}

fn path(value: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(value.to_vec()))
}
