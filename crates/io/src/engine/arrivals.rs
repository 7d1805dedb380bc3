//! Counts and collects completions for an engine whose operations end on other threads.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use super::{Completion, Deadline, Op, Rejected, Wake};

/// The operations in flight of an engine, and the channel on which their completions arrive.
pub struct Arrivals {
    queue_depth: usize,
    in_flight: usize,
    completions: Receiver<Completion>,
    /// Receives the wakes of [`Arrivals::waker`]; silent before that was called.
    wakes: Receiver<()>,
}

impl Arrivals {
    /// Starts with none, and admits `queue_depth` at a time; the threads that perform operations
    /// send each completion once.
    pub fn new(queue_depth: usize) -> (Sender<Completion>, Arrivals) {
        // At most `queue_depth` operations are in flight, so it never fills up.
        let (done, completions) = crossbeam_channel::bounded(queue_depth);
        let arrivals = Arrivals {
            queue_depth,
            in_flight: 0,
            completions,
            wakes: crossbeam_channel::never(),
        };
        (done, arrivals)
    }

    /// Counts an operation, for the caller to start.
    pub fn admit(&mut self, op: Op) -> Result<Op, Rejected> {
        if self.in_flight == self.queue_depth {
            return Err(Rejected { op });
        }
        self.in_flight += 1;
        Ok(op)
    }

    /// As [`Engine::poll`](super::Engine::poll), which cannot fail here.
    ///
    /// # Panics
    /// If the threads that perform operations are gone.
    pub fn poll(&mut self, min: usize, timeout: Option<Duration>, completed: &mut Vec<Completion>) {
        let deadline = Deadline::after(timeout);
        let mut wanted = min.min(self.in_flight);
        loop {
            while let Ok(completion) = self.completions.try_recv() {
                self.take(completion, completed);
                wanted = wanted.saturating_sub(1);
            }
            if wanted == 0 {
                return;
            }
            let timeout = match deadline.left() {
                None => crossbeam_channel::never(),
                Some(left) => crossbeam_channel::after(left),
            };
            select! {
                recv(self.completions) -> received => {
                    let completion = received.expect("who performs operations outlives them");
                    self.take(completion, completed);
                    wanted -= 1;
                }
                recv(self.wakes) -> _ => return,
                recv(timeout) -> _ => return,
            }
        }
    }

    fn take(&mut self, completion: Completion, completed: &mut Vec<Completion>) {
        self.in_flight -= 1;
        completed.push(completion);
    }

    /// As [`Engine::waker`](super::Engine::waker), which cannot fail here.
    pub fn waker(&mut self) -> Arc<dyn Wake> {
        let (wake, wakes) = crossbeam_channel::bounded(1);
        self.wakes = wakes;
        Arc::new(Waker { wake })
    }

    /// The most operations in flight.
    pub fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    /// Operations admitted and not yet returned.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

struct Waker {
    wake: Sender<()>,
}

impl Wake for Waker {
    fn wake(&self) {
        // A full channel already has a wake; a closed one has no receiver left.
        let _ = self.wake.try_send(());
    }
}
