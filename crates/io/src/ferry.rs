//! Bytes that pass through pinned memory: what files have for devices, and the other way.
//!
//! A [`Ferry`] has a thread and memory of a pool. It takes [`Cargo`] in the order in which it is given, piece
//! by piece: as many pieces come to the memory, or go on from it, as there is room for. So a device copies one
//! piece while the next ones are being read, and no cargo needs more memory than the pool has.
//!
//! Promised: a piece goes on when all of it is there, in the order in which pieces have begun; its memory is
//! used again when it has left it, and no earlier. Who gives cargo need not wait for anything: what is given
//! comes to its end by itself, also when the ferry is dropped.
//!
//! Pieces of many cargoes are waited for one after the other, so that one which is late delays those behind it.

mod outcome;
mod shipment;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::buffer::{Arriving, Departing, IoBuf, Pool};
use crate::{Error, Result};

pub use outcome::Outcome;
pub use shipment::{DeviceKind, DeviceMoved, DeviceRequest, DeviceTransfer, Moment, Shipment};

/// For so long a ferry waits for more cargo before it looks whether what goes on has left; twice as long
/// each time that nothing has.
const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// What passes through the memory of a ferry, on its thread.
pub trait Cargo: Send + 'static {
    /// Why some of it does not.
    type Error: From<Error> + Send;
    /// A piece on its way to the memory. Dropped, it lets go of the memory once nothing works on it any more.
    type Coming: Coming + Send;
    /// A piece on its way from there; likewise.
    type Going: Going + Send;

    /// Bytes of memory that the next piece needs, no more than a buffer of the ferry has; `None` where all have
    /// begun.
    fn next_bytes(&self) -> Option<usize>;

    /// Has the next piece come to some memory. It does not wait.
    ///
    /// # Errors
    /// Why it does not come. Nothing else does then.
    fn begin(&mut self, memory: IoBuf) -> std::result::Result<Self::Coming, Self::Error>;

    /// Waits until a piece has come, and has it go on.
    ///
    /// # Errors
    /// Why it does not.
    fn pass_on(&mut self, coming: Self::Coming) -> std::result::Result<Self::Going, Self::Error>;

    /// All pieces go on.
    ///
    /// # Errors
    /// What is in the way.
    fn all_go(&mut self) -> std::result::Result<(), Self::Error> {
        Ok(())
    }

    /// Waits until a piece has left.
    ///
    /// # Errors
    /// Why it does not.
    fn leave(&mut self, going: Self::Going) -> std::result::Result<(), Self::Error>;

    /// All pieces have left: what else is to be done, if anything. Asked for again when that is done.
    ///
    /// # Errors
    /// What is in the way.
    fn follow_up(&mut self) -> std::result::Result<Option<Self::Going>, Self::Error> {
        Ok(None)
    }

    /// It is over: nothing goes on any more. With an error, pieces may still come to the memory.
    fn end(self, result: std::result::Result<(), Self::Error>);
}

/// A piece that comes to the memory of a ferry.
pub trait Coming {
    /// Whether it is there, or never will be.
    fn has_come(&self) -> bool;
}

/// A piece that leaves the memory of a ferry.
pub trait Going {
    /// Whether it has left, or never will.
    fn has_left(&self) -> bool;
}

impl Coming for Arriving {
    fn has_come(&self) -> bool {
        // What is wrong is told when it is waited for.
        self.is_here().unwrap_or(true)
    }
}

impl Going for Departing {
    fn has_left(&self) -> bool {
        self.is_done().unwrap_or(true)
    }
}

/// See the module's description.
pub struct Ferry<C: Cargo> {
    /// Until it is finished.
    sender: Mutex<Option<Sender<C>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl<C: Cargo> Ferry<C> {
    /// Starts one over memory of a pool, which others may use as well.
    ///
    /// # Errors
    /// [`Error::Engine`] where the system has no thread for it.
    pub fn start(pool: Pool) -> Result<Ferry<C>> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let crew = Crew {
            receiver,
            memory: Carver { pool, open: None },
            jobs: BTreeMap::new(),
            unbegun: VecDeque::new(),
            coming: VecDeque::new(),
            going: VecDeque::new(),
            next: 0,
            pause: PAUSE,
        };
        let thread = std::thread::Builder::new()
            .name("penstock-ferry".to_owned())
            .spawn(move || crew.run())
            .map_err(|source| Error::Engine {
                operation: "spawn",
                source,
            })?;
        Ok(Ferry {
            sender: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
            process: std::process::id(),
        })
    }

    /// Gives it cargo.
    ///
    /// # Errors
    /// [`Error::Forked`], or [`Error::Cancelled`] where it is finished. The cargo is dropped then.
    pub fn load(&self, cargo: C) -> Result<()> {
        let process = self.process;
        if process != std::process::id() {
            return Err(Error::Forked { process });
        }
        let sender = lock(&self.sender);
        let sent = sender.as_ref().map(|sender| sender.send(cargo));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(Error::Cancelled),
        }
    }

    /// Waits until all that it was given has come to its end; it takes no more. In a fork it does nothing.
    pub fn finish(&self) {
        if self.process != std::process::id() {
            return;
        }
        drop(lock(&self.sender).take());
        if let Some(thread) = lock(&self.thread).take() {
            // What has panicked there has told of it.
            drop(thread.join());
        }
    }
}

impl<C: Cargo> Drop for Ferry<C> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The thread is another process's, and a lock of the channel may be held for ever.
            let sender = self
                .sender
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(sender.take());
        }
    }
}

impl<C: Cargo> fmt::Debug for Ferry<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ferry")
            .field("process", &self.process)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who does the work.
struct Crew<C: Cargo> {
    receiver: Receiver<C>,
    memory: Carver,
    /// By the order in which they were given.
    jobs: BTreeMap<u64, Job<C>>,
    /// Those that have pieces which have not begun, in order.
    unbegun: VecDeque<u64>,
    coming: VecDeque<(u64, C::Coming)>,
    going: VecDeque<(u64, C::Going)>,
    /// The number of the next one that is given.
    next: u64,
    pause: Duration,
}

/// What came of looking for a piece to begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// One has begun, or could not.
    Begun,
    /// There is no memory for it.
    Short,
    /// There is none.
    Nothing,
}

struct Job<C: Cargo> {
    cargo: C,
    /// How many pieces come, and how many go on.
    coming: usize,
    going: usize,
    has_begun: bool,
    has_told: bool,
    error: Option<C::Error>,
}

impl<C: Cargo> Crew<C> {
    /// Works until nobody can give it anything any more, and nothing is left.
    fn run(mut self) {
        loop {
            while let Ok(cargo) = self.receiver.try_recv() {
                self.take(cargo);
            }
            // One at a time: what the host has is packed here, and is to go on before the next is packed.
            let step = self.begin(false);
            let first = self.coming.front();
            let is_there = first.is_some_and(|(_, coming)| coming.has_come());
            let is_next = is_there || step != Step::Begun;
            if is_next && let Some((number, coming)) = self.coming.pop_front() {
                self.pass_on(number, coming);
                self.let_go();
                continue;
            }
            match step {
                Step::Begun => {}
                Step::Short => {
                    // What goes on gives memory back; else others have all of it.
                    if !self.let_go_of_first() {
                        self.begin(true);
                    }
                }
                Step::Nothing if self.going.is_empty() => {
                    self.memory.open = None;
                    match self.receiver.recv() {
                        Ok(cargo) => self.take(cargo),
                        Err(_) => return,
                    }
                }
                Step::Nothing => match self.receiver.recv_timeout(self.pause) {
                    Ok(cargo) => self.take(cargo),
                    Err(RecvTimeoutError::Timeout) => self.let_go(),
                    Err(RecvTimeoutError::Disconnected) => _ = self.let_go_of_first(),
                },
            }
        }
    }

    fn take(&mut self, cargo: C) {
        self.pause = PAUSE;
        let job = Job {
            cargo,
            coming: 0,
            going: 0,
            has_begun: false,
            has_told: false,
            error: None,
        };
        self.jobs.insert(self.next, job);
        self.unbegun.push_back(self.next);
        self.next += 1;
    }

    /// Has the next piece come, if there is memory for it, which it may wait for.
    fn begin(&mut self, may_wait: bool) -> Step {
        while let Some(&number) = self.unbegun.front() {
            let job = self.jobs.get_mut(&number).expect("it has pieces to begin");
            let Some(bytes) = job.cargo.next_bytes() else {
                job.has_begun = true;
                self.unbegun.pop_front();
                self.settle(number);
                continue;
            };
            let begun = match self.memory.take(bytes, may_wait) {
                Ok(None) => return Step::Short,
                Ok(Some(memory)) => job.cargo.begin(memory),
                Err(error) => Err(error.into()),
            };
            match begun {
                Ok(coming) => {
                    job.coming += 1;
                    self.coming.push_back((number, coming));
                }
                Err(error) => {
                    self.fail(number, error);
                    self.settle(number);
                }
            }
            return Step::Begun;
        }
        Step::Nothing
    }

    fn pass_on(&mut self, number: u64, coming: C::Coming) {
        let job = self.job(number);
        job.coming -= 1;
        if job.error.is_some() {
            // Before anybody is told that it is over.
            drop(coming);
            return self.settle(number);
        }
        match job.cargo.pass_on(coming) {
            Ok(going) => {
                job.going += 1;
                self.going.push_back((number, going));
            }
            Err(error) => self.fail(number, error),
        }
        self.settle(number);
    }

    /// Ends what has left.
    fn let_go(&mut self) {
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

    /// Waits for the first that goes on, if any does.
    fn let_go_of_first(&mut self) -> bool {
        match self.going.pop_front() {
            Some((number, going)) => {
                self.leave(number, going);
                true
            }
            None => false,
        }
    }

    fn leave(&mut self, number: u64, going: C::Going) {
        let job = self.job(number);
        job.going -= 1;
        if let Err(error) = job.cargo.leave(going) {
            self.fail(number, error);
        }
        self.settle(number);
    }

    fn fail(&mut self, number: u64, error: C::Error) {
        let job = self.job(number);
        job.has_begun = true;
        job.error.get_or_insert(error);
        self.unbegun.retain(|&other| other != number);
    }

    /// Ends a cargo that has come to its end.
    fn settle(&mut self, number: u64) {
        let job = self.job(number);
        if !job.has_begun || job.coming > 0 {
            return;
        }
        if job.error.is_none() && !std::mem::replace(&mut job.has_told, true) {
            job.error = job.cargo.all_go().err();
        }
        if job.going > 0 {
            return;
        }
        if job.error.is_none() {
            match job.cargo.follow_up() {
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
        job.cargo.end(result);
    }

    fn job(&mut self, number: u64) -> &mut Job<C> {
        self.jobs.get_mut(&number).expect("it is not over")
    }
}

/// Cuts memory of any size from buffers of a pool, small pieces side by side.
struct Carver {
    pool: Pool,
    /// What is left of the buffer that was cut from last.
    open: Option<IoBuf>,
}

impl Carver {
    /// So many bytes that begin at a page; `None` where there are none, unless it may wait for them.
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
