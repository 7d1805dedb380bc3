//! Element types: their names in a part and the safetensors type that carries their bytes.
//!
//! Names are those of PyTorch and NumPy. What safetensors has no name for is stored under a
//! *carrier*: a type of the same bytes, with one more dimension where an element needs several.

/// How the elements of one dtype lie in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Carrier {
    /// The safetensors name.
    pub name: &'static str,
    /// Length of the extra last dimension, where an element takes several carrier elements.
    pub extra_dim: Option<usize>,
}

/// Types that safetensors names itself: ours, theirs, bytes an element.
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

/// Types under a carrier of several elements or of another name: ours, carrier, extra dimension,
/// bytes an element.
const CARRIED: &[(&str, &str, Option<usize>, usize)] = &[
    ("complex128", "F64", Some(2), 16),
    ("complex32", "F16", Some(2), 4),
    ("bcomplex32", "BF16", Some(2), 4),
    ("bits16", "U16", None, 2),
    ("float8_e4m3fnuz", "U8", None, 1),
    ("float8_e5m2fnuz", "U8", None, 1),
    ("float4_e2m1fn_x2", "U8", None, 1),
    ("bits8", "U8", None, 1),
    ("bits1x8", "U8", None, 1),
    ("bits2x4", "U8", None, 1),
    ("bits4x2", "U8", None, 1),
    ("int1", "U8", None, 1),
    ("int2", "U8", None, 1),
    ("int3", "U8", None, 1),
    ("int4", "U8", None, 1),
    ("int5", "U8", None, 1),
    ("int6", "U8", None, 1),
    ("int7", "U8", None, 1),
    ("uint1", "U8", None, 1),
    ("uint2", "U8", None, 1),
    ("uint3", "U8", None, 1),
    ("uint4", "U8", None, 1),
    ("uint5", "U8", None, 1),
    ("uint6", "U8", None, 1),
    ("uint7", "U8", None, 1),
];

/// Prefix of a NumPy type that has no name of its own here; its `dtype.str` follows.
const NUMPY_PREFIX: &str = "numpy:";

/// The carrier of a dtype whose elements take `item_bytes`; `None` if the format has no place for
/// it or an element of it has another size.
pub fn carrier(dtype: &str, item_bytes: usize) -> Option<Carrier> {
    if let Some((_, name, bytes)) = NATURAL.iter().find(|row| row.0 == dtype) {
        return (*bytes == item_bytes).then_some(Carrier {
            name,
            extra_dim: None,
        });
    }
    if let Some((_, name, extra_dim, bytes)) = CARRIED.iter().find(|row| row.0 == dtype) {
        return (*bytes == item_bytes).then_some(Carrier {
            name,
            extra_dim: *extra_dim,
        });
    }
    let is_numpy = dtype.starts_with(NUMPY_PREFIX);
    is_numpy.then_some(Carrier {
        name: "U8",
        extra_dim: Some(item_bytes),
    })
}

/// Every dtype that has a name of its own here, with the bytes of an element.
pub fn all() -> impl Iterator<Item = (&'static str, usize)> {
    let natural = NATURAL.iter().map(|row| (row.0, row.2));
    natural.chain(CARRIED.iter().map(|row| (row.0, row.3)))
}

/// Whether this version has a place for the dtype. What else a part names is of a newer one.
pub(crate) fn is_known(dtype: &str) -> bool {
    item_bytes(dtype).is_some() || dtype.starts_with(NUMPY_PREFIX)
}

/// Whether shards of this version hold elements under that safetensors type.
pub(crate) fn is_carrier(stored: &str) -> bool {
    stored_item_bytes(stored).is_some()
}

/// Whether safetensors itself names the dtype, so that nothing but the name needs recording.
pub fn is_natural(dtype: &str) -> bool {
    natural(dtype).is_some()
}

/// The safetensors name of a dtype that has one of its own.
pub(crate) fn natural(dtype: &str) -> Option<&'static str> {
    NATURAL.iter().find(|row| row.0 == dtype).map(|row| row.1)
}

/// Bytes an element of a dtype takes; `None` for `numpy:` types, whose size is in their carrier.
pub fn item_bytes(dtype: &str) -> Option<usize> {
    let natural = NATURAL.iter().find(|row| row.0 == dtype).map(|row| row.2);
    natural.or_else(|| CARRIED.iter().find(|row| row.0 == dtype).map(|row| row.3))
}

/// Bytes an element of a safetensors type takes; `None` for names that shards never hold.
pub fn stored_item_bytes(stored: &str) -> Option<usize> {
    NATURAL.iter().find(|row| row.1 == stored).map(|row| row.2)
}

/// The dtype that a safetensors type stands for by itself.
pub(crate) fn of_stored(stored: &str) -> Option<&'static str> {
    NATURAL.iter().find(|row| row.1 == stored).map(|row| row.0)
}

/// Product of a shape and an element's size; `None` when it does not fit.
pub fn nbytes(shape: &[u64], item_bytes: usize) -> Option<u64> {
    // A zero anywhere makes the size zero, but the other factors still have to be sane: a reader
    // in another language may multiply in another order.
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
        for &(dtype, _, bytes) in NATURAL {
            let carrier = carrier(dtype, bytes).unwrap();
            assert_eq!(stored_item_bytes(carrier.name), Some(bytes), "{dtype}");
        }
        for &(dtype, _, _, bytes) in CARRIED {
            let carrier = carrier(dtype, bytes).unwrap();
            let stored = stored_item_bytes(carrier.name).unwrap();
            assert_eq!(stored * carrier.extra_dim.unwrap_or(1), bytes, "{dtype}");
        }
        let text = carrier("numpy:<U5", 20).unwrap();
        assert_eq!(
            text,
            Carrier {
                name: "U8",
                extra_dim: Some(20)
            }
        );
    }

    #[test]
    fn wrong_sizes_and_unknown_names_have_no_carrier() {
        assert_eq!(carrier("float32", 8), None);
        assert_eq!(carrier("object", 8), None);
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
