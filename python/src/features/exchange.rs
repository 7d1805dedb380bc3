//! PyTorch's C functions for tensors, which its tensor type lists: DLPack's `DLPackExchangeAPI`.
//!
//! They spare small batches the calls from Python that a tensor's properties and a new tensor take.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use penstock_io::buffer::{CachedMemory, HostRegion, HostRegionMut, IoBuf};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString, PyType};

use crate::ids::Ids;
use crate::tensor;

/// The major version of DLPack whose structures these are.
const MAJOR: u32 = 1;
/// A device that is the host.
const CPU: i32 = 1;
const SIGNED: u8 = 0;
const UNSIGNED: u8 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Api {
    version: Version,
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: Option<unsafe extern "C" fn(*mut Managed, *mut *mut ffi::PyObject) -> c_int>,
    view: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Tensor) -> c_int>,
    current_stream: *const c_void,
}

/// The type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl Kind {
    /// Bytes of so many elements, if each has whole bytes.
    pub(crate) fn bytes(self, count: i64) -> Option<u64> {
        let bits = u64::from(self.bits) * u64::from(self.lanes);
        let count = u64::try_from(count).ok()?;
        (bits % 8 == 0).then_some(bits / 8 * count)
    }
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: i32,
    device_number: i32,
    dimensions: i32,
    kind: Kind,
    shape: *mut i64,
    strides: *mut i64,
    offset_bytes: u64,
}

impl Tensor {
    /// Address of the first item.
    fn address(&self) -> usize {
        self.data
            .expose_provenance()
            .wrapping_add(self.offset_bytes as usize)
    }

    /// Sizes and number of the items, if they are contiguous and not none.
    fn contiguous(&self) -> Option<(&[i64], usize)> {
        // PyTorch has no list for a tensor without dimensions.
        let list = |first: *const i64| match self.dimensions {
            0 => &[][..],
            // SAFETY: the tensor has so many sizes and strides, which are not changed while the GIL
            // is held.
            count => unsafe { std::slice::from_raw_parts(first, count as usize) },
        };
        let (sizes, strides) = (list(self.shape), list(self.strides));
        let mut step = 1;
        for (&size, &stride) in sizes.iter().zip(strides).rev() {
            if size < 1 || (size > 1 && stride != step) {
                return None;
            }
            step *= size;
        }
        Some((sizes, step as usize))
    }
}

#[repr(C)]
struct Managed {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    tensor: Tensor,
}

/// Memory that a tensor has; the structure that PyTorch gives back is its first field.
#[repr(C)]
struct Held {
    managed: Managed,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    _memory: Arc<CachedMemory>,
}

/// Makes and reads tensors of the type `torch.Tensor`.
pub(crate) struct Exchange {
    api: NonNull<Api>,
    /// The type that lists the functions, and the object that keeps them.
    tensor_type: Py<PyType>,
    _capsule: Py<PyCapsule>,
}

// SAFETY: the functions are never changed, and called by threads that hold the GIL.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

impl Exchange {
    /// The functions of PyTorch's tensor type; `None` where this PyTorch has none that we know.
    pub(crate) fn of(tensor_type: &Bound<'_, PyType>) -> Option<Exchange> {
        let found = tensor_type.getattr("__dlpack_c_exchange_api__").ok()?;
        let capsule = found.cast_into::<PyCapsule>().ok()?;
        let api = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?;
        let api: NonNull<Api> = api.cast();
        // SAFETY: DLPack promises that a capsule of this name points to such a structure, which
        // begins with its version in all versions; it lives as long as the capsule.
        let version = unsafe { *api.cast::<Version>().as_ptr() };
        if version.major != MAJOR {
            return None;
        }
        // SAFETY: as above; this version has all fields.
        let functions = unsafe { api.as_ref() };
        let is_whole = functions.view.is_some() && functions.to_object.is_some();
        is_whole.then(|| Exchange {
            api,
            tensor_type: tensor_type.clone().unbind(),
            _capsule: capsule.unbind(),
        })
    }

    fn api(&self) -> &Api {
        // SAFETY: the capsule keeps it, and nobody changes it.
        unsafe { self.api.as_ref() }
    }

    /// Whether an object is a tensor, not of a subclass, and none of these methods, which ask
    /// whether its elements are the negative or the conjugate of those in memory, says yes.
    fn is_plain(&self, object: &Bound<'_, PyAny>, methods: &[&Bound<'_, PyString>]) -> bool {
        let no = |method: &&Bound<'_, PyString>| {
            let answer = object.call_method0(*method);
            answer.and_then(|yes| yes.is_truthy()).is_ok_and(|yes| !yes)
        };
        let tensor_type = self.tensor_type.bind(object.py());
        object.get_type().is(tensor_type) && methods.iter().all(no)
    }

    /// The properties of a tensor; `None` if it is of a subclass, or no plain tensor of memory.
    ///
    /// Its lists and its memory are there until a method of PyTorch is called: many release the
    /// GIL, and another thread may change the tensor meanwhile.
    fn view(&self, object: &Bound<'_, PyAny>) -> Option<Tensor> {
        if !object.get_type().is(self.tensor_type.bind(object.py())) {
            return None;
        }
        let mut tensor = Tensor {
            data: ptr::null_mut(),
            device: 0,
            device_number: 0,
            dimensions: 0,
            kind: Kind {
                code: 0,
                bits: 0,
                lanes: 0,
            },
            shape: ptr::null_mut(),
            strides: ptr::null_mut(),
            offset_bytes: 0,
        };
        let view = self.api().view?;
        // SAFETY: the object is of the type whose function this is, and the GIL is held.
        if unsafe { view(object.as_ptr(), &raw mut tensor) } != 0 {
            // Sparse tensors, those of other dispatchers, …: others say what is wrong with them.
            drop(PyErr::take(object.py()));
            return None;
        }
        Some(tensor)
    }

    /// The element type of a tensor.
    pub(crate) fn kind(&self, object: &Bound<'_, PyAny>) -> Option<Kind> {
        self.view(object).map(|tensor| tensor.kind)
    }

    /// The integers of a contiguous tensor of the host, all below `end`, and its sizes. `None` if
    /// the object is no such tensor, or has no items or more than `count_max`.
    pub(crate) fn integers(
        &self,
        object: &Bound<'_, PyAny>,
        end: u64,
        count_max: usize,
    ) -> Option<(Vec<u64>, Vec<i64>)> {
        if !self.is_plain(object, &[intern!(object.py(), "is_neg")]) {
            return None;
        }
        let tensor = self.view(object)?;
        let Kind { code, bits, lanes } = tensor.kind;
        let is_signed = code == SIGNED;
        let is_integer = (is_signed || code == UNSIGNED) && lanes == 1;
        if !is_integer || !matches!(bits, 8 | 16 | 32 | 64) || tensor.device != CPU {
            return None;
        }
        let (sizes, count) = tensor.contiguous()?;
        if count > count_max || tensor.data.is_null() {
            return None;
        }
        let item_bytes = usize::from(bits) / 8;
        // SAFETY: the tensor has these items. The caller keeps it, and nobody else releases its
        // memory while the GIL is held, which is until the region is dropped below.
        let region =
            unsafe { HostRegion::contiguous(tensor.address(), count * item_bytes, Box::new(())) };
        let numbers = Ids::new(region, item_bytes, is_signed).numbers(end).ok()?;
        Some((numbers, sizes.to_vec()))
    }

    /// The memory of a contiguous tensor of the host, with these sizes and elements of a kind.
    /// `None` if the object is no such tensor, or rows must not be written to its memory.
    pub(crate) fn target(
        &self,
        object: &Bound<'_, PyAny>,
        kind: Kind,
        sizes: &[i64],
    ) -> Option<HostRegionMut> {
        let py = object.py();
        if !self.is_plain(object, &[intern!(py, "is_neg"), intern!(py, "is_conj")]) {
            return None;
        }
        let requires_grad = object.getattr(intern!(py, "requires_grad")).ok()?;
        // It keeps the memory if the tensor gets another one. It may have been resized to less.
        let storage = object.call_method0(intern!(py, "untyped_storage")).ok()?;
        let start = storage.call_method0(intern!(py, "data_ptr")).ok()?;
        let stored_bytes = storage.call_method0(intern!(py, "nbytes")).ok()?;
        let (start, stored_bytes) = (start.extract::<usize>().ok()?, stored_bytes.extract().ok()?);
        let owner = (object, storage).into_pyobject(py).ok()?.into_any();
        let tensor = self.view(object)?;
        let (found, count) = tensor.contiguous()?;
        let bytes = kind.bytes(count as i64)? as usize;
        let is_stored = tensor.address().checked_sub(start).is_some_and(|first| {
            first
                .checked_add(bytes)
                .is_some_and(|end| end <= stored_bytes)
        });
        let is_same = tensor.kind == kind && tensor.device == CPU && found == sizes;
        if !is_same || !is_stored || requires_grad.is_truthy().ok()? {
            return None;
        }
        tensor::target((tensor.address(), bytes, owner.unbind())).ok()
    }

    /// A tensor that has memory, which comes back when the tensor's storage is released.
    pub(crate) fn tensor(
        &self,
        py: Python<'_>,
        memory: Arc<CachedMemory>,
        kind: Kind,
        sizes: Vec<i64>,
    ) -> PyResult<Py<PyAny>> {
        let mut strides = vec![1; sizes.len()];
        for at in (1..sizes.len()).rev() {
            strides[at - 1] = strides[at] * sizes[at];
        }
        let mut held = Box::new(Held {
            managed: Managed {
                version: Version {
                    major: MAJOR,
                    minor: 0,
                },
                context: ptr::null_mut(),
                deleter: Some(release),
                flags: 0,
                tensor: Tensor {
                    data: ptr::with_exposed_provenance_mut(memory.address()),
                    device: CPU,
                    device_number: 0,
                    dimensions: sizes.len() as i32,
                    kind,
                    shape: ptr::null_mut(),
                    strides: ptr::null_mut(),
                    offset_bytes: 0,
                },
            },
            sizes,
            strides,
            _memory: memory,
        });
        held.managed.tensor.shape = held.sizes.as_mut_ptr();
        held.managed.tensor.strides = held.strides.as_mut_ptr();
        let held = Box::into_raw(held);
        let to_object = self.api().to_object.expect("it was checked");
        let mut made = ptr::null_mut();
        // The structure is the first field of what the box has.
        let managed = held.cast::<Managed>();
        // SAFETY: the GIL is held, and the structure is as DLPack has it.
        if unsafe { to_object(managed, &raw mut made) } != 0 {
            // Whether PyTorch has released the memory is not known: it stays where it is.
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a new reference, of this function's own.
        Ok(unsafe { Bound::from_owned_ptr(py, made) }.unbind())
    }
}

/// A window on all of the memory, for a gather.
pub(crate) fn window(memory: &Arc<CachedMemory>, bytes: usize) -> IoBuf {
    let (address, owner) = (memory.address(), Box::new(Arc::clone(memory)));
    assert!(bytes <= memory.len(), "{bytes} bytes of {}", memory.len());
    // SAFETY: the mapping is initialised and writable and lives as long as the owner; the tensor
    // that gets it is not known to anybody before the gather has filled it.
    unsafe { HostRegionMut::new(address, bytes, owner) }.into_buf()
}

/// Takes the memory of a tensor back; any thread calls it, with or without the GIL.
unsafe extern "C" fn release(managed: *mut Managed) {
    // SAFETY: `tensor` has given this box away, whose first field the structure is, and it comes
    // back once.
    drop(unsafe { Box::from_raw(managed.cast::<Held>()) });
}
