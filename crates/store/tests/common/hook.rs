//! Stops a save at a known operation.

use std::sync::Arc;

use penstock_io::engine::EngineChoice;
use penstock_io::faulty::Faults;
use penstock_store::options::Options;

use super::faulty;

/// Options whose engines call `hook` before every operation with its number, counted from 1; one
/// worker and one chunk an extent, so that the count is the same every time.
pub fn hooked(choice: EngineChoice, hook: impl Fn(u64) + Send + Sync + 'static) -> Options {
    Options {
        io_threads: Some(1),
        ..faulty(
            choice,
            Arc::new(Faults::new(0).call(move |nth, _, _| hook(nth))),
        )
    }
}
