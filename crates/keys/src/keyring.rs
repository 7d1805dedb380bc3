//! Keys from texts and files, in the order in which they were given.
//!
//! A keyring becomes [`Recipients`](crate::Recipients), which wrap, or
//! [`Identities`](crate::Identities), which unwrap. Which keys serve as which is decided there.

use std::path::Path;

use zeroize::Zeroizing;

use crate::age_key::{self, AgeIdentity, AgeRecipient, encrypted};
use crate::key_file::{self, KeyFile};
use crate::kms::{self, KmsScope};
use crate::passphrase::{self, Passphrase};
use crate::{KeyError, Result, file};

/// Keys of one keyring.
pub const KEYS_MAX: usize = 1024;

/// A key of any kind.
#[derive(Clone)]
pub(crate) enum Key {
    KeyFile(KeyFile),
    Passphrase(Passphrase),
    Public(AgeRecipient),
    Pair(AgeIdentity),
    Kms(KmsScope),
}

/// Keys with their names in errors, such as `recipients[0]`.
#[derive(Clone, Default)]
pub struct Keyring(Vec<(String, Key)>);

impl Keyring {
    /// An empty keyring.
    #[must_use]
    pub fn new() -> Keyring {
        Keyring::default()
    }

    pub(crate) fn into_keys(self) -> Vec<(String, Key)> {
        self.0
    }

    /// Adds the key of a text, or those of the file that it names: `age1…`, `ssh-…`, a URI,
    /// `passphrase-file:PATH`, `passphrase-env:NAME`, the text of a secret key, or a path.
    ///
    /// # Errors
    ///
    /// [`KeyError::BadText`] if the text is none of these, without the text; those of
    /// [`Keyring::add_file`].
    pub fn add_text(&mut self, name: &str, text: &str) -> Result<()> {
        if let Some(secret) = passphrase::of_text(name, text)? {
            return self.add_passphrase(name, secret);
        }
        if has_key_form(text) {
            return self.add_content(name, text.as_bytes());
        }
        let path = Path::new(text);
        if !path.exists() {
            // The text is not shown, as it may be a secret key with a wrong character.
            let reason = "this is neither a key (age1…, ssh-ed25519 …, aws-kms://…) nor a file";
            return Err(KeyError::BadText {
                name: name.to_owned(),
                reason: reason.to_owned(),
            });
        }
        self.add_file(path)
    }

    /// Adds the keys of a file: one a line, with comments after `#`, or one ssh private key. A file
    /// that `age -p` or `ssh-keygen` has encrypted opens by a passphrase that was added before.
    ///
    /// # Errors
    ///
    /// [`KeyError::Io`] if it cannot be read, [`KeyError::BadFile`] if a line is no key, or if
    /// there is none.
    pub fn add_file(&mut self, path: &Path) -> Result<()> {
        let content = file::read(path)?;
        let bad = |(line, reason): Refusal| KeyError::BadFile {
            path: path.to_owned(),
            line,
            reason: reason.to_owned(),
        };
        let keys = self.parse(&content).map_err(bad)?;
        self.extend(&path.display().to_string(), keys)
    }

    /// Adds the keys of a text of the form of a file, which a program has got elsewhere.
    ///
    /// # Errors
    ///
    /// [`KeyError::BadText`] if a line is no key, or if there is none.
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let bad = |(line, reason): Refusal| KeyError::BadText {
            name: name.to_owned(),
            reason: match line {
                Some(line) if line > 1 => format!("line {line}: {reason}"),
                _ => reason.to_owned(),
            },
        };
        let keys = self.parse(content).map_err(bad)?;
        self.extend(name, keys)
    }

    /// Adds a passphrase. Line ends after it are none of it.
    ///
    /// # Errors
    ///
    /// [`KeyError::BadText`] if it is empty, or longer than 4 KiB.
    pub fn add_passphrase(&mut self, name: &str, secret: Zeroizing<Vec<u8>>) -> Result<()> {
        let passphrase = Passphrase::named(name, secret)?;
        self.extend(name, vec![Key::Passphrase(passphrase)])
    }

    /// Adds a new X25519 key, which is kept nowhere else.
    ///
    /// Returns its recipient.
    pub fn add_ephemeral(&mut self) -> String {
        let identity = AgeIdentity::generate();
        let recipient = identity.public().to_string();
        self.0
            .push(("the key of this save".to_owned(), Key::Pair(identity)));
        recipient
    }

    fn extend(&mut self, name: &str, keys: Vec<Key>) -> Result<()> {
        if self.0.len() + keys.len() > KEYS_MAX {
            let reason = format!("there are more than {KEYS_MAX} keys");
            return Err(KeyError::BadText {
                name: name.to_owned(),
                reason,
            });
        }
        self.0
            .extend(keys.into_iter().map(|key| (name.to_owned(), key)));
        Ok(())
    }

    fn parse(&self, content: &[u8]) -> std::result::Result<Vec<Key>, Refusal> {
        if encrypted::is_encrypted(content) {
            let passphrases: Vec<_> = self.passphrases().collect();
            let opened = encrypted::open(content, &passphrases).map_err(|why| (None, why))?;
            if encrypted::is_encrypted(&opened) {
                return Err((None, "it is encrypted twice"));
            }
            return self.parse(&opened);
        }
        let text = std::str::from_utf8(content).map_err(|_| (None, "it is no text"))?;
        let start = text.trim_start();
        if start.starts_with("-----BEGIN ") {
            let passphrases: Vec<_> = self.passphrases().cloned().collect();
            let identity = AgeIdentity::parse_ssh(start, &passphrases);
            return identity
                .map(|identity| vec![Key::Pair(identity)])
                .map_err(|why| (None, why));
        }
        let mut keys = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                keys.push(parse_line(line).map_err(|reason| (Some(index + 1), reason))?);
            }
        }
        if keys.is_empty() {
            return Err((None, "there is no key in it"));
        }
        Ok(keys)
    }

    fn passphrases(&self) -> impl Iterator<Item = &Passphrase> {
        self.0.iter().filter_map(|(_, key)| match key {
            Key::Passphrase(passphrase) => Some(passphrase),
            _ => None,
        })
    }
}

/// A line, from 1, and why it is no key.
type Refusal = (Option<usize>, &'static str);

fn has_prefix(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Whether a text is meant as a key, not as a path.
fn has_key_form(text: &str) -> bool {
    let text = text.trim_start();
    has_prefix(text, "age1")
        || has_prefix(text, age_key::SECRET_PREFIX)
        || has_prefix(text, key_file::SECRET_PREFIX)
        || text.starts_with("-----BEGIN ")
        || kms::is_uri(text.trim_end())
        || is_ssh(text)
        || KeyFile::parse(text.trim_end()).is_some()
        // A key after comments, or several.
        || text.contains('\n')
}

fn is_ssh(text: &str) -> bool {
    let kind = text.split(' ').next().unwrap_or_default();
    text.contains(' ')
        && ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"]
            .iter()
            .any(|prefix| kind.starts_with(prefix))
}

fn parse_line(line: &str) -> std::result::Result<Key, &'static str> {
    if has_prefix(line, age_key::SECRET_PREFIX) {
        AgeIdentity::parse_age(line).map(Key::Pair)
    } else if has_prefix(line, "AGE-PLUGIN-") {
        Err(
            "identities of age plug-ins are not supported: use an X25519 key, as `penstock keys \
             generate` makes it",
        )
    } else if line.starts_with("age1") {
        AgeRecipient::parse_age(line).map(Key::Public)
    } else if is_ssh(line) {
        AgeRecipient::parse_ssh(line).map(Key::Public)
    } else if kms::is_uri(line) {
        Ok(Key::Kms(KmsScope::new(line.to_owned())))
    } else {
        KeyFile::parse(line)
            .map(Key::KeyFile)
            .ok_or("this is no key: a character is wrong or missing, or its kind is not known")
    }
}
