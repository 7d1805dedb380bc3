//! `Attempt`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_store::format::digest::Digest;
use penstock_store::format::manifest::PartEntry;
use penstock_store::save::{self, Publication};
use penstock_store::seal::Sha256;
use penstock_store::tier;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call;
use crate::keys::AttemptKey;
use crate::owner::detached;
use crate::report;
use crate::save::{NativeSidecar, json, sidecars};
use crate::signing::SigningKeys;

/// A save, which several ranks may share.
#[pyclass(frozen, module = "penstock._native")]
pub struct Attempt {
    state: Mutex<AttemptState>,
    id: String,
    path: PathBuf,
}

/// A part as a rank voted for it: rank, file, bytes, digest, and its SHA-256 in a sealed or signed
/// save.
#[derive(FromPyObject)]
pub(crate) enum NativePart {
    Sealed(u32, String, u64, u64, String),
    Clear(u32, String, u64, u64),
}

impl NativePart {
    fn into_entry(self) -> PyResult<PartEntry> {
        let (rank, file, bytes, digest, sha256) = match self {
            NativePart::Sealed(rank, file, bytes, digest, sha256) => {
                let hash = Sha256::parse(&sha256);
                let hash = hash.ok_or_else(|| PyValueError::new_err("that is no SHA-256"))?;
                (rank, file, bytes, digest, Some(hash))
            }
            NativePart::Clear(rank, file, bytes, digest) => (rank, file, bytes, digest, None),
        };
        let digest = Digest(digest);
        Ok(PartEntry {
            rank,
            file,
            bytes,
            digest,
            sha256,
        })
    }
}

/// The owner of the attempt. A write takes it for as long as it runs, so that a thread that
/// abandons the attempt need not wait for the write.
enum AttemptState {
    Idle(Box<save::Attempt>),
    Busy,
    /// Abandoned while a write runs: the write ends it this way.
    Doomed(End),
    Gone,
}

/// How an attempt is abandoned.
#[derive(Clone, Copy)]
enum End {
    Abandon,
    Discard,
}

impl End {
    fn carry_out(self, attempt: save::Attempt) {
        match self {
            End::Abandon => drop(attempt),
            End::Discard => attempt.discard(),
        }
    }
}

impl Attempt {
    fn of(attempt: save::Attempt) -> Attempt {
        Attempt {
            id: attempt.id().to_owned(),
            path: attempt.path().to_owned(),
            state: Mutex::new(AttemptState::Idle(Box::new(attempt))),
        }
    }

    /// A panic cannot leave the state half changed, so a poisoned lock is still usable.
    fn lock(&self) -> MutexGuard<'_, AttemptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, next: AttemptState) -> PyResult<save::Attempt> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, next) {
            AttemptState::Idle(attempt) => Ok(*attempt),
            other => {
                let is_gone = matches!(other, AttemptState::Gone);
                *state = other;
                Err(PyRuntimeError::new_err(match is_gone {
                    true => "the attempt was committed or given up",
                    false => "a write of the attempt is under way",
                }))
            }
        }
    }

    /// Takes the attempt for a write; the guard puts it back.
    pub(crate) fn lend(&self) -> PyResult<Lent<'_>> {
        Ok(Lent {
            attempt: Some(self.take(AttemptState::Busy)?),
            lender: self,
        })
    }

    fn end(&self, end: End) {
        let mut state = self.lock();
        let next = match &*state {
            AttemptState::Idle(_) | AttemptState::Gone => AttemptState::Gone,
            AttemptState::Busy | AttemptState::Doomed(_) => AttemptState::Doomed(end),
        };
        let before = std::mem::replace(&mut *state, next);
        drop(state);
        if let AttemptState::Idle(attempt) = before {
            end.carry_out(*attempt);
        }
    }
}

/// An attempt taken by a write, put back on drop.
pub(crate) struct Lent<'a> {
    attempt: Option<save::Attempt>,
    lender: &'a Attempt,
}

impl Lent<'_> {
    pub(crate) fn get(&mut self) -> &mut save::Attempt {
        self.attempt.as_mut().expect("it goes back when dropped")
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let attempt = self.attempt.take().expect("it goes back once");
        let mut state = self.lender.lock();
        match *state {
            AttemptState::Doomed(end) => {
                *state = AttemptState::Gone;
                drop(state);
                end.carry_out(attempt);
            }
            _ => *state = AttemptState::Idle(Box::new(attempt)),
        }
    }
}

#[pymethods]
impl Attempt {
    /// Begins an attempt: creates the directory if necessary and takes the lease.
    #[staticmethod]
    #[pyo3(signature = (path, *, overwrite))]
    fn begin(py: Python<'_>, path: PathBuf, overwrite: bool) -> PyResult<Attempt> {
        call::run(py, &None, |progress| {
            save::Attempt::begin(&path, overwrite, &tier::file_system(&path)?, progress)
        })
        .map(Attempt::of)
    }

    /// Joins an attempt begun by another rank.
    #[staticmethod]
    fn join(py: Python<'_>, path: PathBuf, attempt_id: &str) -> PyResult<Attempt> {
        if attempt_id.len() != 32 || !attempt_id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            let message = format!("attempt_id cannot be {attempt_id:?}");
            return Err(PyValueError::new_err(message));
        }
        call::run(py, &None, |progress| {
            save::Attempt::join(&path, attempt_id, &tier::file_system(&path)?, progress)
        })
        .map(Attempt::of)
    }

    /// Seals what is written from now on with the key of this attempt.
    fn seal(&self, key: &AttemptKey) -> PyResult<()> {
        self.lend()?.get().seal(key.sealing());
        Ok(())
    }

    /// Signs the checkpoint with these keys when it is committed.
    fn sign(&self, keys: &SigningKeys) -> PyResult<()> {
        self.lend()?.get().sign(Arc::clone(&keys.keys));
        Ok(())
    }

    /// Records the ids of checkpoints that are older, newest first.
    fn follow(&self, previous: Vec<String>) -> PyResult<()> {
        self.lend()?.get().follow(previous);
        Ok(())
    }

    /// The id of the checkpoint that it becomes.
    #[getter]
    fn id(&self) -> &str {
        &self.id
    }

    /// The checkpoint directory.
    #[getter]
    fn path(&self) -> OsString {
        self.path.clone().into_os_string()
    }

    /// Publishes the checkpoint from the votes of all ranks.
    #[pyo3(signature = (parts, *, step, metadata, overwrite, files=vec![], index=None))]
    #[expect(clippy::too_many_arguments, reason = "all but the first are keywords")]
    fn commit<'py>(
        &self,
        py: Python<'py>,
        parts: Vec<NativePart>,
        step: Option<u64>,
        metadata: String,
        overwrite: bool,
        files: Vec<NativeSidecar>,
        index: Option<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let publication = Publication {
            path: self.path.clone(),
            step,
            metadata: json(metadata, "metadata")?,
            overwrite,
            sidecars: sidecars(files, index),
        };
        let parts: PyResult<Vec<_>> = parts.into_iter().map(NativePart::into_entry).collect();
        let parts = parts?;
        let attempt = self.take(AttemptState::Gone)?;
        let committed = call::without_gil(py, || save::commit(attempt, &publication, parts))?;
        report::of_commit(py, &committed)
    }

    /// The tensors that a rank has voted for, as JSON.
    fn voted_tensors(&self, py: Python<'_>, part: NativePart) -> PyResult<String> {
        let entry = part.into_entry()?;
        let mut lent = self.lend()?;
        let tensors = call::without_gil(py, || save::voted_tensors(lent.get(), &entry))?;
        Ok(serde_json::to_string(&tensors).expect("they were parsed from JSON"))
    }

    /// Whether it has become the published checkpoint, as far as this rank can see.
    fn is_committed(&self, py: Python<'_>) -> bool {
        detached(py, || {
            let file_system = tier::file_system(&self.path);
            file_system.is_ok_and(|file_system| {
                save::is_committed(&self.path, file_system.files(), &self.id)
            })
        })
    }

    /// Abandons the attempt: removes this rank's files, unless it has cast its vote. A write in
    /// progress continues, and abandons the attempt when it ends.
    fn abandon(&self, py: Python<'_>) {
        detached(py, || self.end(End::Abandon));
    }

    /// Abandons the attempt when it is certain that the votes will not be counted: removes all
    /// files of this rank.
    fn discard(&self, py: Python<'_>) {
        detached(py, || self.end(End::Discard));
    }
}
