//! Records as events of the Trace Event Format.

use std::collections::HashSet;
use std::io::{self, Write};
use std::ops::Range;

use serde::Serialize;
use serde_json::{Value, json};

use super::record::{Record, Transfer};
use super::row::Row;

/// The process of a trace.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub id: u32,
    /// Its position among the processes in viewers.
    pub order: u32,
    /// Its name in viewers.
    pub name: String,
    /// Further information, as a JSON object.
    pub about: Value,
}

/// One event; fields that its kind lacks are left out.
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    /// The kind of event.
    ph: &'static str,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    /// Distinguishes overlapping events of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    id2: Option<LocalId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Value>,
}

#[derive(Serialize)]
struct LocalId {
    local: String,
}

/// Writes an array of events.
pub(super) struct Writer<W: Write> {
    out: W,
    pid: u32,
    origin_ns: u64,
    is_first: bool,
    /// Rows whose names are written.
    named: HashSet<usize>,
}

impl<W: Write> Writer<W> {
    /// Begins the array and describes the process.
    pub(super) fn new(mut out: W, process: &Process, origin_ns: u64) -> io::Result<Writer<W>> {
        out.write_all(b"[\n")?;
        let mut writer = Writer {
            out,
            pid: process.id,
            origin_ns,
            is_first: true,
            named: HashSet::new(),
        };
        writer.metadata("penstock", None, process.about.clone())?;
        writer.metadata("process_name", None, json!({ "name": process.name }))?;
        let sort_index = json!({ "sort_index": process.order });
        writer.metadata("process_sort_index", None, sort_index)?;
        Ok(writer)
    }

    pub(super) fn write(&mut self, record: &Record) -> io::Result<()> {
        match record {
            Record::Span {
                name,
                row,
                times,
                detail,
            } => {
                let Some(times) = self.since_origin(times) else {
                    return Ok(());
                };
                let tid = self.name_row(*row)?;
                let event = Event {
                    tid: Some(tid),
                    ts: Some(self.microseconds(times.start)),
                    dur: Some((times.end - times.start) as f64 / 1e3),
                    args: detail.as_ref().map(|detail| json!({ "of": detail })),
                    ..self.event(name, "X")
                };
                self.put(&event)
            }
            Record::Transfer(transfer) => self.write_transfer(transfer),
            Record::Level {
                gauge,
                at_ns,
                level,
            } => {
                // Viewers show a counter's name and unit next to each other.
                let (name, unit) = gauge.name_and_unit();
                let event = Event {
                    ts: Some(self.microseconds(*at_ns)),
                    args: Some(json!({ unit: level })),
                    ..self.event(name, "C")
                };
                self.put(&event)
            }
        }
    }

    /// Writes a pair of events: requests in flight overlap, which spans of a row must not.
    fn write_transfer(&mut self, transfer: &Transfer) -> io::Result<()> {
        let Some(times) = self.since_origin(&transfer.times) else {
            return Ok(());
        };
        let tid = self.name_row(transfer.row)?;
        let file = transfer.path.file_name().unwrap_or_default();
        let begin = Event {
            tid: Some(tid),
            ts: Some(self.microseconds(times.start)),
            cat: Some("in flight"),
            id2: Some(LocalId {
                local: format!("{tid}.{}", transfer.slot),
            }),
            args: Some(json!({
                "file": file.to_string_lossy(),
                "offset": transfer.offset,
                "bytes": transfer.bytes,
                "direct": transfer.is_direct,
                "aligned": transfer.is_aligned,
                "failed": transfer.has_failed,
            })),
            ..self.event(transfer.operation, "b")
        };
        self.put(&begin)?;
        let end = Event {
            ph: "e",
            ts: Some(self.microseconds(times.end)),
            args: None,
            ..begin
        };
        self.put(&end)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the array, and writes how many records were lost.
    pub(super) fn finish(mut self, lost: u64) -> io::Result<()> {
        self.metadata("penstock end", None, json!({ "lost": lost }))?;
        self.out.write_all(b"\n]\n")?;
        self.out.flush()
    }

    /// The number of a row; its name is written on first use.
    fn name_row(&mut self, row: Row) -> io::Result<usize> {
        let number = row.number();
        if self.named.insert(number) {
            self.metadata("thread_name", Some(number), json!({ "name": row.name() }))?;
            let sort_index = json!({ "sort_index": number });
            self.metadata("thread_sort_index", Some(number), sort_index)?;
        }
        Ok(number)
    }

    fn metadata(&mut self, name: &str, tid: Option<usize>, args: Value) -> io::Result<()> {
        let event = Event {
            tid,
            args: Some(args),
            ..self.event(name, "M")
        };
        self.put(&event)
    }

    fn event<'a>(&self, name: &'a str, ph: &'static str) -> Event<'a> {
        Event {
            name,
            ph,
            pid: self.pid,
            tid: None,
            ts: None,
            dur: None,
            cat: None,
            id2: None,
            args: None,
        }
    }

    /// The part of a time range that is in the trace, if any is.
    fn since_origin(&self, times: &Range<u64>) -> Option<Range<u64>> {
        let start = times.start.max(self.origin_ns);
        (start <= times.end).then_some(start..times.end)
    }

    /// Microseconds since the trace began.
    fn microseconds(&self, at_ns: u64) -> f64 {
        at_ns.saturating_sub(self.origin_ns) as f64 / 1e3
    }

    fn put(&mut self, event: &Event<'_>) -> io::Result<()> {
        if !std::mem::take(&mut self.is_first) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut self.out, event).map_err(io::Error::from)
    }
}
