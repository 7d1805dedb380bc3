//! Storage that completes requests during submission, as memory does.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_io::Result;
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, Opened, Rejected, open,
};
use penstock_store::options::Options;

/// Storage that completes the first requests during submission, and later ones only when waited
/// for.
struct Storage {
    inner: Box<dyn Engine>,
    eager: usize,
    asked: usize,
    /// Number of requests in flight at each poll.
    seen: Arc<Mutex<Vec<usize>>>,
}

impl Engine for Storage {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        self.asked += 1;
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let in_flight = self.in_flight();
        if in_flight > 0 {
            self.seen.lock().unwrap().push(in_flight);
        }
        match (self.asked <= self.eager, min) {
            (true, _) => self.inner.poll(in_flight, timeout, completed),
            (false, 0) => Ok(()),
            (false, _) => self.inner.poll(min, timeout, completed),
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Options with storage that completes the first `eager` requests of a worker during submission;
/// returned with the number of requests in flight at each poll.
pub fn answering(options: Options, eager: usize) -> (Options, Arc<Mutex<Vec<usize>>>) {
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let shared = Arc::clone(&seen);
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice: EngineChoice::Threads,
            queue_depth,
        })?;
        Ok(Opened {
            engine: Box::new(Storage {
                inner: opened.engine,
                eager,
                asked: 0,
                seen: Arc::clone(&shared),
            }),
            fallback: opened.fallback,
        })
    };
    let options = Options {
        engine_factory: Some(Arc::new(factory)),
        ..options
    };
    (options, seen)
}
