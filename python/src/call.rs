//! Running long work without the GIL, with progress and with Ctrl-C.

use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use penstock_store::{Error, Progress};
use pyo3::prelude::*;

use crate::errors;

/// How often signals and the progress callback get their turn. A person notices no delay, and
/// the thread that waits costs nothing.
const TURN: Duration = Duration::from_millis(50);

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
    let result: Mutex<Option<thread::Result<Result<T, Error>>>> = Mutex::new(None);
    let finished = Condvar::new();
    let mut raised = None;
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&progress)));
            *result.lock().expect("nothing panics with the lock") = Some(outcome);
            finished.notify_one();
        });
        loop {
            let outcome = py.detach(|| {
                let guard = result.lock().expect("nothing panics with the lock");
                let (mut guard, _) = finished
                    .wait_timeout_while(guard, TURN, |outcome| outcome.is_none())
                    .expect("nothing panics with the lock");
                guard.take()
            });
            if raised.is_none()
                && let Err(error) = take_turn(py, callback, &progress)
            {
                progress.cancel();
                raised = Some(error);
            }
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    });
    match (outcome, raised) {
        // What is done is done, and told so: a save that was committed returns its report even if
        // the signal came with the last byte.
        (Ok(Ok(value)), None) => Ok(value),
        (_, Some(raised)) => Err(raised),
        (Ok(Err(error)), None) => Err(errors::raise(py, &error)),
        (Err(panic), None) => Err(errors::internal(py, panic.as_ref())),
    }
}

fn take_turn(py: Python<'_>, callback: &Callback, progress: &Progress) -> PyResult<()> {
    py.check_signals()?;
    if let Some(callback) = callback {
        callback.call1(py, progress.bytes())?;
    }
    Ok(())
}
