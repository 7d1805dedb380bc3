//! Running long work without the GIL, with progress and with Ctrl-C.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use penstock_io::trace::{self, Row};
use penstock_store::{Error, Progress};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::owner::detached;

/// How often signals and the progress callback get their turn. A person notices no delay, and
/// the thread that waits costs nothing.
const TURN: Duration = Duration::from_millis(50);

/// What the kernel calls a thread that [`beside`] starts, and those that it starts: the package knows
/// by that name whom an exit need not wait for (`native_threads.py`). There is room for 15 bytes.
const WRITER: &str = "penstock-writer";

/// A callback `(done_bytes, total_bytes)`, or nothing.
pub(crate) type Callback = Option<Py<PyAny>>;

/// Runs `work` on a thread of its own while this one waits without the GIL, and looks after
/// signals and progress in between. A signal handler or a callback that raises cancels the work;
/// its exception is the one raised, once the work has stopped.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    callback: &Callback,
    work: impl FnOnce(&Progress) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let progress = Progress::default();
    let turn = || take_turn(py, callback, &progress);
    let (outcome, raised) = watch(py, turn, || progress.cancel(), || work(&progress));
    if matches!(outcome, Ok(Ok(_))) {
        match &raised {
            // What is done is done, whatever the callback thinks of it by now.
            None => drop(show(py, callback, &progress)),
            Some(raised) => {
                let note = "the call had finished by then: what it saved is complete";
                raised.value(py).call_method1("add_note", (note,))?;
            }
        }
    }
    raised.map_or_else(|| value_or_exception(py, outcome), Err)
}

/// Runs `work` as [`run`] does; `cancel` makes it stop when a signal handler raises.
pub(crate) fn run_until<T: Send>(
    py: Python<'_>,
    cancel: impl Fn(),
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let (outcome, raised) = watch(py, || py.check_signals(), cancel, work);
    raised.map_or_else(|| value_or_exception(py, outcome), Err)
}

/// Waits on this thread for what `wait` returns, which waits without the GIL and for so long at the
/// most; None where the time is over before. Signals have their turn meanwhile.
pub(crate) fn wait<T>(
    py: Python<'_>,
    timeout_seconds: Option<f64>,
    wait: impl Fn(Duration) -> PyResult<Option<T>>,
) -> PyResult<Option<T>> {
    if timeout_seconds.is_some_and(f64::is_nan) {
        let problem = "the timeout is nan: it must be seconds, or None to wait for ever";
        return Err(PyValueError::new_err(problem));
    }
    // Below zero is a look, and what no clock counts no bound.
    let seconds = timeout_seconds.map(|seconds| seconds.clamp(0.0, 1e9));
    let deadline = seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let turn = left.map_or(TURN, |left| left.min(TURN));
        if let Some(value) = wait(turn)? {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= turn) {
            return Ok(None);
        }
    }
}

/// Runs `work` on this thread without the GIL, and without an eye on signals.
pub(crate) fn without_gil<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let work = std::panic::AssertUnwindSafe(work);
    let outcome = detached(py, || std::panic::catch_unwind(work));
    value_or_exception(py, outcome)
}

/// Runs `work` as [`without_gil`] does, on a thread of its own: this one is back with Python in
/// between, when `pause` is over. That has to end with the work at the latest.
pub(crate) fn beside<T: Send, U: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send,
    pause: impl FnOnce() -> U + Send,
) -> PyResult<T> {
    let row = Row::of_caller();
    let outcome = thread::scope(|scope| {
        let builder = thread::Builder::new().name(WRITER.to_owned());
        let spawned = builder.spawn_scoped(scope, || {
            let _row = Row::lend(row);
            work()
        });
        let worker = spawned.map_err(no_thread)?;
        detached(py, pause);
        Ok(detached(py, || worker.join()))
    });
    value_or_exception(py, outcome.unwrap_or_else(|error| Ok(Err(error))))
}

/// The value or the exception.
fn value_or_exception<T>(py: Python<'_>, outcome: thread::Result<Result<T, Error>>) -> PyResult<T> {
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(errors::raise(py, &error)),
        Err(panic) => Err(errors::internal(py, panic.as_ref())),
    }
}

/// Runs `work` on a thread of its own and takes turns until it ends; the first exception of a turn
/// cancels it, and comes back beside what became of it.
fn watch<T: Send>(
    py: Python<'_>,
    turn: impl Fn() -> PyResult<()>,
    cancel: impl Fn(),
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> (thread::Result<Result<T, Error>>, Option<PyErr>) {
    let result: Mutex<Option<thread::Result<Result<T, Error>>>> = Mutex::new(None);
    let finished = Condvar::new();
    let mut raised = None;
    let row = Row::of_caller();
    let begun_ns = trace::now_ns();
    let ended_ns = AtomicU64::new(0);
    let outcome = thread::scope(|scope| {
        let spawned = thread::Builder::new().spawn_scoped(scope, || {
            let _row = Row::lend(row);
            trace::span_since("hand over", begun_ns, None);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            ended_ns.store(trace::now_ns(), Ordering::Relaxed);
            *result.lock().expect("nothing panics with the lock") = Some(outcome);
            finished.notify_one();
        });
        if let Err(source) = spawned {
            // Whoever waits for the work must not.
            cancel();
            return Ok(Err(no_thread(source)));
        }
        loop {
            let outcome = detached(py, || {
                let guard = result.lock().expect("nothing panics with the lock");
                let (mut guard, _) = finished
                    .wait_timeout_while(guard, TURN, |outcome| outcome.is_none())
                    .expect("nothing panics with the lock");
                guard.take()
            });
            if let Some(outcome) = outcome {
                return outcome;
            }
            if raised.is_none()
                && let Err(error) = turn()
            {
                cancel();
                raised = Some(error);
            }
        }
    });
    trace::span_since("hand back", ended_ns.into_inner().max(begun_ns), None);
    (outcome, raised)
}

fn no_thread(source: io::Error) -> Error {
    let operation = "start a thread";
    penstock_io::Error::Engine { operation, source }.into()
}

fn take_turn(py: Python<'_>, callback: &Callback, progress: &Progress) -> PyResult<()> {
    py.check_signals()?;
    show(py, callback, progress)
}

fn show(py: Python<'_>, callback: &Callback, progress: &Progress) -> PyResult<()> {
    if let Some(callback) = callback {
        callback.call1(py, progress.bytes())?;
    }
    Ok(())
}
