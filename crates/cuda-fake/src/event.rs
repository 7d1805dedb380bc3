//! Events: the position in a stream at the last record.

use std::time::Instant;

use crate::capture::Mark;
use crate::operation::Position;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// All flags of `CUevent_flags`: `BLOCKING_SYNC`, `DISABLE_TIMING` and `INTERPROCESS`.
const KNOWN: u32 = 7;
/// `CU_EVENT_INTERPROCESS`, which requires `CU_EVENT_DISABLE_TIMING`.
const INTERPROCESS: u32 = 4;

pub(crate) enum Record {
    Never,
    In(Position),
    /// In a capturing stream: there is no position to wait for.
    Captured(Mark),
}

pub(crate) struct Event {
    pub(crate) context: u64,
    pub(crate) is_timed: bool,
    pub(crate) record: Record,
    /// When the record was reached, if it was.
    pub(crate) reached: Option<Instant>,
}

impl Event {
    /// `None` if the flags are not allowed.
    pub(crate) fn new(context: u64, flags: u32) -> Option<Event> {
        let is_timed = flags & DISABLE_TIMING == 0;
        let is_allowed = flags & !KNOWN == 0 && !(is_timed && flags & INTERPROCESS != 0);
        let record = Record::Never;
        is_allowed.then_some(Event {
            context,
            is_timed,
            record,
            reached: None,
        })
    }
}
