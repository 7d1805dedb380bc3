//! Objects that callers made and did not free.

use crate::memory::Home;
use crate::state::DriverState;

/// Counts of objects that were made and not freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Leaks {
    /// Allocations of device memory.
    pub allocations: u64,
    /// Their bytes.
    pub device_bytes: u64,
    /// Registered ranges of host memory.
    pub registered: u64,
    /// Allocations of pinned host memory.
    pub pinned_allocations: u64,
    /// Bytes of both kinds of pinned memory.
    pub pinned_bytes: u64,
    /// Streams created by callers.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Graphs.
    pub graphs: u64,
    /// Retains of contexts without a release.
    pub retained: u64,
}

impl Leaks {
    pub(crate) fn count(state: &DriverState) -> Leaks {
        let mut leaks = Leaks {
            pinned_bytes: state.memory.pinned_bytes(),
            streams: state.streams.count(),
            events: state.events.len() as u64,
            modules: state.modules.count(),
            graphs: state.graphs.len() as u64,
            retained: state
                .contexts
                .values()
                .map(|context| u64::from(context.users))
                .sum(),
            ..Leaks::default()
        };
        for range in state.memory.space().ranges() {
            match range.home {
                Home::Device(_) => {
                    leaks.allocations += 1;
                    leaks.device_bytes += range.bytes;
                }
                Home::Registered { .. } => leaks.registered += 1,
                Home::Pinned { .. } => leaks.pinned_allocations += 1,
            }
        }
        leaks
    }
}
