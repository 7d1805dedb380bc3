//! `SigningKey`.

use std::fmt;
use std::path::Path;

use super::bundle;
use super::ec::EcKey;
use super::ssh::SshKey;
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

impl SigningKey {
    /// Reads a file.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key of a known kind, and [`KeyError::Io`].
    pub fn read(path: &Path) -> Result<SigningKey> {
        let content = file::read(path)?;
        parse(&content).map_err(|reason| KeyError::BadSigner {
            name: path.display().to_string(),
            reason,
        })
    }

    /// Reads the content of such a file; `name` is for messages.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key of a known kind.
    pub fn from_content(name: &str, content: &[u8]) -> Result<SigningKey> {
        parse(content).map_err(|reason| KeyError::BadSigner {
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

fn parse(content: &[u8]) -> std::result::Result<SigningKey, String> {
    let has = |text: &str| content.windows(text.len()).any(|at| at == text.as_bytes());
    if has("-----BEGIN OPENSSH PRIVATE KEY") {
        return SshKey::from_openssh(content).map(|key| SigningKey(Kind::Ssh(key)));
    }
    if has("ENCRYPTED") {
        return Err("it has a passphrase: `openssl pkey -in FILE` writes one without".to_owned());
    }
    if has("PRIVATE KEY-----") {
        return EcKey::from_pem(content).map(|key| SigningKey(Kind::Ec(key)));
    }
    Err("it is no private key: neither EC P-256 in PEM nor Ed25519 of ssh".to_owned())
}
