//! Wraps: the data key of an attempt, encrypted for one recipient each.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{DataKey, KeyError, Result};

/// Kinds of wraps, as manifests name them.
pub(crate) const KEY_FILE: &str = "key-file";
pub(crate) const PASSPHRASE: &str = "passphrase";
pub(crate) const AGE: &str = "age";
pub(crate) const KMS: &str = "kms";

/// The data key of an attempt, encrypted for one recipient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrap {
    /// `key-file`, `passphrase`, `age` or `kms`.
    pub kind: String,
    /// The recipient in public: a fingerprint, `age1…`, `ssh-…` or the URI of a KMS key.
    pub recipient: String,
    /// The encrypted key. In JSON: base64.
    #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
    pub key: Vec<u8>,
}

/// Finds the data key among the wraps of a manifest.
pub trait Unwrap: Send + Sync {
    /// The data key, from the first wrap that an identity opens.
    ///
    /// # Errors
    ///
    /// [`crate::KeyError::NoIdentity`] if no identity belongs to a recipient of the wraps,
    /// [`crate::KeyError::WrongKey`] if one does and the wrap does not open with it.
    fn unwrap(&self, wraps: &[Wrap]) -> Result<DataKey>;
}

/// The outcome of one identity at one wrap.
#[derive(Debug)]
pub(crate) enum Opened {
    Key(DataKey),
    /// The wrap is for another recipient.
    NotMine,
    /// The wrap is for this identity, or may be, and does not open.
    Failed(KeyError),
}

pub(crate) fn wrong_key(wrap: &Wrap) -> KeyError {
    KeyError::WrongKey {
        kind: wrap.kind.clone(),
        recipient: wrap.recipient.clone(),
    }
}

pub(crate) fn bad_wrap(wrap: &Wrap, reason: impl Into<String>) -> KeyError {
    KeyError::BadWrap {
        kind: wrap.kind.clone(),
        recipient: wrap.recipient.clone(),
        reason: reason.into(),
    }
}

fn to_base64<S: Serializer>(bytes: &[u8], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(&BASE64_STANDARD.encode(bytes))
}

fn from_base64<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64_STANDARD
        .decode(text)
        .map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrap_survives_json() {
        let wrap = Wrap {
            kind: "age".into(),
            recipient: "age1abc".into(),
            key: vec![0, 255, 62, 63],
        };
        let json = serde_json::to_string(&wrap).unwrap();
        assert_eq!(
            json,
            r#"{"kind":"age","recipient":"age1abc","key":"AP8+Pw=="}"#
        );
        assert_eq!(serde_json::from_str::<Wrap>(&json).unwrap(), wrap);
    }

    #[test]
    fn a_key_that_is_no_base64_is_refused() {
        let json = r#"{"kind":"age","recipient":"age1abc","key":"*"}"#;
        assert!(serde_json::from_str::<Wrap>(json).is_err());
    }
}
