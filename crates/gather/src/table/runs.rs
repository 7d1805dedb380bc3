//! Merges rows to read into requests.

use std::ops::Range;

use super::Span;

/// When neighbouring rows are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merging {
    /// Bytes that the device reads in the time of one request: gaps between rows up to this size
    /// are read if that makes the batch cheaper.
    pub gap_bytes: u64,
    /// Most bytes of a request; a single longer row is one request all the same.
    pub run_bytes_max: u64,
}

/// The smallest read of a device.
const UNIT_BYTES: u64 = 4096;

/// Neighbouring rows that one request reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The bytes read.
    pub(crate) span: Span,
    /// Indices of the rows.
    pub(crate) rows: Range<usize>,
}

/// Reading gaps must save at least one part in this many of the cost, because merged rows are
/// copied once more, while single rows can be read directly into their destination.
const SAVED_PART: u64 = 8;

/// Merges rows, across gaps if that makes all of them cheaper, else only where they touch.
///
/// `base` is the offset of a segment in its file.
///
/// # Panics
/// If the spans of the rows are not in ascending order.
pub(crate) fn runs(
    spans: impl Iterator<Item = Span> + Clone,
    base: impl Fn(usize) -> u64,
    merging: Merging,
) -> Vec<Run> {
    let touching = Merging {
        gap_bytes: 0,
        ..merging
    };
    let apart = merged(spans.clone(), &base, touching);
    if merging.gap_bytes == 0 {
        return apart;
    }
    let together = merged(spans, &base, merging);
    let (dear, cheap) = (price(&apart, merging), price(&together, merging));
    match dear.saturating_sub(cheap) >= dear / SAVED_PART {
        true => together,
        false => apart,
    }
}

/// The cost of requests, in bytes that the device could read sequentially meanwhile: a request
/// costs as much as the largest gap worth reading.
fn price(runs: &[Run], merging: Merging) -> u64 {
    let bytes = |run: &Run| run.span.bytes.end - run.span.bytes.start;
    runs.iter()
        .map(|run| bytes(run).saturating_add(merging.gap_bytes))
        .fold(0, u64::saturating_add)
}

fn merged(
    spans: impl Iterator<Item = Span>,
    base: &impl Fn(usize) -> u64,
    merging: Merging,
) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    let mut last = None;
    for (index, span) in spans.enumerate() {
        let start = (span.segment, span.bytes.start);
        assert!(last.replace(start) <= Some(start), "rows come in order");
        if let Some(run) = found.last_mut()
            && run.span.segment == span.segment
            && is_near(base(span.segment), &run.span, &span, merging)
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

/// Whether to read `next` together with the run before it, in a segment at `base` of its file.
fn is_near(base: u64, run: &Span, next: &Span, merging: Merging) -> bool {
    if next.bytes.end <= run.bytes.end {
        return true;
    }
    let whole_bytes = next.bytes.end - run.bytes.start;
    if whole_bytes > merging.run_bytes_max {
        return false;
    }
    // Rows within one unit are read together in any case.
    let end = (base + run.bytes.end).next_multiple_of(UNIT_BYTES);
    let start = base + next.bytes.start;
    (start - start % UNIT_BYTES).saturating_sub(end) <= merging.gap_bytes
}
