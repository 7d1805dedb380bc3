//! The state of each slot, shared by all eviction orders.

/// A place for a row in memory.
pub type Slot = u32;

/// Candidates that may not be evicted before the search ends: while nearly all rows are being read
/// or copied, each miss would examine all of them otherwise.
pub(super) const REFUSALS_MAX: u32 = 32;

/// No slot.
pub(super) const NONE: Slot = Slot::MAX;
/// The row's next use is unknown.
pub(super) const NEVER: u32 = u32::MAX;

/// A slot and the row in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) key: u64,
    /// Neighbours in a queue.
    pub(super) newer: Slot,
    pub(super) older: Slot,
    /// The row's next use by an announced batch, by its number in the window.
    pub(super) due: u32,
    /// How often the row was used, up to the limit of its queue.
    pub(super) uses: u8,
    pub(super) state: SlotState,
    /// Whether the row is being read: it cannot be evicted before it has arrived.
    pub(super) comes: bool,
}

/// The position of a slot's row in the policy's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SlotState {
    /// The slot has no row.
    #[default]
    Free,
    /// In the queue, or in the first of two.
    Queued,
    /// In the second queue.
    Main,
    /// In none: it was due when its turn came.
    Out,
    /// In none: it is pinned.
    Pinned,
}

impl Place {
    /// The place of a new row.
    pub(super) fn of(key: u64) -> Place {
        Place {
            key,
            ..Place::default()
        }
    }

    /// Counts a use, up to a number. A place that has reached it is not written to, so that a row
    /// that is used often costs no way back to memory.
    pub(super) fn count_use(&mut self, uses_max: u8) {
        if self.uses < uses_max {
            self.uses += 1;
        }
    }
}

impl Default for Place {
    fn default() -> Place {
        Place {
            key: 0,
            newer: NONE,
            older: NONE,
            due: NEVER,
            uses: 0,
            state: SlotState::Free,
            comes: false,
        }
    }
}
