//! Rows to read, put together into requests.

use std::ops::Range;

use crate::table::{Span, Table};

/// When neighbouring rows are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merging {
    /// What the device reads in the time that a request takes: bytes between two rows, up to so many,
    /// are read where that pays for the batch.
    pub gap_bytes: u64,
    /// What a request has at most; a row that is longer is one all the same.
    pub run_bytes_max: u64,
}

/// The least that a device reads, whatever is asked for.
const UNIT_BYTES: u64 = 4096;

/// Neighbouring rows that one request reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// What is read.
    pub(crate) span: Span,
    /// Which of the rows.
    pub(crate) rows: Range<usize>,
}

/// What bytes between rows have to save of the price, at least, to be read: what is read with them
/// is copied once more, where rows alone can land where they go.
const SAVED_PART: u64 = 8;

/// Puts rows together: over gaps where that pays for all of them, else only where nothing lies
/// between.
///
/// # Panics
/// If they are not in ascending order, or the table does not have them.
pub(crate) fn runs(
    table: &Table,
    rows: impl Iterator<Item = u64> + Clone,
    merging: Merging,
) -> Vec<Run> {
    let touching = Merging {
        gap_bytes: 0,
        ..merging
    };
    let apart = merged(table, rows.clone(), touching);
    if merging.gap_bytes == 0 {
        return apart;
    }
    let together = merged(table, rows, merging);
    let (dear, cheap) = (price(&apart, merging), price(&together, merging));
    match dear.saturating_sub(cheap) >= dear / SAVED_PART {
        true => together,
        false => apart,
    }
}

/// What requests cost, as bytes that the device could read one behind the other meanwhile: a request
/// takes as long as the gap that is worth one.
fn price(runs: &[Run], merging: Merging) -> u64 {
    let bytes = |run: &Run| run.span.bytes.end - run.span.bytes.start;
    runs.iter()
        .map(|run| bytes(run).saturating_add(merging.gap_bytes))
        .fold(0, u64::saturating_add)
}

fn merged(table: &Table, rows: impl Iterator<Item = u64>, merging: Merging) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    let mut last = None;
    for (index, row) in rows.enumerate() {
        assert!(last.replace(row) <= Some(row), "rows come in order");
        let span = table.read(table.span(row));
        if let Some(run) = found.last_mut()
            && run.span.segment == span.segment
            && is_near(table, &run.span, &span, merging)
        {
            run.span.bytes.end = run.span.bytes.end.max(span.bytes.end);
            run.rows.end = index + 1;
            continue;
        }
        found.push(Run {
            span,
            rows: index..index + 1,
        });
    }
    found
}

/// Whether to read `next` together with what comes before it.
fn is_near(table: &Table, run: &Span, next: &Span, merging: Merging) -> bool {
    if next.bytes.end <= run.bytes.end {
        return true;
    }
    let whole_bytes = next.bytes.end - run.bytes.start;
    if whole_bytes > merging.run_bytes_max {
        return false;
    }
    // What lies in one unit is read together in any case.
    let end = table
        .offset(run.segment, run.bytes.end)
        .next_multiple_of(UNIT_BYTES);
    let start = table.offset(next.segment, next.bytes.start);
    (start - start % UNIT_BYTES).saturating_sub(end) <= merging.gap_bytes
}
