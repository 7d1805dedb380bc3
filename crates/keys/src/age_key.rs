//! X25519 and ssh keys: the data key as an age file, which `age -d` opens.
//!
//! A wrap's recipient stands outside of the manifest's MAC, so an identity tries the age files of
//! other recipients too; the recipient decides only which error a failure is.

pub(crate) mod encrypted;

use std::fmt;
use std::io::Read;
use std::iter;
use std::str::FromStr;

use age::secrecy::{ExposeSecret, SecretString};
use age::ssh::{ParseRecipientKeyError, UnsupportedKey};
use age::{DecryptError, Decryptor, ssh, x25519};
use zeroize::Zeroizing;

use crate::data_key::DATA_KEY_BYTES;
use crate::passphrase::Passphrase;
use crate::wrap::{AGE, Opened, bad_wrap, wrong_key};
use crate::{DataKey, Wrap};

/// Start of the text of an X25519 identity.
pub(crate) const SECRET_PREFIX: &str = "AGE-SECRET-KEY-";
/// Bytes of an age file of one key for one recipient; those for RSA keys are the largest.
const AGE_FILE_BYTES_MAX: usize = 16 << 10;

/// A public key that age files are made for.
#[derive(Clone, Debug)]
pub(crate) enum AgeRecipient {
    X25519(x25519::Recipient),
    Ssh(ssh::Recipient),
}

/// A secret key, with its public one.
#[derive(Clone)]
pub(crate) struct AgeIdentity {
    secret: Secret,
    public: AgeRecipient,
}

#[derive(Clone)]
enum Secret {
    X25519(x25519::Identity),
    Ssh(Box<ssh::Identity>),
}

impl AgeRecipient {
    /// The recipient of a text that begins with `age1`.
    pub(crate) fn parse_age(text: &str) -> std::result::Result<AgeRecipient, &'static str> {
        match x25519::Recipient::from_str(text) {
            Ok(recipient) => Ok(AgeRecipient::X25519(recipient)),
            // `age1tag1…`, `age1tagpq1…` and `age1NAME1…`, which programs of others decrypt.
            Err(_) if text["age1".len()..].contains('1') => Err(
                "recipients of age plug-ins are not supported: use an X25519 key, as \
                 `penstock keys generate` makes it",
            ),
            Err(_) => Err("no X25519 recipient: a character is wrong or missing"),
        }
    }

    /// The recipient of a line of an ssh public key file.
    pub(crate) fn parse_ssh(text: &str) -> std::result::Result<AgeRecipient, &'static str> {
        match ssh::Recipient::from_str(text) {
            Ok(recipient) => Ok(AgeRecipient::Ssh(recipient)),
            Err(error) => Err(ssh_reason(&error)),
        }
    }

    pub(crate) fn wrap(&self, key: &DataKey) -> Wrap {
        let encrypted = match self {
            AgeRecipient::X25519(recipient) => age::encrypt(recipient, key.expose()),
            AgeRecipient::Ssh(recipient) => age::encrypt(recipient, key.expose()),
        };
        let key = encrypted.expect("native recipients and memory do not fail");
        Wrap {
            kind: AGE.to_owned(),
            recipient: self.to_string(),
            key,
        }
    }
}

impl fmt::Display for AgeRecipient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AgeRecipient::X25519(recipient) => recipient.fmt(formatter),
            AgeRecipient::Ssh(recipient) => recipient.fmt(formatter),
        }
    }
}

impl AgeIdentity {
    pub(crate) fn generate() -> AgeIdentity {
        AgeIdentity::x25519(x25519::Identity::generate())
    }

    /// The identity of a text that begins with [`SECRET_PREFIX`].
    pub(crate) fn parse_age(text: &str) -> std::result::Result<AgeIdentity, &'static str> {
        x25519::Identity::from_str(text)
            .map(AgeIdentity::x25519)
            .map_err(|_| "no X25519 identity: a character is wrong or missing")
    }

    /// The identity of an ssh private key file; the passphrases are tried if it has one.
    pub(crate) fn parse_ssh(
        text: &str,
        passphrases: &[Passphrase],
    ) -> std::result::Result<AgeIdentity, &'static str> {
        let secret = ssh::Identity::from_buffer(text.as_bytes(), None)
            .map_err(|_| "no ssh private key: it is incomplete or damaged")?;
        let secret = match secret {
            ssh::Identity::Encrypted(key) => passphrases
                .iter()
                .filter_map(|passphrase| std::str::from_utf8(passphrase.expose()).ok())
                .find_map(|text| key.decrypt(SecretString::from(text)).ok())
                .map(ssh::Identity::from)
                .ok_or(
                    "the ssh key has a passphrase: give it before the key, among the identities",
                )?,
            ssh::Identity::Unsupported(UnsupportedKey::Hardware(_) | UnsupportedKey::Type(_)) => {
                return Err("keys of this type cannot decrypt: use ssh-ed25519 or ssh-rsa");
            }
            ssh::Identity::Unsupported(_) => {
                return Err(
                    "the key is encrypted in a way that age does not know: convert it with \
                            `ssh-keygen -p`",
                );
            }
            unencrypted => unencrypted,
        };
        let public =
            ssh::Recipient::try_from(secret.clone()).map_err(|error| ssh_reason(&error))?;
        let public = AgeRecipient::Ssh(public);
        Ok(AgeIdentity {
            secret: Secret::Ssh(Box::new(secret)),
            public,
        })
    }

    fn x25519(secret: x25519::Identity) -> AgeIdentity {
        let public = AgeRecipient::X25519(secret.to_public());
        AgeIdentity {
            secret: Secret::X25519(secret),
            public,
        }
    }

    pub(crate) fn public(&self) -> &AgeRecipient {
        &self.public
    }

    /// The text of an X25519 identity; ssh keys have files of their own.
    pub(crate) fn to_text(&self) -> Option<Zeroizing<String>> {
        match &self.secret {
            Secret::X25519(secret) => Some(Zeroizing::new(
                secret.to_string().expose_secret().to_owned(),
            )),
            Secret::Ssh(_) => None,
        }
    }

    pub(crate) fn open(&self, wrap: &Wrap) -> Opened {
        if wrap.kind != AGE {
            return Opened::NotMine;
        }
        let is_mine = wrap.recipient == self.public.to_string();
        match self.decrypt(wrap) {
            Ok(Some(key)) => Opened::Key(key),
            Ok(None) => Opened::Failed(bad_wrap(wrap, "it holds no key of 32 bytes")),
            Err(_) if !is_mine => Opened::NotMine,
            Err(DecryptError::NoMatchingKeys | DecryptError::DecryptionFailed) => {
                Opened::Failed(wrong_key(wrap))
            }
            Err(_) => Opened::Failed(bad_wrap(wrap, "its age file is damaged")),
        }
    }

    /// The data key; `None` if the age file holds something else.
    fn decrypt(&self, wrap: &Wrap) -> std::result::Result<Option<DataKey>, DecryptError> {
        if wrap.key.len() > AGE_FILE_BYTES_MAX {
            return Err(DecryptError::InvalidHeader);
        }
        let identity: &dyn age::Identity = match &self.secret {
            Secret::X25519(secret) => secret,
            Secret::Ssh(secret) => &**secret,
        };
        let decryptor = Decryptor::new(wrap.key.as_slice())?;
        let mut reader = decryptor.decrypt(iter::once(identity))?;
        let mut key = Zeroizing::new([0; DATA_KEY_BYTES]);
        if reader.read_exact(key.as_mut_slice()).is_err() || reader.read(&mut [0])? != 0 {
            return Ok(None);
        }
        Ok(Some(DataKey::from_bytes(&key)))
    }
}

fn ssh_reason(error: &ParseRecipientKeyError) -> &'static str {
    match error {
        ParseRecipientKeyError::RsaModulusTooLarge => "the RSA key is larger than 4096 bits",
        ParseRecipientKeyError::RsaModulusTooSmall => "the RSA key is smaller than 2048 bits",
        ParseRecipientKeyError::Unsupported(_) | ParseRecipientKeyError::Ignore => {
            "keys of this type cannot encrypt: use ssh-ed25519 or ssh-rsa"
        }
        _ => "no ssh public key: it is incomplete or damaged",
    }
}
