//! The running trace: its file, and the thread that writes it.

use std::collections::VecDeque;
use std::fs::{self, OpenOptions, TryLockError};
use std::io::{self, BufWriter};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;

use super::cell::{Cell, lock};
use super::clock::{now_ns, turn};
use super::event::{Process, Writer};
use super::meter::{self, gauge};
use super::record::{self, Gauge, Record, drain, lost};
use super::row;
use crate::{Error, Result};

/// The most levels kept before a file exists: some minutes of a busy process.
const KEPT_MAX: usize = 1 << 14;

/// The most names tried for a file of this process's own.
const OPENED_MAX: u32 = 100;

/// How often the records of threads are written out.
const TURN: Duration = Duration::from_millis(100);

/// A trace that runs.
struct Running {
    ending: Arc<Ending>,
    thread: JoinHandle<io::Result<()>>,
    path: PathBuf,
}

static RUNNING: Cell<Mutex<Option<Running>>> = Cell::new();

/// Counts the traces begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// The number of the latest trace, which identifies the trace that a request belongs to.
pub(super) fn number() -> u64 {
    BEGUN.load(Ordering::Relaxed)
}

/// Tells the writer to end.
#[derive(Default)]
struct Ending {
    is_wanted: Mutex<bool>,
    wanted: Condvar,
}

/// Begins a trace. If another process is writing the file, this one writes a file of its own next
/// to it, with its process id in the name. Times in the file count from now.
///
/// With `is_shared`, several processes were given the path: the file is made at the first record,
/// and another process's file is kept. Otherwise the file is replaced, at once.
///
/// # Errors
/// [`Error::Storage`] where the file cannot be made, or another trace of this process runs.
pub fn start(path: &Path, mut process: Process, is_shared: bool) -> Result<()> {
    let mut running = lock(RUNNING.get());
    let failed = |source| Error::Storage {
        operation: "write a trace to",
        path: path.to_owned(),
        source,
    };
    if running.is_some() {
        return Err(failed(io::ErrorKind::ResourceBusy.into()));
    }
    let origin_ns = now_ns();
    let unix = SystemTime::now().duration_since(UNIX_EPOCH);
    let began_at_unix_ns = unix.map_or(0, |since| since.as_nanos() as u64);
    if let Some(about) = process.about.as_object_mut() {
        about.insert("began_at_unix_ns".to_owned(), began_at_unix_ns.into());
    }
    let mut output = Output {
        path: path.to_owned(),
        process,
        origin_ns,
        is_shared,
        writer: None,
        locked: None,
        kept: VecDeque::new(),
    };
    if !is_shared {
        output.open().map_err(failed)?;
    }
    meter::reset();
    drop(drain());
    lost();
    let ending = Arc::<Ending>::default();
    let seen = Arc::clone(&ending);
    let thread = thread::Builder::new()
        .name("penstock-trace".to_owned())
        .spawn(move || output.run(&seen))
        .map_err(failed)?;
    BEGUN.fetch_add(1, Ordering::Relaxed);
    *running = Some(Running {
        ending,
        thread,
        path: path.to_owned(),
    });
    turn(true);
    Ok(())
}

/// Ends the trace, if one runs, and completes its file.
///
/// # Errors
/// [`Error::Storage`] where the file could not be written; it may end early then.
pub fn stop() -> Result<()> {
    // Held until the file is complete: another trace begins after that.
    let mut slot = lock(RUNNING.get());
    let Some(running) = slot.take() else {
        return Ok(());
    };
    turn(false);
    *lock(&running.ending.is_wanted) = true;
    running.ending.wanted.notify_all();
    let written = running.thread.join();
    let written = written.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    written.map_err(|source| Error::Storage {
        operation: "write a trace to",
        path: running.path,
        source,
    })
}

/// Leaves the trace to the parent, in a forked child, which does not have the writing thread.
pub fn forget() {
    turn(false);
    RUNNING.renew();
    meter::forget();
    record::forget();
    row::forget();
}

/// The state of the trace's thread.
struct Output {
    path: PathBuf,
    process: Process,
    origin_ns: u64,
    is_shared: bool,
    writer: Option<Writer<BufWriter<fs::File>>>,
    /// The same file, to unlock it at the end.
    locked: Option<fs::File>,
    /// The latest levels from before the file exists.
    kept: VecDeque<Record>,
}

impl Output {
    fn run(mut self, ending: &Ending) -> io::Result<()> {
        let mut traffic = Traffic::now();
        loop {
            let is_wanted = lock(&ending.is_wanted);
            let waited = ending
                .wanted
                .wait_timeout_while(is_wanted, TURN, |is_wanted| !*is_wanted);
            let is_last = *waited.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(traffic) = &mut traffic {
                traffic.sample();
                if is_last {
                    traffic.end();
                }
            }
            match is_last {
                true => meter::close(now_ns()),
                false => meter::advance(now_ns()),
            }
            if let Err(error) = self.write(drain()) {
                // Later records could not be written.
                turn(false);
                return Err(error);
            }
            if is_last {
                let finished = self.writer.map_or(Ok(()), |writer| writer.finish(lost()));
                // Forked children have the file open, and with it the lock, so it is released
                // explicitly.
                return finished.and(self.locked.map_or(Ok(()), |file| file.unlock()));
            }
        }
    }

    fn write(&mut self, mut records: Vec<Record>) -> io::Result<()> {
        let is_level = |record: &Record| matches!(record, Record::Level { .. });
        if self.writer.is_none() {
            if records.iter().all(is_level) {
                self.kept.extend(records);
                let excess = self.kept.len().saturating_sub(KEPT_MAX);
                self.kept.drain(..excess);
                return Ok(());
            }
            self.open()?;
            records.extend(self.kept.drain(..));
        }
        let Some(writer) = &mut self.writer else {
            unreachable!("it was just opened");
        };
        // Viewers take the first of several spans with the same start as the outermost.
        records.sort_by_key(|record| match record {
            Record::Span { times, .. } => (times.start, u64::MAX - times.end),
            Record::Transfer(transfer) => (transfer.times.start, 0),
            Record::Level { at_ns, .. } => (*at_ns, 0),
        });
        records.iter().try_for_each(|record| writer.write(record))?;
        writer.flush()
    }

    fn open(&mut self) -> io::Result<()> {
        let file = open_own(&self.path, self.is_shared)?;
        self.locked = Some(file.try_clone()?);
        let writer = Writer::new(BufWriter::new(file), &self.process, self.origin_ns)?;
        self.writer = Some(writer);
        Ok(())
    }
}

/// Opens an empty file for this process alone: the one at `path`, or one next to it. With
/// `is_shared`, a file with content is left as it is.
fn open_own(path: &Path, is_shared: bool) -> io::Result<fs::File> {
    for attempt in 0..OPENED_MAX {
        let file = open(&process_path(path, attempt))?;
        if !file.metadata()?.is_file() {
            return Ok(file);
        }
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => continue,
            // On a file system without locks, other processes go unnoticed.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        if is_shared && file.metadata()?.len() > 0 {
            continue;
        }
        file.set_len(0)?;
        return Ok(file);
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Opens the file without blocking, as opening a pipe would.
fn open(path: &Path) -> io::Result<fs::File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    options.custom_flags(OFlags::NONBLOCK.bits() as i32);
    options.open(path)
}

/// `path` itself at attempt 0, then with the process id in it, and from attempt 2 on with the
/// attempt as well.
fn process_path(path: &Path, attempt: u32) -> PathBuf {
    let process = std::process::id();
    let number = match attempt {
        0 => return path.to_owned(),
        1 => process.to_string(),
        _ => format!("{process}.{attempt}"),
    };
    match path.extension() {
        Some(extension) => path.with_extension(format!("{number}.{}", extension.display())),
        None => path.with_extension(number),
    }
}

/// Bytes that the process has read from and written to storage (not caches), by the kernel's count.
struct Traffic {
    at_ns: u64,
    read_bytes: u64,
    written_bytes: u64,
    was_idle: bool,
}

impl Traffic {
    /// `None` where the kernel does not count them.
    fn now() -> Option<Traffic> {
        let text = fs::read_to_string("/proc/self/io").ok()?;
        let field = |name: &str| {
            let rest = text.lines().find_map(|line| line.strip_prefix(name));
            rest.and_then(|rest| rest.trim().parse().ok())
        };
        Some(Traffic {
            at_ns: now_ns(),
            read_bytes: field("read_bytes:")?,
            written_bytes: field("write_bytes:")?,
            was_idle: false,
        })
    }

    /// Records the end of the rates.
    fn end(&self) {
        gauge(Gauge::ProcessRead, self.at_ns, 0.0);
        gauge(Gauge::ProcessWritten, self.at_ns, 0.0);
    }

    /// Records the rates since the last sample, unless both this rate and the last are zero.
    fn sample(&mut self) {
        let Some(now) = Traffic::now() else { return };
        let seconds = (now.at_ns - self.at_ns) as f64 / 1e9;
        let rate = |bytes: u64| bytes as f64 / seconds / f64::from(1 << 30);
        let read = now.read_bytes.saturating_sub(self.read_bytes);
        let written = now.written_bytes.saturating_sub(self.written_bytes);
        let is_idle = read + written == 0;
        if !(is_idle && self.was_idle) {
            gauge(Gauge::ProcessRead, self.at_ns, rate(read));
            gauge(Gauge::ProcessWritten, self.at_ns, rate(written));
        }
        *self = Traffic {
            was_idle: is_idle,
            ..now
        };
    }
}
