//! Element types: their names in a part, and the safetensors types that store them.
//!
//! Names are those of PyTorch and NumPy. A dtype that earlier versions had no safetensors name for
//! is stored under a *carrier*, which the part records: a safetensors type with the same bytes, in
//! a shape that its own element size requires.

/// The representation of a dtype's elements in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Carrier {
    /// The safetensors name.
    pub name: &'static str,
    /// How many carrier elements make one element of the dtype, and along which dimension.
    pub layout: Layout,
}

/// How the shape in a shard's header follows from the tensor's shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// The header has the tensor's shape.
    Same,
    /// An additional last dimension of this length.
    Extra(usize),
    /// A last dimension longer by this factor; not applicable to a tensor without dimensions.
    Packed(u64),
}

impl Carrier {
    /// The shape in a shard's header for a tensor of the dtype, if the layout has one.
    pub fn stored_shape(&self, shape: &[u64]) -> Option<Vec<u64>> {
        let mut stored = shape.to_vec();
        match self.layout {
            Layout::Same => {}
            Layout::Extra(length) => stored.push(length as u64),
            Layout::Packed(count) => {
                let last = stored.last_mut()?;
                *last = last.checked_mul(count)?;
            }
        }
        Some(stored)
    }
}

/// Types that safetensors names itself: our name, its name, bytes per element.
const NATURAL: &[(&str, &str, usize)] = &[
    ("bool", "BOOL", 1),
    ("uint8", "U8", 1),
    ("int8", "I8", 1),
    ("uint16", "U16", 2),
    ("int16", "I16", 2),
    ("uint32", "U32", 4),
    ("int32", "I32", 4),
    ("uint64", "U64", 8),
    ("int64", "I64", 8),
    ("float16", "F16", 2),
    ("bfloat16", "BF16", 2),
    ("float32", "F32", 4),
    ("float64", "F64", 8),
    ("complex64", "C64", 8),
    ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e5m2", "F8_E5M2", 1),
    ("float8_e8m0fnu", "F8_E8M0", 1),
];

/// Types under a carrier: our name, carrier, layout, bytes per element. Shards are written with the
/// first row of a dtype whose layout has a shape for the tensor; all rows are read.
const CARRIED: &[(&str, &str, Layout, usize)] = &[
    ("complex128", "F64", Layout::Extra(2), 16),
    ("complex32", "F16", Layout::Extra(2), 4),
    ("bcomplex32", "BF16", Layout::Extra(2), 4),
    ("bits16", "U16", Layout::Same, 2),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", Layout::Same, 1),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", Layout::Same, 1),
    // safetensors counts half-bytes, PyTorch bytes.
    ("float4_e2m1fn_x2", "F4", Layout::Packed(2), 1),
    // Earlier versions knew none of these three names, and a scalar has no dimension in which to
    // count half-bytes.
    ("float8_e4m3fnuz", "U8", Layout::Same, 1),
    ("float8_e5m2fnuz", "U8", Layout::Same, 1),
    ("float4_e2m1fn_x2", "U8", Layout::Same, 1),
    ("bits8", "U8", Layout::Same, 1),
    ("bits1x8", "U8", Layout::Same, 1),
    ("bits2x4", "U8", Layout::Same, 1),
    ("bits4x2", "U8", Layout::Same, 1),
    ("int1", "U8", Layout::Same, 1),
    ("int2", "U8", Layout::Same, 1),
    ("int3", "U8", Layout::Same, 1),
    ("int4", "U8", Layout::Same, 1),
    ("int5", "U8", Layout::Same, 1),
    ("int6", "U8", Layout::Same, 1),
    ("int7", "U8", Layout::Same, 1),
    ("uint1", "U8", Layout::Same, 1),
    ("uint2", "U8", Layout::Same, 1),
    ("uint3", "U8", Layout::Same, 1),
    ("uint4", "U8", Layout::Same, 1),
    ("uint5", "U8", Layout::Same, 1),
    ("uint6", "U8", Layout::Same, 1),
    ("uint7", "U8", Layout::Same, 1),
];

/// Carriers that are the safetensors name of the dtype itself: other readers see the saved type.
const NAMED: &[&str] = &["F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"];

/// Types of the safetensors library missing from `NATURAL`, with the bits per element.
const OTHERS: &[(&str, u64)] = &[
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
];

/// Prefix of a NumPy type without a name of its own here; its `dtype.str` follows.
const NUMPY_PREFIX: &str = "numpy:";

/// The possible representations of a dtype whose elements take `item_bytes`, the one used for
/// writing first; none if the format does not support the dtype, or its elements have another size.
pub(crate) fn carriers(dtype: &str, item_bytes: usize) -> impl Iterator<Item = Carrier> {
    let natural = NATURAL.iter().find(|row| row.0 == dtype);
    let natural = natural.map(|&(_, name, bytes)| (name, Layout::Same, bytes));
    let carried = CARRIED.iter().filter(move |row| row.0 == dtype);
    let carried = carried.map(|&(_, name, layout, bytes)| (name, layout, bytes));
    let is_numpy = dtype.starts_with(NUMPY_PREFIX);
    let numpy = is_numpy.then_some(("U8", Layout::Extra(item_bytes), item_bytes));
    let found = natural.into_iter().chain(carried).chain(numpy);
    found
        .filter(move |&(_, _, bytes)| bytes == item_bytes)
        .map(|(name, layout, _)| Carrier { name, layout })
}

/// The representation used for writing a tensor.
pub fn carrier(dtype: &str, item_bytes: usize, shape: &[u64]) -> Option<Carrier> {
    carriers(dtype, item_bytes).find(|carrier| carrier.stored_shape(shape).is_some())
}

/// Every dtype with a name of its own here, with the bytes per element.
pub fn all() -> impl Iterator<Item = (&'static str, usize)> {
    let natural = NATURAL.iter().map(|row| (row.0, row.2));
    // Further rows of a dtype are carriers of earlier versions, which are no longer written.
    let carried = CARRIED.iter().enumerate();
    let first = carried.filter(|(at, row)| !CARRIED[..*at].iter().any(|other| other.0 == row.0));
    natural.chain(first.map(|(_, row)| (row.0, row.3)))
}

/// Every dtype that safetensors has a name for: our name, its name, and how many of its elements
/// make one of ours along the last dimension.
pub fn named() -> impl Iterator<Item = (&'static str, &'static str, u64)> {
    let natural = NATURAL.iter().map(|row| (row.0, row.1, 1));
    let carried = CARRIED.iter().filter(|row| NAMED.contains(&row.1));
    natural.chain(carried.map(|row| match row.2 {
        Layout::Packed(count) => (row.0, row.1, count),
        Layout::Same | Layout::Extra(_) => (row.0, row.1, 1),
    }))
}

/// Whether this version supports the dtype. Other names in a part come from newer versions.
pub(crate) fn is_known(dtype: &str) -> bool {
    item_bytes(dtype).is_some() || dtype.starts_with(NUMPY_PREFIX)
}

/// Whether shards of this version store elements under this safetensors type.
pub(crate) fn is_carrier(stored: &str) -> bool {
    let natural = NATURAL.iter().any(|row| row.1 == stored);
    natural || CARRIED.iter().any(|row| row.1 == stored)
}

/// Whether safetensors itself names the dtype, so that only the name needs recording.
pub fn is_natural(dtype: &str) -> bool {
    natural(dtype).is_some()
}

/// The safetensors name of a dtype that has one of its own.
pub(crate) fn natural(dtype: &str) -> Option<&'static str> {
    NATURAL.iter().find(|row| row.0 == dtype).map(|row| row.1)
}

/// Bytes per element of a dtype; `None` for `numpy:` types, whose size is in their carrier.
pub fn item_bytes(dtype: &str) -> Option<usize> {
    let natural = NATURAL.iter().find(|row| row.0 == dtype).map(|row| row.2);
    natural.or_else(|| CARRIED.iter().find(|row| row.0 == dtype).map(|row| row.3))
}

/// Bits per element of a safetensors type; `None` for a type that this version does not know.
pub(crate) fn stored_bits(stored: &str) -> Option<u64> {
    let natural = NATURAL.iter().find(|row| row.1 == stored);
    let natural = natural.map(|row| row.2 as u64 * 8);
    natural.or_else(|| OTHERS.iter().find(|row| row.0 == stored).map(|row| row.1))
}

/// The dtype that a safetensors type means by itself, and the shape in elements of that dtype;
/// `None` if no dtype here has such elements, or if a row ends within an element.
pub fn of_stored(stored: &str, shape: &[u64]) -> Option<(&'static str, Vec<u64>)> {
    let (dtype, _, count) = named().find(|row| row.1 == stored)?;
    let mut shape = shape.to_vec();
    if count > 1 {
        let last = shape.last_mut()?;
        if !last.is_multiple_of(count) {
            return None;
        }
        *last /= count;
    }
    Some((dtype, shape))
}

/// Product of a shape and an element size; `None` on overflow.
pub fn nbytes(shape: &[u64], item_bytes: usize) -> Option<u64> {
    // A zero dimension makes the size zero, but the product of the others must still not overflow:
    // a reader in another language may multiply in another order.
    let mut product = item_bytes as u64;
    let mut has_zero = false;
    for &dim in shape {
        if dim == 0 {
            has_zero = true;
        } else {
            product = product
                .checked_mul(dim)
                .filter(|&bytes| bytes <= i64::MAX as u64)?;
        }
    }
    Some(if has_zero { 0 } else { product })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carriers_hold_the_same_bytes() {
        let shape = [3, 4];
        for (dtype, item_bytes) in all() {
            assert!(carrier(dtype, item_bytes, &shape).is_some(), "{dtype}");
            for carrier in carriers(dtype, item_bytes) {
                let stored: u64 = carrier.stored_shape(&shape).unwrap().iter().product();
                let bits = stored * stored_bits(carrier.name).unwrap();
                assert_eq!(bits, 12 * 8 * item_bytes as u64, "{dtype} {carrier:?}");
            }
        }
        let text = carrier("numpy:<U5", 20, &shape).unwrap();
        assert_eq!((text.name, text.layout), ("U8", Layout::Extra(20)));
    }

    #[test]
    fn a_type_that_safetensors_names_comes_back_from_its_name() {
        for (dtype, stored, _) in named() {
            let item_bytes = item_bytes(dtype).unwrap();
            let carrier = carrier(dtype, item_bytes, &[3, 4]).unwrap();
            assert_eq!(carrier.name, stored);
            let shape = carrier.stored_shape(&[3, 4]).unwrap();
            assert_eq!(of_stored(stored, &shape), Some((dtype, vec![3, 4])));
        }
        assert_eq!(of_stored("F4", &[3]), None);
        assert_eq!(of_stored("F4", &[]), None);
        assert_eq!(of_stored("F6_E2M3", &[4]), None);
    }

    #[test]
    fn a_scalar_that_no_named_type_can_hold_lies_under_another() {
        let carrier = carrier("float4_e2m1fn_x2", 1, &[]).unwrap();
        assert_eq!((carrier.name, carrier.layout), ("U8", Layout::Same));
    }

    #[test]
    fn wrong_sizes_and_unknown_names_have_no_carrier() {
        assert_eq!(carrier("float32", 8, &[]), None);
        assert_eq!(carrier("object", 8, &[]), None);
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        assert_eq!(nbytes(&[2, 3], 4), Some(24));
        assert_eq!(nbytes(&[], 4), Some(4));
        assert_eq!(nbytes(&[0, 7], 4), Some(0));
        assert_eq!(nbytes(&[u64::MAX, 2], 1), None);
        assert_eq!(nbytes(&[0, u64::MAX, u64::MAX], 8), None);
    }
}
