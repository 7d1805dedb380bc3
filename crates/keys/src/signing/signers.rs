//! `Signers`: the keys whose signatures are accepted.

use std::path::Path;

use super::bundle;
use super::ec::EcPublic;
use super::ssh::{NAMESPACE, SshPublic, SshSignature};
use super::{SignatureFlaw, bad};
use crate::{KeyError, Result, file};

/// Public keys of those whose signature is accepted.
#[derive(Clone, Default)]
pub struct Signers {
    ec: Vec<EcPublic>,
    ssh: Vec<SshPublic>,
}

impl Signers {
    /// No keys yet.
    pub fn new() -> Signers {
        Signers::default()
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.ec.len() + self.ssh.len()
    }

    /// Adds the keys of a file: public keys in PEM, a `.pub` file, or ssh's `allowed_signers`.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`] if it holds no key, or a condition that is not checked, and
    /// [`KeyError::Io`].
    pub fn add_file(&mut self, path: &Path) -> Result<()> {
        let content = file::read(path)?;
        self.add_content(&path.display().to_string(), &content)
    }

    /// Adds the keys in the content of such a file; `name` is for messages.
    ///
    /// # Errors
    /// [`KeyError::BadSigner`].
    pub fn add_content(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let before = self.count();
        let added = self.add(content);
        let added = added.and_then(|()| match self.count() > before {
            true => Ok(()),
            false => Err("it holds no public key that signs: P-256 in PEM or ssh-ed25519".into()),
        });
        added.map_err(|reason| KeyError::BadSigner {
            name: name.to_owned(),
            reason,
        })
    }

    fn add(&mut self, content: &[u8]) -> std::result::Result<(), String> {
        let text = str::from_utf8(content).map_err(|_| "it is no text".to_owned())?;
        if text.contains("PRIVATE KEY-----") {
            return Err("it is a private key; give the public one".to_owned());
        }
        if text.contains("-----BEGIN") {
            self.ec.extend(EcPublic::all_from_pem(content)?);
            return Ok(());
        }
        for line in text.lines().map(str::trim) {
            if !line.is_empty() && !line.starts_with('#') {
                self.ssh.extend(allowed(line)?);
            }
        }
        Ok(())
    }

    /// Checks a bundle; returns its statement and the key that signed it.
    ///
    /// # Errors
    /// A flaw of the signature.
    pub fn verify_bundle(
        &self,
        text: &[u8],
    ) -> std::result::Result<(Vec<u8>, String), SignatureFlaw> {
        bundle::verify(text, &self.ec)
    }

    /// Checks the ssh signature of a statement; returns the key that signed it.
    ///
    /// # Errors
    /// A flaw of the signature.
    pub fn verify_ssh(
        &self,
        statement: &[u8],
        signature: &[u8],
    ) -> std::result::Result<String, SignatureFlaw> {
        let signature = SshSignature::parse(signature)?;
        let signer = signature.signer();
        let Some(key) = self.ssh.iter().find(|key| signature.is_by(key)) else {
            return Err(SignatureFlaw::Untrusted { signer });
        };
        signature.verify(key, statement)?;
        match signer == key.fingerprint() {
            true => Ok(signer),
            false => Err(bad("it names another key")),
        }
    }
}

impl std::fmt::Debug for Signers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signers({} keys)", self.count())
    }
}

/// The key of a line: of a `.pub` file, or of `allowed_signers` (ssh-keygen(1)). Keys of other kinds
/// make no signature that is accepted, so they are left out of a list.
fn allowed(line: &str) -> std::result::Result<Option<SshPublic>, String> {
    if is_kind(first_word(line)) {
        return SshPublic::from_line(line).map(Some);
    }
    let after_principals = rest(line);
    let (options, key) = match is_kind(first_word(after_principals)) {
        true => ("", after_principals),
        false => split_options(after_principals),
    };
    if !is_kind(first_word(key)) {
        return Err("a line is neither a public key nor one of allowed_signers".to_owned());
    }
    if !options.is_empty() && !is_for_us(options)? {
        return Ok(None);
    }
    match first_word(key) {
        "ssh-ed25519" => SshPublic::from_line(key).map(Some),
        _ => Ok(None),
    }
}

fn is_kind(word: &str) -> bool {
    ["ssh-", "ecdsa-", "sk-"]
        .iter()
        .any(|kind| word.starts_with(kind))
}

fn first_word(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// The line after its first word.
fn rest(line: &str) -> &str {
    let found = line.split_once(char::is_whitespace);
    found.map_or("", |(_, rest)| rest.trim_start())
}

/// Splits options, in which spaces are quoted, from the key behind them.
fn split_options(line: &str) -> (&str, &str) {
    let mut is_quoted = false;
    let end = line.find(|character: char| {
        is_quoted ^= character == '"';
        character.is_whitespace() && !is_quoted
    });
    let (options, key) = line.split_at(end.unwrap_or(line.len()));
    (options, key.trim_start())
}

/// Whether options allow our signatures. An option that is not understood could forbid them.
fn is_for_us(options: &str) -> std::result::Result<bool, String> {
    match options
        .strip_prefix("namespaces=\"")
        .and_then(|rest| rest.strip_suffix('"'))
    {
        Some(names) if !names.contains('"') => {
            let mut names = names.split(',').map(str::trim);
            Ok(names.any(|name| name == NAMESPACE || name == "*"))
        }
        _ => {
            let shown: String = options.escape_debug().take(100).collect();
            Err(format!(
                "a line has options that are not checked: {shown}; only namespaces=\"…\" is"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILM+rvN+ot98qgEN796jTiQfZfG1KaT0PtFDJ/XFSqti";

    fn count(content: &str) -> std::result::Result<usize, String> {
        let mut signers = Signers::new();
        match signers.add_content("file", content.as_bytes()) {
            Ok(()) => Ok(signers.count()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn public_keys_and_lines_of_allowed_signers_are_read() {
        assert_eq!(count(KEY), Ok(1));
        assert_eq!(count(&format!("{KEY} me@host\n")), Ok(1));
        assert_eq!(
            count(&format!("# team\n\nme@host,you@host {KEY}\n{KEY}")),
            Ok(2)
        );
        let option = format!("me namespaces=\"git, {NAMESPACE}\" {KEY}");
        assert_eq!(count(&option), Ok(1));
    }

    #[test]
    fn conditions_that_are_not_checked_are_refused() {
        for options in [
            "cert-authority",
            "valid-before=\"20300101\"",
            "namespaces=\"a\",x",
        ] {
            let refused = count(&format!("me {options} {KEY}")).unwrap_err();
            assert!(refused.contains("options"), "{refused}");
        }
        // Keys for something else, or of another kind, are left out.
        count(&format!("me namespaces=\"git\" {KEY}")).unwrap_err();
        count("me ecdsa-sha2-nistp256 AAAA").unwrap_err();
        for text in [
            "",
            "# nothing",
            "text",
            "-----BEGIN PUBLIC KEY-----",
            "\u{ff}",
        ] {
            count(text).unwrap_err();
        }
    }
}
