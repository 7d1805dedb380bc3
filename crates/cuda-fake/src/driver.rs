//! The driver of this process, and the first steps of every call: taking the lock, counting the
//! call, injecting a planned failure, and checking whether the call is allowed.

use std::ops::{Deref, DerefMut};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::operation::Position;
use crate::state::DriverState;
use crate::status::{Answer, Status};
use crate::stream::{Order, PER_THREAD};
use crate::thread;

struct Driver {
    state: Mutex<DriverState>,
    changed: Condvar,
}

static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
    state: Mutex::new(DriverState::new()),
    changed: Condvar::new(),
});

/// The process that initialised the driver; 0 for none.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// A call that waits for a held stream gives up after this long: no thread may be left to release
/// it.
const HELD: Duration = Duration::from_secs(60);

/// Requirements of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// `cuInit`.
    Init,
    /// A current context that has not failed.
    Context,
    /// A current context. The object is freed even in a failed context, whose code the call then
    /// returns.
    Cleanup,
}

/// Makes a call of the driver; returns the number of a `CUresult`.
pub(crate) fn call(
    function: &'static str,
    needs: Needs,
    body: impl FnOnce(&mut Session) -> Answer,
) -> i32 {
    match attempt(function, needs, body) {
        Ok(()) => 0,
        Err(status) => status.0,
    }
}

fn attempt(
    function: &'static str,
    needs: Needs,
    body: impl FnOnce(&mut Session) -> Answer,
) -> Answer {
    // A child has none of the worker threads, and perhaps a lock that is never released.
    if is_forked() {
        return Err(Status::NOT_INITIALIZED);
    }
    if thread::in_host_function() {
        return Err(Status::NOT_PERMITTED);
    }
    let mut session = Session::begin();
    session.faults.call(function)?;
    if needs != Needs::Nothing && !session.is_initialized {
        return Err(Status::NOT_INITIALIZED);
    }
    if matches!(needs, Needs::Context | Needs::Cleanup) {
        session.current = thread::current_context().ok_or(Status::INVALID_CONTEXT)?;
        let context = session.contexts.get(&session.current);
        let usable = context.ok_or(Status::CONTEXT_IS_DESTROYED)?.is_usable();
        if needs == Needs::Context {
            usable?;
        }
    }
    body(&mut session)?;
    match session.contexts.get(&session.current) {
        Some(context) if needs == Needs::Cleanup => context.is_usable(),
        _ => Ok(()),
    }
}

/// Initialises the driver for this process. Forks of a process that did so before are refused
/// forever.
pub(crate) fn own() {
    OWNER.store(process::id(), Ordering::Release);
}

/// Returns to the state after loading.
pub(crate) fn disown() {
    OWNER.store(0, Ordering::Release);
}

fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != process::id()
}

/// The driver's locked state, and the current context of a call.
pub(crate) struct Session {
    /// `None` only while this thread waits.
    state: Option<MutexGuard<'static, DriverState>>,
    /// 0 unless the call needs a context.
    pub(crate) current: u64,
}

impl Session {
    pub(crate) fn begin() -> Session {
        Session {
            state: Some(lock()),
            current: 0,
        }
    }

    /// Runs `body` without the lock.
    pub(crate) fn unlocked(&mut self, body: impl FnOnce()) {
        self.state = None;
        body();
        self.state = Some(lock());
    }

    /// Waits for any change.
    pub(crate) fn wait(&mut self) {
        self.wait_for_work(&DRIVER.changed);
    }

    /// Waits until a stream has work, or is gone.
    pub(crate) fn wait_for_work(&mut self, work: &Condvar) {
        if let Some(state) = self.state.take() {
            let waited = work.wait(state);
            self.state = Some(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Waits for a state that streams bring about.
    pub(crate) fn wait_until(&mut self, mut is_so: impl FnMut(&DriverState) -> bool) {
        while !is_so(self) {
            let Some(state) = self.state.take() else {
                return;
            };
            let waited = DRIVER.changed.wait_timeout(state, HELD);
            let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() && state.holds.is_any() && !is_so(&state) {
                eprintln!("penstock-cuda-fake: a call waits for a stream that is held");
                process::abort();
            }
            self.state = Some(state);
        }
    }

    /// Waits until streams have reached positions; returns an error if the context failed
    /// meanwhile.
    pub(crate) fn wait_for(&mut self, positions: &[Position], context: u64) -> Answer {
        self.wait_until(|state| state.have_reached(positions, context) != Ok(false));
        self.have_reached(positions, context).map(|_| ())
    }

    /// Notifies all waiting threads.
    pub(crate) fn changed(&self) {
        DRIVER.changed.notify_all();
    }

    /// Refuses a call that a driver of this version does not have.
    pub(crate) fn needs_version(&self, version: i32) -> Answer {
        let is_new_enough = self.config.driver_version >= version;
        is_new_enough.then_some(()).ok_or(Status::NOT_SUPPORTED)
    }

    /// The stream of a caller's handle; the default handles name streams of the current context.
    pub(crate) fn stream(&mut self, stream: u64) -> Answer<u64> {
        let current = self.current;
        match stream {
            0 | 1 => self.contexts.get(&current).map(|context| context.legacy),
            PER_THREAD => Some(self.per_thread(current)),
            _ => Some(stream),
        }
        .filter(|id| {
            self.streams
                .get(*id)
                .is_some_and(|stream| !stream.is_destroyed)
        })
        .ok_or(Status::INVALID_HANDLE)
    }

    fn per_thread(&mut self, current: u64) -> u64 {
        let thread = thread::id();
        let known = self.contexts.get(&current);
        if let Some(stream) = known.and_then(|context| context.per_thread.get(&thread)) {
            return *stream;
        }
        let stream = self.new_stream(Some(PER_THREAD), current, Order::Blocking);
        if let Some(context) = self.contexts.get_mut(&current) {
            context.per_thread.insert(thread, stream);
        }
        stream
    }
}

impl Deref for Session {
    type Target = DriverState;

    fn deref(&self) -> &DriverState {
        self.state
            .as_deref()
            .expect("only a thread that waits is without the state")
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut DriverState {
        self.state
            .as_deref_mut()
            .expect("only a thread that waits is without the state")
    }
}

/// A panic within a call ends the process, so the data behind a poisoned lock is never seen.
fn lock() -> MutexGuard<'static, DriverState> {
    DRIVER.state.lock().unwrap_or_else(PoisonError::into_inner)
}
