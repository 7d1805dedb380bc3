//! The key of one attempt.

use std::fmt;

use aws_lc_rs::rand;
use zeroize::Zeroizing;

use crate::{KeyError, Result};

/// Bytes of a data key.
pub const DATA_KEY_BYTES: usize = 32;

/// 32 random bytes that seal one attempt.
///
/// The bytes are zeroized on drop. The type is neither `Clone` nor serializable, and its `Debug`
/// does not show them.
// On the heap, as moves of the value would leave copies on the stack.
pub struct DataKey(Box<Zeroizing<[u8; DATA_KEY_BYTES]>>);

impl DataKey {
    /// Draws a key from the system's random numbers.
    ///
    /// # Errors
    ///
    /// [`KeyError::Entropy`] if the system has none.
    pub fn generate() -> Result<DataKey> {
        let mut key = Box::new(Zeroizing::new([0; DATA_KEY_BYTES]));
        rand::fill(key.as_mut_slice()).map_err(|_| KeyError::Entropy)?;
        Ok(DataKey(key))
    }

    /// A key with these bytes. The caller zeroizes its copy.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; DATA_KEY_BYTES]) -> DataKey {
        let mut key = Box::new(Zeroizing::new([0; DATA_KEY_BYTES]));
        key.copy_from_slice(bytes);
        DataKey(key)
    }

    /// The bytes, for the derivation of keys and for wrapping.
    #[must_use]
    pub fn expose(&self) -> &[u8; DATA_KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("DataKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_keys_differ() {
        let (one, other) = (DataKey::generate().unwrap(), DataKey::generate().unwrap());
        assert_ne!(one.expose(), other.expose());
    }

    #[test]
    fn debug_shows_no_byte() {
        assert_eq!(
            format!("{:?}", DataKey::from_bytes(&[0xab; 32])),
            "DataKey(..)"
        );
    }
}
