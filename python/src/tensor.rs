//! Memory that Python owns, and memory that is handed to Python.
//!
//! A tensor to save arrives as an address with a shape and strides, a tensor to fill as an address
//! with a length; both with the object that keeps the memory alive. The package computes them from
//! live `torch` and NumPy objects, which it references for the length of the call.
#![allow(unsafe_code)]

pub(crate) mod device;

use std::ffi::c_int;
use std::sync::Arc;

use penstock_io::buffer::{
    ArrayMut, CachedMemory, DeviceArrayMut, DeviceRegion, DeviceStreams, HostArrayMut, HostRegion,
    HostRegionMut, Memory, Region, RegionMut,
};
use penstock_io::executor::{Landing, Source};
use penstock_store::format::part::TensorBox;
use penstock_store::load::fill::{Fill, Whole};
use penstock_store::plan::write::TensorSpec;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::{PyErr, ffi};

use crate::errors;
use crate::owner::Owner;
use device::{Followed, NativeDevice};

/// `(global name, global shape, start)`.
pub(crate) type NativeBox = (String, Vec<u64>, Vec<u64>);

/// `(name, dtype, shape, address, strides in bytes or None, bytes an item, owner, box, device)`;
/// host memory if `device` is None.
pub(crate) type TensorSource = (
    String,
    String,
    Vec<u64>,
    usize,
    Option<Vec<isize>>,
    usize,
    Py<PyAny>,
    Option<NativeBox>,
    Option<NativeDevice>,
);

/// `(address, bytes, owner)` of C-contiguous host memory to fill.
pub(crate) type TensorTarget = (usize, usize, Py<PyAny>);

/// `(shape, address, strides in bytes or None, bytes an item, owner, device)` of device memory to
/// fill.
type DeviceTarget = (
    Vec<usize>,
    usize,
    Option<Vec<isize>>,
    usize,
    Py<PyAny>,
    NativeDevice,
);

/// Memory to fill with a whole tensor.
#[derive(FromPyObject)]
pub(crate) enum LoadTarget {
    #[pyo3(transparent)]
    Host(TensorTarget),
    #[pyo3(transparent)]
    Device(DeviceTarget),
}

/// Splits a source into its description and its bytes.
pub(crate) fn source(
    py: Python<'_>,
    source: TensorSource,
    followed: &mut Followed,
) -> PyResult<(TensorSpec, Region)> {
    let (name, dtype, shape, address, strides, item_bytes, owner, region, device) = source;
    let sizes: Vec<usize> = shape.iter().map(|&dim| dim as usize).collect();
    let owner = Owner::of(owner);
    let items = sizes
        .iter()
        .try_fold(1usize, |items, &dim| items.checked_mul(dim));
    let bytes = items.and_then(|items| items.checked_mul(item_bytes));
    let Some(bytes) = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()) else {
        return Err(PyValueError::new_err(format!(
            "{name}: the shape {shape:?} is too large"
        )));
    };
    if bytes > 0 && address == 0 {
        return Err(PyValueError::new_err(format!(
            "{name}: {bytes} bytes at a null address"
        )));
    }
    if strides
        .as_ref()
        .is_some_and(|strides| strides.len() != sizes.len())
    {
        return Err(PyValueError::new_err(format!(
            "{name}: one stride a dimension is needed"
        )));
    }
    let memory = match (device, &strides) {
        (Some(device), strides) => {
            let device_streams = followed.device_streams(device);
            let device_streams =
                device_streams.map_err(|error| errors::raise(py, &error.into()))?;
            device::region(
                &device_streams,
                address,
                item_bytes,
                &sizes,
                strides.as_deref(),
                owner,
            )
            .into()
        }
        // SAFETY: the package passes the data pointer of a live, contiguous tensor or array of
        // this shape and item size, with the object itself as the owner.
        (None, None) => unsafe { HostRegion::contiguous(address, bytes, owner) }.into(),
        (None, Some(strides)) => {
            // SAFETY: as above, with the strides of the same object: every item that they reach is
            // its own.
            unsafe { HostRegion::new(address, item_bytes, &sizes, strides, owner) }.into()
        }
    };
    Ok((
        TensorSpec {
            name,
            dtype,
            shape,
            item_bytes,
            region: region.map(self::region),
            group: None,
        },
        memory,
    ))
}

/// The bytes of a source in host memory.
pub(crate) fn on_host(py: Python<'_>, source: TensorSource) -> PyResult<HostRegion> {
    match self::source(py, source, &mut Followed::default())? {
        (_, Region::Host(region)) => Ok(region),
        (spec, _) => Err(PyValueError::new_err(format!(
            "{}: the host does not have it",
            spec.name
        ))),
    }
}

/// The box of a global tensor.
pub(crate) fn region((tensor, shape, start): NativeBox) -> TensorBox {
    TensorBox {
        tensor,
        shape,
        start,
    }
}

/// The memory of a load's target.
pub(crate) fn load_target(
    py: Python<'_>,
    index: usize,
    target: LoadTarget,
    followed: &mut Followed,
) -> PyResult<RegionMut> {
    let (shape, address, strides, item_bytes, owner, device) = match target {
        LoadTarget::Host(target) => return Ok(self::target(target)?.into()),
        LoadTarget::Device(target) => target,
    };
    let invalid = |detail: &str| PyValueError::new_err(format!("tensor {index}: {detail}"));
    let strides = strides.as_deref();
    check_array(&shape, address, strides, item_bytes).map_err(invalid)?;
    let device_streams = followed.streams_to_fill(device);
    let device_streams = device_streams.map_err(|error| errors::raise(py, &error.into()))?;
    let owner = Owner::of(owner);
    let array = device::array(&device_streams, address, item_bytes, &shape, strides, owner);
    array.map(Into::into).ok_or_else(|| invalid(UNDECIDED))
}

/// The memory of a target.
pub(crate) fn target(target: TensorTarget) -> PyResult<HostRegionMut> {
    let (address, bytes, owner) = target;
    if bytes > 0 && address == 0 {
        return Err(PyValueError::new_err(format!(
            "{bytes} bytes to fill at a null address"
        )));
    }
    // SAFETY: the package passes the data pointer and size of a live, contiguous, writable tensor
    // or array, with the object as the owner, and no two targets that share memory. Other threads
    // that use the tensor while it is filled race in their own data, as with any in-place load.
    Ok(unsafe { HostRegionMut::new(address, bytes, Owner::of(owner)) })
}

/// The tensor's name or the entry's index, the first index of the box, its shape, the address of
/// its first item in memory, strides in bytes or None, bytes an item of that memory, owner,
/// device; host memory if `device` is None.
pub(crate) type NativeFill = (
    NativeWhole,
    Vec<u64>,
    Vec<usize>,
    usize,
    Option<Vec<isize>>,
    usize,
    Py<PyAny>,
    Option<NativeDevice>,
);

/// A global tensor by name, or an entry by index.
#[derive(FromPyObject)]
pub(crate) enum NativeWhole {
    #[pyo3(transparent)]
    Entry(usize),
    #[pyo3(transparent)]
    Tensor(String),
}

impl From<NativeWhole> for Whole {
    fn from(whole: NativeWhole) -> Whole {
        match whole {
            NativeWhole::Entry(index) => Whole::Entry(index),
            NativeWhole::Tensor(name) => Whole::Tensor(name),
        }
    }
}

/// The memory for a requested box. The size of its items is the one that the memory's owner
/// states, never that of the file: the engine refuses the box if the two differ.
pub(crate) fn fill(py: Python<'_>, fill: NativeFill, followed: &mut Followed) -> PyResult<Fill> {
    let (of, start, shape, address, strides, item_bytes, owner, device) = fill;
    let of = Whole::from(of);
    let invalid = |detail: &str| PyValueError::new_err(format!("{of}: {detail}"));
    let strides = strides.as_deref();
    check_array(&shape, address, strides, item_bytes).map_err(invalid)?;
    let owner = Owner::of(owner);
    let into = match device {
        Some(device) => {
            let device_streams = followed.streams_to_fill(device);
            let device_streams =
                device_streams.map_err(|error| errors::raise(py, &error.into()))?;
            let array = device::array(&device_streams, address, item_bytes, &shape, strides, owner);
            array.map(ArrayMut::from)
        }
        None => {
            // SAFETY: as for `target`, with the strides and the item size of the same object:
            // every item that they reach is its own.
            let array = unsafe { HostArrayMut::new(address, item_bytes, &shape, strides, owner) };
            array.map(ArrayMut::from)
        }
    };
    let into = into.ok_or_else(|| invalid(UNDECIDED))?;
    Ok(Fill { of, start, into })
}

const UNDECIDED: &str = "items of the memory to fill lie in each other";

/// Checks that an array to fill is possible at all.
fn check_array(
    shape: &[usize],
    address: usize,
    strides: Option<&[isize]>,
    item_bytes: usize,
) -> Result<(), &'static str> {
    if strides.is_some_and(|strides| strides.len() != shape.len()) {
        return Err("one stride a dimension is needed");
    }
    if address == 0 && !shape.contains(&0) {
        return Err("bytes to fill at a null address");
    }
    let items = shape
        .iter()
        .try_fold(1usize, |items, &dim| items.checked_mul(dim));
    let bytes = items.and_then(|items| items.checked_mul(item_bytes));
    if item_bytes == 0 || bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err("no size of memory to fill");
    }
    Ok(())
}

/// Page-aligned memory that tensors use; freed, or returned to its origin, with the last of them.
#[pyclass(frozen, module = "penstock._native")]
pub struct HostBuffer {
    address: usize,
    len: usize,
    /// Keeps the memory for as long as the buffer exists.
    _memory: Box<dyn Send + Sync>,
}

impl HostBuffer {
    pub(crate) fn new(memory: Memory) -> HostBuffer {
        HostBuffer {
            address: memory.address(),
            len: memory.len(),
            _memory: Box::new(memory),
        }
    }
}

impl From<Arc<Memory>> for HostBuffer {
    fn from(memory: Arc<Memory>) -> HostBuffer {
        HostBuffer {
            address: memory.address(),
            len: memory.len(),
            _memory: Box::new(memory),
        }
    }
}

impl From<CachedMemory> for HostBuffer {
    fn from(memory: CachedMemory) -> HostBuffer {
        HostBuffer::from(Arc::new(memory))
    }
}

impl From<Arc<CachedMemory>> for HostBuffer {
    fn from(memory: Arc<CachedMemory>) -> HostBuffer {
        HostBuffer {
            address: memory.address(),
            len: memory.len(),
            _memory: Box::new(memory),
        }
    }
}

#[pymethods]
impl HostBuffer {
    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    fn __len__(&self) -> usize {
        self.len
    }

    /// Exports the memory as writable bytes.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        const WRITABLE: c_int = 0;
        let (address, bytes) = {
            let buffer = slf.get();
            (buffer.address, buffer.len)
        };
        let pointer = std::ptr::with_exposed_provenance_mut(address);
        let py = slf.py();
        // SAFETY: `view` comes from the interpreter. The memory lives as long as this object, which
        // the view takes a reference to; Rust makes no reference into it any more.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer, bytes as isize, WRITABLE, flags)
        };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(py))
        }
    }
}

/// Address of the first item, dimensions, strides in bytes or None, bytes an item, owner.
pub(crate) type NativeArray = (usize, Vec<usize>, Option<Vec<isize>>, usize, Py<PyAny>);

/// The bytes of an array; an error if memory cannot have that many.
fn checked_bytes(array: &NativeArray) -> PyResult<usize> {
    let (address, shape, strides, item_bytes, _) = array;
    let items = shape
        .iter()
        .try_fold(1usize, |items, &dim| items.checked_mul(dim));
    let bytes = items.and_then(|items| items.checked_mul(*item_bytes));
    let Some(bytes) = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()) else {
        return Err(PyValueError::new_err("the array is too large"));
    };
    if bytes > 0 && *address == 0 {
        return Err(PyValueError::new_err(format!(
            "{bytes} bytes at a null address"
        )));
    }
    if strides
        .as_ref()
        .is_some_and(|strides| strides.len() != shape.len())
    {
        return Err(PyValueError::new_err("one stride a dimension is needed"));
    }
    Ok(bytes)
}

/// An array to read into.
pub(crate) fn landing(array: NativeArray) -> PyResult<Landing> {
    let bytes = checked_bytes(&array)?;
    let (address, shape, strides, item_bytes, owner) = array;
    if bytes == 0 || strides.is_none() {
        // SAFETY: as for `target`.
        let region = unsafe { HostRegionMut::new(address, bytes, Owner::of(owner)) };
        return Ok(Landing::Window(region.into_buf()));
    }
    let strides = strides.as_deref();
    // SAFETY: as for `fill`.
    let array =
        unsafe { HostArrayMut::new(address, item_bytes, &shape, strides, Owner::of(owner)) };
    let array = array.ok_or_else(|| PyValueError::new_err("its items lie in each other"))?;
    Ok(match array.into_region() {
        Ok(region) => Landing::Window(region.into_buf()),
        Err(array) => {
            let mut strides = vec![item_bytes; shape.len()];
            for dim in (1..shape.len()).rev() {
                strides[dim - 1] = strides[dim] * shape[dim];
            }
            Landing::Scattered(array.into_scatter(&strides))
        }
    })
}

/// A device array to fill.
pub(crate) fn device_landing(
    device_streams: &Arc<DeviceStreams>,
    array: NativeArray,
) -> PyResult<DeviceArrayMut> {
    checked_bytes(&array)?;
    let (address, shape, strides, item_bytes, owner) = array;
    let owner = Owner::of(owner);
    device::array(
        device_streams,
        address,
        item_bytes,
        &shape,
        strides.as_deref(),
        owner,
    )
    .ok_or_else(|| PyValueError::new_err("its items lie in each other"))
}

/// A device array to copy from.
pub(crate) fn device_supply(
    device_streams: &Arc<DeviceStreams>,
    array: NativeArray,
) -> PyResult<DeviceRegion> {
    checked_bytes(&array)?;
    let (address, shape, strides, item_bytes, owner) = array;
    let owner = Owner::of(owner);
    let region = device::region(
        device_streams,
        address,
        item_bytes,
        &shape,
        strides.as_deref(),
        owner,
    );
    Ok(region)
}

/// A contiguous array to copy from.
pub(crate) fn contiguous(array: NativeArray) -> PyResult<HostRegion> {
    let bytes = checked_bytes(&array)?;
    let (address, _, strides, _, owner) = array;
    if strides.is_some() {
        return Err(PyValueError::new_err("it has to be contiguous"));
    }
    // SAFETY: as for `source`.
    Ok(unsafe { HostRegion::contiguous(address, bytes, Owner::of(owner)) })
}

/// All of a buffer, to fill anew.
pub(crate) fn buffer(buffer: Bound<'_, HostBuffer>) -> HostRegionMut {
    let (address, bytes) = (buffer.get().address, buffer.get().len);
    let owner = Owner::of(buffer.into_any().unbind());
    // SAFETY: the memory lives as long as the buffer. The package fills a buffer again only when
    // what it was filled with before is not used any more.
    unsafe { HostRegionMut::new(address, bytes, owner) }
}

/// A copy of a contiguous array of `uint32`.
pub(crate) fn words(array: NativeArray) -> PyResult<Vec<u32>> {
    let region = contiguous(array)?;
    let mut bytes = vec![0; region.len() as usize];
    region.copy_to(0, &mut bytes);
    let words = bytes.as_chunks::<4>().0;
    Ok(words.iter().map(|word| u32::from_ne_bytes(*word)).collect())
}

/// An array to write from.
pub(crate) fn supply(array: NativeArray) -> PyResult<Source> {
    let bytes = checked_bytes(&array)?;
    let (address, shape, strides, item_bytes, owner) = array;
    let owner = Owner::of(owner);
    Ok(match strides.filter(|_| bytes > 0) {
        None => {
            // SAFETY: the package passes the data pointer and size of a live, contiguous tensor or
            // array, with the object as the owner. It is only read from here, so other threads may
            // read it as well; a thread that modifies it meanwhile races in its own data.
            let region = unsafe { HostRegionMut::new(address, bytes, owner) };
            Source::Window(region.into_buf())
        }
        Some(strides) => {
            // SAFETY: as for `source`.
            let region = unsafe { HostRegion::new(address, item_bytes, &shape, &strides, owner) };
            Source::Gathered(Arc::new(region))
        }
    })
}
