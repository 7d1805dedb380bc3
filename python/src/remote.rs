//! `penstock.Remote`, the settings of a bucket, and the probe of its store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use penstock_object::{Address, Credentials, Keys, Remote, Verdict, buckets, probe};
use penstock_store::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::owner::detached;

/// Id, secret, token, and the expiry in seconds since 1970.
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

/// How long to wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(300);

/// Channel for the answer.
type Answer = SyncSender<Result<Keys, String>>;

/// Requests for a key. A thread of Python answers them, because no thread unknown to Python may
/// take the GIL.
#[pyclass(frozen, module = "penstock._native")]
pub struct Questions {
    /// Channel to the listener of this process.
    outbox: Arc<Mutex<Option<Sender<Answer>>>>,
}

/// Receives requests, as long as their sender exists.
#[pyclass(frozen, module = "penstock._native")]
pub struct Listener {
    inbox: Mutex<Receiver<Answer>>,
}

/// A request that waits for its answer.
#[pyclass(frozen, module = "penstock._native")]
pub struct Question {
    answer: Answer,
}

#[pymethods]
impl Questions {
    #[new]
    fn new() -> Questions {
        Questions {
            outbox: Arc::default(),
        }
    }

    /// Creates the listener of this process; a forked child needs its own.
    fn listen(&self) -> Listener {
        let (outbox, inbox) = channel();
        *lock(&self.outbox) = Some(outbox);
        Listener {
            inbox: Mutex::new(inbox),
        }
    }
}

impl Questions {
    fn credentials(&self) -> Credentials {
        let outbox = Arc::clone(&self.outbox);
        Credentials::Asked(Arc::new(move || {
            let (answer, answered) = sync_channel(1);
            let outbox = lock(&outbox).clone();
            let asked = outbox.is_some_and(|outbox| outbox.send(answer).is_ok());
            if !asked {
                return Err(io::Error::other(
                    "nobody answers for penstock.Remote any more",
                ));
            }
            match answered.recv_timeout(ANSWER_MAX) {
                Ok(keys) => keys.map_err(io::Error::other),
                Err(_) => Err(io::Error::other(
                    "the callable of penstock.Remote does not return",
                )),
            }
        }))
    }
}

#[pymethods]
impl Listener {
    /// Waits for the next request; `None` once no sender is left.
    fn next(&self, py: Python<'_>) -> Option<Question> {
        let answer = detached(py, || lock(&self.inbox).recv().ok());
        answer.map(|answer| Question { answer })
    }
}

#[pymethods]
impl Question {
    /// Answers the request.
    fn answer(&self, row: Row) {
        // The requester may have timed out.
        let _ = self.answer.try_send(Ok(keys(row)));
    }

    /// Answers with the reason why there is no key.
    fn refuse(&self, reason: String) {
        let _ = self.answer.try_send(Err(reason));
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().expect("nothing panics with the lock")
}

/// Sets how this process reaches the bucket of a URL; the environment supplies options that are
/// not given.
#[pyfunction]
#[pyo3(signature = (url, *, endpoint, region, keys, questions, part_bytes, connections, patience_seconds, checksums))]
#[expect(clippy::too_many_arguments, reason = "all but the first are keywords")]
pub(crate) fn reach(
    py: Python<'_>,
    url: &str,
    endpoint: Option<String>,
    region: Option<String>,
    keys: Option<Row>,
    questions: Option<PyRef<'_, Questions>>,
    part_bytes: Option<usize>,
    connections: Option<usize>,
    patience_seconds: Option<u64>,
    checksums: Option<bool>,
) -> PyResult<()> {
    let address = Address::of(Path::new(url));
    let address = address.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let address = address.ok_or_else(|| PyValueError::new_err("no URL of a bucket"))?;
    let given = keys.map(|row| Credentials::Given(self::keys(row)));
    let remote = Remote {
        endpoint,
        region,
        credentials: given.or_else(|| Some(questions?.credentials())),
        part_bytes,
        connections,
        patience: patience_seconds.map(Duration::from_secs),
        checksums,
    };
    detached(py, || buckets::reach(address, remote));
    Ok(())
}

/// A property of a store, the verdict, its consequence, and the observation unless it holds.
type Finding = (&'static str, &'static str, &'static str, Option<String>);

/// Tests the store of a bucket under a URL that this process may write to.
#[pyfunction]
pub(crate) fn probe_bucket(py: Python<'_>, url: PathBuf) -> PyResult<Vec<Finding>> {
    let found = detached(py, || match buckets::at(&url)? {
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
