//! The runtime that all requests of a process run on.

use std::future::Future;
use std::io;
use std::sync::Mutex;

use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that move bytes of requests: sockets are copied from and to, and checksums are made.
const THREADS_MAX: usize = 4;

/// The runtime, and the process that it is of. A fork has none of its threads, and gets one of its
/// own; that of its parent is left alone, as nothing of it can be ended there.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// The runtime of this process.
pub(crate) fn handle() -> io::Result<Handle> {
    let mut runtime = RUNTIME.lock().expect("nothing panics with the lock");
    let process = std::process::id();
    if let Some((owner, runtime)) = &*runtime
        && *owner == process
    {
        return Ok(runtime.handle().clone());
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let made = Builder::new_multi_thread()
        .worker_threads(cores.min(THREADS_MAX))
        .thread_name("penstock-object")
        .enable_all()
        .build()?;
    let made: &'static Runtime = Box::leak(Box::new(made));
    *runtime = Some((process, made));
    Ok(made.handle().clone())
}

/// Waits on this thread, which is none of the runtime's, for what is done there.
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
