//! Requests of a device: kernels post ids, and who serves them on the host answers with rows.
//!
//! A [`Fifo`] is memory that both sides reach. A warp draws a ticket, which names a slot, writes ids into it,
//! and waits for the answer; the host finds them in the order of the tickets ([`Posts`]), has rows written to
//! the slot's memory, and answers. Neither side calls the driver meanwhile, so a kernel that waits does not
//! depend on anything that might wait for kernels.
//!
//! The device's side stands in [`HEADER`], for kernels of others too. The kernel that this launches has been
//! compiled from it.
//!
//! Promised: rows of an answer that says so are there, whole; each post is answered, if by nothing else then
//! by the end of the FIFO; its memory is not freed while a kernel may use it.
#![allow(unsafe_code)]

mod desk;
mod echo;
mod pack;

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

use penstock_cuda::{
    Device, DeviceMemory, Direction, Event, Foreign, Kernel, Module, Piece, Stream,
};

use crate::buffer::{IoBuf, Slots, Words};
use crate::kernels::{BLOCK_THREADS, LANES, PTX};
use crate::{Error, Result};
use desk::Desk;

pub use desk::Answer;
pub use echo::echo;
pub use pack::pack;

/// What kernels post and take with: CUDA C++ for NVRTC and nvcc.
pub const HEADER: &str = include_str!("../kernels/fifo.cuh");

const KERNEL: &CStr = c"penstock_gather";

/// Ids of a post, at most: one a lane.
const POST_ROWS_MAX: usize = 32;
/// What the rows of a post take at most, unless one row is longer.
const POST_BYTES: usize = 256 << 10;
/// Slots of a FIFO.
const SLOTS_MAX: usize = 4096;
const SLOTS_MIN: usize = 2;
/// Where storage writes to directly.
const SLOT_ALIGNMENT: usize = 4096;

/// Words of the description, as in `kernels/fifo.cuh`.
const FIELDS: usize = 11;
/// Between the words of a device and its arrays: a line of its caches.
const LINE_BYTES: usize = 128;

/// Memory that a device and the host exchange requests by.
pub struct Fifo {
    /// Never freed where it is not known that no kernel of ours runs.
    memory: ManuallyDrop<Shared>,
    row_bytes: usize,
    post_rows: usize,
    /// Posts of launches of our own, in all.
    expected: AtomicU64,
    launches: Mutex<Launches>,
    has_posts: AtomicBool,
    /// Who looks out for posts, and sleeps where none are expected.
    server: OnceLock<Thread>,
    process: u32,
}

struct Shared {
    /// The stop word, what was posted, what is done, and ids.
    words: Words,
    slots: Arc<Slots>,
    /// The description, the head, and how often each slot was left.
    state: DeviceMemory,
    kernel: Kernel,
}

/// Of each stream by its handle, when the last kernel of ours on it is done.
type Launches = Vec<(usize, Event)>;

impl Fifo {
    /// One for rows of so many bytes, with as many slots as about `staging_bytes` of memory allow.
    ///
    /// # Errors
    /// [`Error::Cuda`]: memory cannot be pinned, or the driver does not take the kernels.
    ///
    /// # Panics
    /// If rows have no bytes.
    pub fn new(device: &Arc<Device>, row_bytes: usize, staging_bytes: usize) -> Result<Fifo> {
        assert!(row_bytes > 0, "rows have bytes");
        let post_rows = (POST_BYTES / row_bytes).clamp(1, POST_ROWS_MAX);
        let slot_bytes = (post_rows * row_bytes).next_multiple_of(SLOT_ALIGNMENT);
        let affordable = (staging_bytes / slot_bytes).clamp(SLOTS_MIN, SLOTS_MAX);
        let count = 1_usize << affordable.ilog2();
        let memory = Shared {
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
            process: std::process::id(),
        };
        fifo.describe()?;
        Ok(fifo)
    }

    /// Writes the description, and zeros behind it, to the device.
    fn describe(&self) -> Result<()> {
        let Shared {
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
        let piece = Piece::run(bytes.as_ptr() as usize, state.address(), bytes.len());
        // SAFETY: both sides stay until the stream is synchronized, and nobody else knows of them.
        let copied = unsafe { stream.copy(Direction::ToDevice, &[piece]) };
        let copied = copied.and_then(|()| stream.synchronize());
        Ok(copied.inspect_err(|_| stream.settle())?)
    }

    /// Where kernels find the description: what [`HEADER`] calls `fifo`. Whoever launches some with it has to
    /// wait for them before this is dropped.
    pub fn address(&self) -> u64 {
        self.memory.state.address()
    }

    /// The device that it is for.
    pub fn device(&self) -> &Arc<Device> {
        self.memory.state.device()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Ids of a post, at most.
    pub fn post_rows(&self) -> usize {
        self.post_rows
    }

    /// Posts that can be under way.
    pub fn slots(&self) -> usize {
        self.memory.slots.count() as usize
    }

    /// Queues a kernel that gathers the rows of `count` ids, of `id_bytes` (4 or 8) bytes each, at `ids`, to
    /// `out`. Whoever [serves](Fifo::served_by) the posts is woken before.
    ///
    /// # Errors
    /// [`Error::Cuda`], notably where the stream is captured into a graph: who replays it
    /// does not say so.
    ///
    /// # Panics
    /// If ids have another size.
    ///
    /// # Safety
    /// `ids` and `out` are memory of the device, with room for the ids and the rows, until what the stream has
    /// now is done; nobody writes to the one or uses the other meanwhile, but in order of the stream.
    pub unsafe fn gather(
        &self,
        stream: &Foreign,
        ids: u64,
        id_bytes: usize,
        count: usize,
        out: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promise is handed on. More warps than find slots would only wait.
        unsafe { self.launch(stream, ids, id_bytes, count, out, self.slots()) }
    }

    /// As [`gather`](Fifo::gather), by so many warps at most.
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
        // Before the launch: a tool may have it return when the kernel has ended.
        self.expected.fetch_add(posts as u64, Ordering::Relaxed);
        if let Some(server) = self.server.get() {
            server.unpark();
        }
        // Held until the moment is noted: the last noted is that of the last launch.
        let mut launches = self.launches();
        let kernel = &self.memory.kernel;
        // SAFETY: the kernel has these arguments; the description is there until this is dropped, which waits
        // for kernels, and the rest is the caller's promise.
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

    /// Waits until all is done that was launched. Whoever serves has to go on meanwhile.
    ///
    /// # Errors
    /// [`Error::Cuda`]: the device has failed.
    pub fn wait(&self) -> Result<()> {
        while let Some((stream, moment)) = self.launches().pop() {
            // Without the lock: others may launch meanwhile.
            if let Err(error) = moment.wait() {
                self.launches().push((stream, moment));
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Whether the device has failed since something was launched.
    ///
    /// # Errors
    /// [`Error::Cuda`]: it has.
    pub fn check(&self) -> Result<()> {
        for (_, moment) in self.launches().iter() {
            moment.is_done()?;
        }
        Ok(())
    }

    /// Says who looks out for posts: the thread is unparked when some are expected.
    pub fn served_by(&self, thread: Thread) {
        // Whoever has the posts, of which there is one.
        let _ = self.server.set(thread);
    }

    fn launches(&self) -> MutexGuard<'_, Launches> {
        self.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was posted, for the one who serves it.
    ///
    /// # Panics
    /// If somebody does already.
    pub fn posts(self: &Arc<Self>) -> Posts {
        let is_taken = self.has_posts.swap(true, Ordering::Relaxed);
        assert!(!is_taken, "one serves a FIFO");
        Posts {
            fifo: Arc::clone(self),
            next: 0,
            own: 0,
        }
    }

    /// Answers nothing any more: whoever waits for rows is told so.
    pub fn stop(&self) {
        if let Some(stop) = self.memory.words.as_slice().first() {
            stop.store(1, Ordering::Release);
        }
    }

    /// None in a fork, which does not have the memory.
    fn desk(&self) -> Option<Desk<'_, AtomicU64>> {
        let words = self.memory.words.as_slice().get(LINE_BYTES / 8..)?;
        let (posted, rest) = words.split_at(self.slots());
        let (done, ids) = rest.split_at(self.slots());
        Some(Desk { posted, done, ids })
    }

    fn answer(&self, ticket: u64, answer: Answer) {
        if let Some(desk) = self.desk() {
            desk.answer(ticket, answer);
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
        if self.process != std::process::id() || self.wait().is_ok() {
            // SAFETY: it is dropped once, here, and not used after that. No kernel of ours uses what it is of,
            // those of others are not to (see `address`), and in a fork there is nothing to free.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

/// What kernels have posted, in order.
#[derive(Debug)]
pub struct Posts {
    fifo: Arc<Fifo>,
    /// The ticket that is looked for.
    next: u64,
    /// How many of launches of our own there were.
    own: u64,
}

impl Posts {
    /// Who posts.
    pub fn fifo(&self) -> &Arc<Fifo> {
        &self.fifo
    }

    /// The next post, if it is there.
    pub fn take(&mut self) -> Option<Post> {
        let found = self.fifo.desk()?.find(self.next)?;
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

    /// Whether all was found that launches of our own have posted and will post.
    pub fn is_over(&self) -> bool {
        self.own >= self.fifo.expected.load(Ordering::Relaxed)
    }
}

/// Ids that a warp waits for. Dropped without an answer it has failed.
#[derive(Debug)]
pub struct Post {
    fifo: Arc<Fifo>,
    ticket: u64,
    ids: Option<Vec<u64>>,
    is_answered: bool,
}

impl Post {
    /// The ids, in order, as they were posted: a negative one is a large number.
    ///
    /// # Errors
    /// [`Error::Posted`]: a kernel has posted more than [`Fifo::post_rows`].
    pub fn ids(&self) -> Result<&[u64]> {
        let most = self.fifo.post_rows;
        self.ids.as_deref().ok_or(Error::Posted { most })
    }

    /// Room for their rows, one behind the other, until the last window on it is dropped.
    ///
    /// # Errors
    /// As [`Post::ids`], and [`Error::Engine`] where somebody has it.
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

    /// Says what became of it, once nobody has its memory any more.
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
