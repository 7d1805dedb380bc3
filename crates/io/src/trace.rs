//! Records where the time of a call goes: spans, requests in flight and counters, in a file.
//!
//! While no trace runs, which is nearly always, recording checks one flag. While one runs, a thread
//! appends records to a buffer of its own; a thread of the trace writes the buffers out ten times a
//! second, and samples the process's reads and writes. A process that is killed loses a tenth of a
//! second of its trace, and the spans and requests that were open: these are recorded when they
//! end.
//!
//! The file is JSON in the Trace Event Format, an array of events, which Perfetto and other viewers
//! open; times are microseconds of the wall clock, so that files of several processes fit together.
//! A process has *rows*: one per recording thread, named by the thread's task ([`Role`]), and
//! reused by the next thread with that task.
//!
//! An error of the trace file ends the trace, and never the traced call.

mod cell;
mod clock;
mod event;
pub(crate) mod meter;
mod record;
mod row;
mod sink;

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

pub use clock::{is_on, now_ns};
pub use event::Process;
use record::{Record, Transfer};
pub use row::{Role, Row, enter};
pub use sink::{forget, start, stop};

use crate::file::File;

/// An activity of the calling thread, until this is dropped. Spans of a thread nest.
#[must_use = "a span ends where it is dropped"]
pub struct Span(Option<Open>);

struct Open {
    name: &'static str,
    start_ns: u64,
    detail: Option<String>,
}

/// The time at which a span of the calling thread begins, in nanoseconds.
///
/// The thread takes its row now, not when it records the span: until then another thread could end
/// and free a row with spans that overlap this one.
pub fn begin_ns() -> u64 {
    if is_on() {
        row::current();
    }
    now_ns()
}

/// Begins a span.
pub fn span(name: &'static str) -> Span {
    Span(is_on().then(|| Open {
        name,
        start_ns: begin_ns(),
        detail: None,
    }))
}

/// Begins a span with a file or directory as its detail.
pub(crate) fn span_of(name: &'static str, path: &Path) -> Span {
    Span(is_on().then(|| {
        Open {
            name,
            start_ns: begin_ns(),
            detail: path
                .file_name()
                .map(|name| name.to_string_lossy().into_owned()),
        }
    }))
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(open) = self.0.take() {
            let times = open.start_ns..now_ns();
            let row = row::current();
            record::push(Record::span(open.name.into(), row, times, open.detail));
        }
    }
}

/// Records a span of the calling thread that ends now; `detail` names its object.
pub fn span_since(name: impl Into<Cow<'static, str>>, start_ns: u64, detail: Option<String>) {
    if is_on() {
        span_during(name, start_ns..now_ns(), detail);
    }
}

/// Records a span of the calling thread between two past times.
pub fn span_during(name: impl Into<Cow<'static, str>>, times: Range<u64>, detail: Option<String>) {
    if is_on() {
        record::push(Record::span(name.into(), row::current(), times, detail));
    }
}

/// Records an activity outside of the threads' spans, in a row of its own role.
pub fn span_overlapping(role: Role, name: String, times: Range<u64>, detail: Option<String>) {
    if is_on() {
        let row = row::overlapping(role, &times);
        record::push(Record::span(name.into(), row, times, detail));
    }
}

/// A request from its submission to its completion.
pub(crate) struct InFlight {
    start_ns: u64,
    /// The trace it belongs to.
    trace: u64,
    is_over: bool,
}

impl InFlight {
    /// Called at the submission; `None` while no trace runs.
    pub(crate) fn begin(bytes: usize) -> Option<InFlight> {
        is_on().then(|| {
            let start_ns = now_ns();
            meter::submitted(start_ns, bytes);
            InFlight {
                start_ns,
                trace: sink::number(),
                is_over: false,
            }
        })
    }

    /// Called at the completion. `slot` distinguishes the thread's requests in flight.
    pub(crate) fn end(
        mut self,
        operation: &'static str,
        slot: usize,
        file: &File,
        offset: u64,
        memory: &[u8],
        has_failed: bool,
    ) {
        self.is_over = true;
        if !self.is_traced() {
            return;
        }
        let end_ns = now_ns();
        meter::completed(end_ns, if has_failed { 0 } else { memory.len() });
        let alignment = offset | memory.as_ptr().addr() as u64 | memory.len() as u64;
        record::push(Record::Transfer(Box::new(Transfer {
            operation,
            row: row::current(),
            slot,
            times: self.start_ns..end_ns,
            path: file.shared_path(),
            is_direct: file.is_direct(),
            offset,
            bytes: memory.len(),
            is_aligned: alignment.is_multiple_of(ALIGNMENT),
            has_failed,
        })));
    }

    fn is_traced(&self) -> bool {
        is_on() && self.trace == sink::number()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // The engine was dropped with its requests.
        if !self.is_over && self.is_traced() {
            meter::dropped(now_ns());
        }
    }
}

/// Alignment that counts as aligned: a page, which suits every device.
const ALIGNMENT: u64 = 4096;
