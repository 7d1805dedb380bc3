//! Copies of rows, from the caller's arguments to an operation in a stream.
//!
//! Unpinned memory is treated as by the driver: a source is read during the call, and a call with
//! such a destination returns when the copy is done.

use super::stream::context_of;
use crate::driver::Session;
use crate::executor::submit;
use crate::memory::Range;
use crate::operation::{Kind, Operation, Work};
use crate::status::{Answer, Status};
use crate::transfer::{Place, RowsCopy, Side};

/// The side of the link that memory is on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Host,
    Device,
}

/// The side of an address that may be on either.
pub(super) fn end_at(session: &Session, address: u64) -> End {
    let range = session.memory.space().find(address);
    if range.is_some_and(Range::is_device) {
        End::Device
    } else {
        End::Host
    }
}

fn kind_of(source: End, destination: End) -> Kind {
    match (source, destination) {
        (End::Host, End::Host) => Kind::HostToHost,
        (End::Host, End::Device) => Kind::HostToDevice,
        (End::Device, End::Host) => Kind::DeviceToHost,
        (End::Device, End::Device) => Kind::DeviceToDevice,
    }
}

/// The layout of the rows of a copy.
pub(super) struct Rows {
    pub(super) width: u64,
    pub(super) count: u64,
    pub(super) source_pitch: u64,
    pub(super) destination_pitch: u64,
}

impl Rows {
    pub(super) fn line(bytes: usize) -> Rows {
        let width = bytes as u64;
        Rows {
            width,
            count: 1,
            source_pitch: width,
            destination_pitch: width,
        }
    }

    /// A copy of these rows, if both sides have all of them.
    pub(super) fn piece(
        &self,
        session: &Session,
        source: (End, u64),
        destination: (End, u64),
        context: u64,
    ) -> Answer<RowsCopy> {
        Ok(RowsCopy {
            source: self.side(session, source, self.source_pitch, context)?,
            destination: self.side(session, destination, self.destination_pitch, context)?,
            width: self.width,
            rows: self.count,
        })
    }

    fn side(
        &self,
        session: &Session,
        (end, address): (End, u64),
        pitch: u64,
        context: u64,
    ) -> Answer<Side> {
        if self.count == 0 || self.width == 0 || (self.count > 1 && pitch < self.width) {
            return Err(Status::INVALID_VALUE);
        }
        let skipped = (self.count - 1).checked_mul(pitch);
        let extent = skipped.and_then(|skipped| skipped.checked_add(self.width));
        let extent = extent.filter(|extent| address.checked_add(*extent).is_some());
        let extent = extent
            .filter(|_| address != 0)
            .ok_or(Status::INVALID_VALUE)?;
        let space = session.memory.space();
        let place = match end {
            End::Device => {
                space.reach(address, extent).ok_or(Status::INVALID_VALUE)?;
                Place::Device(address)
            }
            End::Host => {
                let pinned = space.is_pinned(address, extent, context)?;
                Place::Host { address, pinned }
            }
        };
        Ok(Side { place, pitch })
    }
}

pub(super) fn copy(
    session: &mut Session,
    source: (End, u64),
    destination: (End, u64),
    rows: &Rows,
    stream: u64,
) -> Answer {
    let id = session.stream(stream)?;
    let context = context_of(session, id)?;
    if rows.width == 0 || rows.count == 0 {
        return Ok(());
    }
    let mut piece = rows.piece(session, source, destination, context)?;
    if piece.source.is_pageable() && !session.captures.includes(id) {
        piece.stage(session.memory.space(), context)?;
    }
    let kind = kind_of(source.0, destination.0);
    queue(session, kind, vec![piece], id, context)
}

/// Queues copies in a stream, and waits for them if one involves unpinned memory as a destination.
pub(super) fn queue(
    session: &mut Session,
    kind: Kind,
    pieces: Vec<RowsCopy>,
    id: u64,
    context: u64,
) -> Answer {
    let is_awaited = pieces.iter().any(|piece| piece.destination.is_pageable());
    let operation = Operation::new(kind, Work::Copy(pieces), context);
    if submit(session, id, operation)? && is_awaited {
        let end = session.streams.end(id);
        session.wait_for(&[end], context)?;
    }
    Ok(())
}

/// Waits for all work of a stream.
pub(super) fn finish(session: &mut Session, stream: u64) -> Answer {
    let id = session.stream(stream)?;
    let context = context_of(session, id)?;
    let end = session.streams.end(id);
    session.wait_for(&[end], context)
}
