//! Runs long work without the GIL, with progress callbacks and Ctrl-C.

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

/// Interval of signal checks and progress callbacks: short for a person, and long enough to cost
/// nothing.
const TURN: Duration = Duration::from_millis(50);

/// Name of the threads that [`on_own_thread`] starts, inherited by the threads that these start:
/// `native_threads.py` recognises by it the threads that an exit need not wait for. Linux allows
/// 15 bytes.
const WRITER: &str = "penstock-writer";

/// A callback `(done_bytes, total_bytes)`, or nothing.
pub(crate) type Callback = Option<Py<PyAny>>;

/// Runs `work` on a new thread, while this one waits without the GIL and handles signals and
/// progress. An exception of a signal handler or of the callback cancels the work, and is raised
/// once the work has stopped.
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
            // The work is complete, so an exception of the callback is ignored.
            None => drop(show(py, callback, &progress)),
            Some(raised) => {
                let note = "the call had finished by then: what it saved is complete";
                raised.value(py).call_method1("add_note", (note,))?;
            }
        }
    }
    raised.map_or_else(|| value_or_exception(py, outcome), Err)
}

/// Runs `work` as [`run`] does; `cancel` stops it if a signal handler raises.
pub(crate) fn run_until<T: Send>(
    py: Python<'_>,
    cancel: impl Fn(),
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let (outcome, raised) = watch(py, || py.check_signals(), cancel, work);
    raised.map_or_else(|| value_or_exception(py, outcome), Err)
}

/// Calls `wait` repeatedly, without the GIL and for a limited time each, until it returns a value;
/// `None` on timeout. Handles signals between the calls.
pub(crate) fn wait<T>(
    py: Python<'_>,
    timeout_seconds: Option<f64>,
    wait: impl Fn(Duration) -> PyResult<Option<T>>,
) -> PyResult<Option<T>> {
    if timeout_seconds.is_some_and(f64::is_nan) {
        let problem = "the timeout is nan: it must be seconds, or None to wait for ever";
        return Err(PyValueError::new_err(problem));
    }
    // A negative timeout polls once; a very large one is cut to 1e9 seconds.
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

/// Runs `work` on this thread without the GIL and without signal handling.
pub(crate) fn without_gil<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let work = std::panic::AssertUnwindSafe(work);
    let outcome = detached(py, || std::panic::catch_unwind(work));
    value_or_exception(py, outcome)
}

/// Runs `work` as [`without_gil`] does, but on a new thread; this thread returns to Python in
/// between, once `pause` has returned, which must be no later than the end of the work.
pub(crate) fn on_own_thread<T: Send, U: Send>(
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

/// Runs `work` on a new thread and calls `turn` until it ends. The first exception of a turn
/// cancels the work, and is returned with the work's result.
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
    let begun_ns = trace::begin_ns();
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
            // Wakes threads that wait for work that cannot start.
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
