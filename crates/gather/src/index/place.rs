//! What is known of each slot, for all who put slots in an order.

/// One of the places that rows have in memory.
pub type Slot = u32;

/// So many rows that may not go are passed over before a row is not admitted: where nearly all of
/// them are being read or copied, each row that misses would look at all of them otherwise.
pub(super) const REFUSALS_MAX: u32 = 32;

/// No slot.
pub(super) const NONE: Slot = Slot::MAX;
/// Nobody knows when the row is needed next.
pub(super) const NEVER: u32 = u32::MAX;

/// A slot and the row in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) key: u64,
    /// Neighbours in a queue.
    pub(super) newer: Slot,
    pub(super) older: Slot,
    /// The next use of the row, where a batch that is known ahead has it, by its number in the
    /// window.
    pub(super) due: u32,
    /// How often the row was used, as far as its queue wants to know.
    pub(super) uses: u8,
    pub(super) state: State,
    /// Whether the row is on its way: nobody can take its place before it is there.
    pub(super) comes: bool,
}

/// Where the row of a slot stands in the order of the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// There is no row.
    #[default]
    Free,
    /// In its queue, or in the first of two.
    Queued,
    /// In the second queue.
    Main,
    /// In none: it was due when its turn came.
    Out,
    /// In none, as it stays whatever happens.
    Pinned,
}

impl Place {
    /// That of a row that comes.
    pub(super) fn of(key: u64) -> Place {
        Place {
            key,
            ..Place::default()
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
            state: State::Free,
            comes: false,
        }
    }
}
