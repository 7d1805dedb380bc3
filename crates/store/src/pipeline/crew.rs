//! The crew of a save: workers that begin one after the other, as the device needs them.
//!
//! A worker copies and digests several times as fast as most drives write. More workers than the
//! device needs cost processor time: a drive that completes many requests at once wakes all of
//! them, and they slow each other down where they share a core's units or the memory. So one worker
//! begins, with all the requests in flight that the others would have. A worker whose queue stays
//! nearly empty although it never waits is slower than the device, and calls another one.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// After so many requests the worker looks back at how many were in flight at most. A device that
/// completes requests in batches has more of them in flight before a batch.
const REQUESTS: usize = 16;

pub(super) struct Crew {
    workers: usize,
    /// Requests in flight of all workers together.
    depth: usize,
    state: Mutex<State>,
    /// Signals that another worker may begin, or that none will.
    called: Condvar,
}

#[derive(Default)]
struct State {
    /// Workers that may have begun.
    wanted: usize,
    begun: usize,
    /// Whether a worker has ended: nothing is left to begin with.
    is_over: bool,
}

/// A worker's place in the crew.
pub(super) struct Member<'a> {
    crew: &'a Crew,
    /// The most requests that it has in flight.
    depth: usize,
    /// Requests submitted since the worker last had to wait, or looked back.
    submitted: usize,
    /// The most of them in flight.
    most_in_flight: usize,
}

impl Crew {
    /// A crew of `workers`, each of which has `queue_depth` requests in flight if all work. Only the
    /// first begins at once if they begin `in_turn`.
    pub(super) fn new(workers: usize, queue_depth: usize, in_turn: bool) -> Crew {
        let wanted = if in_turn { 1 } else { workers };
        Crew {
            workers,
            depth: workers * queue_depth,
            state: Mutex::new(State {
                wanted,
                ..State::default()
            }),
            called: Condvar::new(),
        }
    }

    /// Waits until this worker is needed; `None` if it is not.
    pub(super) fn join(&self) -> Option<Member<'_>> {
        let must_wait = |state: &mut State| !state.is_over && state.begun == state.wanted;
        let waited = self.called.wait_while(self.lock(), must_wait);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_over {
            return None;
        }
        state.begun += 1;
        Some(Member {
            crew: self,
            depth: self.depth / state.wanted,
            submitted: 0,
            most_in_flight: 0,
        })
    }

    /// The number of workers that have begun, and the requests of each in flight; `None` for none.
    pub(super) fn begun(&self) -> Option<(usize, usize)> {
        let begun = self.lock().begun;
        (begun > 0).then(|| (begun, self.depth / begun))
    }

    /// A panic cannot leave the state inconsistent, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member<'_> {
    /// The most requests that this worker may have in flight.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Notes a request, after whose submission so many are in flight.
    pub(super) fn submitted(&mut self, in_flight: usize) {
        self.submitted += 1;
        self.most_in_flight = self.most_in_flight.max(in_flight);
        if self.submitted < REQUESTS {
            return;
        }
        let is_behind = self.most_in_flight <= (self.depth / 8).max(1);
        self.waits();
        let mut state = self.crew.lock();
        // One at a time: the next one is called when the last one has begun.
        if is_behind && state.begun == state.wanted && state.wanted < self.crew.workers {
            state.wanted += 1;
            self.crew.called.notify_one();
        }
        self.depth = self.crew.depth / state.wanted;
    }

    /// Notes that the worker has to wait, for the device or for others.
    pub(super) fn waits(&mut self) {
        self.submitted = 0;
        self.most_in_flight = 0;
    }
}

impl Drop for Member<'_> {
    /// Sends home those that have not begun: a worker ends when nothing is left, or in failure.
    fn drop(&mut self) {
        self.crew.lock().is_over = true;
        self.crew.called.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_worker_that_keeps_up_stays_alone() {
        let crew = Crew::new(4, 8, true);
        let mut member = crew.join().unwrap();
        assert_eq!(member.depth(), 32);
        // The device is behind, or completes batches.
        (0..100).for_each(|_| (1..=REQUESTS).for_each(|in_flight| member.submitted(in_flight)));
        // Others are behind.
        for _ in 0..100 {
            (1..REQUESTS).for_each(|_| member.submitted(1));
            member.waits();
        }
        thread::scope(|scope| {
            let second = scope.spawn(|| crew.join().is_none());
            drop(member);
            assert!(second.join().unwrap());
        });
        assert_eq!(crew.begun(), Some((1, 32)));
    }

    #[test]
    fn a_worker_that_falls_behind_gets_help_and_shares_the_queue() {
        let crew = Crew::new(2, 8, true);
        let mut first = crew.join().unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| crew.join().map(|member| member.depth()));
            (0..REQUESTS).for_each(|_| first.submitted(2));
            assert_eq!(second.join().unwrap(), Some(8));
        });
        assert_eq!(first.depth(), 8);
        assert_eq!(crew.begun(), Some((2, 8)));
    }

    #[test]
    fn all_begin_at_once_unless_they_take_turns() {
        let crew = Crew::new(3, 8, false);
        let members: Vec<_> = (0..3).map(|_| crew.join().unwrap()).collect();
        assert!(members.iter().all(|member| member.depth() == 8));
    }
}
