//! Records of threads, until the thread of the trace writes them.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::cell::{Cell, lock};
use super::row::Row;

/// One event. Times are nanoseconds of the monotonic clock.
pub(super) enum Record {
    Span {
        name: Cow<'static, str>,
        row: Row,
        times: Range<u64>,
        detail: Option<Box<str>>,
    },
    /// Boxed, as it is several times as large as the others.
    Transfer(Box<Transfer>),
    Level {
        gauge: Gauge,
        at_ns: u64,
        level: f64,
    },
}

/// A request that was in flight.
pub(super) struct Transfer {
    pub(super) operation: &'static str,
    pub(super) row: Row,
    pub(super) slot: usize,
    pub(super) times: Range<u64>,
    pub(super) path: Arc<Path>,
    pub(super) is_direct: bool,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) is_aligned: bool,
    pub(super) has_failed: bool,
}

impl Record {
    pub(super) fn span(
        name: Cow<'static, str>,
        row: Row,
        times: Range<u64>,
        detail: Option<String>,
    ) -> Record {
        let detail = detail.map(String::into_boxed_str);
        Record::Span {
            name,
            row,
            times,
            detail,
        }
    }
}

/// A quantity with a level at every moment.
#[derive(Clone, Copy)]
pub(super) enum Gauge {
    /// Bytes submitted to the engines, in GiB/s.
    Submitted,
    /// Bytes completed by the engines, in GiB/s.
    Completed,
    /// Requests in flight, the most of each bucket.
    Depth,
    /// Memory of pools that is in use, in bytes.
    PoolBytes,
    /// Bytes that the process reads from storage, in GiB/s.
    ProcessRead,
    /// Bytes that the process writes to storage, in GiB/s.
    ProcessWritten,
}

impl Gauge {
    pub(super) fn name_and_unit(self) -> (&'static str, &'static str) {
        match self {
            Gauge::Submitted => ("submitted", "GiB/s"),
            Gauge::Completed => ("completed", "GiB/s"),
            Gauge::Depth => ("in flight", "requests"),
            Gauge::PoolBytes => ("pool", "bytes"),
            Gauge::ProcessRead => ("process reads", "GiB/s"),
            Gauge::ProcessWritten => ("process writes", "GiB/s"),
        }
    }
}

/// The most records in memory. They are written ten times a second: enough for ten million requests
/// a second, and a bound where the file is slower than that.
const RECORDS_MAX: usize = 1 << 20;

/// The records of one thread. Only the writer of the trace ever contends for the lock.
type Buffer = Arc<Mutex<Vec<Record>>>;

/// The records of all threads.
#[derive(Default)]
struct Noted {
    /// The buffers of all threads, ended threads included until they are drained.
    buffers: Mutex<Vec<Buffer>>,
    /// Records in all buffers.
    records: AtomicUsize,
    /// Records dropped for lack of room.
    lost: AtomicU64,
}

static NOTED: Cell<Noted> = Cell::new();

/// Leaves all records to the parent, in a forked child.
pub(super) fn forget() {
    NOTED.renew();
}

/// A thread's buffer, and the list that has it.
struct Own(&'static Noted, Buffer);

thread_local! {
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// Records an event of the calling thread.
pub(super) fn push(record: Record) {
    // A thread that is ending has lost its buffer already.
    let _ = OWN.try_with(|own| {
        let noted = NOTED.get();
        let mut own = own.borrow_mut();
        if own
            .as_ref()
            .is_some_and(|Own(known, _)| !NOTED.is_current(known))
        {
            // The parent's buffer, whose lock may be held by a thread that does not exist here.
            std::mem::forget(own.take());
        }
        let Own(_, buffer) = own.get_or_insert_with(|| {
            let buffer = Buffer::default();
            lock(&noted.buffers).push(Arc::clone(&buffer));
            Own(noted, buffer)
        });
        if noted.records.fetch_add(1, Ordering::Relaxed) < RECORDS_MAX {
            lock(buffer).push(record);
        } else {
            noted.records.fetch_sub(1, Ordering::Relaxed);
            noted.lost.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Takes the number of records dropped for lack of room.
pub(super) fn lost() -> u64 {
    NOTED.get().lost.swap(0, Ordering::Relaxed)
}

/// Takes all records.
pub(super) fn drain() -> Vec<Record> {
    let noted = NOTED.get();
    let mut buffers = lock(&noted.buffers);
    let mut drained = Vec::new();
    buffers.retain(|buffer| {
        // A buffer held by nobody else is that of an ended thread, and gets no more records.
        let is_alive = Arc::strong_count(buffer) > 1;
        drained.append(&mut lock(buffer));
        is_alive
    });
    noted.records.fetch_sub(drained.len(), Ordering::Relaxed);
    drained
}
