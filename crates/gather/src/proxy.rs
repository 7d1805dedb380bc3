//! Serves what kernels ask for: the host's side of a FIFO, and a reader.

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

/// For so long who finds nothing looks again at once, and then after having let others run.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_micros(200);
/// Then it sleeps, for a part of the time that it has found nothing, and this at the most: the first post
/// after a pause waits for so long.
const SLEEP_MAX: Duration = Duration::from_micros(500);
const SLEEP_PART: u32 = 16;

/// A thread that has rows read which kernels ask for. It sleeps as long as no kernel is launched.
pub struct Proxy {
    shared: Arc<Shared>,
    fifo: Arc<Fifo>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

#[derive(Default)]
struct Shared {
    is_stopped: AtomicBool,
    /// Posts whose rows are on their way.
    under_way: AtomicUsize,
    /// Who has said that kernels of others may post.
    servings: AtomicUsize,
    failed: Mutex<Option<Error>>,
    has_panicked: AtomicBool,
}

impl Proxy {
    /// Serves a FIFO with rows of a reader.
    ///
    /// # Errors
    /// [`Error::Io`] where the system has no thread to give.
    ///
    /// # Panics
    /// If rows of the FIFO do not have the size of the reader's, or somebody serves it already.
    pub fn new(reader: Reader, fifo: Arc<Fifo>) -> Result<Proxy> {
        let row_bytes = reader.table().value_bytes();
        assert_eq!(fifo.row_bytes() as u64, row_bytes, "rows of one size");
        let shared = Arc::<Shared>::default();
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
            process: std::process::id(),
        })
    }

    /// What it serves.
    pub fn fifo(&self) -> &Arc<Fifo> {
        &self.fifo
    }

    /// Has it look out for posts of kernels that the FIFO has not launched, until what comes back is dropped.
    pub fn serve(self: &Arc<Self>) -> Serving {
        self.shared.servings.fetch_add(1, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.as_ref() {
            thread.thread().unpark();
        }
        drop(thread);
        Serving(Arc::clone(self))
    }

    /// Ends it, when all is done that was launched: other kernels that run get no more rows.
    pub fn stop(&self) {
        // No fork has the thread.
        if self.process != std::process::id() {
            return;
        }
        // A device that has failed runs none.
        drop(self.fifo.wait());
        self.shared.is_stopped.store(true, Ordering::Relaxed);
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            thread.thread().unpark();
            // One that panicked has ended as well.
            let _ = thread.join();
        }
    }

    /// Tells the first thing that went wrong since this was asked last: whoever asked for those rows does not
    /// have them.
    ///
    /// # Errors
    /// That thing; the failure of the device, or that of the thread, each time.
    pub fn check(&self) -> Result<()> {
        if let Some(error) = self.shared.failed().take() {
            return Err(error);
        }
        self.check_runs()?;
        Ok(self.fifo.check()?)
    }

    /// That it serves.
    ///
    /// # Errors
    /// [`Error::Io`]: its thread has failed.
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

/// Kernels of others are served as long as this is there: whoever launches some waits for them before.
#[derive(Debug)]
pub struct Serving(Arc<Proxy>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.shared.servings.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn failed(&self) -> MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A post has its rows, or does not get them.
    fn end(&self, post: Post, outcome: Result<()>) {
        match outcome {
            Ok(()) => post.answer(Answer::Done),
            Err(error) => {
                // Before whoever waits can know of it.
                self.failed().get_or_insert(error);
                post.answer(Answer::Failed);
            }
        }
        self.under_way.fetch_sub(1, Ordering::Release);
    }
}

/// Rows of a post that did not all come as they should.
struct Flight {
    batch: Batch,
    post: Post,
}

struct Worker {
    reader: Reader,
    posts: Posts,
    shared: Arc<Shared>,
    /// They are read again here.
    again: Sender<Flight>,
    rest: Receiver<Flight>,
}

impl Worker {
    fn run(mut self) {
        // Whatever ends it, kernels hear of it.
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

    /// Whether there is nothing to look out for.
    fn is_over(&self) -> bool {
        self.posts.is_over()
            && self.shared.servings.load(Ordering::Relaxed) == 0
            && self.shared.under_way.load(Ordering::Acquire) == 0
    }

    /// Begins what was posted, and says whether there was anything.
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
            // Where in its ids a kernel has it nobody knows here.
            Error::OutOfRange { position, rows, .. } => Error::NoSuchRow {
                id: ids[position].cast_signed(),
                rows,
            },
            error => error,
        })
    }

    /// Answers when the rows are there, from whichever thread has brought the last.
    fn follow(&self, batch: Batch, post: Post) {
        let (shared, again) = (Arc::clone(&self.shared), self.again.clone());
        batch.hand_over(Box::new(move |batch| {
            if batch.is_good() {
                drop(batch);
                shared.end(post, Ok(()));
            } else {
                // The worker has the other end for as long as posts are under way.
                let _ = again.send(Flight { batch, post });
            }
        }));
    }

    /// Reads what was damaged or lost once more, and waits for it, as it is seldom.
    fn read_again(&self) -> bool {
        let mut is_any = false;
        for Flight { batch, post } in self.rest.try_iter() {
            is_any = true;
            let outcome = batch.wait(None).map(drop);
            drop(batch);
            self.shared.end(post, outcome);
        }
        is_any
    }
}

/// Stops a FIFO when it is dropped.
struct Ended {
    fifo: Arc<Fifo>,
    shared: Arc<Shared>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        if thread::panicking() {
            self.shared.has_panicked.store(true, Ordering::Release);
        }
        self.fifo.stop();
    }
}

/// Waits before the next look, the longer the longer nothing was found.
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
