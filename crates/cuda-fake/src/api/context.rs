//! Primary contexts, and each thread's current context.

use super::device::existing;
use super::{Out, put, wanted};
use crate::driver::{Needs, Session, call};
use crate::executor::destroy_context;
use crate::status::{Answer, Status};
use crate::thread;

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, u64>, device: i32) -> i32 {
    call("cuDevicePrimaryCtxRetain", Needs::Init, |session| {
        existing(session, device)?;
        wanted(&context)?;
        let id = match session.primary(device) {
            Some(id) => {
                if let Some(known) = session.contexts.get_mut(&id) {
                    known.users += 1;
                }
                id
            }
            None => session.new_context(device),
        };
        put(context, id)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> i32 {
    call("cuDevicePrimaryCtxRelease_v2", Needs::Init, |session| {
        existing(session, device)?;
        let id = session.primary(device).ok_or(Status::INVALID_CONTEXT)?;
        let known = session.contexts.get_mut(&id);
        let users = known.map_or(0, |context| {
            context.users -= 1;
            context.users
        });
        if users == 0 {
            destroy_context(session, id);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(
    device: i32,
    flags: Out<'_, u32>,
    is_active: Out<'_, i32>,
) -> i32 {
    call("cuDevicePrimaryCtxGetState", Needs::Init, |session| {
        existing(session, device)?;
        wanted(&flags)?;
        put(is_active, i32::from(session.primary(device).is_some()))?;
        put(flags, 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: u64) -> i32 {
    call("cuCtxPushCurrent_v2", Needs::Init, |session| {
        alive(session, context)?;
        thread::push_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<'_, u64>) -> i32 {
    call("cuCtxPopCurrent_v2", Needs::Init, |_| {
        let popped = thread::pop_context().ok_or(Status::INVALID_CONTEXT)?;
        if let Some(context) = context {
            context.write(popped);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<'_, u64>) -> i32 {
    call("cuCtxGetCurrent", Needs::Init, |_| {
        put(context, thread::current_context().unwrap_or_default())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> i32 {
    call("cuCtxSetCurrent", Needs::Init, |session| {
        if context != 0 {
            alive(session, context)?;
        }
        thread::pop_context();
        if context != 0 {
            thread::push_context(context);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: Out<'_, i32>) -> i32 {
    call("cuCtxGetDevice", Needs::Init, |session| {
        let current = thread::current_context().ok_or(Status::INVALID_CONTEXT)?;
        let context = session
            .contexts
            .get(&current)
            .ok_or(Status::CONTEXT_IS_DESTROYED)?;
        put(device, context.device)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> i32 {
    call("cuCtxSynchronize", Needs::Context, |session| {
        session.captures.refuse_unsafe_call()?;
        let current = session.current;
        let ends = session.streams.ends(current);
        for end in &ends {
            if session.captures.includes(end.stream) {
                session.captures.spoil(end.stream);
                return Err(Status::CAPTURE_UNSUPPORTED);
            }
        }
        session.wait_for(&ends, current)
    })
}

fn alive(session: &Session, context: u64) -> Answer {
    let is_alive = session.contexts.contains_key(&context);
    is_alive.then_some(()).ok_or(Status::INVALID_CONTEXT)
}
