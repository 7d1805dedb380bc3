//! Prepares and runs a job, and measures it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use penstock_cuda::{CuFile, CuFileCounts, CuFileHandle};
use penstock_io::buffer::{DeviceStreams, Memory};
use penstock_io::file::{Direct, File};
use penstock_store::{Error, Result};
use rustix::time::{ClockId, clock_gettime};

use crate::content::Tag;
use crate::job::{Job, Layout, Method, Pattern};
use crate::method;
use crate::outcome::{CufileCounts, Metadata, Outcome, Tally};
use crate::plan::{Plan, Request};
use crate::worker::{Worker, WorkerShared};

/// Most memory that stands for tensors: too much for any cache.
const SOURCE_BYTES_MAX: u64 = 512 << 20;

/// A job whose files are open.
pub struct Bench {
    job: Job,
    plan: Plan,
    files: Vec<Arc<File>>,
    tags: Vec<Tag>,
    source: Option<Memory>,
    device_streams: Option<Arc<DeviceStreams>>,
    cufile: Option<Arc<CuFile>>,
    handles: Vec<CuFileHandle>,
    metadata: Metadata,
    open_seconds: f64,
    stop: AtomicBool,
}

impl Bench {
    /// Creates the files to write, or opens the files to read and drops their cached pages.
    ///
    /// # Errors
    /// [`Error::Io`] from the file system, notably if a file to create exists, or if direct I/O
    /// was requested and is not supported; and the driver's errors, if the job has a device.
    ///
    /// # Panics
    /// If the job does not pass [`Job::check`].
    pub fn prepare(job: Job) -> Result<Bench> {
        let device_streams = job.device.map(DeviceStreams::of).transpose()?;
        let cufile = match job.method {
            Method::Cufile => Some(CuFile::shared().map_err(penstock_io::Error::from)?),
            _ => None,
        };
        Bench::prepare_with(job, device_streams, cufile)
    }

    /// As [`prepare`](Bench::prepare), with a device of another driver than this process shares,
    /// and with another cuFile.
    ///
    /// # Panics
    /// As [`prepare`](Bench::prepare).
    pub fn prepare_with(
        job: Job,
        device_streams: Option<Arc<DeviceStreams>>,
        cufile: Option<Arc<CuFile>>,
    ) -> Result<Bench> {
        if let Err(problem) = job.check() {
            panic!("{problem}");
        }
        let plan = Plan::new(&job);
        let begun = Instant::now();
        let mut metadata = Metadata::default();
        let files = open(&job, &plan, &mut metadata)?;
        let handles = match (&cufile, &device_streams) {
            (Some(cufile), Some(device_streams)) => handles(cufile, device_streams, &files)?,
            _ => Vec::new(),
        };
        let open_seconds = begun.elapsed().as_secs_f64();
        let process = match job.layout {
            Layout::SharedFile => 0,
            Layout::FilePerTensor | Layout::FilePerProcess => job.process,
        };
        let tags = (0..).take(files.len());
        let tags = tags.map(|file| Tag::new(job.seed, process, file)).collect();
        // Copies from a device take the place of these copies.
        let copies = job.copies && device_streams.is_none();
        let source = match copies && job.pattern == Pattern::Write {
            true => Some(source(&job)?),
            false => None,
        };
        Ok(Bench {
            job,
            plan,
            files,
            tags,
            source,
            device_streams,
            cufile,
            handles,
            metadata,
            open_seconds,
            stop: AtomicBool::new(false),
        })
    }

    /// Bytes of one pass over the files.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// cuFile's counters, if it moves the bytes.
    fn counts(&self) -> Option<CuFileCounts> {
        self.cufile.as_ref()?.counts()
    }

    /// Ends a run early; callable from any thread.
    pub fn cancel(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Makes all requests, then syncs.
    ///
    /// # Arguments
    /// `start_at` is the time to begin, in seconds of the monotonic clock; a past time means at
    /// once.
    ///
    /// # Errors
    /// [`Error::Io`] for the first request that failed, [`Error::Interrupted`] after a
    /// [`cancel`](Bench::cancel).
    pub fn run(&self, start_at: f64) -> Result<Outcome> {
        let shared = WorkerShared {
            job: &self.job,
            plan: &self.plan,
            files: &self.files,
            tags: &self.tags,
            source: self.source.as_ref(),
            device_streams: self.device_streams.as_ref(),
            handles: &self.handles,
            stop: &self.stop,
        };
        let before = self.counts();
        let callers = self.job.method.callers(self.job.threads);
        let gate = Gate::new(callers, start_at);
        let tallies = run_workers(&shared, &gate, callers);
        let begun = gate.begun();
        let seconds = begun.elapsed().as_secs_f64();
        let mut tally = Tally::new();
        for one in tallies {
            tally.add(one?);
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let mut metadata = self.metadata;
        let syncing = Instant::now();
        if self.job.syncs && self.job.pattern == Pattern::Write {
            for file in &self.files {
                file.sync_data()?;
                metadata.sync += 1;
            }
        }
        Ok(Outcome {
            bytes: tally.bytes,
            requests: tally.requests,
            short: tally.short,
            started_at: gate.started_at(),
            seconds,
            open_seconds: self.open_seconds,
            sync_seconds: syncing.elapsed().as_secs_f64(),
            cpu_seconds: gate.cpu_seconds(),
            latencies: tally.latencies(),
            timeline: tally.timeline,
            metadata,
            setup: tally.setup,
            is_direct: self.files.iter().all(|file| file.is_direct()),
            fallback: tally.fallback,
            checked: tally.checked,
            damaged: tally.damaged,
            cufile: self.counts().zip(before).map(CufileCounts::since),
        })
    }
}

/// Runs all requests on threads, each with its share.
fn run_workers(shared: &WorkerShared<'_>, gate: &Gate, callers: usize) -> Vec<Result<Tally>> {
    thread::scope(|scope| {
        let shares = share(&shared.plan.requests, callers);
        let workers: Vec<_> = shares
            .map(|requests| {
                scope.spawn(move || {
                    let worker = Worker::new(shared, requests);
                    // The other threads must not wait for a worker that could not be set up.
                    let worker = worker.inspect_err(|_| {
                        gate.pass();
                    })?;
                    method::run(worker, || gate.pass())
                })
            })
            .collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).collect()
    })
}

/// Holds the threads of a process until all are ready and the start time has come.
struct Gate {
    barrier: Barrier,
    start_at: f64,
    /// The start time on both clocks, and the processor time until then.
    begun: OnceLock<(Instant, f64, f64)>,
}

impl Gate {
    fn new(threads: usize, start_at: f64) -> Gate {
        Gate {
            barrier: Barrier::new(threads),
            start_at,
            begun: OnceLock::new(),
        }
    }

    fn pass(&self) -> Instant {
        self.barrier.wait();
        let wait = self.start_at - seconds(ClockId::Monotonic);
        if wait > 0.0 {
            thread::sleep(Duration::from_secs_f64(wait));
        }
        self.moment().0
    }

    fn moment(&self) -> (Instant, f64, f64) {
        *self.begun.get_or_init(|| {
            let cpu_seconds = seconds(ClockId::ProcessCPUTime);
            (Instant::now(), seconds(ClockId::Monotonic), cpu_seconds)
        })
    }

    fn begun(&self) -> Instant {
        self.moment().0
    }

    fn started_at(&self) -> f64 {
        self.moment().1
    }

    fn cpu_seconds(&self) -> f64 {
        seconds(ClockId::ProcessCPUTime) - self.moment().2
    }
}

fn seconds(clock: ClockId) -> f64 {
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Each thread's requests, which are consecutive.
fn share(requests: &[Request], threads: usize) -> impl Iterator<Item = &[Request]> {
    (0..threads).map(move |thread| {
        let bound = |thread: usize| requests.len() * thread / threads;
        &requests[bound(thread)..bound(thread + 1)]
    })
}

fn open(job: &Job, plan: &Plan, metadata: &mut Metadata) -> Result<Vec<Arc<File>>> {
    let direct = if job.direct { Direct::On } else { Direct::Off };
    let mut files = Vec::with_capacity(plan.files.len());
    for planned in &plan.files {
        let file = match job.pattern {
            // The first process creates a shared file before the others open it.
            Pattern::Write if planned.is_shared && job.process > 0 => {
                metadata.open += 1;
                File::open_to_write(&planned.path, direct)?
            }
            Pattern::Write => {
                let file = File::create(&planned.path, direct)?;
                metadata.create += 1;
                if job.allocates {
                    file.allocate(planned.bytes)?;
                    metadata.allocate += 1;
                }
                file
            }
            Pattern::Read | Pattern::RandomRead => {
                let file = File::open(&planned.path, direct)?;
                metadata.open += 1;
                file.drop_cache()?;
                file
            }
        };
        files.push(Arc::new(file));
    }
    Ok(files)
}

fn handles(
    cufile: &Arc<CuFile>,
    device_streams: &Arc<DeviceStreams>,
    files: &[Arc<File>],
) -> Result<Vec<CuFileHandle>> {
    let mut handles = Vec::with_capacity(files.len());
    for file in files {
        let handle = CuFileHandle::new(cufile, device_streams.device(), Arc::clone(file) as _);
        handles.push(handle.map_err(penstock_io::Error::from)?);
    }
    Ok(handles)
}

/// Memory that stands for the tensors.
fn source(job: &Job) -> Result<Memory> {
    let bytes: u64 = job.tensors.iter().sum();
    let bytes = bytes.min(SOURCE_BYTES_MAX).next_multiple_of(8);
    let mut memory = Memory::allocate(bytes as usize)?;
    Tag::new(job.seed, u32::MAX, 1).fill(memory.as_mut_slice(), 0);
    Ok(memory)
}
