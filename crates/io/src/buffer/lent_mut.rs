//! Memory of the host or a device that a caller lends for filling.

use super::{Bounds, DeviceArrayMut, HostArrayMut, HostRegionMut, OverlapUndecided};

/// Borrowed memory to fill with one content.
#[derive(Debug)]
pub enum RegionMut {
    /// Contiguous host memory.
    Host(HostRegionMut),
    /// Device memory, of any strides.
    Device(DeviceArrayMut),
}

impl RegionMut {
    /// Bytes to fill.
    pub fn len(&self) -> usize {
        match self {
            RegionMut::Host(region) => region.len(),
            RegionMut::Device(array) => array.len(),
        }
    }

    /// Whether there is nothing to fill.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<HostRegionMut> for RegionMut {
    fn from(region: HostRegionMut) -> RegionMut {
        RegionMut::Host(region)
    }
}

impl From<DeviceArrayMut> for RegionMut {
    fn from(array: DeviceArrayMut) -> RegionMut {
        RegionMut::Device(array)
    }
}

/// A borrowed array to fill.
#[derive(Debug)]
pub enum ArrayMut {
    /// Host memory.
    Host(HostArrayMut),
    /// Device memory.
    Device(DeviceArrayMut),
}

impl ArrayMut {
    /// Bytes of an item.
    pub fn item_bytes(&self) -> usize {
        match self {
            ArrayMut::Host(array) => array.item_bytes(),
            ArrayMut::Device(array) => array.item_bytes(),
        }
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        match self {
            ArrayMut::Host(array) => array.shape(),
            ArrayMut::Device(array) => array.shape(),
        }
    }

    /// Bytes between neighbours along each dimension.
    pub fn strides_bytes(&self) -> &[isize] {
        match self {
            ArrayMut::Host(array) => array.strides_bytes(),
            ArrayMut::Device(array) => array.strides_bytes(),
        }
    }

    /// Bytes to fill.
    pub fn len(&self) -> usize {
        match self {
            ArrayMut::Host(array) => array.len(),
            ArrayMut::Device(array) => array.len(),
        }
    }

    /// Whether there is nothing to fill.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Splits the array into the given boxes; items in no box stay untouched.
    ///
    /// # Errors
    /// [`OverlapUndecided`] where proving that no two boxes overlap would take too long.
    ///
    /// # Panics
    /// If a box reaches beyond the array or overlaps another.
    pub fn split(self, boxes: &[Bounds]) -> Result<Vec<ArrayMut>, OverlapUndecided> {
        Ok(match self {
            ArrayMut::Host(array) => array.split(boxes)?.into_iter().map(Into::into).collect(),
            ArrayMut::Device(array) => array.split(boxes)?.into_iter().map(Into::into).collect(),
        })
    }
}

impl From<HostArrayMut> for ArrayMut {
    fn from(array: HostArrayMut) -> ArrayMut {
        ArrayMut::Host(array)
    }
}

impl From<DeviceArrayMut> for ArrayMut {
    fn from(array: DeviceArrayMut) -> ArrayMut {
        ArrayMut::Device(array)
    }
}
