//! What the workers of an executor and its callers share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::pieces::Rest;
use super::request::Assist;
use super::schedule::{Next, Schedule};
use super::transfer::{Failure, Moved, State};
use crate::buffer::Pool;
use crate::engine::Wake;

/// For how long a worker that has nothing left to do looks out for more before it sleeps. To wake it
/// takes as long as a short read; who reads one by one comes back sooner than this.
const LOOKOUT: Duration = Duration::from_micros(50);

/// So many invitations are kept; of those before, whoever sent them goes on alone.
const INVITATIONS_MAX: usize = 64;

/// Staging for ragged reads and edges, which are small as a rule.
const SMALL_BYTES: usize = 80 << 10;

pub(super) struct Shared {
    queue: Mutex<Queue>,
    /// Something to do, or the end.
    work: Condvar,
    /// Room for more requests.
    room: Condvar,
    /// How often there was something more to do, for who looks out for it.
    more: AtomicUsize,
    pub(super) wakers: Wakers,
    pub(super) staging: Staging,
    queued_max: usize,
}

struct Queue {
    schedule: Schedule,
    /// Work on the processor that callers have begun, for workers with nothing better to do.
    invitations: VecDeque<Arc<dyn Assist>>,
    /// Workers that have nothing at all to do.
    idle: usize,
    /// Whether a worker that has nothing to do looks out for something, and will look here again.
    is_looked_out: bool,
    /// Workers that still take work.
    alive: usize,
    is_closing: bool,
}

/// What a worker found.
pub(super) enum Found {
    /// Something, and perhaps there is more.
    Some,
    /// No piece, but somebody to help along.
    Invitation(Arc<dyn Assist>),
    /// Nothing, and the worker may wait for what it has under way.
    None,
    /// Nothing, and there will be nothing any more.
    End,
}

/// What a worker can take on.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) pieces: usize,
    /// One piece is taken whatever it has, unless this is 0.
    pub(super) bytes: u64,
}

impl Room {
    /// Whether there is none any more.
    fn is_over(self) -> bool {
        self.pieces == 0 || self.bytes == 0
    }

    fn without(self, next: &Next) -> Room {
        let bytes = match next {
            Next::Piece(piece, _) => piece.bytes,
            Next::Over(_) => 0,
        };
        Room {
            pieces: self.pieces - 1,
            bytes: self.bytes.saturating_sub(bytes),
        }
    }
}

/// Buffers of two sizes.
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

    /// The buffers that hold so many bytes.
    pub(super) fn of(&self, bytes: usize) -> &Pool {
        match bytes <= self.small.buffer_bytes() {
            true => &self.small,
            false => &self.large,
        }
    }
}

/// What wakes the workers that wait for what they have under way.
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
        // A worker has one.
        drop(self.slots[index].waker.set(waker));
    }

    /// A worker does not wait any more.
    pub(super) fn is_up(&self, index: usize) {
        self.slots[index].is_waiting.store(false, Ordering::Relaxed);
    }

    /// Wakes up to so many that wait.
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

impl Shared {
    pub(super) fn new(schedule: Schedule, workers: usize, staging: Staging, max: usize) -> Shared {
        Shared {
            queue: Mutex::new(Queue {
                schedule,
                invitations: VecDeque::new(),
                idle: 0,
                is_looked_out: false,
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

    /// Hands requests over, once there is room for any; they fail where no worker is left.
    pub(super) fn push(&self, share: usize, rests: Vec<Rest>, state: &Arc<State>) {
        let mut queue = self.lock();
        while queue.schedule.queued() >= self.queued_max && queue.alive > 0 {
            let waited = self.room.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
        self.put(queue, share, rests, state);
    }

    /// Hands requests over without waiting.
    fn put(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        share: usize,
        rests: Vec<Rest>,
        state: &Arc<State>,
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
        self.rouse(&queue, workers);
    }

    /// Asks so many workers to help somebody along, once they have nothing to begin.
    pub(super) fn invite(&self, assist: &Arc<dyn Assist>, workers: usize) {
        let mut queue = self.lock();
        let workers = workers.min(queue.alive);
        // Who was asked before has had the time to come.
        let kept = INVITATIONS_MAX.saturating_sub(workers);
        queue.invitations.truncate(kept);
        let more = std::iter::repeat_n(assist, workers).cloned();
        queue.invitations.extend(more);
        self.rouse(&queue, workers);
    }

    /// Has workers look for work: those that do nothing first.
    fn rouse(&self, queue: &Queue, workers: usize) {
        self.more.fetch_add(1, Ordering::Relaxed);
        let workers = workers - usize::from(queue.is_looked_out).min(workers);
        let idle = queue.idle.min(workers);
        match idle {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
        self.wakers.wake(workers - idle);
    }

    /// Takes the pieces that there is room for, waiting for some where the worker is idle.
    pub(super) fn take(
        &self,
        index: usize,
        mut room: Room,
        is_idle: bool,
        taken: &mut VecDeque<Next>,
    ) -> Found {
        let mut queue = self.lock();
        let mut has_looked_out = false;
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
                    // One request may be work for all.
                    self.rouse(&queue, 1);
                }
                return Found::Some;
            }
            if let Some(invitation) = queue.invitations.pop_front() {
                return Found::Invitation(invitation);
            }
            if !is_idle {
                self.wakers.slots[index]
                    .is_waiting
                    .store(true, Ordering::Release);
                return Found::None;
            }
            if queue.is_closing {
                return Found::End;
            }
            if !has_looked_out && !queue.is_looked_out {
                has_looked_out = true;
                queue = self.look_out(queue);
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

    /// Waits for a moment, without sleeping, for something to be handed over.
    fn look_out<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let before = self.more.load(Ordering::Relaxed);
        queue.is_looked_out = true;
        drop(queue);
        let until = Instant::now() + LOOKOUT;
        while self.more.load(Ordering::Relaxed) == before && Instant::now() < until {
            std::hint::spin_loop();
        }
        let mut queue = self.lock();
        queue.is_looked_out = false;
        queue
    }

    /// A piece has ended, or a request that need not begin; syncs follow where all is written.
    pub(super) fn end(
        &self,
        state: &Arc<State>,
        result: std::result::Result<Moved, Option<Failure>>,
    ) {
        let syncs = state.end(result);
        if !syncs.is_empty() {
            let rests: Vec<Rest> = syncs.into_iter().map(Rest::sync).collect();
            let mut queue = self.lock();
            // A share of their own: nobody's turn is used up by them.
            let share = queue.schedule.add_share(1);
            self.put(queue, share, rests, state);
            self.remove_share(share);
        }
    }

    /// Whether there is nothing to begin.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().schedule.is_empty()
    }

    /// Lets workers go once all is done.
    pub(super) fn close(&self) {
        let mut queue = self.lock();
        queue.is_closing = true;
        drop(queue);
        self.work.notify_all();
    }

    /// A worker is gone. What is left by the last one fails.
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
            let (Next::Piece(_, state) | Next::Over(state)) = next;
            drop(state.end(Err(Some(failure.clone()))));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
