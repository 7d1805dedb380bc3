//! Kernels: their device source, compiled for the host. A warp is a thread, of which there are a
//! few whatever the grid, and accesses memory through the driver alone.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::memory::AddressSpace;
use crate::status::{Answer, Status};

/// A kernel's entry point: all have five arguments, of 64 bits each.
pub(crate) type Entry = unsafe extern "C" fn(u64, u64, u64, u64, u64);

/// The number of arguments of every kernel.
pub(crate) const ARGUMENTS: usize = 5;

const LANES: u64 = 32;

/// The most warps that run in parallel: they share the work of a grid.
const WARPS_MAX: u64 = 8;

/// A kernel that modules can contain.
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    pub(crate) entry: Entry,
}

/// A kernel with the arguments of its launch.
pub(crate) struct Launch {
    pub(crate) kernel: &'static Kernel,
    pub(crate) arguments: [u64; ARGUMENTS],
    /// Threads of all blocks together.
    pub(crate) threads: u64,
}

impl Launch {
    pub(crate) fn run(&self, space: &Arc<AddressSpace>) -> Answer {
        let warps = (self.threads / LANES).clamp(1, WARPS_MAX);
        let has_strayed = AtomicBool::new(false);
        thread::scope(|scope| {
            for number in 0..warps {
                let warp = Warp {
                    space: Arc::clone(space),
                    number,
                    warps,
                    has_strayed: false,
                };
                let has_strayed = &has_strayed;
                scope.spawn(move || {
                    if self.run_warp(warp) {
                        has_strayed.store(true, Ordering::Relaxed);
                    }
                });
            }
        });
        match has_strayed.into_inner() {
            true => Err(Status::ILLEGAL_ADDRESS),
            false => Ok(()),
        }
    }

    /// Returns whether it accessed memory outside of its allocations.
    fn run_warp(&self, warp: Warp) -> bool {
        WARP.with_borrow_mut(|here| *here = Some(warp));
        let [a, b, c, d, e] = self.arguments;
        // SAFETY: the entry has these arguments, and accesses memory through `penstock_host_reach`.
        unsafe { (self.kernel.entry)(a, b, c, d, e) };
        let warp = WARP.take();
        warp.is_some_and(|warp| warp.has_strayed)
    }
}

struct Warp {
    space: Arc<AddressSpace>,
    number: u64,
    warps: u64,
    has_strayed: bool,
}

thread_local! {
    /// The warp that this thread runs.
    static WARP: RefCell<Option<Warp>> = const { RefCell::new(None) };
}

/// Calls `ask` with this thread's warp; 0 on a thread without one.
fn with_warp(ask: impl FnOnce(&Warp) -> u64) -> u64 {
    WARP.with_borrow(|warp| warp.as_ref().map_or(0, ask))
}

#[unsafe(no_mangle)]
extern "C" fn penstock_host_reach(address: u64, bytes: u64) -> *mut c_void {
    WARP.with_borrow_mut(|warp| {
        let Some(warp) = warp else {
            return ptr::null_mut();
        };
        let reached = warp.space.reach(address, bytes);
        warp.has_strayed |= reached.is_none();
        reached.map_or(ptr::null_mut(), <*mut u8>::cast)
    })
}

#[unsafe(no_mangle)]
extern "C" fn penstock_warp() -> u64 {
    with_warp(|warp| warp.number)
}

#[unsafe(no_mangle)]
extern "C" fn penstock_warps() -> u64 {
    with_warp(|warp| warp.warps)
}

#[unsafe(no_mangle)]
extern "C" fn penstock_pause() {
    thread::yield_now();
}
