//! The rows of a trace, and the row that a thread records in.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Mutex;

use super::cell::{Cell, lock};
use super::clock::is_on;

/// The task of a thread, or the content of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Time that the caller had to wait.
    Stall,
    /// Work in the background of the caller.
    Background,
    /// A thread that calls Penstock.
    Caller,
    /// Copies a caller's memory so that the caller can reuse it.
    Stager,
    /// Digests and writes.
    Writer,
    /// Reads and verifies.
    Reader,
    /// Moves bytes for many callers.
    Executor,
    /// Sends copies to a bucket.
    Mirror,
}

const ROLES: [Role; 8] = [
    Role::Stall,
    Role::Background,
    Role::Caller,
    Role::Stager,
    Role::Writer,
    Role::Reader,
    Role::Executor,
    Role::Mirror,
];

/// The most rows of a role; further threads share the last.
const ROWS_MAX: u16 = 1000;

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::Stall => "stall",
            Role::Background => "background",
            Role::Caller => "caller",
            Role::Stager => "stager",
            Role::Writer => "writer",
            Role::Reader => "reader",
            Role::Executor => "executor",
            Role::Mirror => "mirror",
        }
    }

    /// The role of that name.
    pub fn of(name: &str) -> Option<Role> {
        ROLES.into_iter().find(|role| role.name() == name)
    }

    fn place(self) -> usize {
        self as usize
    }
}

/// A row: a role, and the index of a thread among those of that role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub(super) role: Role,
    pub(super) index: u16,
}

impl Row {
    fn of(role: Role, place: usize) -> Row {
        let index = place.min(usize::from(ROWS_MAX) - 1) as u16;
        Row { role, index }
    }

    /// The thread id of the row in the file.
    pub(super) fn number(self) -> usize {
        self.role.place() * usize::from(ROWS_MAX) + usize::from(self.index) + 1
    }

    pub(super) fn name(self) -> String {
        match self.index {
            0 => self.role.name().to_owned(),
            index => format!("{} {}", self.role.name(), index + 1),
        }
    }
}

/// Which rows are in use.
#[derive(Default)]
struct Rows {
    /// For each role, which rows have a thread, by index.
    taken: [Vec<bool>; ROLES.len()],
    /// For each role, when the last span of each row without a thread ends.
    ends: [Vec<u64>; ROLES.len()],
}

static ROWS: Cell<Mutex<Rows>> = Cell::new();

/// Leaves all rows to the parent, in a forked child.
pub(super) fn forget() {
    ROWS.renew();
}

/// A row that belongs to a thread, until this is dropped.
struct Held {
    rows: &'static Mutex<Rows>,
    role: Role,
    place: usize,
}

impl Held {
    fn take(role: Role) -> Held {
        let rows = ROWS.get();
        let taken = &mut lock(rows).taken[role.place()];
        let place = taken.iter().position(|is_taken| !is_taken);
        let place = place.unwrap_or_else(|| {
            taken.push(false);
            taken.len() - 1
        });
        taken[place] = true;
        Held { rows, role, place }
    }

    fn row(&self) -> Row {
        Row::of(self.role, self.place)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a forked child, the lock may be held by a thread that does not exist there.
        if ROWS.is_current(self.rows) {
            lock(self.rows).taken[self.role.place()][self.place] = false;
        }
    }
}

/// The row of the calling thread: its own, or a borrowed one.
enum Seat {
    Own(Held),
    Lent(Row),
}

thread_local! {
    static SEAT: RefCell<Option<Seat>> = const { RefCell::new(None) };
}

/// The row that the calling thread records in. A thread that never [entered](enter) a role is a
/// caller.
pub(super) fn current() -> Row {
    let row = SEAT.try_with(|seat| {
        let mut seat = seat.borrow_mut();
        if matches!(&*seat, Some(Seat::Own(held)) if !ROWS.is_current(held.rows)) {
            *seat = None;
        }
        let seat = seat.get_or_insert_with(|| Seat::Own(Held::take(Role::Caller)));
        match seat {
            Seat::Own(held) => held.row(),
            Seat::Lent(row) => *row,
        }
    });
    row.unwrap_or(Row {
        role: Role::Caller,
        index: 0,
    })
}

/// A row without a thread, where the activity overlaps no other of that row.
pub(super) fn overlapping(role: Role, times: &Range<u64>) -> Row {
    let ends = &mut lock(ROWS.get()).ends[role.place()];
    let index = ends.iter().position(|&end_ns| end_ns <= times.start);
    let index = index.unwrap_or_else(|| {
        ends.push(0);
        ends.len() - 1
    });
    ends[index] = times.end;
    Row::of(role, index)
}

/// Restores the calling thread's previous row on drop.
#[must_use = "the row is left where this is dropped"]
pub struct Entered(Option<Option<Seat>>);

/// Makes the calling thread record in a row of `role` until the guard is dropped.
pub fn enter(role: Role) -> Entered {
    seat(|| Seat::Own(Held::take(role)))
}

impl Row {
    /// The row of the calling thread, for a thread that works while it waits; `None` without a
    /// trace.
    pub fn of_caller() -> Option<Row> {
        is_on().then(current)
    }

    /// Makes the calling thread record in the row of the thread that waits for it.
    pub fn lend(row: Option<Row>) -> Entered {
        row.map_or(Entered(None), |row| seat(|| Seat::Lent(row)))
    }
}

fn seat(next: impl FnOnce() -> Seat) -> Entered {
    // Even without a trace, as one may begin while the thread is working.
    let next = next();
    Entered(SEAT.try_with(|seat| seat.borrow_mut().replace(next)).ok())
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.0.take() {
            let _ = SEAT.try_with(|seat| *seat.borrow_mut() = before);
        }
    }
}
