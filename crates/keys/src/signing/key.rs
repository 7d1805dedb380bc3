//! `SigningKey`.

use std::fmt;
use std::path::Path;

use zeroize::Zeroizing;

use super::bundle;
use super::ec::EcKey;
use super::ssh::SshKey;
use crate::passphrase::{self, Passphrase};
use crate::{KeyError, Result, file};

/// The form of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignatureForm {
    /// An OpenSSF bundle, with the statement in it.
    Bundle,
    /// An ssh signature, apart from the statement.
    Ssh,
}

/// A private key that signs statements: EC P-256 in PEM, or Ed25519 of ssh.
pub struct SigningKey(Kind);

enum Kind {
    Ec(EcKey),
    Ssh(SshKey),
}

/// Private keys that sign, and the passphrases of those that come after them.
#[derive(Default)]
pub struct SigningKeyring {
    passphrases: Vec<Passphrase>,
    keys: Vec<SigningKey>,
}

impl SigningKeyring {
    /// No keys.
    #[must_use]
    pub fn new() -> SigningKeyring {
        SigningKeyring::default()
    }

    /// Adds the passphrase that a text names, `passphrase-file:PATH` or `passphrase-env:NAME`;
    /// returns whether it is such a text.
    ///
    /// # Errors
    /// [`KeyError::BadText`] if there is none or it is empty or too long, [`KeyError::Io`].
    pub fn add_named_passphrase(&mut self, name: &str, text: &str) -> Result<bool> {
        match passphrase::of_text(name, text)? {
            Some(secret) => self.add_passphrase(name, secret).map(|()| true),
            None => Ok(false),
        }
    }

    /// Adds a passphrase.
    ///
    /// # Errors
    /// [`KeyError::BadText`] if it is empty or too long.
    pub fn add_passphrase(&mut self, name: &str, secret: Zeroizing<Vec<u8>>) -> Result<()> {
        self.passphrases.push(Passphrase::named(name, secret)?);
        Ok(())
    }

    /// Adds the key of a file.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key of a known kind, and [`KeyError::Io`].
    pub fn add_file(&mut self, path: &Path) -> Result<()> {
        let content = file::read(path)?;
        self.add_content(&path.display().to_string(), &content)
    }

    /// Adds the key of a file with this content; `name` is for messages.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key of a known kind.
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let key = parse(content, &self.passphrases).map_err(|reason| KeyError::BadSigner {
            name: name.to_owned(),
            reason,
        })?;
        self.keys.push(key);
        Ok(())
    }

    /// The keys that sign, in their order.
    ///
    /// # Errors
    /// [`KeyError::BadText`] if there are passphrases and no key.
    pub fn into_keys(self, name: &str) -> Result<Vec<SigningKey>> {
        if self.keys.is_empty() && !self.passphrases.is_empty() {
            return Err(KeyError::BadText {
                name: name.to_owned(),
                reason: "a passphrase signs nothing: give the key that it belongs to after it"
                    .to_owned(),
            });
        }
        Ok(self.keys)
    }
}

impl SigningKey {
    /// Reads the content of a key's file; `name` is for messages.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key of a known kind, or one with a passphrase.
    pub fn from_content(name: &str, content: &[u8]) -> Result<SigningKey> {
        parse(content, &[]).map_err(|reason| KeyError::BadSigner {
            name: name.to_owned(),
            reason,
        })
    }

    /// The form of its signatures.
    pub fn form(&self) -> SignatureForm {
        match &self.0 {
            Kind::Ec(_) => SignatureForm::Bundle,
            Kind::Ssh(_) => SignatureForm::Ssh,
        }
    }

    /// The key in public: the hint of a bundle, or the fingerprint of ssh.
    pub fn signer(&self) -> String {
        match &self.0 {
            Kind::Ec(key) => bundle::signer(key.public()),
            Kind::Ssh(key) => key.public().fingerprint(),
        }
    }

    /// Signs a statement; returns the text of the signature's file.
    ///
    /// # Errors
    /// [`KeyError::Entropy`].
    pub fn sign(&self, statement: &[u8]) -> Result<String> {
        let signed = match &self.0 {
            Kind::Ec(key) => bundle::sign(key, statement),
            Kind::Ssh(key) => key.sign(statement),
        };
        signed.map_err(|_| KeyError::Entropy)
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.signer())
    }
}

fn parse(content: &[u8], passphrases: &[Passphrase]) -> std::result::Result<SigningKey, String> {
    let has = |text: &str| content.windows(text.len()).any(|at| at == text.as_bytes());
    if has("-----BEGIN OPENSSH PRIVATE KEY") {
        return SshKey::from_openssh(content, passphrases).map(|key| SigningKey(Kind::Ssh(key)));
    }
    if has("ENCRYPTED") {
        return Err("it has a passphrase: `openssl pkey -in FILE` writes one without".to_owned());
    }
    if has("PRIVATE KEY-----") {
        return EcKey::from_pem(content).map(|key| SigningKey(Kind::Ec(key)));
    }
    Err("it is no private key: neither EC P-256 in PEM nor Ed25519 of ssh".to_owned())
}
