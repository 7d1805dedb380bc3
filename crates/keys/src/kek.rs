//! Keys that encrypt data keys, by AES key wrap (RFC 3394).

use std::fmt;

use aws_lc_rs::key_wrap::{AES_256, AesKek, KeyWrap};
use aws_lc_rs::rand;
use zeroize::Zeroizing;

use crate::data_key::DATA_KEY_BYTES;
use crate::secret::{SECRET_BYTES, Secret};
use crate::{DataKey, KeyError, Result};

/// Bytes of a key-encryption key.
pub(crate) const KEK_BYTES: usize = SECRET_BYTES;
/// Bytes of a data key after AES key wrap: eight more than the key.
pub(crate) const WRAPPED_BYTES: usize = DATA_KEY_BYTES + 8;

/// A 256-bit key-encryption key.
pub(crate) struct Kek(Secret);

impl Kek {
    pub(crate) fn generate() -> Result<Kek> {
        let mut key = Secret::zeroed();
        rand::fill(key.expose_mut()).map_err(|_| KeyError::Entropy)?;
        Ok(Kek(key))
    }

    pub(crate) fn from_bytes(bytes: &[u8; KEK_BYTES]) -> Kek {
        let mut key = Secret::zeroed();
        key.expose_mut().copy_from_slice(bytes);
        Kek(key)
    }

    /// A key that is filled in place by the caller, so that no copy of it is made.
    pub(crate) fn derive(fill: impl FnOnce(&mut [u8; KEK_BYTES]) -> Result<()>) -> Result<Kek> {
        let mut key = Secret::zeroed();
        fill(key.expose_mut())?;
        Ok(Kek(key))
    }

    pub(crate) fn expose(&self) -> &[u8; KEK_BYTES] {
        self.0.expose()
    }

    pub(crate) fn wrap(&self, key: &DataKey) -> [u8; WRAPPED_BYTES] {
        let mut wrapped = [0; WRAPPED_BYTES];
        self.cipher()
            .wrap(key.expose(), &mut wrapped)
            .expect("a key of 32 bytes fits its wrap");
        wrapped
    }

    /// The data key; `None` if this is not the key that wrapped it.
    pub(crate) fn unwrap(&self, wrapped: &[u8; WRAPPED_BYTES]) -> Option<DataKey> {
        let mut bytes = Zeroizing::new([0; DATA_KEY_BYTES]);
        self.cipher().unwrap(wrapped, bytes.as_mut_slice()).ok()?;
        Some(DataKey::from_bytes(&bytes))
    }

    // The library consumes its object with each call, and zeroizes it.
    fn cipher(&self) -> AesKek {
        AesKek::new(&AES_256, self.0.expose()).expect("the key has the length of the cipher")
    }
}

impl fmt::Debug for Kek {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Kek(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of_hex(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect()
    }

    /// RFC 3394, 4.6: 256 bits of key data with a 256-bit KEK.
    #[test]
    fn wraps_as_the_rfc_does() {
        let kek: [u8; 32] = std::array::from_fn(|index| index as u8);
        let key = bytes_of_hex("00112233445566778899aabbccddeeff000102030405060708090a0b0c0d0e0f");
        let expected = bytes_of_hex(
            "28c9f404c4b810f4cbccb35cfb87f8263f5786e2d80ed326cbc7f0e71a99f43bfb988b9b7a02dd21",
        );
        let kek = Kek::from_bytes(&kek);
        let key = DataKey::from_bytes(key.as_slice().try_into().unwrap());
        let wrapped = kek.wrap(&key);
        assert_eq!(wrapped.as_slice(), expected);
        assert_eq!(kek.unwrap(&wrapped).unwrap().expose(), key.expose());
    }

    #[test]
    fn another_key_and_each_flipped_bit_are_refused() {
        let kek = Kek::generate().unwrap();
        let wrapped = kek.wrap(&DataKey::generate().unwrap());
        assert!(Kek::generate().unwrap().unwrap(&wrapped).is_none());
        for bit in 0..WRAPPED_BYTES * 8 {
            let mut flipped = wrapped;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(kek.unwrap(&flipped).is_none(), "bit {bit}");
        }
    }
}
