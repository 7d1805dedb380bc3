//! Faults of requests.

/// A fault of a request. A request that is applied several times gets its last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Not applied, and answered with this status; 200 is an answer whose body reports a failure.
    Refused(u16),
    /// Applied, and answered with this status as if it were not.
    Disowned(u16),
    /// Not applied, and the connection ends.
    Dropped,
    /// Applied, and the connection ends before the answer.
    Unanswered,
    /// The connection ends, and the request is applied right before the nth later one, or when
    /// [`Server::apply_late`](crate::Server::apply_late) is called.
    Late(usize),
    /// Applied twice.
    Doubled,
    /// Applied, and the answer's body ends in its middle.
    Cut,
    /// Applied, and this bit of the answer's body is flipped; counted from the body's first bit,
    /// modulo its length.
    Flipped(usize),
    /// Applied, and the answer begins with an invalid status line.
    Garbled,
    /// A listing shows the state of this many changes before; other requests are answered as usual.
    Stale(usize),
    /// Applied, and answered after this many requests of other clients were.
    Held(usize),
    /// Its client dies before the request.
    Killed,
    /// Its client dies after the request, and gets no answer.
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

    /// Whether its client is dead afterwards.
    pub(crate) fn kills(self) -> bool {
        matches!(self, Fault::Killed | Fault::KilledAfter)
    }
}
