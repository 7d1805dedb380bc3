//! The key of one attempt.

use std::fmt;

use aws_lc_rs::rand;

use crate::secret::{SECRET_BYTES, Secret};
use crate::{KeyError, Result};

/// Bytes of a data key.
pub const DATA_KEY_BYTES: usize = SECRET_BYTES;

/// 32 random bytes that seal one attempt.
///
/// The bytes are in a locked page that no core dump has, and are overwritten on drop. The type is neither `Clone` nor serializable, and its `Debug`
/// does not show them.
pub struct DataKey(Secret);

impl DataKey {
    /// Draws a key from the system's random numbers.
    ///
    /// # Errors
    ///
    /// [`KeyError::Entropy`] if the system has none.
    pub fn generate() -> Result<DataKey> {
        let mut key = Secret::zeroed();
        rand::fill(key.expose_mut()).map_err(|_| KeyError::Entropy)?;
        Ok(DataKey(key))
    }

    /// A key with these bytes. The caller zeroizes its copy.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; DATA_KEY_BYTES]) -> DataKey {
        let mut key = Secret::zeroed();
        key.expose_mut().copy_from_slice(bytes);
        DataKey(key)
    }

    /// The bytes, for the derivation of keys and for wrapping.
    #[must_use]
    pub fn expose(&self) -> &[u8; DATA_KEY_BYTES] {
        self.0.expose()
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
