//! Streams, and queries of their state.

use std::ffi::c_void;

use super::{Out, put, wanted};
use crate::driver::{Needs, Session, call};
use crate::event::Record;
use crate::executor::{destroy_stream, submit};
use crate::operation::{HostCall, Kind, Operation, Work};
use crate::status::{Answer, Status};
use crate::stream::Order;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(stream: Out<'_, u64>, flags: u32) -> i32 {
    call("cuStreamCreate", Needs::Context, |session| {
        create(session, stream, flags)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreateWithPriority(
    stream: Out<'_, u64>,
    flags: u32,
    // Priorities have no effect here, and any number is clamped to the device's range.
    _priority: i32,
) -> i32 {
    call("cuStreamCreateWithPriority", Needs::Context, |session| {
        create(session, stream, flags)
    })
}

fn create(session: &mut Session, stream: Out<'_, u64>, flags: u32) -> Answer {
    wanted(&stream)?;
    let order = match flags {
        0 => Order::Blocking,
        NON_BLOCKING => Order::NonBlocking,
        _ => return Err(Status::INVALID_VALUE),
    };
    let current = session.current;
    put(stream, session.new_stream(None, current, order))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> i32 {
    call("cuStreamDestroy_v2", Needs::Cleanup, |session| {
        let id = session.stream(stream)?;
        if id != stream {
            return Err(Status::INVALID_HANDLE);
        }
        destroy_stream(session, id);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> i32 {
    call("cuStreamSynchronize", Needs::Context, |session| {
        let id = not_capturing(session, stream)?;
        let end = session.streams.whole_end(id);
        let context = context_of(session, id)?;
        session.wait_for(&end, context)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(stream: u64) -> i32 {
    call("cuStreamQuery", Needs::Context, |session| {
        let id = not_capturing(session, stream)?;
        let context = context_of(session, id)?;
        let is_done = session.have_reached(&session.streams.whole_end(id), context)?;
        is_done.then_some(()).ok_or(Status::NOT_READY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) -> i32 {
    call("cuStreamWaitEvent", Needs::Context, |session| {
        let id = session.stream(stream)?;
        let known = session.events.get(&event).ok_or(Status::INVALID_HANDLE)?;
        if flags != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let position = match &known.record {
            Record::Captured(mark) => {
                let mark = mark.clone();
                if session
                    .streams
                    .get(id)
                    .is_some_and(|known| known.order == Order::Legacy)
                {
                    session.captures.spoil_marked(&mark);
                    return Err(Status::CAPTURE_IMPLICIT);
                }
                return session.captures.join(id, &mark);
            }
            Record::In(position) => Some(*position),
            Record::Never => None,
        };
        if session.captures.includes(id) {
            // A graph cannot wait for work outside of its capture.
            session.captures.spoil(id);
            return Err(Status::CAPTURE_ISOLATION);
        }
        let Some(position) = position else {
            return Ok(());
        };
        let context = context_of(session, id)?;
        let mut wait = Operation::new(Kind::EventWait, Work::Wait, context);
        wait.after.push(position);
        submit(session, id, wait).map(|_| ())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> i32 {
    call("cuLaunchHostFunc", Needs::Context, |session| {
        let function = function.ok_or(Status::INVALID_VALUE)?;
        let id = session.stream(stream)?;
        let host_call = HostCall {
            function,
            data: data as usize,
        };
        let context = context_of(session, id)?;
        let work = Work::HostFunction(host_call);
        submit(
            session,
            id,
            Operation::new(Kind::HostFunction, work, context),
        )
        .map(|_| ())
    })
}

/// A stream that may be queried. Querying a capturing stream invalidates the capture, whatever the
/// thread's capture mode.
fn not_capturing(session: &mut Session, stream: u64) -> Answer<u64> {
    session.captures.refuse_unsafe_call()?;
    let id = session.stream(stream)?;
    if session.captures.includes(id) {
        session.captures.spoil(id);
        return Err(Status::CAPTURE_UNSUPPORTED);
    }
    let known = session.streams.get(id).ok_or(Status::INVALID_HANDLE)?;
    if known.order == Order::Legacy {
        let context = known.context;
        session.refuse_implicit(context, true)?;
    }
    Ok(id)
}

pub(super) fn context_of(session: &Session, stream: u64) -> Answer<u64> {
    session
        .streams
        .get(stream)
        .map(|stream| stream.context)
        .ok_or(Status::INVALID_HANDLE)
}
