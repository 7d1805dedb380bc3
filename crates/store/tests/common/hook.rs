//! An engine that calls out before every operation, to stop a save at a known moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use penstock_io::Result;
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, Opened, Rejected, open,
};
use penstock_store::options::Options;

/// Called with the number of the operation, counted from 1 over all engines of a call.
pub type Hook = Arc<dyn Fn(u64) + Send + Sync>;

struct Hooked {
    inner: Box<dyn Engine>,
    operations: Arc<AtomicU64>,
    hook: Hook,
}

impl Engine for Hooked {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        (self.hook)(self.operations.fetch_add(1, Ordering::Relaxed) + 1);
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        self.inner.poll(min, timeout, completed)
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Options whose engines call `hook`; one worker and one chunk an extent, so that the count is the
/// same every time.
pub fn hooked(choice: EngineChoice, hook: impl Fn(u64) + Send + Sync + 'static) -> Options {
    let (operations, hook): (_, Hook) = (Arc::new(AtomicU64::new(0)), Arc::new(hook));
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice,
            queue_depth,
        })?;
        let hooked = Hooked {
            inner: opened.engine,
            operations: Arc::clone(&operations),
            hook: Arc::clone(&hook),
        };
        Ok(Opened {
            engine: Box::new(hooked),
            fallback: opened.fallback,
        })
    };
    Options {
        engine_factory: Some(Arc::new(factory)),
        extent_bytes: Some(1 << 20),
        io_threads: Some(1),
        ..Options::default()
    }
}
