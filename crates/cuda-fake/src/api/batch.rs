//! Batches of copies. A batch makes all of its copies, or none.

use std::slice;

use super::copy::NULL;
use super::rows::{Rows, end_at, queue};
use super::stream::context_of;
use crate::driver::{Needs, Session, call};
use crate::operation::Kind;
use crate::status::{Answer, Status};

/// `CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL`.
const DURING_API_CALL: u32 = 2;

/// `CUmemcpyAttributes`; its hints concern managed memory, which does not exist here.
#[repr(C)]
struct CopyAttributes {
    source_access_order: u32,
    source_hint: [i32; 2],
    destination_hint: [i32; 2],
    flags: u32,
}

/// The caller's arrays of a batch.
struct Batch {
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    attribute_starts: *const usize,
    attribute_count: usize,
}

// The signature is that of `cuda.h`.
#[allow(clippy::too_many_arguments)]
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync(
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    attribute_starts: *const usize,
    attribute_count: usize,
    failed_index: Option<&mut usize>,
    stream: u64,
) -> i32 {
    call("cuMemcpyBatchAsync", Needs::Context, |session| {
        session.needs_version(12_080)?;
        let batch = Batch {
            destinations,
            sources,
            sizes,
            count,
            attributes,
            attribute_starts,
            attribute_count,
        };
        batch.submit(session, stream).map_err(|(status, index)| {
            if let Some(failed_index) = failed_index {
                *failed_index = index.unwrap_or(usize::MAX);
            }
            status
        })
    })
}

// The signature is that of `cuda.h`.
#[allow(clippy::too_many_arguments)]
#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync_v2(
    destinations: *const u64,
    sources: *const u64,
    sizes: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    attribute_starts: *const usize,
    attribute_count: usize,
    stream: u64,
) -> i32 {
    call("cuMemcpyBatchAsync_v2", Needs::Context, |session| {
        session.needs_version(13_000)?;
        let batch = Batch {
            destinations,
            sources,
            sizes,
            count,
            attributes,
            attribute_starts,
            attribute_count,
        };
        batch.submit(session, stream).map_err(|(status, _)| status)
    })
}

impl Batch {
    /// Queues all copies as one operation, or none; an error names the wrong copy.
    fn submit(&self, session: &mut Session, stream: u64) -> Result<(), (Status, Option<usize>)> {
        let whole = |status| (status, None);
        if stream == NULL || stream == 1 {
            return Err(whole(Status::INVALID_VALUE));
        }
        let id = session.stream(stream).map_err(whole)?;
        let context = context_of(session, id).map_err(whole)?;
        let is_capturing = session.captures.includes(id);
        let orders = self.orders().map_err(whole)?;
        let destinations = array(self.destinations, self.count).map_err(whole)?;
        let sources = array(self.sources, self.count).map_err(whole)?;
        let sizes = array(self.sizes, self.count).map_err(whole)?;
        let mut pieces = Vec::with_capacity(self.count);
        for index in 0..self.count {
            let source = (end_at(session, sources[index]), sources[index]);
            let destination = (end_at(session, destinations[index]), destinations[index]);
            let rows = Rows::line(sizes[index]);
            let piece = rows.piece(session, source, destination, context);
            let mut piece = piece.map_err(|status| (status, Some(index)))?;
            let at_once = orders[index] == DURING_API_CALL || piece.source.is_pageable();
            if at_once && !is_capturing {
                let staged = piece.stage(session.memory.space(), context);
                staged.map_err(|status| (status, Some(index)))?;
            }
            pieces.push(piece);
        }
        queue(session, Kind::Batch, pieces, id, context).map_err(whole)
    }

    /// The order in which each source may be read.
    fn orders(&self) -> Answer<Vec<u32>> {
        let attributes = array(self.attributes, self.attribute_count)?;
        let starts = array(self.attribute_starts, self.attribute_count)?;
        let is_growing = starts.is_sorted_by(|first, second| first < second);
        let last = starts.last().copied().unwrap_or_default();
        if starts.first() != Some(&0) || !is_growing || last >= self.count {
            return Err(Status::INVALID_VALUE);
        }
        let known = |attribute: &CopyAttributes| (1..=3).contains(&attribute.source_access_order);
        if !attributes
            .iter()
            .all(|attribute| known(attribute) && attribute.flags <= 1)
        {
            return Err(Status::INVALID_VALUE);
        }
        let of = |index: usize| {
            let next = starts.partition_point(|start| *start <= index);
            attributes[next - 1].source_access_order
        };
        Ok((0..self.count).map(of).collect())
    }
}

fn array<'a, T>(first: *const T, count: usize) -> Answer<&'a [T]> {
    if first.is_null() || count == 0 {
        return Err(Status::INVALID_VALUE);
    }
    // SAFETY: the caller gives `count` elements, which do not change during the call.
    Ok(unsafe { slice::from_raw_parts(first, count) })
}
