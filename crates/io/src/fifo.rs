//! Row requests of a device: kernels post ids, and a host thread answers with the rows.
//!
//! A [`Fifo`] is memory that both sides access. A warp draws a ticket, which determines a slot,
//! writes ids into the slot, and waits for the answer; the host finds the posts in the order of the
//! tickets ([`Posts`]), reads the rows into the slot's memory, and answers. Neither side calls the
//! driver meanwhile, so a waiting kernel does not depend on anything that might wait for kernels.
//!
//! [`HEADER`] is the device's side, for other kernels too. The kernels launched here are compiled
//! from it.
//!
//! Promised: after a successful answer all rows are there, whole; each post is answered, at the
//! latest by the end of the FIFO; its memory is not freed while a kernel may use it.
#![allow(unsafe_code)]

mod host_queue;
mod post_latency;
mod row_packing;

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use penstock_cuda::{
    Device, DeviceMemory, Direction, Event, Foreign, Kernel, Module, PitchedCopy, Stream,
};

use crate::buffer::{IoBuf, Slots, Words};
use crate::kernels::{BLOCK_THREADS, LANES, PTX};
use crate::{Error, Result};
use host_queue::HostQueue;

pub use host_queue::Answer;
pub use post_latency::measure_posts;
pub use row_packing::measure_packing;

/// Functions by which kernels post ids and take rows: CUDA C++ for NVRTC and nvcc.
pub const HEADER: &str = include_str!("../kernels/fifo.cuh");

const KERNEL: &CStr = c"penstock_gather";

/// The most ids of a post: one per lane.
const POST_ROWS_MAX: usize = 32;
/// The most bytes of a post's rows, unless one row is longer.
const POST_BYTES: usize = 256 << 10;
/// Bounds on the slots of a FIFO.
const SLOTS_MAX: usize = 4096;
const SLOTS_MIN: usize = 2;
/// Alignment of the slots, so that direct I/O can write to them.
const SLOT_ALIGNMENT: usize = 4096;

/// Words of the FIFO's description, as in `kernels/fifo.cuh`.
const FIELDS: usize = 11;
/// A cache line of the device, which separates the device's words from its arrays.
const LINE_BYTES: usize = 128;

/// Memory through which a device and the host exchange requests.
pub struct Fifo {
    /// Leaked unless no kernel launched here can still run.
    memory: ManuallyDrop<FifoMemory>,
    row_bytes: usize,
    post_rows: usize,
    /// The total posts of all launches made here.
    expected: AtomicU64,
    launches: Mutex<Launches>,
    has_posts: AtomicBool,
    /// The thread that serves posts; it sleeps while none are expected.
    server: OnceLock<Thread>,
    process: u32,
}

struct FifoMemory {
    /// The stop word; then for each slot its post, its answer, and its ids.
    words: Words,
    slots: Arc<Slots>,
    /// The description, the head, and how often each slot was released.
    state: DeviceMemory,
    kernel: Kernel,
}

/// For each stream, by its handle, the event behind the last kernel launched here.
type Launches = Vec<(usize, Event)>;

impl Fifo {
    /// A FIFO for rows of `row_bytes`, with the slots that fit into about `staging_bytes` of
    /// memory.
    ///
    /// # Errors
    /// [`Error::Cuda`]: memory cannot be pinned, or the driver rejects the kernels.
    ///
    /// # Panics
    /// If `row_bytes` is zero.
    pub fn new(device: &Arc<Device>, row_bytes: usize, staging_bytes: usize) -> Result<Fifo> {
        assert!(row_bytes > 0, "rows have bytes");
        let post_rows = (POST_BYTES / row_bytes).clamp(1, POST_ROWS_MAX);
        let slot_bytes = (post_rows * row_bytes).next_multiple_of(SLOT_ALIGNMENT);
        let affordable = (staging_bytes / slot_bytes).clamp(SLOTS_MIN, SLOTS_MAX);
        let count = 1_usize << affordable.ilog2();
        let memory = FifoMemory {
            kernel: Module::load(device, PTX)?.kernel(KERNEL)?,
            words: Words::allocate(device, LINE_BYTES / 8 + count * (2 + post_rows))?,
            slots: Slots::mapped(device, count as u32, slot_bytes)?,
            state: DeviceMemory::allocate(device, 2 * LINE_BYTES + 8 * count)?,
        };
        let fifo = Fifo {
            memory: ManuallyDrop::new(memory),
            row_bytes,
            post_rows,
            expected: AtomicU64::new(0),
            launches: Mutex::default(),
            has_posts: AtomicBool::new(false),
            server: OnceLock::new(),
            process: crate::process::id(),
        };
        fifo.describe()?;
        Ok(fifo)
    }

    /// Writes the description, followed by zeros, to the device.
    fn describe(&self) -> Result<()> {
        let FifoMemory {
            words,
            slots,
            state,
            ..
        } = &*self.memory;
        let count = u64::from(slots.count());
        let (head, left) = (
            state.address() + LINE_BYTES as u64,
            state.address() + 2 * LINE_BYTES as u64,
        );
        let stop = words.device_address();
        let posted = stop + LINE_BYTES as u64;
        let fields: [u64; FIELDS] = [
            head,
            left,
            stop,
            posted,
            posted + 8 * count,
            posted + 16 * count,
            slots.device_address().expect("they are mapped"),
            slots.stride_bytes() as u64,
            count,
            self.post_rows as u64,
            self.row_bytes as u64,
        ];
        let mut bytes = vec![0_u8; state.len()];
        for (field, place) in fields.iter().zip(bytes.chunks_exact_mut(8)) {
            place.copy_from_slice(&field.to_ne_bytes());
        }
        let stream = Stream::new(state.device())?;
        let piece = PitchedCopy::run(bytes.as_ptr() as usize, state.address(), bytes.len());
        // SAFETY: both sides stay until the stream is synchronized, and nothing else has their
        // addresses.
        let copied = unsafe { stream.copy(Direction::ToDevice, &[piece]) };
        let copied = copied.and_then(|()| stream.synchronize());
        Ok(copied.inspect_err(|_| stream.drain())?)
    }

    /// The device address of the description: [`HEADER`] calls it `fifo`. Kernels launched with it
    /// must have ended before this value is dropped.
    pub fn address(&self) -> u64 {
        self.memory.state.address()
    }

    /// The device whose kernels post.
    pub fn device(&self) -> &Arc<Device> {
        self.memory.state.device()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The most ids of a post.
    pub fn post_rows(&self) -> usize {
        self.post_rows
    }

    /// The most posts in flight.
    pub fn slots(&self) -> usize {
        self.memory.slots.count() as usize
    }

    /// Queues a kernel that gathers the rows of `count` ids, of `id_bytes` (4 or 8) bytes each, at
    /// `ids`, to `out`. The [serving](Fifo::served_by) thread is woken first.
    ///
    /// # Errors
    /// [`Error::Cuda`], notably where the stream is being captured into a graph: replays of a graph
    /// would go unannounced.
    ///
    /// # Panics
    /// If `id_bytes` is neither 4 nor 8.
    ///
    /// # Safety
    /// `ids` and `out` are memory of the device, with room for the ids and the rows, until the work
    /// now on the stream is done; meanwhile only work of the stream writes to `ids` or uses `out`.
    pub unsafe fn gather(
        &self,
        stream: &Foreign,
        ids: u64,
        id_bytes: usize,
        count: usize,
        out: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promise is passed on. Warps beyond the number of slots would only
        // wait.
        unsafe { self.launch(stream, ids, id_bytes, count, out, self.slots()) }
    }

    /// As [`gather`](Fifo::gather), with at most `warps_max` warps.
    ///
    /// # Safety
    /// As [`gather`](Fifo::gather).
    unsafe fn launch(
        &self,
        stream: &Foreign,
        ids: u64,
        id_bytes: usize,
        count: usize,
        out: u64,
        warps_max: usize,
    ) -> Result<()> {
        assert!(matches!(id_bytes, 4 | 8), "ids of {id_bytes} bytes");
        if count == 0 {
            return Ok(());
        }
        let posts = count.div_ceil(self.post_rows);
        let warps = posts.min(warps_max) as u32;
        let threads = (warps * LANES).min(BLOCK_THREADS);
        let blocks = (warps * LANES).div_ceil(threads);
        let arguments = [self.address(), ids, id_bytes as u64, count as u64, out];
        // Before the launch: under a debugging tool the launch may return only after the kernel has
        // ended.
        self.expected.fetch_add(posts as u64, Ordering::Relaxed);
        if let Some(server) = self.server.get() {
            server.unpark();
        }
        // Held until the event is noted, so that the last one noted belongs to the last launch.
        let mut launches = self.launches();
        let kernel = &self.memory.kernel;
        // SAFETY: these are the kernel's arguments; the description exists until this is dropped,
        // which waits for kernels, and the rest is the caller's promise.
        let launched = unsafe { kernel.launch(stream, blocks, threads, arguments) };
        if let Err(error) = launched {
            self.expected.fetch_sub(posts as u64, Ordering::Relaxed);
            return Err(error.into());
        }
        let moment = stream.record()?;
        launches.retain(|(known, _)| *known != stream.raw());
        launches.push((stream.raw(), moment));
        Ok(())
    }

    /// Waits until all launched kernels have ended. The serving thread must continue meanwhile.
    pub fn wait(&self) -> Result<()> {
        while let Some((stream, moment)) = self.launches().pop() {
            // Without the lock, so that others can launch meanwhile.
            if let Err(error) = moment.wait() {
                self.launches().push((stream, moment));
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Checks whether the device has failed since a launch.
    pub fn check(&self) -> Result<()> {
        for (_, moment) in self.launches().iter() {
            moment.is_done()?;
        }
        Ok(())
    }

    /// Sets the thread to unpark when posts are expected.
    pub fn served_by(&self, thread: Thread) {
        // Only the one thread that has the posts calls this.
        let _ = self.server.set(thread);
    }

    fn launches(&self) -> MutexGuard<'_, Launches> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The posts, for the one thread that serves them.
    ///
    /// # Panics
    /// If they were given out already.
    pub fn posts(self: &Arc<Self>) -> Posts {
        let is_taken = self.has_posts.swap(true, Ordering::Relaxed);
        assert!(!is_taken, "one serves a FIFO");
        Posts {
            fifo: Arc::clone(self),
            next: 0,
            own: 0,
        }
    }

    /// Closes the FIFO: waiting kernels get no more rows, and a status that says so.
    pub fn stop(&self) {
        if let Some(stop) = self.memory.words.as_slice().first() {
            stop.store(1, Ordering::Release);
        }
    }

    /// The words of all slots; `None` in a fork, which does not have the memory.
    fn host_queue(&self) -> Option<HostQueue<'_, AtomicU64>> {
        let words = self.memory.words.as_slice().get(LINE_BYTES / 8..)?;
        let (posted, rest) = words.split_at(self.slots());
        let (done, ids) = rest.split_at(self.slots());
        Some(HostQueue { posted, done, ids })
    }

    fn answer(&self, ticket: u64, answer: Answer) {
        if let Some(host_queue) = self.host_queue() {
            host_queue.answer(ticket, answer);
        }
    }
}

impl fmt::Debug for Fifo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fifo")
            .field("device", self.device())
            .field("row_bytes", &self.row_bytes)
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}

impl Drop for Fifo {
    fn drop(&mut self) {
        self.stop();
        if self.process != crate::process::id() || self.wait().is_ok() {
            // SAFETY: it is dropped once, here, and not used after that. Kernels launched here no
            // longer use it, other kernels must have ended (see `address`), and in a fork there is
            // nothing to free.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// The posts of kernels, in order.
#[derive(Debug)]
pub struct Posts {
    fifo: Arc<Fifo>,
    /// The ticket of the next post.
    next: u64,
    /// How many posts of launches made here were found.
    own: u64,
}

impl Posts {
    /// The FIFO of the posts.
    pub fn fifo(&self) -> &Arc<Fifo> {
        &self.fifo
    }

    /// Takes the next post, if it has arrived.
    pub fn take(&mut self) -> Option<Post> {
        let found = self.fifo.host_queue()?.find(self.next)?;
        let ticket = self.next;
        self.next += 1;
        self.own += u64::from(found.is_own);
        Some(Post {
            fifo: Arc::clone(&self.fifo),
            ticket,
            ids: found.ids,
            is_answered: false,
        })
    }

    /// Whether all posts of launches made here were found.
    pub fn is_over(&self) -> bool {
        self.own >= self.fifo.expected.load(Ordering::Relaxed)
    }
}

/// Ids of rows that a warp waits for. Dropping it without an answer answers with a failure.
#[derive(Debug)]
pub struct Post {
    fifo: Arc<Fifo>,
    ticket: u64,
    ids: Option<Vec<u64>>,
    is_answered: bool,
}

impl Post {
    /// The ids, in order, as they were posted; a negative id appears as a large number.
    ///
    /// # Errors
    /// [`Error::Posted`]: a kernel has posted more than [`Fifo::post_rows`].
    pub fn ids(&self) -> Result<&[u64]> {
        let most = self.fifo.post_rows;
        self.ids.as_deref().ok_or(Error::Posted { most })
    }

    /// Memory for the rows, contiguous, until the last window on it is dropped.
    pub fn memory(&self) -> Result<IoBuf> {
        let bytes = self.ids()?.len() * self.fifo.row_bytes;
        let slots = &self.fifo.memory.slots;
        let slot = (self.ticket % u64::from(slots.count())) as u32;
        let mut memory = slots.claim(slot).ok_or_else(|| Error::Engine {
            operation: "the memory of a slot",
            source: io::Error::other("its last rows still have it"),
        })?;
        drop(memory.split_off(bytes));
        Ok(memory)
    }

    /// Answers the post; nobody may use its memory any more.
    pub fn answer(mut self, answer: Answer) {
        self.is_answered = true;
        self.fifo.answer(self.ticket, answer);
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        if !self.is_answered {
            self.fifo.answer(self.ticket, Answer::Failed);
        }
    }
}
