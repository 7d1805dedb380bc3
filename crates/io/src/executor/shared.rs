//! State shared by the workers of an executor and its callers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::pieces::Rest;
use super::request::ParallelWork;
use super::schedule::{Next, Schedule};
use super::transfer::{Failure, Moved, TransferState};
use crate::buffer::Pool;
use crate::engine::Wake;

/// How long a worker without work spins before it sleeps. Waking it takes as long as a short read;
/// a caller that reads one by one returns sooner than this.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// The most invitations kept; the callers of dropped ones work without help.
const OFFERS_MAX: usize = 64;

/// Bytes of small staging buffers, for unaligned reads and edges, which are usually small.
const SMALL_BYTES: usize = 80 << 10;

pub(super) struct ExecutorShared {
    queue: Mutex<Queue>,
    /// Signalled for new work, and for the end.
    work: Condvar,
    /// Signalled when more requests may be submitted.
    room: Condvar,
    /// Counts additions of work, for a worker that is spinning.
    more: AtomicUsize,
    pub(super) wakers: Wakers,
    pub(super) staging: Staging,
    queued_max: usize,
}

struct Queue {
    schedule: Schedule,
    /// Computations that callers have started, for workers without requests.
    offers: VecDeque<Arc<dyn ParallelWork>>,
    /// Workers that sleep.
    idle: usize,
    /// Whether a worker without work is spinning, and will check this queue again.
    has_spinner: bool,
    /// Workers that still take work.
    alive: usize,
    is_closing: bool,
}

/// The result of looking for work.
pub(super) enum WorkFound {
    /// Pieces were taken, and there may be more.
    Some,
    /// No piece, but a computation to help with.
    Offer(Arc<dyn ParallelWork>),
    /// Nothing; the worker may wait for its operations in flight.
    None,
    /// Nothing, for good: the executor is closing.
    End,
}

/// The next step of a worker that finds nothing to take.
#[derive(Clone, Copy)]
pub(super) enum Otherwise {
    /// Delivers bytes that have arrived.
    Deliver,
    /// Waits for its operations in flight, until it is woken.
    Wait,
    /// Nothing: it sleeps until there is something to take.
    Sleep,
}

/// Work that a worker can take now.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) pieces: usize,
    /// Unless this is 0, one piece is taken whatever its size.
    pub(super) bytes: u64,
}

impl Room {
    /// Whether it is used up.
    fn is_over(self) -> bool {
        self.pieces == 0 || self.bytes == 0
    }

    fn without(self, next: &Next) -> Room {
        let bytes = match next {
            Next::RequestPart(piece, _) => piece.bytes,
            Next::Over(_) => 0,
        };
        Room {
            pieces: self.pieces - 1,
            bytes: self.bytes.saturating_sub(bytes),
        }
    }
}

/// Staging buffers of two sizes.
pub(super) struct Staging {
    small: Pool,
    large: Pool,
}

impl Staging {
    pub(super) fn new(block_bytes: usize, budget_bytes: usize) -> Staging {
        let large_bytes = block_bytes + 2 * 4096;
        let small_bytes = SMALL_BYTES.min(large_bytes);
        Staging {
            small: Pool::new(small_bytes, budget_bytes / 4),
            large: Pool::new(large_bytes, budget_bytes - budget_bytes / 4),
        }
    }

    /// The pool whose buffers hold `bytes`.
    pub(super) fn of(&self, bytes: usize) -> &Pool {
        match bytes <= self.small.buffer_bytes() {
            true => &self.small,
            false => &self.large,
        }
    }
}

/// Wakes workers that wait for their operations in flight.
pub(super) struct Wakers {
    slots: Box<[Slot]>,
}

#[derive(Default)]
struct Slot {
    waker: OnceLock<Arc<dyn Wake>>,
    /// Whether it waits, and has room for more.
    is_waiting: AtomicBool,
}

impl Wakers {
    fn new(workers: usize) -> Wakers {
        Wakers {
            slots: (0..workers).map(|_| Slot::default()).collect(),
        }
    }

    pub(super) fn set(&self, index: usize, waker: Arc<dyn Wake>) {
        // Each worker sets one.
        drop(self.slots[index].waker.set(waker));
    }

    /// Notes that a worker no longer waits.
    pub(super) fn is_up(&self, index: usize) {
        self.slots[index].is_waiting.store(false, Ordering::Relaxed);
    }

    /// Wakes up to `workers` workers that wait.
    fn wake(&self, mut workers: usize) {
        for slot in &self.slots {
            if workers == 0 {
                return;
            }
            if slot.is_waiting.load(Ordering::Relaxed)
                && slot.is_waiting.swap(false, Ordering::AcqRel)
                && let Some(waker) = slot.waker.get()
            {
                waker.wake();
                workers -= 1;
            }
        }
    }
}

impl ExecutorShared {
    pub(super) fn new(
        schedule: Schedule,
        workers: usize,
        staging: Staging,
        max: usize,
    ) -> ExecutorShared {
        ExecutorShared {
            queue: Mutex::new(Queue {
                schedule,
                offers: VecDeque::new(),
                idle: 0,
                has_spinner: false,
                alive: workers,
                is_closing: false,
            }),
            work: Condvar::new(),
            room: Condvar::new(),
            more: AtomicUsize::new(0),
            wakers: Wakers::new(workers),
            staging,
            queued_max: max,
        }
    }

    pub(super) fn add_share(&self, weight: u32) -> usize {
        self.lock().schedule.add_share(weight)
    }

    pub(super) fn remove_share(&self, share: usize) {
        self.lock().schedule.remove_share(share);
    }

    /// Submits requests once there is room; they fail where no worker is left.
    pub(super) fn push(&self, share: usize, rests: Vec<Rest>, state: &Arc<TransferState>) {
        let mut queue = self.lock();
        while queue.schedule.queued() >= self.queued_max && queue.alive > 0 {
            let waited = self.room.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
        self.put(queue, share, rests, state);
    }

    /// Submits requests without waiting.
    fn put(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        share: usize,
        rests: Vec<Rest>,
        state: &Arc<TransferState>,
    ) {
        if queue.alive == 0 {
            drop(queue);
            let failure = Failure::of_worker("no thread of it is left");
            for _ in rests {
                drop(state.end(Err(Some(failure.clone()))));
            }
            return;
        }
        let workers = rests.len();
        queue.schedule.push(share, rests, state);
        self.wake_workers(&queue, workers);
    }

    /// Asks `workers` workers to help with a computation once they have nothing to begin.
    pub(super) fn offer(&self, run_part: &Arc<dyn ParallelWork>, workers: usize) {
        let mut queue = self.lock();
        let workers = workers.min(queue.alive);
        // Workers had the time to answer older invitations.
        let kept = OFFERS_MAX.saturating_sub(workers);
        queue.offers.truncate(kept);
        let more = std::iter::repeat_n(run_part, workers).cloned();
        queue.offers.extend(more);
        self.wake_workers(&queue, workers);
    }

    /// Notifies workers of new work, sleeping ones first.
    fn wake_workers(&self, queue: &Queue, workers: usize) {
        self.more.fetch_add(1, Ordering::Relaxed);
        let workers = workers - usize::from(queue.has_spinner).min(workers);
        let idle = queue.idle.min(workers);
        match idle {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
        self.wakers.wake(workers - idle);
    }

    /// Takes the pieces that there is room for; sleeps until there are some, if the worker has
    /// nothing else to do.
    pub(super) fn take(
        &self,
        index: usize,
        mut room: Room,
        otherwise: Otherwise,
        taken: &mut VecDeque<Next>,
    ) -> WorkFound {
        let mut queue = self.lock();
        let mut has_spun = false;
        loop {
            let was_full = queue.schedule.queued() >= self.queued_max;
            while !room.is_over()
                && let Some(next) = queue.schedule.take()
            {
                room = room.without(&next);
                taken.push_back(next);
            }
            if !taken.is_empty() {
                if was_full && queue.schedule.queued() < self.queued_max {
                    self.room.notify_all();
                }
                if !queue.schedule.is_empty() {
                    // One request may be enough work for all workers.
                    self.wake_workers(&queue, 1);
                }
                return WorkFound::Some;
            }
            if let Some(offer) = queue.offers.pop_front() {
                return WorkFound::Offer(offer);
            }
            match otherwise {
                Otherwise::Deliver => return WorkFound::None,
                Otherwise::Wait => {
                    let slot = &self.wakers.slots[index];
                    slot.is_waiting.store(true, Ordering::Release);
                    return WorkFound::None;
                }
                Otherwise::Sleep => {}
            }
            if queue.is_closing {
                return WorkFound::End;
            }
            if !has_spun && !queue.has_spinner {
                has_spun = true;
                queue = self.spin_wait(queue);
                continue;
            }
            queue.idle += 1;
            queue = self
                .work
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }

    /// Spins for a short time, until work is added.
    fn spin_wait<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let before = self.more.load(Ordering::Relaxed);
        queue.has_spinner = true;
        drop(queue);
        let until = Instant::now() + SPIN_MAX;
        while self.more.load(Ordering::Relaxed) == before && Instant::now() < until {
            std::hint::spin_loop();
        }
        let mut queue = self.lock();
        queue.has_spinner = false;
        queue
    }

    /// Notes the end of a piece, or of a request that was skipped; submits the syncs once
    /// everything is written.
    pub(super) fn end(
        &self,
        state: &Arc<TransferState>,
        result: std::result::Result<Moved, Option<Failure>>,
    ) {
        let syncs = state.end(result);
        if !syncs.is_empty() {
            let rests: Vec<Rest> = syncs.into_iter().map(Rest::sync).collect();
            let mut queue = self.lock();
            // Syncs have a share of their own, so they use up no caller's turn.
            let share = queue.schedule.add_share(1);
            self.put(queue, share, rests, state);
            self.remove_share(share);
        }
    }

    /// Whether no request is waiting to begin.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().schedule.is_empty()
    }

    /// Lets workers end once everything is done.
    pub(super) fn close(&self) {
        let mut queue = self.lock();
        queue.is_closing = true;
        drop(queue);
        self.work.notify_all();
    }

    /// Notes the end of a worker. If it was the last, the remaining requests fail.
    pub(super) fn leave(&self, failure: &Failure) {
        let mut queue = self.lock();
        queue.alive -= 1;
        if queue.alive > 0 {
            return;
        }
        let mut left = Vec::new();
        while let Some(next) = queue.schedule.take() {
            left.push(next);
        }
        drop(queue);
        self.room.notify_all();
        for next in left {
            let (Next::RequestPart(_, state) | Next::Over(state)) = next;
            drop(state.end(Err(Some(failure.clone()))));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
