//! The threads of streams: started with a stream's first work, and ended with the stream. A process
//! that exits does not wait for them.

use std::thread::{Builder, JoinHandle};

use crate::driver::{self, Session};
use crate::operation::Operation;
use crate::state::{DriverState, Next};
use crate::status::{Answer, Status};
use crate::thread;

/// Submits an operation to a stream, which may be capturing. Returns whether it was queued.
pub(crate) fn submit(session: &mut Session, stream: u64, operation: Operation) -> Answer<bool> {
    let is_queued = session.submit(stream, operation)?;
    if is_queued {
        start(session, stream)?;
        session.changed();
    }
    Ok(is_queued)
}

fn start(session: &mut Session, id: u64) -> Answer {
    let Some(stream) = session.streams.get_mut(id) else {
        return Ok(());
    };
    if stream.thread.is_none() {
        let thread = Builder::new()
            .name("cuda-fake".to_owned())
            .spawn(move || run(id));
        stream.thread = Some(thread.map_err(|_| Status::OPERATING_SYSTEM)?);
    }
    Ok(())
}

/// Executes the operations of a stream.
fn run(id: u64) {
    let mut session = Session::begin();
    loop {
        match session.next(id) {
            Next::Run {
                operation,
                space,
                fault,
            } => {
                let mut outcome = fault;
                let garbles = session.config.garbles;
                session.unlocked(|| {
                    outcome = outcome.and_then(|()| operation.execute(&space));
                    if garbles && outcome.is_ok() {
                        operation.garble();
                    }
                });
                session.finish(id, &operation, outcome);
                session.changed();
            }
            Next::Wait => session.wait(),
            Next::Idle(work) => session.wait_for_work(&work),
            Next::End => return,
        }
    }
}

/// Destroys a stream: queued work is finished, and the handle becomes invalid.
pub(crate) fn destroy_stream(session: &mut Session, id: u64) {
    session.captures.leave(id);
    if let Some(stream) = session.streams.get_mut(id) {
        stream.destroy();
        if stream.thread.is_none() {
            session.streams.remove(id);
        }
    }
    session.changed();
}

/// Ends a context once all its work is done, together with everything made in it.
pub(crate) fn destroy_context(session: &mut Session, id: u64) {
    let ends = session.streams.ends(id);
    session.wait_until(|state| state.streams.have_reached(&ends));
    let Some(context) = session.contexts.remove(&id) else {
        return;
    };
    join(session, context.ended, |_, stream| stream == id);
    session.remove_context(id);
}

/// Removes everything, queued work included. Running operations finish first.
pub(crate) fn reset() {
    let mut session = Session::begin();
    session.holds.release_all();
    session
        .streams
        .values_mut()
        .for_each(|stream| stream.drop_queue());
    let mut ended = Vec::new();
    for context in session.contexts.values_mut() {
        ended.append(&mut context.ended);
    }
    session.contexts.clear();
    join(&mut session, ended, |_, _| true);
    *session = DriverState::new();
    thread::reset();
    driver::disown();
}

/// Removes the streams of some contexts, and waits for their threads to end.
fn join(
    session: &mut Session,
    mut threads: Vec<JoinHandle<()>>,
    is_theirs: impl Fn(u64, u64) -> bool,
) {
    let streams = session
        .streams
        .iter()
        .filter(|(id, stream)| is_theirs(*id, stream.context));
    for id in streams.map(|(id, _)| id).collect::<Vec<_>>() {
        session.captures.leave(id);
        threads.extend(session.streams.remove(id).and_then(|stream| stream.thread));
    }
    session.changed();
    session.unlocked(|| {
        for thread in threads {
            // A stream's thread that panicked has ended as well, and has printed its message.
            let _ = thread.join();
        }
    });
}
