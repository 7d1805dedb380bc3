//! Statements: in-toto, of the predicate that OpenSSF model signing defines.
//!
//! `model_signing verify` reads `resources` and `ignore_paths`, and leaves our own member alone. Its
//! command line, in version 1.1.1, knows resources with SHA-256 only, so a statement may list those;
//! then our own member has the BLAKE3 of every file.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Blake3;
use crate::seal::Sha256;

const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
const ALGORITHM: &str = "blake3";
const SHA256: &str = "sha256";

/// The files of a checkpoint that a statement lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    /// The checkpoint's id.
    pub(crate) id: String,
    /// The hash of the manifest, of a sealed one up to its MAC.
    pub(crate) manifest: Blake3,
    /// All other files, by name; of a clear checkpoint also the manifest.
    pub(crate) files: BTreeMap<String, Blake3>,
    /// Files and directories that belong to no reader of the checkpoint.
    pub(crate) ignored: Vec<String>,
}

/// The SHA-256 of every file that a statement lists.
pub(crate) type Sha256s = BTreeMap<String, Sha256>;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: Predicate,
}

#[derive(Debug, Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
    /// The member that Penstock reads: it names the checkpoint, and covers a manifest whose wraps
    /// may be replaced.
    penstock: Option<Own>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Serialization {
    method: String,
    hash_type: String,
    allow_symlinks: bool,
    #[serde(default)]
    ignore_paths: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Own {
    id: String,
    manifest: Blake3,
    /// All files, where the resources have other hashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    files: Option<BTreeMap<String, Blake3>>,
}

impl Statement {
    /// The statement about a directory; `name` is for people. Its resources are listed with their
    /// SHA-256, if there are any.
    pub(crate) fn new(name: &str, contents: &Contents, sha256s: Option<&Sha256s>) -> Statement {
        let algorithm = sha256s.map_or(ALGORITHM, |_| SHA256);
        let hashes: Vec<(&String, String, [u8; 32])> = match sha256s {
            Some(hashes) => {
                let hashes = hashes.iter();
                hashes
                    .map(|(name, hash)| (name, hash.to_string(), hash.0))
                    .collect()
            }
            None => {
                let hashes = contents.files.iter();
                hashes
                    .map(|(name, hash)| (name, hash.to_string(), hash.0))
                    .collect()
            }
        };
        let root = root_of(hashes.iter().map(|(.., hash)| *hash));
        let resource = |(name, digest, _): (&String, String, [u8; 32])| Resource {
            name: name.clone(),
            algorithm: algorithm.to_owned(),
            digest,
        };
        Statement {
            kind: STATEMENT_TYPE.to_owned(),
            subject: vec![Subject {
                name: name.to_owned(),
                digest: BTreeMap::from([("sha256".to_owned(), root)]),
            }],
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: Predicate {
                serialization: Serialization {
                    method: "files".to_owned(),
                    hash_type: algorithm.to_owned(),
                    allow_symlinks: false,
                    ignore_paths: contents.ignored.clone(),
                },
                // Sorted by name, as `model_signing` sorts them.
                resources: hashes.into_iter().map(resource).collect(),
                penstock: Some(Own {
                    id: contents.id.clone(),
                    manifest: contents.manifest,
                    files: sha256s.map(|_| contents.files.clone()),
                }),
            },
        }
    }

    /// The text that is signed.
    pub(crate) fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a statement always serialises")
    }

    /// Reads a statement whose signature is right.
    ///
    /// # Errors
    /// A flaw: it is about something else, or contradicts itself.
    pub(crate) fn parse(text: &[u8]) -> Result<Contents, String> {
        let statement: Statement = serde_json::from_slice(text).map_err(|error| {
            let error = error.to_string();
            format!("its statement is none about a model: {}", shown(&error))
        })?;
        let Statement {
            kind,
            subject,
            predicate_type,
            predicate,
        } = statement;
        let serialization = &predicate.serialization;
        let hash_type = serialization.hash_type.as_str();
        let is_ours = kind == STATEMENT_TYPE
            && predicate_type == PREDICATE_TYPE
            && serialization.method == "files"
            && matches!(hash_type, ALGORITHM | SHA256);
        if !is_ours {
            return Err(format!(
                "its statement is not about files with their BLAKE3 or SHA-256: {}, {}, {}",
                shown(&predicate_type),
                shown(&serialization.method),
                shown(hash_type)
            ));
        }
        let Some(own) = predicate.penstock else {
            return Err("its statement names no checkpoint: sign it with `penstock sign`".into());
        };
        let mut listed = BTreeMap::new();
        for Resource {
            name,
            algorithm,
            digest,
        } in predicate.resources
        {
            let Some(hash) = Blake3::parse(&digest).filter(|_| algorithm == hash_type) else {
                return Err(format!("{} has no hash", shown(&name)));
            };
            if listed.insert(name.clone(), hash).is_some() {
                return Err(format!("it lists {} twice", shown(&name)));
            }
        }
        let [subject] = subject.as_slice() else {
            return Err("its statement has not one subject".to_owned());
        };
        let root = root_of(listed.values().map(|hash| hash.0));
        if subject.digest.get("sha256") != Some(&root) {
            return Err("the digest of its subject is not that of its files".to_owned());
        }
        let files = match own.files {
            // Both lists are about the same files.
            Some(files) if files.keys().eq(listed.keys()) => files,
            None if hash_type == ALGORITHM => listed,
            _ => return Err("it does not list the BLAKE3 of its files".to_owned()),
        };
        Ok(Contents {
            id: own.id,
            manifest: own.manifest,
            files,
            ignored: predicate.serialization.ignore_paths,
        })
    }
}

/// The files that a statement lists, with their hashes.
///
/// # Errors
/// A flaw: the text is no statement about a checkpoint, or contradicts itself.
pub fn statement_files(text: &[u8]) -> Result<BTreeMap<String, Blake3>, String> {
    Statement::parse(text).map(|contents| contents.files)
}

/// SHA-256 of all hashes, one after another.
fn root_of(hashes: impl Iterator<Item = [u8; 32]>) -> String {
    let hashes: Vec<[u8; 32]> = hashes.collect();
    Sha256::of(hashes.as_flattened()).to_string()
}

/// A text of others, as a message shows it.
fn shown(text: &str) -> impl fmt::Display {
    text.escape_debug().take(100).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents() -> Contents {
        let files = ["manifest.json", "part", "shard"];
        Contents {
            id: "0".repeat(32),
            manifest: Blake3::of(b"manifest.json"),
            files: files
                .map(|name| (name.to_owned(), Blake3::of(name.as_bytes())))
                .into(),
            ignored: vec!["protected".to_owned()],
        }
    }

    #[test]
    fn statements_round_trip() {
        let hash = |name: &String| (name.clone(), Sha256::of(name.as_bytes()));
        let sha256s: Sha256s = contents().files.keys().map(hash).collect();
        for sha256s in [None, Some(&sha256s)] {
            let statement = Statement::new("step-1", &contents(), sha256s);
            assert_eq!(Statement::parse(&statement.text()), Ok(contents()));
        }
        let mut other = contents();
        other.files.remove("part");
        let statement = Statement::new("step-1", &other, Some(&sha256s));
        Statement::parse(&statement.text()).unwrap_err();
    }

    #[test]
    fn other_statements_are_refused() {
        let lies: [fn(&mut Statement); 10] = [
            |s| s.kind.push('x'),
            |s| s.predicate_type.push('x'),
            |s| s.subject.clear(),
            |s| s.subject[0].digest.clear(),
            |s| s.predicate.serialization.method = "shards".into(),
            |s| s.predicate.serialization.hash_type = "sha256".into(),
            |s| s.predicate.resources[0].algorithm = "sha256".into(),
            |s| s.predicate.resources[0].digest.make_ascii_uppercase(),
            |s| {
                s.predicate.resources.pop();
            },
            |s| s.predicate.penstock = None,
        ];
        for (number, lie) in lies.iter().enumerate() {
            let mut statement = Statement::new("step-1", &contents(), None);
            lie(&mut statement);
            Statement::parse(&statement.text()).expect_err(&number.to_string());
        }
        for text in [&b""[..], b"{}", b"\xff", b"[[[["] {
            Statement::parse(text).unwrap_err();
        }
    }
}
