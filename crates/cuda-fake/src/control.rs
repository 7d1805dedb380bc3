//! The handle by which a Rust test controls the library: the control symbols, with types.

use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use libloading::Library;

use crate::journal::Entry;
use crate::leaks::Leaks;
use crate::library::library;
use crate::operation::Kind;

/// A test's exclusive control of the driver.
///
/// The process has one library: code under test that loads [`library`] gets the same one. So there
/// is one `Control` at a time, and other tests wait for its drop. It resets the library at its
/// start and its end, so users of the driver have to be dropped before it.
pub struct Control {
    symbols: &'static Symbols,
    _alone: Alone,
}

impl Control {
    /// Waits for exclusive control, loads the library and resets it.
    ///
    /// # Panics
    ///
    /// If the library cannot be found or loaded.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Control {
        let alone = Alone::wait();
        let control = Control {
            symbols: Symbols::loaded(),
            _alone: alone,
        };
        control.reset();
        control
    }

    /// Removes everything that was made, set or counted: the driver is as freshly loaded. Running
    /// operations finish, queued ones are dropped, and the threads of streams have ended.
    pub fn reset(&self) {
        (self.symbols.reset)();
    }

    /// Sets the seed of delays, for streams created later.
    pub fn set_seed(&self, seed: u64) {
        (self.symbols.seed)(seed);
    }

    /// Sets the number of devices, at most 64; before `cuInit`, which returns 100 for none.
    pub fn set_devices(&self, count: u32) {
        (self.symbols.devices)(count);
    }

    /// Sets the memory of each device.
    pub fn set_memory_bytes(&self, bytes: u64) {
        (self.symbols.memory_bytes)(bytes);
    }

    /// Sets the longest delay of an operation; 0 for none.
    pub fn set_delay_us_max(&self, delay_us_max: u64) {
        (self.symbols.delay_us_max)(delay_us_max);
    }

    /// Sets the version, 1000 × major + 10 × minor. Symbols cannot vanish: functions newer than the
    /// version return 801 (`CUDA_ERROR_NOT_SUPPORTED`), as `cuMemcpyBatchAsync` does before 12080.
    pub fn set_driver_version(&self, version: i32) {
        (self.symbols.driver_version)(version);
    }

    /// Sets an attribute of a device, by its number.
    pub fn set_attribute(&self, device: i32, attribute: i32, value: i32) {
        (self.symbols.attribute)(device, attribute, value);
    }

    /// Sets how many bytes of host memory may be pinned at a time. Pinning more is error 2.
    pub fn set_pinned_bytes_max(&self, bytes: u64) {
        (self.symbols.pinned_bytes_max)(bytes);
    }

    /// Sets whether host memory may be pinned. If not, pinning is error 800.
    pub fn set_pinning_permitted(&self, is_permitted: bool) {
        (self.symbols.pinning_permitted)(i32::from(is_permitted));
    }

    /// Sets whether copies to pinned memory silently deliver wrong bytes, as in a guest of
    /// confidential computing that bypasses the driver's buffers.
    pub fn set_garbles(&self, does: bool) {
        (self.symbols.garbles)(i32::from(does));
    }

    /// Makes the `nth` next call of a function, by its exported name, return `status` and do
    /// nothing. 1 is the next.
    pub fn fail_call(&self, function: &str, nth: u64, status: i32) {
        (self.symbols.fail_call)(text(function).as_ptr(), nth, status);
    }

    /// Makes the `nth` next operation, of a kind or of all, fail with `status`, and its context
    /// with it. 1 is the next. With status 0 it does nothing and reports success.
    pub fn fail_operation(&self, kind: Option<Kind>, nth: u64, status: i32) {
        (self.symbols.fail_operation)(kind.map_or(0, |kind| kind as u32), nth, status);
    }

    /// Removes the planned failures that have not occurred.
    pub fn clear_faults(&self) {
        (self.symbols.clear_faults)();
    }

    /// The number of calls of a function, by its exported name, since the reset.
    pub fn calls(&self, function: &str) -> u64 {
        (self.symbols.calls)(text(function).as_ptr())
    }

    /// The objects that were made and not freed.
    pub fn leaks(&self) -> Leaks {
        let mut leaks = Leaks::default();
        (self.symbols.leaks)(&mut leaks);
        leaks
    }

    /// Holds all streams: none begins an operation until the result is dropped.
    #[must_use = "streams are held until this is dropped"]
    pub fn hold(&self) -> Hold<'_> {
        (self.symbols.hold_all)();
        Hold {
            control: self,
            stream: None,
        }
    }

    /// Holds one stream until the result is dropped; 0 is the legacy stream of each context.
    #[must_use = "the stream is held until this is dropped"]
    pub fn hold_stream(&self, stream: u64) -> Hold<'_> {
        (self.symbols.hold)(stream);
        Hold {
            control: self,
            stream: Some(stream),
        }
    }

    /// The number of operations of a stream that are not done yet.
    pub fn pending(&self, stream: u64) -> u64 {
        (self.symbols.pending)(stream)
    }

    /// Reads device memory, or pinned memory, as it is now.
    ///
    /// # Panics
    ///
    /// If not all of these bytes are memory of the driver.
    pub fn peek(&self, address: u64, into: &mut [u8]) {
        let status = (self.symbols.peek)(address, into.as_mut_ptr(), into.len() as u64);
        assert_eq!(status, 0, "no memory of a device or pinned at {address:#x}");
    }

    /// Overwrites device memory, or pinned memory, now.
    ///
    /// # Panics
    ///
    /// If not all of these bytes are memory of the driver.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        let status = (self.symbols.poke)(address, bytes.as_ptr(), bytes.len() as u64);
        assert_eq!(status, 0, "no memory of a device or pinned at {address:#x}");
    }

    /// The operations executed since the reset, or since the journal was cleared, in order of
    /// completion; at most the last 262,144.
    pub fn journal(&self) -> Vec<Entry> {
        (0..(self.symbols.journal_length)())
            .filter_map(|index| self.entry(index))
            .collect()
    }

    /// Empties the journal.
    pub fn clear_journal(&self) {
        (self.symbols.journal_clear)();
    }

    fn entry(&self, index: u64) -> Option<Entry> {
        let mut entry = MaybeUninit::uninit();
        let status = (self.symbols.journal_entry)(index, &mut entry);
        // SAFETY: the library returns 0 after it has written the whole entry.
        (status == 0).then(|| unsafe { entry.assume_init() })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.reset();
    }
}

/// The exclusive right to a `Control`, which any thread may give back.
struct Alone;

static IS_TAKEN: Mutex<bool> = Mutex::new(false);
static ENDED: Condvar = Condvar::new();

impl Alone {
    fn wait() -> Alone {
        // A test that panicked leaves nothing that a reset does not clear.
        let is_taken = IS_TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = ENDED.wait_while(is_taken, |is_taken| *is_taken);
        *waited.unwrap_or_else(PoisonError::into_inner) = true;
        Alone
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        *IS_TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = false;
        ENDED.notify_one();
    }
}

/// Streams that are held until this is dropped.
pub struct Hold<'a> {
    control: &'a Control,
    stream: Option<u64>,
}

impl Hold<'_> {
    /// Allows a held stream to begin `operations` more operations, and returns at once. An
    /// operation that waits for another stream counts when it can begin.
    pub fn allow(&self, stream: u64, operations: u64) {
        (self.control.symbols.allow)(stream, operations);
    }

    /// Lets a held stream execute `operations` operations, and waits until they are done.
    ///
    /// # Panics
    ///
    /// If fewer are queued.
    pub fn step(&self, stream: u64, operations: u64) {
        let pending = self.control.pending(stream);
        let left = pending.checked_sub(operations);
        let left = left.expect("as many operations are queued as are to be executed");
        self.allow(stream, operations);
        while self.control.pending(stream) > left {
            thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        match self.stream {
            Some(stream) => (self.control.symbols.release)(stream),
            None => (self.control.symbols.release_all)(),
        }
    }
}

fn text(name: &str) -> CString {
    CString::new(name).expect("a function's name holds no zero")
}

/// Declares the control symbols, and loads each by its name.
macro_rules! symbols {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        struct Symbols {
            $($name: extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Symbols {
            fn load(library: &Library) -> Symbols {
                Symbols {
                    // SAFETY: these are the types of the functions in `symbols.rs` of the same
                    // build.
                    $($name: *unsafe {
                        library.get(concat!("penstock_fake_", stringify!($name)))
                    }.expect("the library has all control symbols"),)*
                }
            }
        }
    };
}

symbols! {
    reset();
    seed(u64);
    devices(u32);
    memory_bytes(u64);
    delay_us_max(u64);
    driver_version(i32);
    attribute(i32, i32, i32);
    pinned_bytes_max(u64);
    pinning_permitted(i32);
    garbles(i32);
    fail_call(*const c_char, u64, i32);
    fail_operation(u32, u64, i32);
    clear_faults();
    calls(*const c_char) -> u64;
    leaks(&mut Leaks);
    hold_all();
    hold(u64);
    release_all();
    release(u64);
    allow(u64, u64);
    pending(u64) -> u64;
    peek(u64, *mut u8, u64) -> i32;
    poke(u64, *const u8, u64) -> i32;
    journal_length() -> u64;
    journal_entry(u64, &mut MaybeUninit<Entry>) -> i32;
    journal_clear();
}

impl Symbols {
    /// The symbols of the library, which stays loaded.
    fn loaded() -> &'static Symbols {
        static SYMBOLS: OnceLock<Symbols> = OnceLock::new();
        SYMBOLS.get_or_init(|| {
            let path = library();
            // SAFETY: loading this library runs only Rust's own set-up.
            let library = unsafe { Library::new(&path) };
            let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let symbols = Symbols::load(&library);
            std::mem::forget(library);
            symbols
        })
    }
}
