//! The state of a staging queue: the phase of its sources, and the extents on their way.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use penstock_io::buffer::{DeviceToHost, Region, Watch};

use crate::format::digest::Digest;
use crate::seal::Tag;

/// An extent whose bytes are in a buffer, or arriving there, padded with zeros to a whole page.
pub(crate) struct Filled {
    pub(crate) number: u64,
    pub(crate) buf: DeviceToHost,
    /// The digests of its chunks, if they were taken while it was copied; empty otherwise.
    pub(crate) digests: Vec<Digest>,
    /// The tags of chunks that were sealed while they were copied; empty if none was.
    pub(crate) tags: Vec<Option<Tag>>,
}

pub(super) struct StagingState {
    pub(super) sources: Sources,
    /// The reason the save has ended early, if it has: nothing more is copied or written.
    ending: Option<Ending>,
    /// Extents of the plan.
    extents: u64,
    /// The cursor: the first extent that is not claimed.
    pub(super) next: u64,
    /// Claims of stagers and of workers that are still copied from.
    pub(super) staging: usize,
    pub(super) filling: usize,
    pub(super) staged: VecDeque<Filled>,
    /// Whether workers may take staged extents. An eager save keeps workers off the memory bus
    /// until everything is copied or a stager needs their buffers.
    pub(super) is_open: bool,
    /// Whether threads wait for devices only on request.
    pub(super) is_deferred: bool,
}

/// The phases of the sources of a save, in order.
pub(super) enum Sources {
    /// They are copied, and the watch, if there is one, detects changes until then.
    Lent {
        regions: Arc<Vec<Region>>,
        watch: Option<Watch>,
    },
    /// After the last copy, one thread checks whether anybody has written to them.
    Checking,
    /// That thread waits for devices that copy from them, and drops them.
    Releasing,
    /// They are dropped.
    Released,
}

#[derive(Clone, Copy)]
enum Ending {
    /// It has failed, or was cancelled.
    Interrupted,
    /// This tensor was changed before it was copied.
    SourceModified(usize),
}

impl StagingState {
    pub(super) fn new(
        extents: u64,
        regions: Arc<Vec<Region>>,
        watch: Option<Watch>,
        is_open: bool,
    ) -> StagingState {
        StagingState {
            sources: Sources::Lent { regions, watch },
            ending: None,
            extents,
            next: 0,
            staging: 0,
            filling: 0,
            staged: VecDeque::new(),
            is_open,
            is_deferred: false,
        }
    }

    /// Ends the save early.
    pub(super) fn end(&mut self) {
        self.ending.get_or_insert(Ending::Interrupted);
    }

    /// Ends the save because a tensor was changed before it was copied; the first one is reported.
    pub(super) fn end_modified(&mut self, tensor: usize) {
        if self.source_modified().is_none() {
            self.ending = Some(Ending::SourceModified(tensor));
        }
    }

    /// Whether the save has ended early.
    pub(super) fn is_over(&self) -> bool {
        self.ending.is_some()
    }

    /// The tensor that was changed before it was copied, if any.
    pub(super) fn source_modified(&self) -> Option<usize> {
        match self.ending {
            Some(Ending::SourceModified(tensor)) => Some(tensor),
            Some(Ending::Interrupted) | None => None,
        }
    }

    /// Takes the watch for a check before the release, if the host's part is copied. Until
    /// `end_check`, the check counts as a stager, so that no worker finds the save written.
    pub(super) fn begin_check(&mut self) -> Option<Watch> {
        if self.is_over() || !self.is_last() {
            return None;
        }
        let Sources::Lent { watch, .. } = &mut self.sources else {
            return None;
        };
        let watch = watch.take()?;
        self.staging += 1;
        Some(watch)
    }

    /// Ends the check that `begin_check` began, with the tensor that was written to, if any.
    pub(super) fn end_check(&mut self, written: Option<usize>) {
        self.staging -= 1;
        if let Some(tensor) = written {
            self.end_modified(tensor);
        }
    }

    /// Whether all extents are claimed.
    pub(super) fn is_exhausted(&self) -> bool {
        self.next == self.extents
    }

    /// Whether everything is copied, or will not be, and only device copies are outstanding.
    pub(super) fn is_last(&self) -> bool {
        (self.is_over() || self.is_exhausted()) && self.staging + self.filling == 0
    }
}

impl Sources {
    /// The sources, until after the last copy.
    pub(super) fn lent(&self) -> Option<&Arc<Vec<Region>>> {
        match self {
            Sources::Lent { regions, .. } => Some(regions),
            Sources::Checking | Sources::Releasing | Sources::Released => None,
        }
    }

    /// Takes the sources and their watch, for the one thread that releases them. With a watch the
    /// next phase is the check, without one the release.
    pub(super) fn take(&mut self) -> Option<(Arc<Vec<Region>>, Option<Watch>)> {
        self.lent()?;
        match mem::replace(self, Sources::Releasing) {
            Sources::Lent { regions, watch } => {
                if watch.is_some() {
                    *self = Sources::Checking;
                }
                Some((regions, watch))
            }
            Sources::Checking | Sources::Releasing | Sources::Released => None,
        }
    }

    pub(super) fn is_checking(&self) -> bool {
        matches!(self, Sources::Checking)
    }

    pub(super) fn is_released(&self) -> bool {
        matches!(self, Sources::Released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> StagingState {
        StagingState::new(2, Arc::new(Vec::new()), None, false)
    }

    #[test]
    fn a_changed_source_outweighs_a_cancellation_and_the_first_one_is_reported() {
        let mut state = state();
        assert!(!state.is_over() && state.source_modified().is_none());
        state.end();
        assert!(state.is_over() && state.source_modified().is_none());
        state.end_modified(7);
        state.end_modified(3);
        state.end();
        assert!(state.is_over());
        assert_eq!(state.source_modified(), Some(7));
    }

    #[test]
    fn sources_are_taken_once() {
        let mut state = state();
        assert!(state.sources.lent().is_some());
        assert!(matches!(state.sources.take(), Some((_, None))));
        assert!(state.sources.lent().is_none() && !state.sources.is_checking());
        assert!(state.sources.take().is_none() && !state.sources.is_released());
        state.sources = Sources::Released;
        assert!(state.sources.take().is_none() && state.sources.is_released());
    }

    #[test]
    fn a_claim_that_is_copied_from_holds_back_the_last_copy() {
        let mut state = state();
        state.next = 2;
        state.filling = 1;
        assert!(state.is_exhausted() && !state.is_last());
        state.filling = 0;
        assert!(state.is_last());
        state.next = 1;
        assert!(!state.is_last());
        state.end();
        assert!(state.is_last());
    }
}
