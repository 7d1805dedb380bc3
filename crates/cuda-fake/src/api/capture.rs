//! Stream capture, and the captured graphs. The fake cannot launch a graph, only destroy it.

use super::{Out, put, wanted};
use crate::capture::CaptureStatus;
use crate::driver::{Needs, call};
use crate::handle;
use crate::status::Status;
use crate::stream::Order;
use crate::thread::{self, MODE_GLOBAL, MODE_RELAXED};

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: u64, status: Out<'_, i32>) -> i32 {
    call("cuStreamIsCapturing", Needs::Context, |session| {
        let id = session.stream(stream)?;
        let known = session.streams.get(id).ok_or(Status::INVALID_HANDLE)?;
        if known.order == Order::Legacy {
            let context = known.context;
            session.refuse_implicit(context, false)?;
            return put(status, CaptureStatus::None as i32);
        }
        put(status, session.captures.status(id) as i32)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: i32) -> i32 {
    call("cuStreamBeginCapture_v2", Needs::Context, |session| {
        if !(MODE_GLOBAL..=MODE_RELAXED).contains(&mode) {
            return Err(Status::INVALID_VALUE);
        }
        let id = session.stream(stream)?;
        let known = session.streams.get(id).ok_or(Status::INVALID_HANDLE)?;
        if known.order == Order::Legacy {
            return Err(Status::CAPTURE_UNSUPPORTED);
        }
        session.captures.begin(handle::next(), id, mode)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(stream: u64, graph: Out<'_, u64>) -> i32 {
    call("cuStreamEndCapture", Needs::Context, |session| {
        wanted(&graph)?;
        let id = session.stream(stream)?;
        if let Err(status) = session.captures.end(id) {
            put(graph, 0)?;
            return Err(status);
        }
        let made = handle::next();
        let context = session.current;
        session.graphs.insert(made, context);
        put(graph, made)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: u64) -> i32 {
    call("cuGraphDestroy", Needs::Init, |session| {
        session
            .graphs
            .remove(&graph)
            .map(|_| ())
            .ok_or(Status::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Option<&mut i32>) -> i32 {
    call("cuThreadExchangeStreamCaptureMode", Needs::Init, |_| {
        let mode = mode.ok_or(Status::INVALID_VALUE)?;
        if !(MODE_GLOBAL..=MODE_RELAXED).contains(mode) {
            return Err(Status::INVALID_VALUE);
        }
        *mode = thread::exchange_capture_mode(*mode);
        Ok(())
    })
}
