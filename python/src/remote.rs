//! How buckets are reached: `penstock.Remote`.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use penstock_object::{Address, Credentials, Keys, Remote, buckets};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

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
