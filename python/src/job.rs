//! `Job` and `Arena`: saves in the background.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use penstock_store::save::{self, Shards, Staging, Written};
use penstock_store::{Error, Progress};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::attempt::Attempt;
use crate::call;
use crate::errors;
use crate::options::NativeOptions;
use crate::owner::{detached, release_dropped};
use crate::report;
use crate::save::{NativeAlias, NativeGrouped, NativeLinked, json, state};
use crate::tensor::TensorSource;
use crate::tensor::device::{NativeDevice, streams as streams_of};

/// Staging memory that is kept from save to save.
#[pyclass(frozen, module = "penstock._native")]
pub struct Arena {
    inner: save::Arena,
}

#[pymethods]
impl Arena {
    #[new]
    // Written out, because PyO3 only writes plain literals there.
    #[pyo3(
        signature = (budget_bytes, sharers=NonZeroUsize::MIN),
        text_signature = "(budget_bytes, sharers=1)"
    )]
    fn new(budget_bytes: Option<usize>, sharers: NonZeroUsize) -> Arena {
        let inner = save::Arena::new(budget_bytes).shared_by(sharers);
        Arena { inner }
    }

    /// Returns memory that no save is using to the system.
    fn release(&self, py: Python<'_>) {
        detached(py, || self.inner.release());
    }

    /// Bytes that it holds now.
    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.held_bytes()
    }
}

/// One rank's write, with the copying separate from the writing.
#[pyclass(frozen, module = "penstock._native")]
pub struct Job {
    inner: save::Job,
    path: PathBuf,
    progress: Progress,
    /// Shards that are written and not yet described.
    shards: Mutex<Option<Shards>>,
}

impl Job {
    /// A panic cannot leave the slot half changed, so a poisoned lock is still usable.
    fn shards(&self) -> MutexGuard<'_, Option<Shards>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) {
        self.progress.cancel();
        self.inner.cancel();
    }

    /// Runs a write without the GIL. References to tensors are dropped as soon as all are copied,
    /// not when the write ends.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        attempt: &Attempt,
        work: impl FnOnce(&mut save::Attempt) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let mut lent = attempt.lend()?;
        let work = move || {
            let result = work(lent.get());
            // The attempt is back before Python continues.
            drop(lent);
            result
        };
        if self.inner.is_staged() {
            return call::without_gil(py, work);
        }
        // The references are kept until this thread returns to Python. No engine thread may enter
        // Python to drop them: a thread unknown to Python first takes a lock of the interpreter,
        // and a fork at that moment leaves a child that waits for the lock forever.
        let written = call::on_own_thread(py, work, || self.inner.wait_staged(None));
        // A thread that stages must not wait for a write that could not begin.
        written.inspect_err(|_| detached(py, || self.inner.cancel()))
    }

    fn report<'py>(&self, py: Python<'py>, written: &Written) -> PyResult<Bound<'py, PyDict>> {
        report::of_written(py, &self.path, written)
    }
}

#[pymethods]
impl Job {
    #[new]
    #[pyo3(signature = (
        path, tensors, aliases, tree, *, linked=None, grouped=vec![], options, arena, lazy, nice,
        watched=false, eager=vec![], sealed=false, hashed=false
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "all but the first four are keywords"
    )]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        tensors: Vec<TensorSource>,
        aliases: Vec<NativeAlias>,
        tree: String,
        linked: Option<NativeLinked>,
        grouped: Vec<NativeGrouped>,
        options: NativeOptions,
        arena: Option<PyRef<'_, Arena>>,
        lazy: bool,
        nice: Option<u8>,
        watched: bool,
        eager: Vec<usize>,
        sealed: bool,
        hashed: bool,
    ) -> PyResult<Job> {
        let (state, streams) = state(py, tensors, aliases, tree, linked, grouped)?;
        let mut options = options.at(py, &path)?;
        options.nice = nice;
        options.is_sealed = sealed;
        options.is_hashed = hashed;
        let staging = Staging {
            arena: arena.map(|arena| arena.inner.clone()),
            is_lazy: lazy,
            is_watched: watched,
            eager,
            streams,
        };
        let inner = call::without_gil(py, || save::Job::new(state, &path, &options, &staging))?;
        Ok(Job {
            inner,
            path,
            progress: Progress::default(),
            shards: Mutex::default(),
        })
    }

    /// Copies the remaining tensors; when it returns, the tensors may be modified. An exception of
    /// a signal handler cancels the job.
    fn stage(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_staged(py) {
            return Ok(());
        }
        call::run_until(py, || self.stop(), || self.inner.stage(None))
    }

    /// Copies the remaining host tensors, and makes streams wait for the copies of their devices'
    /// tensors, which work queued on the streams later may modify.
    fn hold(&self, py: Python<'_>, streams: Vec<NativeDevice>) -> PyResult<()> {
        let streams = streams_of(streams).map_err(|error| errors::raise(py, &error.into()))?;
        call::run_until(py, || self.stop(), || self.inner.hold(&streams))
    }

    /// Indices of device tensors that were copied at the call.
    #[getter]
    fn snapshots(&self) -> Vec<usize> {
        self.inner.snapshots().to_vec()
    }

    /// Whether some of the tensors are on a device that has not copied them yet.
    #[getter]
    fn is_on_device(&self) -> bool {
        self.inner.is_on_device()
    }

    /// Waits, without copying, until the tensors may be modified; returns whether they may.
    fn wait_staged(&self, py: Python<'_>, timeout_seconds: Option<f64>) -> PyResult<bool> {
        let wait = |turn| {
            let is_staged = detached(py, || self.inner.wait_staged(Some(turn)));
            Ok(is_staged.then_some(()))
        };
        Ok(call::wait(py, timeout_seconds, wait)?.is_some())
    }

    /// Whether the tensors may be modified.
    #[getter]
    fn is_staged(&self, py: Python<'_>) -> bool {
        let is_staged = self.inner.is_staged();
        release_dropped(py);
        is_staged
    }

    /// Writes everything and casts the vote. For a background thread: it handles no signals.
    fn write<'py>(
        &self,
        py: Python<'py>,
        attempt: &Attempt,
        rank: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let progress = &self.progress;
        let write = |attempt: &mut save::Attempt| self.inner.write(attempt, rank, progress);
        let written = self.run(py, attempt, write)?;
        self.report(py, &written)
    }

    /// Writes everything except the part, for `write_part`.
    fn write_shards(&self, py: Python<'_>, attempt: &Attempt, rank: u32) -> PyResult<()> {
        let progress = &self.progress;
        let write = |attempt: &mut save::Attempt| self.inner.write_shards(attempt, rank, progress);
        *self.shards() = Some(self.run(py, attempt, write)?);
        Ok(())
    }

    /// Writes the part, with `tree` in place of the state's tree if it is given, and casts the
    /// vote.
    fn write_part<'py>(
        &self,
        py: Python<'py>,
        attempt: &Attempt,
        tree: Option<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let tree = tree.map(|tree| json(tree, "tree")).transpose()?;
        let Some(shards) = self.shards().take() else {
            return Err(PyRuntimeError::new_err("there are no shards to describe"));
        };
        let describe = |attempt: &mut save::Attempt| shards.describe(attempt, tree);
        let written = self.run(py, attempt, describe)?;
        self.report(py, &written)
    }

    /// Whether the job itself copies tensors that no one stages; false if they cannot be watched.
    #[getter]
    fn is_lazy(&self) -> bool {
        self.inner.is_lazy()
    }

    /// Bytes written and bytes to write.
    fn progress(&self) -> (u64, u64) {
        (self.progress.bytes().0, self.inner.bytes())
    }

    /// Cancels the job, releasing its references: a write in progress ends with
    /// `KeyboardInterrupt`.
    fn cancel(&self, py: Python<'_>) {
        detached(py, || self.stop());
    }
}
