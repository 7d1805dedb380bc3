//! How buckets are reached, `penstock.Remote`, and what a store does there.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use penstock_object::{Address, Credentials, Keys, Remote, Verdict, buckets, probe};
use penstock_store::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;

/// Id, secret, token, and when it ends in seconds since 1970.
type Row = (String, String, Option<String>, Option<f64>);

fn keys((id, secret, token, expires): Row) -> Keys {
    let at = |seconds: f64| {
        let since = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        SystemTime::UNIX_EPOCH + since
    };
    Keys {
        id,
        secret,
        token,
        expires: expires.map(at),
    }
}

/// Asks Python for a key.
fn asked(ask: Py<PyAny>) -> Credentials {
    Credentials::Asked(Arc::new(move || {
        let row = Python::attach(|py| ask.call0(py)?.extract::<Row>(py));
        row.map(keys).map_err(io::Error::other)
    }))
}

/// From now on this process reaches the bucket of a URL so; with all left open, as the environment says.
#[pyfunction]
#[pyo3(signature = (url, *, endpoint, region, ask, part_bytes, connections, patience_seconds, checksums))]
#[expect(clippy::too_many_arguments, reason = "all but the first are keywords")]
pub(crate) fn reach(
    py: Python<'_>,
    url: &str,
    endpoint: Option<String>,
    region: Option<String>,
    ask: Option<Py<PyAny>>,
    part_bytes: Option<usize>,
    connections: Option<usize>,
    patience_seconds: Option<u64>,
    checksums: Option<bool>,
) -> PyResult<()> {
    let address = Address::of(Path::new(url));
    let address = address.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let address = address.ok_or_else(|| PyValueError::new_err("no URL of a bucket"))?;
    let remote = Remote {
        endpoint,
        region,
        credentials: ask.map(asked),
        part_bytes,
        connections,
        patience: patience_seconds.map(Duration::from_secs),
        checksums,
    };
    // Whoever has the lock may wait for the GIL, to drop what Python gave.
    py.detach(|| buckets::reach(address, remote));
    Ok(())
}

/// A thing that a store is to do, whether it does, what that means, and what was seen if it does not.
type Finding = (&'static str, &'static str, &'static str, Option<String>);

/// Finds out what the store of a bucket does, under a URL that this process may write to.
#[pyfunction]
pub(crate) fn probe_bucket(py: Python<'_>, url: PathBuf) -> PyResult<Vec<Finding>> {
    let found = py.detach(|| match buckets::at(&url)? {
        Some(objects) => probe(&objects, &url),
        None => Err(io::ErrorKind::InvalidInput.into()),
    });
    let found = found.map_err(|source| {
        let (operation, path) = ("ask", url);
        let error = Error::Storage {
            operation,
            path,
            source,
        };
        errors::raise(py, &error)
    })?;
    let verdict = |verdict| match verdict {
        Verdict::Holds => "holds",
        Verdict::Fails => "fails",
        Verdict::Unknown => "unknown",
    };
    let rows = found
        .into_iter()
        .map(|one| (one.name, verdict(one.verdict), one.meaning, one.detail));
    Ok(rows.collect())
}
