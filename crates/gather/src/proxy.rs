//! Serves kernels' requests for rows: the host side of the host queue, with a reader.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use penstock_io::fifo::{Answer, Fifo, Post, Posts};

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::reader::Reader;

/// How long an idle thread spins, and how long it then yields between polls.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(200);
/// After that it sleeps for a fraction of the idle time, at most this long, which delays the first
/// request after a pause.
const SLEEP_MAX: Duration = Duration::from_micros(500);
const SLEEP_PART: u32 = 16;

/// A thread that reads the rows that kernels request. It sleeps while no kernel is launched.
pub struct Proxy {
    shared: Arc<ProxyShared>,
    fifo: Arc<Fifo>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

#[derive(Default)]
struct ProxyShared {
    is_stopped: AtomicBool,
    /// Requests whose rows are being read.
    under_way: AtomicUsize,
    /// Number of [`Serving`] guards for kernels launched elsewhere.
    servings: AtomicUsize,
    failed: Mutex<Option<Error>>,
    has_panicked: AtomicBool,
}

impl Proxy {
    /// Serves a host queue with the rows of a reader.
    ///
    /// # Errors
    /// [`Error::Io`] if the thread cannot be started.
    ///
    /// # Panics
    /// If the queue's rows do not have the size of the reader's, or the queue is already served.
    pub fn new(reader: Reader, fifo: Arc<Fifo>) -> Result<Proxy> {
        let row_bytes = reader.table().value_bytes();
        assert_eq!(fifo.row_bytes() as u64, row_bytes, "rows of one size");
        let shared = Arc::<ProxyShared>::default();
        let (again, rest) = unbounded();
        let worker = Worker {
            reader,
            posts: fifo.posts(),
            shared: Arc::clone(&shared),
            again,
            rest,
        };
        let thread = thread::Builder::new().name("penstock-proxy".to_owned());
        let thread = thread.spawn(move || worker.run());
        let thread = thread.map_err(|source| penstock_io::Error::Engine {
            operation: "a new thread",
            source,
        })?;
        fifo.served_by(thread.thread().clone());
        Ok(Proxy {
            shared,
            fifo,
            thread: Mutex::new(Some(thread)),
            process: penstock_io::process::id(),
        })
    }

    /// The host queue that it serves.
    pub fn fifo(&self) -> &Arc<Fifo> {
        &self.fifo
    }

    /// Polls for requests of kernels that the queue has not launched, until the returned guard is
    /// dropped.
    pub fn serve(self: &Arc<Self>) -> Serving {
        self.shared.servings.fetch_add(1, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.as_ref() {
            thread.thread().unpark();
        }
        drop(thread);
        Serving(Arc::clone(self))
    }

    /// Stops after all launched work: other running kernels receive no more rows.
    pub fn stop(&self) {
        // A forked child does not have the thread.
        if self.process != penstock_io::process::id() {
            return;
        }
        // A failed device runs no kernels.
        drop(self.fifo.wait());
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            thread.thread().unpark();
            // A panicked thread has ended too.
            let _ = thread.join();
        }
    }

    /// Returns the first failure since the last call, whose rows were not delivered.
    ///
    /// # Errors
    /// The failure of a request, once; the failure of the device or of the thread, on every call.
    pub fn check(&self) -> Result<()> {
        if let Some(error) = self.shared.failed().take() {
            return Err(error);
        }
        self.check_runs()?;
        Ok(self.fifo.check()?)
    }

    /// Checks that the thread is running.
    ///
    /// # Errors
    /// [`Error::Io`] if the thread has failed.
    pub fn check_runs(&self) -> Result<()> {
        match self.shared.has_panicked.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(penstock_io::Error::Engine {
                operation: "the thread that serves kernels",
                source: io::Error::other("it panicked"),
            }
            .into()),
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("fifo", &self.fifo)
            .finish_non_exhaustive()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Keeps the proxy serving kernels launched elsewhere. Their launcher waits for them before
/// dropping it.
#[derive(Debug)]
pub struct Serving(Arc<Proxy>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.shared.servings.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ProxyShared {
    fn failed(&self) -> MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a request, successfully or not.
    fn end(&self, post: Post, outcome: Result<()>) {
        match outcome {
            Ok(()) => post.answer(Answer::Done),
            Err(error) => {
                // Before the requester can see the answer.
                self.failed().get_or_insert(error);
                post.answer(Answer::Failed);
            }
        }
        self.under_way.fetch_sub(1, Ordering::Release);
    }
}

/// A request some of whose rows were lost or damaged.
struct PendingPost {
    batch: Batch,
    post: Post,
}

struct Worker {
    reader: Reader,
    posts: Posts,
    shared: Arc<ProxyShared>,
    /// Requests to read again here.
    again: Sender<PendingPost>,
    rest: Receiver<PendingPost>,
}

impl Worker {
    fn run(mut self) {
        // However it ends, the kernels are told.
        let _ended = Ended {
            fifo: Arc::clone(self.posts.fifo()),
            shared: Arc::clone(&self.shared),
        };
        let mut idle_since = None;
        while !self.shared.is_stopped.load(Ordering::Relaxed) {
            if self.serve_all() {
                idle_since = None;
                continue;
            }
            if self.is_over() {
                thread::park();
                idle_since = None;
                continue;
            }
            pause(*idle_since.get_or_insert_with(Instant::now));
        }
        while self.shared.under_way.load(Ordering::Acquire) > 0 {
            self.read_again();
            thread::sleep(SLEEP_MAX);
        }
    }

    /// Whether no request can arrive.
    fn is_over(&self) -> bool {
        self.posts.is_over()
            && self.shared.servings.load(Ordering::Relaxed) == 0
            && self.shared.under_way.load(Ordering::Acquire) == 0
    }

    /// Begins all posted requests; returns whether there were any.
    fn serve_all(&mut self) -> bool {
        let mut is_any = self.read_again();
        while let Some(post) = self.posts.take() {
            is_any = true;
            self.shared.under_way.fetch_add(1, Ordering::Relaxed);
            match self.begin(&post) {
                Ok(batch) => self.follow(batch, post),
                Err(error) => self.shared.end(post, Err(error)),
            }
        }
        is_any
    }

    fn begin(&self, post: &Post) -> Result<Batch> {
        let ids = post.ids()?;
        let begun = self.reader.gather(ids, post.memory()?);
        begun.map_err(|error| match error {
            // The index among the kernel's ids is not known here.
            Error::OutOfRange { position, rows, .. } => Error::NoSuchRow {
                id: ids[position].cast_signed(),
                rows,
            },
            error => error,
        })
    }

    /// Answers once the rows have arrived, on the thread that read the last.
    fn follow(&self, batch: Batch, post: Post) {
        let (shared, again) = (Arc::clone(&self.shared), self.again.clone());
        batch.hand_over(Box::new(move |batch| {
            if batch.is_good() {
                drop(batch);
                shared.end(post, Ok(()));
            } else {
                // The worker keeps the receiver while requests are in flight.
                let _ = again.send(PendingPost { batch, post });
            }
        }));
    }

    /// Reads damaged and lost rows again and blocks on it, as this is rare.
    fn read_again(&self) -> bool {
        let mut is_any = false;
        for PendingPost { batch, post } in self.rest.try_iter() {
            is_any = true;
            let outcome = batch.wait(None).map(drop);
            drop(batch);
            self.shared.end(post, outcome);
        }
        is_any
    }
}

/// Stops a host queue when it is dropped.
struct Ended {
    fifo: Arc<Fifo>,
    shared: Arc<ProxyShared>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        if thread::panicking() {
            self.shared.has_panicked.store(true, Ordering::Release);
        }
        self.fifo.stop();
    }
}

/// Waits before the next poll, longer the longer nothing was found.
fn pause(since: Instant) {
    let idle = since.elapsed();
    if idle < SPIN {
        std::hint::spin_loop();
    } else if idle < YIELD {
        thread::yield_now();
    } else {
        thread::sleep((idle / SLEEP_PART).min(SLEEP_MAX));
    }
}
