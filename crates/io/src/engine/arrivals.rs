//! What an engine needs whose operations end on other threads: completions as they arrive, counted.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use super::{Completion, Deadline, Op, Rejected, Wake};

/// The operations of an engine that are in flight, and where their completions arrive.
pub struct Arrivals {
    queue_depth: usize,
    in_flight: usize,
    completions: Receiver<Completion>,
    /// What [`Arrivals::waker`] sends; nobody sends before.
    wakes: Receiver<()>,
}

impl Arrivals {
    /// None yet, `queue_depth` at a time; who performs them sends each completion, once.
    pub fn new(queue_depth: usize) -> (Sender<Completion>, Arrivals) {
        // It can never be full.
        let (done, completions) = crossbeam_channel::bounded(queue_depth);
        let arrivals = Arrivals {
            queue_depth,
            in_flight: 0,
            completions,
            wakes: crossbeam_channel::never(),
        };
        (done, arrivals)
    }

    /// Counts an operation, which the caller has performed then.
    ///
    /// # Errors
    /// As [`Engine::submit`](super::Engine::submit).
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
    /// If whoever performs operations is gone.
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

    /// The most operations at a time.
    pub fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    /// Operations that were admitted and not handed back.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

struct Waker {
    wake: Sender<()>,
}

impl Wake for Waker {
    fn wake(&self) {
        // Full, there is a wake already; gone, nobody waits.
        let _ = self.wake.try_send(());
    }
}
