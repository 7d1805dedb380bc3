//! The asynchronous runtimes of a process, one for each scheduling priority of its callers.
//!
//! A caller with lowered priority needs transfers of the same priority, and threads inherit
//! the nice value of the thread that starts them.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::sync::Mutex;

use penstock_io::priority;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that copy to and from sockets and compute checksums.
const THREADS_MAX: usize = 4;

/// The runtimes by process and nice value. A forked child has none of its parent's threads, so it
/// starts its own; the parent's runtimes cannot be shut down there and are leaked.
static RUNTIMES: Mutex<Option<HashMap<(u32, i32), &'static Runtime>>> = Mutex::new(None);

/// The runtime for this process and this thread's priority.
pub(crate) fn handle() -> io::Result<Handle> {
    let mut runtimes = RUNTIMES.lock().expect("nothing panics with the lock");
    let runtimes = runtimes.get_or_insert_default();
    let whose = (std::process::id(), priority::nice());
    if let Some(runtime) = runtimes.get(&whose) {
        return Ok(runtime.handle().clone());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let made = Builder::new_multi_thread()
        .worker_threads(cores.min(THREADS_MAX))
        .thread_name("penstock-object")
        .enable_all()
        .build()?;
    let made: &'static Runtime = Box::leak(Box::new(made));
    runtimes.insert(whose, made);
    Ok(made.handle().clone())
}

/// Blocks this thread, which is none of the runtime's, until the future completes.
pub(crate) fn wait<T: Send + 'static>(
    work: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    let (done, outcome) = crossbeam_channel::bounded(1);
    handle()?.spawn(async move {
        let _ = done.send(work.await);
    });
    outcome
        .recv()
        .unwrap_or_else(|_| Err(io::Error::other("a request ended without an answer")))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn who_has_stepped_back_is_served_by_threads_that_have_too() {
        let asked = || wait(async { Ok(priority::nice()) }).unwrap();
        let before = priority::nice();
        assert_eq!(asked(), before);
        let behind = thread::spawn(move || {
            priority::step_back(9);
            asked()
        });
        assert_eq!(behind.join().unwrap(), before.max(9));
        assert_eq!(asked(), before);
    }
}
