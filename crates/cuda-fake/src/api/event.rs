//! Events.

use super::stream::context_of;
use super::{Out, put, wanted};
use crate::driver::{Needs, Session, call};
use crate::event::{Event, Record};
use crate::executor::submit;
use crate::handle;
use crate::operation::{Kind, Operation, Position, Work};
use crate::status::{Answer, Status};

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(event: Out<'_, u64>, flags: u32) -> i32 {
    call("cuEventCreate", Needs::Context, |session| {
        wanted(&event)?;
        let made = Event::new(session.current, flags).ok_or(Status::INVALID_VALUE)?;
        let id = handle::next();
        session.events.insert(id, made);
        put(event, id)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> i32 {
    call("cuEventDestroy_v2", Needs::Cleanup, |session| {
        session
            .events
            .remove(&event)
            .map(|_| ())
            .ok_or(Status::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> i32 {
    call("cuEventRecord", Needs::Context, |session| {
        let id = session.stream(stream)?;
        let context = context_of(session, id)?;
        let known = session.events.get(&event).ok_or(Status::INVALID_HANDLE)?;
        if known.context != context {
            return Err(Status::INVALID_HANDLE);
        }
        let operation = Operation::new(Kind::EventRecord, Work::Record { event }, context);
        let record = match session.captures.mark(id)? {
            Some(mark) => Record::Captured(mark),
            None => {
                submit(session, id, operation)?;
                Record::In(session.streams.end(id))
            }
        };
        if let Some(known) = session.events.get_mut(&event) {
            known.record = record;
            known.reached = None;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> i32 {
    call("cuEventQuery", Needs::Context, |session| {
        let (position, context) = moment(session, event)?;
        let is_done = session.have_reached(position.as_slice(), context)?;
        is_done.then_some(()).ok_or(Status::NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> i32 {
    call("cuEventSynchronize", Needs::Context, |session| {
        let (position, context) = moment(session, event)?;
        session.wait_for(position.as_slice(), context)
    })
}

/// The position that an event waits for, if it was ever recorded, and its context.
fn moment(session: &mut Session, event: u64) -> Answer<(Option<Position>, u64)> {
    session.captures.refuse_unsafe_call()?;
    let known = session.events.get(&event).ok_or(Status::INVALID_HANDLE)?;
    let context = known.context;
    match &known.record {
        Record::Never => Ok((None, context)),
        Record::In(position) => Ok((Some(*position), context)),
        Record::Captured(mark) => {
            let mark = mark.clone();
            session.captures.spoil_marked(&mark);
            Err(Status::CAPTURED_EVENT)
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(milliseconds: Out<'_, f32>, start: u64, end: u64) -> i32 {
    call("cuEventElapsedTime", Needs::Context, |session| {
        elapsed(session, milliseconds, start, end)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(milliseconds: Out<'_, f32>, start: u64, end: u64) -> i32 {
    call("cuEventElapsedTime_v2", Needs::Context, |session| {
        elapsed(session, milliseconds, start, end)
    })
}

fn elapsed(session: &Session, milliseconds: Out<'_, f32>, start: u64, end: u64) -> Answer {
    let timed = |event: u64| {
        let known = session.events.get(&event).filter(|event| event.is_timed);
        known.ok_or(Status::INVALID_HANDLE)
    };
    let (start, end) = (timed(start)?, timed(end)?);
    if start.context != end.context {
        return Err(Status::INVALID_HANDLE);
    }
    for event in [start, end] {
        match &event.record {
            Record::Never => return Err(Status::INVALID_HANDLE),
            Record::Captured(_) => return Err(Status::CAPTURED_EVENT),
            Record::In(_) => {}
        }
    }
    let (Some(start), Some(end)) = (start.reached, end.reached) else {
        return Err(Status::NOT_READY);
    };
    // If the end was reached first, the time is negative.
    let forward = end.saturating_duration_since(start).as_secs_f32();
    let backward = start.saturating_duration_since(end).as_secs_f32();
    put(milliseconds, (forward - backward) * 1e3)
}
