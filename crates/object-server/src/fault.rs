//! What goes wrong with a request.

/// What goes wrong with a request. Of those that are applied the answer is that of the last time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not applied, and answered with this status; 200 is one whose body says that it failed.
    Refused(u16),
    /// It is applied, and answered as if it were not.
    Disowned(u16),
    /// It is not applied, and the connection ends.
    Dropped,
    /// It is applied, and the connection ends before the answer.
    Unanswered,
    /// The connection ends, and the request is applied right before the nth one that comes after it, or when
    /// [`Server::settle`](crate::Server::settle) is called.
    Late(usize),
    /// It is applied twice.
    Doubled,
    /// It is applied, and the answer's body ends in its middle.
    Cut,
    /// It is applied, and this bit of the answer's body is another one; counted from the first of the body, and
    /// on from there where it has fewer.
    Flipped(usize),
    /// It is applied, and the answer begins with a status line that is none.
    Garbled,
    /// A listing that shows what was there before so many changes; anything else is answered as ever.
    Stale(usize),
    /// It is applied, and answered when so many of others were.
    Held(usize),
    /// Its client dies before it.
    Killed,
    /// Its client dies after it, and never hears of it.
    KilledAfter,
}

impl Fault {
    /// How often the request is applied before it is answered.
    pub(crate) fn applications(self) -> usize {
        match self {
            Fault::Refused(_) | Fault::Dropped | Fault::Late(_) | Fault::Killed => 0,
            Fault::Doubled => 2,
            Fault::Disowned(_)
            | Fault::Unanswered
            | Fault::Cut
            | Fault::Flipped(_)
            | Fault::Garbled
            | Fault::Stale(_)
            | Fault::Held(_)
            | Fault::KilledAfter => 1,
        }
    }

    /// Whether its client is dead from then on.
    pub(crate) fn kills(self) -> bool {
        matches!(self, Fault::Killed | Fault::KilledAfter)
    }
}
