//! Transfers between files and the memory of tensors, many at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use penstock_io::Error;
use penstock_io::buffer::{DeviceRegion, DeviceStreams, Pool};
use penstock_io::executor::{
    self, ExecutorConfig, Kind, Landing, Moved, Request, Source, Target, page_bytes,
};
use penstock_io::file::File;
use penstock_io::staging::{
    DeviceCopyJob, DeviceKind, DeviceMoved, DeviceRequest, DeviceTransfer, Moment, StagingPipeline,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::call;
use crate::data_file::DataFile;
use crate::errors::{self, transferred as raised};
use crate::event_fd::EventFd;
use crate::owner::{detached, release_dropped};
use crate::rows::TransferCounts;
use crate::tensor::device::{NativeDevice, foreign};
use crate::tensor::{self, NativeArray, landing, supply};

/// A file, an offset in it, and an array.
type NativeRequest = (Py<DataFile>, u64, NativeArray);

/// A file, an offset in it, and an array on a device.
type NativeDeviceRequest = (Py<DataFile>, u64, NativeArray, NativeDevice);

/// Bytes that pass through pinned memory at a time: a device copies them while the next are read.
const PIECE_BYTES: usize = 4 << 20;

/// Workers that many callers share.
#[pyclass(frozen, module = "penstock._native")]
pub struct Executor {
    /// `None` once it is closed.
    inner: Mutex<Option<executor::Executor>>,
    /// The shares for tables, by weight.
    rows: Mutex<HashMap<u32, Weak<executor::Share>>>,
    /// The staging pipeline for device transfers, once there was one, and its memory.
    pipeline: Mutex<Option<(Arc<StagingPipeline<DeviceCopyJob>>, Pool)>>,
    staging_bytes: usize,
    engine: &'static str,
    fallback: Option<String>,
}

#[pymethods]
impl Executor {
    #[new]
    #[pyo3(signature = (*, engine, workers, queue_depth, in_flight_bytes, block_bytes, staging_bytes))]
    fn new(
        py: Python<'_>,
        engine: &str,
        workers: usize,
        queue_depth: usize,
        in_flight_bytes: usize,
        block_bytes: usize,
        staging_bytes: usize,
    ) -> PyResult<Executor> {
        let config = ExecutorConfig {
            engine: raised(py, engine.parse())?,
            workers,
            queue_depth,
            in_flight_bytes,
            block_bytes,
            staging_bytes,
            ..ExecutorConfig::default()
        };
        let inner = raised(py, detached(py, || executor::Executor::open(&config)))?;
        Ok(Executor {
            engine: inner.engine(),
            fallback: inner.fallback().map(str::to_owned),
            inner: Mutex::new(Some(inner)),
            rows: Mutex::default(),
            pipeline: Mutex::default(),
            staging_bytes,
        })
    }

    /// The engine in use.
    #[getter]
    fn engine(&self) -> &'static str {
        self.engine
    }

    /// Why it is not io_uring, if the choice was automatic.
    #[getter]
    fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Why some of the staging memory for devices is not pinned.
    #[getter]
    fn unpinned(&self, py: Python<'_>) -> Option<String> {
        release_dropped(py);
        self.pipeline()
            .as_ref()
            .and_then(|(_, pool)| pool.unpinned())
    }

    /// A share of the executor.
    fn share(slf: &Bound<'_, Self>, weight: u32) -> PyResult<Share> {
        let inner = slf.get().claim(slf.py(), weight)?;
        Ok(Share {
            inner: Arc::new(inner),
            executor: slf.clone().unbind(),
        })
    }

    /// Finishes the submitted requests and stops the workers.
    fn close(&self, py: Python<'_>) {
        let pipeline = self.pipeline().take();
        let inner = self.inner().take();
        detached(py, || {
            // The staging pipeline submits requests to the workers.
            if let Some((pipeline, _)) = pipeline {
                pipeline.finish();
            }
            drop(inner);
        });
    }
}

impl Executor {
    pub(crate) fn claim(&self, py: Python<'_>, weight: u32) -> PyResult<executor::Share> {
        match &*self.inner() {
            Some(inner) => raised(py, inner.share(weight)),
            None => Err(PyRuntimeError::new_err("the program ends")),
        }
    }

    /// The share for all tables: their requests are read in the order of submission, because
    /// batches that are waited for together have rows of several tables.
    pub(crate) fn claim_for_rows(
        &self,
        py: Python<'_>,
        weight: u32,
    ) -> PyResult<Arc<executor::Share>> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = rows.get(&weight).and_then(Weak::upgrade) {
            return Ok(share);
        }
        let share = Arc::new(self.claim(py, weight)?);
        rows.insert(weight, Arc::downgrade(&share));
        Ok(share)
    }

    /// The staging pipeline for device transfers; one device pins its memory for all.
    fn pipeline_of(
        &self,
        device_streams: &DeviceStreams,
    ) -> Result<Arc<StagingPipeline<DeviceCopyJob>>, Error> {
        let mut pipeline = self.pipeline();
        if let Some((pipeline, _)) = &*pipeline {
            return Ok(Arc::clone(pipeline));
        }
        let budget_bytes = self.staging_bytes.max(PIECE_BYTES);
        let pool = Pool::pinned_and_kept(PIECE_BYTES, budget_bytes, device_streams.device());
        let made = Arc::new(StagingPipeline::start(pool.clone())?);
        *pipeline = Some((Arc::clone(&made), pool));
        Ok(made)
    }

    fn pipeline(&self) -> MutexGuard<'_, Option<(Arc<StagingPipeline<DeviceCopyJob>>, Pool)>> {
        self.pipeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> MutexGuard<'_, Option<executor::Executor>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One caller's share of an executor.
#[pyclass(frozen, module = "penstock._native")]
pub struct Share {
    inner: Arc<executor::Share>,
    executor: Py<Executor>,
}

#[pymethods]
impl Share {
    /// Reads into arrays of the host and of devices.
    fn read(
        &self,
        py: Python<'_>,
        requests: Vec<NativeRequest>,
        on_devices: Vec<NativeDeviceRequest>,
    ) -> PyResult<Transfer> {
        let request = |(file, offset, array): NativeRequest| {
            let landing: Landing = landing(array)?;
            Ok(Request {
                target: file.get().to_read(),
                offset,
                kind: Kind::Read(landing),
            })
        };
        let requests: PyResult<Vec<Request>> = requests.into_iter().map(request).collect();
        let mut streams = Streams::default();
        let request = |(file, offset, array, device): NativeDeviceRequest| {
            let device_streams = raised(py, streams.device_streams(py, device))?;
            Ok(DeviceRequest {
                target: file.get().to_read(),
                offset,
                kind: DeviceKind::Read(tensor::device_landing(&device_streams, array)?),
            })
        };
        let on_devices: PyResult<Vec<DeviceRequest>> =
            on_devices.into_iter().map(request).collect();
        self.submit(py, requests?, on_devices?, streams, Vec::new())
    }

    /// Writes arrays of the host and of devices. Each file is extended first, and made durable at
    /// the end if `durable`.
    fn write(
        &self,
        py: Python<'_>,
        requests: Vec<NativeRequest>,
        on_devices: Vec<NativeDeviceRequest>,
        durable: bool,
    ) -> PyResult<Transfer> {
        let (mut supplies, mut regions) = (Vec::with_capacity(requests.len()), Vec::new());
        let mut files = Files::default();
        for (file, offset, array) in requests {
            let supply: Source = supply(array)?;
            supplies.push((files.add(file, offset, supply.len()), offset, supply));
        }
        let mut streams = Streams::default();
        for (file, offset, array, device) in on_devices {
            let device_streams = raised(py, streams.device_streams(py, device))?;
            let region = tensor::device_supply(&device_streams, array)?;
            regions.push((files.add(file, offset, region.len()), offset, region));
        }
        let targets = raised(py, detached(py, || files.prepare(durable)))?;
        let request = |(index, offset, supply): (usize, u64, Source)| Request {
            target: targets[index].clone(),
            offset,
            kind: Kind::Write(supply),
        };
        let made = supplies.into_iter().map(request).collect();
        let request = |(index, offset, region): (usize, u64, DeviceRegion)| DeviceRequest {
            target: targets[index].clone(),
            offset,
            kind: DeviceKind::Write(region),
        };
        let on_devices = regions.into_iter().map(request).collect();
        let syncs = match durable {
            true => targets.iter().map(|one| Arc::clone(&one.file)).collect(),
            false => Vec::new(),
        };
        self.submit(py, made, on_devices, streams, syncs)
    }
}

impl Share {
    fn submit(
        &self,
        py: Python<'_>,
        requests: Vec<Request>,
        on_devices: Vec<DeviceRequest>,
        streams: Streams,
        syncs: Vec<Arc<File>>,
    ) -> PyResult<Transfer> {
        let begin = || {
            let Some((_, (device_streams, _))) = streams.moments.first() else {
                // Blocks here if too many requests are queued.
                let inner = self.inner.submit_synced(requests, syncs)?;
                return Ok(Handed::OfHost(inner));
            };
            let pipeline = self.executor.get().pipeline_of(device_streams)?;
            let host_transfer = match requests.is_empty() {
                true => None,
                false => Some(self.inner.submit(requests)?),
            };
            let moments = streams.moments.into_iter().map(|(_, moment)| moment);
            let moments = moments.collect();
            let share = &self.inner;
            let copy_job = DeviceCopyJob::new(
                share,
                on_devices,
                PIECE_BYTES,
                moments,
                host_transfer,
                syncs,
            );
            Ok(Handed::OfDevices(copy_job.begin(&pipeline)?))
        };
        let inner = raised(py, detached(py, begin))?;
        Ok(Transfer { inner })
    }
}

/// Streams of callers, and events after the work queued on them so far.
#[derive(Default)]
struct Streams {
    moments: Vec<(NativeDevice, Moment)>,
}

impl Streams {
    /// The copy streams of a device, whose copies follow the work queued on the caller's stream.
    fn device_streams(
        &mut self,
        py: Python<'_>,
        device: NativeDevice,
    ) -> Result<Arc<DeviceStreams>, Error> {
        let known = self.moments.iter().find(|(known, _)| *known == device);
        if let Some((_, (device_streams, _))) = known {
            return Ok(Arc::clone(device_streams));
        }
        // The first use of a device takes as long as creating a context and a few copies.
        let device_streams = detached(py, || DeviceStreams::of(device.0))?;
        let moment = foreign(&device_streams, device.1).record()?;
        self.moments
            .push((device, (Arc::clone(&device_streams), moment)));
        Ok(device_streams)
    }
}

/// Files that a call writes to, each once.
#[derive(Default)]
struct Files {
    /// Each file with the end of its writes, and whether any write covers part of a page.
    files: Vec<(Py<DataFile>, u64, bool)>,
    known: HashMap<usize, usize>,
}

impl Files {
    /// Adds a write; returns the index of its file.
    fn add(&mut self, file: Py<DataFile>, offset: u64, len: u64) -> usize {
        let page = page_bytes();
        // As with pwrite, a write of no bytes does not extend the file.
        let end = if len == 0 {
            0
        } else {
            offset.saturating_add(len)
        };
        let has_edges = !offset.is_multiple_of(page) || !len.is_multiple_of(page);
        let index = *self.known.entry(file.as_ptr().addr()).or_insert_with(|| {
            self.files.push((file, 0, false));
            self.files.len() - 1
        });
        let (_, last, any_edges) = &mut self.files[index];
        (*last, *any_edges) = (end.max(*last), has_edges || *any_edges);
        index
    }

    fn prepare(&self, is_durable: bool) -> Result<Vec<Target>, Error> {
        let target = |(file, end, has_edges): &(Py<DataFile>, u64, bool)| {
            file.get().prepare(*end, *has_edges, is_durable)
        };
        self.files.iter().map(target).collect()
    }
}

/// Requests that were submitted together.
#[pyclass(frozen, module = "penstock._native")]
pub struct Transfer {
    inner: Handed,
}

enum Handed {
    /// All requests use host memory.
    OfHost(executor::Transfer),
    /// Some requests use device memory.
    OfDevices(DeviceTransfer),
}

impl Transfer {
    /// Reads of another part of the engine, all into host memory.
    pub(crate) fn of_host(inner: executor::Transfer) -> Transfer {
        Transfer {
            inner: Handed::OfHost(inner),
        }
    }
}

#[pymethods]
impl Transfer {
    /// Whether it has ended, successfully or not.
    fn done(&self, py: Python<'_>) -> bool {
        let is_done = match &self.inner {
            Handed::OfHost(inner) => inner.is_done(),
            Handed::OfDevices(inner) => inner.is_done(),
        };
        release_dropped(py);
        is_done
    }

    /// Waits for the end; `None` on timeout. Handles signals meanwhile.
    fn wait(
        &self,
        py: Python<'_>,
        timeout_seconds: Option<f64>,
    ) -> PyResult<Option<TransferCounts>> {
        let wait = |turn| match &self.inner {
            Handed::OfHost(inner) => {
                let moved = raised(py, detached(py, || inner.wait(Some(turn))))?;
                Ok(moved.map(|moved| DeviceMoved {
                    moved,
                    device_bytes: 0,
                }))
            }
            Handed::OfDevices(inner) => detached(py, || inner.wait(Some(turn)))
                .map_err(|error| errors::raise_transfer(py, error)),
        };
        let moved = call::wait(py, timeout_seconds, wait)?;
        let of = |DeviceMoved {
                      moved,
                      device_bytes,
                  }| {
            let took = match &self.inner {
                Handed::OfHost(inner) => inner.took(),
                Handed::OfDevices(inner) => inner.took(),
            };
            let Moved {
                bytes,
                staged_bytes,
                cached_bytes,
            } = moved;
            TransferCounts {
                bytes,
                staged_bytes,
                cached_bytes,
                device_bytes,
                seconds: took.as_secs_f64(),
            }
        };
        Ok(moved.map(of))
    }

    /// Cancels the requests that have not begun.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let cancelled = match &self.inner {
            Handed::OfHost(inner) => inner.cancel(),
            Handed::OfDevices(inner) => inner.cancel(),
        };
        raised(py, cancelled)
    }

    /// Signals `event_fd` with `key` when it ends.
    fn ring(&self, py: Python<'_>, event_fd: &EventFd, key: u64) -> PyResult<()> {
        let hung = match &self.inner {
            Handed::OfHost(inner) => inner.on_done(event_fd.signal(key)),
            Handed::OfDevices(inner) => inner.on_done(event_fd.signal(key)),
        };
        raised(py, hung)
    }
}
