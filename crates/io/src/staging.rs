//! Transfers between files and devices through pinned memory.
//!
//! A [`StagingPipeline`] has a thread and memory of a pool. It runs [`CopyJob`], its copy jobs, in the order of
//! submission, piece by piece: new pieces begin while the memory has room. So a device
//! copies one piece while the next ones are being read, and no copy job needs more memory than the
//! pool has.
//!
//! Promised: a piece is passed on once all of it has arrived, in the order in which pieces have
//! begun; its memory is reused after the piece has left it, and no earlier. Submitters need not
//! wait: copy jobs complete by themselves, even when the pipeline is dropped.
//!
//! Pieces of all copy jobs are waited for in order, so a late one delays those behind it.

mod device_copy;
mod device_transfer;
mod outcome;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::buffer::{DeviceToHost, HostToDevice, IoBuf, Pool};
use crate::{Error, Result};

pub use device_copy::{DeviceCopyJob, DeviceKind, DeviceRequest, Moment};
pub use device_transfer::{DeviceMoved, DeviceTransfer};
pub use outcome::Outcome;

/// How long the pipeline waits for more copy jobs before it checks whether outgoing pieces have
/// left; doubled each time that none has.
const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// A copy job: bytes that move through the memory of the pipeline, on its thread.
pub trait CopyJob: Send + 'static {
    /// The error of a copy job.
    type Error: From<Error> + Send;
    /// A piece on its way to the memory. Dropping it releases the memory once nothing uses it any
    /// more.
    type Inbound: Inbound + Send;
    /// A piece on its way from the memory; dropping it does the same.
    type Outbound: Outbound + Send;

    /// Bytes of memory that the next piece needs, at most those of a buffer of the pipeline; `None`
    /// once all pieces have begun.
    fn next_bytes(&self) -> Option<usize>;

    /// Begins to bring the next piece into `memory`. It does not wait.
    ///
    /// # Errors
    /// The reason the piece cannot begin; then no other one begins.
    fn begin(&mut self, memory: IoBuf) -> std::result::Result<Self::Inbound, Self::Error>;

    /// Waits until a piece has arrived, and passes it on to its destination.
    ///
    /// # Errors
    /// The reason the piece failed.
    fn forward(
        &mut self,
        coming: Self::Inbound,
    ) -> std::result::Result<Self::Outbound, Self::Error>;

    /// Called once all pieces are on their way from the memory.
    ///
    /// # Errors
    /// The reason the copy job fails.
    fn all_forwarded(&mut self) -> std::result::Result<(), Self::Error> {
        Ok(())
    }

    /// Waits until a piece has left the memory.
    ///
    /// # Errors
    /// The reason the piece failed.
    fn leave(&mut self, going: Self::Outbound) -> std::result::Result<(), Self::Error>;

    /// Called once all pieces have left: starts a further step, if there is one. Called again after
    /// that step.
    ///
    /// # Errors
    /// The reason the copy job fails.
    fn follow_up(&mut self) -> std::result::Result<Option<Self::Outbound>, Self::Error> {
        Ok(None)
    }

    /// Ends the copy job: none of its pieces is on its way from the memory any more. After an
    /// error, pieces may still be arriving in it.
    fn end(self, result: std::result::Result<(), Self::Error>);
}

/// A piece that is arriving in the memory of the pipeline.
pub trait Inbound {
    /// Whether it has arrived, or has failed.
    fn has_arrived(&self) -> bool;
}

/// A piece that is leaving the memory of the pipeline.
pub trait Outbound {
    /// Whether it has left, or has failed.
    fn has_left(&self) -> bool;
}

impl Inbound for DeviceToHost {
    fn has_arrived(&self) -> bool {
        // An error is reported by the wait for it.
        self.is_done().unwrap_or(true)
    }
}

impl Outbound for HostToDevice {
    fn has_left(&self) -> bool {
        self.is_done().unwrap_or(true)
    }
}

/// A staging pipeline: a thread that moves copy jobs through pinned memory; see the module's
/// description.
pub struct StagingPipeline<C: CopyJob> {
    /// `None` after `finish`.
    sender: Mutex<Option<Sender<C>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl<C: CopyJob> StagingPipeline<C> {
    /// Starts a pipeline over memory of a pool, which it may share.
    ///
    /// # Errors
    /// [`Error::Engine`] where the system cannot start a thread.
    pub fn start(pool: Pool) -> Result<StagingPipeline<C>> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let worker = PipelineWorker {
            receiver,
            memory: SubAllocator { pool, open: None },
            jobs: BTreeMap::new(),
            unbegun: VecDeque::new(),
            coming: VecDeque::new(),
            going: VecDeque::new(),
            next: 0,
            pause: PAUSE,
        };
        let thread = std::thread::Builder::new()
            .name("penstock-staging".to_owned())
            .spawn(move || worker.run())
            .map_err(|source| Error::Engine {
                operation: "spawn",
                source,
            })?;
        Ok(StagingPipeline {
            sender: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
            process: crate::process::id(),
        })
    }

    /// Submits a copy job.
    ///
    /// # Errors
    /// [`Error::Forked`], or [`Error::Cancelled`] after `finish`. The copy job is dropped then.
    pub fn submit(&self, work: C) -> Result<()> {
        let process = self.process;
        if process != crate::process::id() {
            return Err(Error::Forked { process });
        }
        let sender = lock(&self.sender);
        let sent = sender.as_ref().map(|sender| sender.send(work));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(Error::Cancelled),
        }
    }

    /// Waits until all submitted copy jobs have ended, and accepts no more. In a fork it does
    /// nothing.
    pub fn finish(&self) {
        if self.process != crate::process::id() {
            return;
        }
        drop(lock(&self.sender).take());
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the thread has printed its own message.
            drop(thread.join());
        }
    }
}

impl<C: CopyJob> Drop for StagingPipeline<C> {
    fn drop(&mut self) {
        if self.process != crate::process::id() {
            // The thread belongs to another process, and a lock of the channel may be held forever
            // here.
            let sender = self
                .sender
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(sender.take());
        }
    }
}

impl<C: CopyJob> fmt::Debug for StagingPipeline<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingPipeline")
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of the pipeline's thread.
struct PipelineWorker<C: CopyJob> {
    receiver: Receiver<C>,
    memory: SubAllocator,
    /// By order of submission.
    jobs: BTreeMap<u64, JobInProgress<C>>,
    /// Copy jobs with pieces that have not begun, in order.
    unbegun: VecDeque<u64>,
    coming: VecDeque<(u64, C::Inbound)>,
    going: VecDeque<(u64, C::Outbound)>,
    /// The number of the next copy job.
    next: u64,
    pause: Duration,
}

/// The result of looking for a piece to begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// A piece has begun, or has failed to.
    Begun,
    /// There is no memory for the next piece.
    Short,
    /// There is no piece to begin.
    Nothing,
}

struct JobInProgress<C: CopyJob> {
    work: C,
    /// The number of pieces that are arriving, and of those that are leaving.
    coming: usize,
    going: usize,
    has_begun: bool,
    is_forwarded: bool,
    error: Option<C::Error>,
}

impl<C: CopyJob> PipelineWorker<C> {
    /// Works until the pipeline is finished and no copy job is left.
    fn run(mut self) {
        loop {
            while let Ok(work) = self.receiver.try_recv() {
                self.take(work);
            }
            // One piece at a time: host bytes are packed here, and are to be passed on before the
            // next are packed.
            let step = self.begin(false);
            let first = self.coming.front();
            let is_there = first.is_some_and(|(_, coming)| coming.has_arrived());
            let is_next = is_there || step != Step::Begun;
            if is_next && let Some((number, coming)) = self.coming.pop_front() {
                self.forward(number, coming);
                self.reap();
                continue;
            }
            match step {
                Step::Begun => {}
                Step::Short => {
                    // An outgoing piece returns memory; without one, other users of the pool hold
                    // all of it.
                    if !self.reap_first() {
                        self.begin(true);
                    }
                }
                Step::Nothing if self.going.is_empty() => {
                    self.memory.open = None;
                    match self.receiver.recv() {
                        Ok(work) => self.take(work),
                        Err(_) => return,
                    }
                }
                Step::Nothing => match self.receiver.recv_timeout(self.pause) {
                    Ok(work) => self.take(work),
                    Err(RecvTimeoutError::Timeout) => self.reap(),
                    Err(RecvTimeoutError::Disconnected) => _ = self.reap_first(),
                },
            }
        }
    }

    fn take(&mut self, work: C) {
        self.pause = PAUSE;
        let job = JobInProgress {
            work,
            coming: 0,
            going: 0,
            has_begun: false,
            is_forwarded: false,
            error: None,
        };
        self.jobs.insert(self.next, job);
        self.unbegun.push_back(self.next);
        self.next += 1;
    }

    /// Begins the next piece, if there is memory for it; with `may_wait` it waits for memory.
    fn begin(&mut self, may_wait: bool) -> Step {
        while let Some(&number) = self.unbegun.front() {
            let job = self.jobs.get_mut(&number).expect("it has pieces to begin");
            let Some(bytes) = job.work.next_bytes() else {
                job.has_begun = true;
                self.unbegun.pop_front();
                self.finish_if_done(number);
                continue;
            };
            let begun = match self.memory.take(bytes, may_wait) {
                Ok(None) => return Step::Short,
                Ok(Some(memory)) => job.work.begin(memory),
                Err(error) => Err(error.into()),
            };
            match begun {
                Ok(coming) => {
                    job.coming += 1;
                    self.coming.push_back((number, coming));
                }
                Err(error) => {
                    self.fail(number, error);
                    self.finish_if_done(number);
                }
            }
            return Step::Begun;
        }
        Step::Nothing
    }

    fn forward(&mut self, number: u64, coming: C::Inbound) {
        let job = self.job(number);
        job.coming -= 1;
        if job.error.is_some() {
            // Dropped before the end of the copy job is reported.
            drop(coming);
            return self.finish_if_done(number);
        }
        match job.work.forward(coming) {
            Ok(going) => {
                job.going += 1;
                self.going.push_back((number, going));
            }
            Err(error) => self.fail(number, error),
        }
        self.finish_if_done(number);
    }

    /// Ends the pieces that have left.
    fn reap(&mut self) {
        let before = self.going.len();
        for _ in 0..self.going.len() {
            let (number, going) = self.going.pop_front().expect("so many are there");
            match going.has_left() {
                true => self.leave(number, going),
                false => self.going.push_back((number, going)),
            }
        }
        self.pause = match self.going.len() < before {
            true => PAUSE,
            false => PAUSE_MAX.min(2 * self.pause),
        };
    }

    /// Waits for the first outgoing piece; returns false where there is none.
    fn reap_first(&mut self) -> bool {
        match self.going.pop_front() {
            Some((number, going)) => {
                self.leave(number, going);
                true
            }
            None => false,
        }
    }

    fn leave(&mut self, number: u64, going: C::Outbound) {
        let job = self.job(number);
        job.going -= 1;
        if let Err(error) = job.work.leave(going) {
            self.fail(number, error);
        }
        self.finish_if_done(number);
    }

    fn fail(&mut self, number: u64, error: C::Error) {
        let job = self.job(number);
        job.has_begun = true;
        job.error.get_or_insert(error);
        self.unbegun.retain(|&other| other != number);
    }

    /// Ends a copy job if nothing of it is left to do.
    fn finish_if_done(&mut self, number: u64) {
        let job = self.job(number);
        if !job.has_begun || job.coming > 0 {
            return;
        }
        if job.error.is_none() && !std::mem::replace(&mut job.is_forwarded, true) {
            job.error = job.work.all_forwarded().err();
        }
        if job.going > 0 {
            return;
        }
        if job.error.is_none() {
            match job.work.follow_up() {
                Ok(Some(going)) => {
                    job.going += 1;
                    return self.going.push_back((number, going));
                }
                Ok(None) => {}
                Err(error) => job.error = Some(error),
            }
        }
        let job = self.jobs.remove(&number).expect("it was there just now");
        let result = job.error.map_or(Ok(()), Err);
        job.work.end(result);
    }

    fn job(&mut self, number: u64) -> &mut JobInProgress<C> {
        self.jobs.get_mut(&number).expect("it is not over")
    }
}

/// Cuts page-aligned memory of any size from buffers of a pool, small pieces next to each other.
struct SubAllocator {
    pool: Pool,
    /// The unused rest of the last buffer.
    open: Option<IoBuf>,
}

impl SubAllocator {
    /// Takes `bytes` page-aligned bytes; `None` where no memory is free, unless `may_wait` is set.
    fn take(&mut self, bytes: usize, may_wait: bool) -> Result<Option<IoBuf>> {
        let whole = bytes.next_multiple_of(rustix::param::page_size());
        let left = self.open.take();
        let left = match left.filter(|left| left.capacity() >= whole) {
            Some(left) => Some(left),
            None if may_wait => Some(self.pool.take()?),
            None => self.pool.try_take()?,
        };
        let Some(mut memory) = left else {
            return Ok(None);
        };
        if memory.capacity() > whole {
            self.open = Some(memory.split_off(whole));
        }
        drop(memory.split_off(bytes));
        Ok(Some(memory))
    }
}
