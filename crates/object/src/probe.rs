//! Tests a store for the behaviour that checkpoints depend on.
//!
//! Stores that speak S3's protocol differ in what matters here: some accept a condition and
//! ignore it, some check it and then put, so that two concurrent requests both win. A store's
//! description of itself does not show this, so the probe tests it with small objects under a key
//! of their own, and removes them at the end.
//!
//! A test that holds has held once: one of eight requests that won a race alone may share it
//! another time. A test that fails is certain.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use object_store::path::Path as Key;
use object_store::{GetOptions, PutMode, PutOptions, PutPayload, UpdateVersion};

use crate::client::{BucketClient, kind_of};
use crate::objects::Objects;
use crate::provider::{Provider, only_over};

/// Concurrent puts of one key.
const RACERS: usize = 8;

/// Rounds, because one may pass by luck.
const RACES: usize = 4;

/// How often a request is sent that gets no answer, or an answer to retry.
const TRIES_MAX: u32 = 5;

const PAUSE: Duration = Duration::from_millis(200);

/// Whether a store has a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has.
    Holds,
    /// It has not.
    Fails,
    /// The test had no result.
    Unknown,
}

/// The result for one property of a store.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The property, in a few words.
    pub name: &'static str,
    /// Whether the store has it.
    pub verdict: Verdict,
    /// The consequence for checkpoints in this store.
    pub meaning: &'static str,
    /// The observation, unless the property holds.
    pub detail: Option<String>,
}

impl Finding {
    fn of(name: &'static str, meanings: [&'static str; 2], seen: io::Result<Seen>) -> Finding {
        let [holds, else_] = meanings;
        let (verdict, meaning, detail) = match seen {
            Ok(Ok(())) => (Verdict::Holds, holds, None),
            Ok(Err(detail)) => (Verdict::Fails, else_, Some(detail)),
            Err(error) => (Verdict::Unknown, else_, Some(error.to_string())),
        };
        Finding {
            name,
            verdict,
            meaning,
            detail,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}: {}", self.name, self.verdict, self.meaning)?;
        self.detail
            .iter()
            .try_for_each(|detail| write!(f, " ({detail})"))
    }
}

/// Success, or the observation that contradicts it.
type Seen = Result<(), String>;

/// Tests a store under a directory that this process may write to.
///
/// # Errors
/// A small object cannot be put there, read back and removed.
pub fn probe(objects: &Objects, directory: &Path) -> io::Result<Vec<Finding>> {
    let drawn = RandomState::new().hash_one(std::process::id());
    let key = objects.key(&directory.join(format!("probe-{drawn:016x}")))?;
    objects.run(|bucket_client| async move {
        let probe = Probe { bucket_client, key };
        let findings = probe.findings().await;
        // After a failure too.
        let removed = probe.remove_all().await;
        let findings = findings?;
        removed?;
        Ok(findings)
    })
}

struct Probe {
    bucket_client: BucketClient,
    /// Prefix of the probe's keys.
    key: Key,
}

impl Probe {
    fn at(&self, name: &str) -> Key {
        self.key.clone().join(name)
    }

    async fn findings(&self) -> io::Result<Vec<Finding>> {
        let plain = self.at("plain");
        self.bucket_client
            .put(&plain, Bytes::from_static(b"1"))
            .await?;
        let read = self.read(&plain).await?;
        Ok(vec![
            Finding::of(
                "read after write",
                [
                    "what was saved is seen by all who look",
                    "a reader, or a save that looks whether it has won, may not see what is there: do not \
                     save here",
                ],
                self.read_after_write(read).await,
            ),
            Finding::of(
                "list after write",
                [
                    "sweeps and commits see all files of a save",
                    "a commit may fail that is none the worse, and steps may be missing from lists",
                ],
                self.list_after_write().await,
            ),
            Finding::of(
                "create where nothing is",
                [
                    "a save replaces no checkpoint that it was not asked to",
                    "a save may replace a checkpoint that another one has acknowledged: do not save here",
                ],
                self.create_over().await,
            ),
            Finding::of(
                "one winner of creates at one moment",
                [
                    "of several saves of one step one is told that it won",
                    "two saves of one step may both be told that they won: let one job save to it",
                ],
                self.race().await,
            ),
            Finding::of(
                "replace what was seen",
                [
                    "saves that overwrite a step take turns",
                    "two saves that overwrite one step at one moment may both be told that they won, \
                     and files of the wrong one be removed: use overwrite=True from one job only",
                ],
                self.replace().await,
            ),
            Finding::of(
                "remove what was seen",
                [
                    "a deletion takes no checkpoint that came in its place",
                    "a deletion and an overwrite of one step at one moment may take the new checkpoint: \
                     delete and save from one job only",
                ],
                self.remove_seen().await,
            ),
            Finding::of(
                self.checked(),
                [
                    "bytes that change on their way are refused",
                    "bytes that change on their way are found when they are read, not when they are saved",
                ],
                self.checksum().await,
            ),
        ])
    }

    async fn read(&self, key: &Key) -> io::Result<Bytes> {
        let found = self
            .bucket_client
            .get(key, &GetOptions::default(), u64::MAX)
            .await?;
        Ok(found.bytes)
    }

    /// Puts an object once; returns its version, or `None` if the condition failed.
    async fn put(
        &self,
        key: &Key,
        text: &'static [u8],
        mode: &PutMode,
    ) -> io::Result<Option<String>> {
        let mut retry = 0;
        loop {
            let options = PutOptions::from(mode.clone());
            let put =
                self.bucket_client
                    .store
                    .put_opts(key, PutPayload::from_static(text), options);
            retry += 1;
            match put.await.map_err(kind_of) {
                Ok(put) => {
                    let (e_tag, version) = (put.e_tag, put.version);
                    let put = UpdateVersion { e_tag, version };
                    let version = self.bucket_client.signed.provider().version(put);
                    return Ok(Some(version.unwrap_or_default()));
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
                Err(error) if retry >= TRIES_MAX => return Err(error),
                // Google allows one write a second for each name.
                Err(_) => tokio::time::sleep(PAUSE * retry).await,
            }
        }
    }

    async fn read_after_write(&self, first: Bytes) -> io::Result<Seen> {
        if first != "1" {
            return Ok(Err(format!("{first:?} was read in the place of \"1\"")));
        }
        let key = self.at("plain");
        for text in [b"2", b"3", b"4", b"5"] {
            self.put(&key, text, &PutMode::Overwrite).await?;
            let read = self.read(&key).await?;
            if read != text[..] {
                return Ok(Err(format!("{read:?} was read after {text:?} was put")));
            }
        }
        Ok(Ok(()))
    }

    async fn list_after_write(&self) -> io::Result<Seen> {
        for count in 1..=4 {
            let key = self.at("listed").join(count.to_string());
            self.put(&key, b"", &PutMode::Overwrite).await?;
            let listed = self.list(&self.at("listed")).await?;
            if listed.len() != count {
                let detail = format!("{} of {count} objects were listed", listed.len());
                return Ok(Err(detail));
            }
        }
        Ok(Ok(()))
    }

    async fn list(&self, below: &Key) -> io::Result<Vec<Key>> {
        let listed = self.bucket_client.list(below).await?.objects.into_iter();
        Ok(listed.map(|found| found.location).collect())
    }

    async fn create_over(&self) -> io::Result<Seen> {
        let key = self.at("created");
        self.put(&key, b"first", &PutMode::Overwrite).await?;
        let put = self.put(&key, b"second", &PutMode::Create).await?;
        let read = self.read(&key).await?;
        Ok(match (put, &read[..]) {
            (None, b"first") => Ok(()),
            (None, _) => Err("it was refused, and carried out all the same".to_owned()),
            (Some(_), _) => Err("the condition is not looked at".to_owned()),
        })
    }

    async fn race(&self) -> io::Result<Seen> {
        const TEXTS: [&[u8]; RACERS] = [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"];
        for race in 0..RACES {
            let key = self.at(&format!("race-{race}"));
            let puts = TEXTS.map(|text| self.put(&key, text, &PutMode::Create));
            let puts = join_all(puts)
                .await
                .into_iter()
                .collect::<io::Result<Vec<_>>>()?;
            let winners: Vec<usize> = (0..RACERS).filter(|&racer| puts[racer].is_some()).collect();
            let read = self.read(&key).await?;
            match winners[..] {
                [winner] if read == TEXTS[winner] => {}
                [winner] => return Ok(Err(format!("{winner} won, and {read:?} is there"))),
                // A response was lost, and the retry of that request refused.
                [] => return Err(io::Error::other("nobody was told that it won")),
                _ => return Ok(Err(format!("{} of {RACERS} won", winners.len()))),
            }
        }
        Ok(Ok(()))
    }

    async fn replace(&self) -> io::Result<Seen> {
        let key = self.at("replaced");
        let over = |seen: &String| PutMode::Update(only_over(seen.clone()));
        let Some(first) = self.put(&key, b"first", &PutMode::Overwrite).await? else {
            return Ok(Err("a put without a condition was refused".to_owned()));
        };
        let Some(second) = self.put(&key, b"second", &over(&first)).await? else {
            return Ok(Err(
                "it was refused though it was the one that was seen".to_owned()
            ));
        };
        if first == second {
            return Ok(Err("two different objects have one tag".to_owned()));
        }
        let third = self.put(&key, b"third", &over(&first)).await?;
        let read = self.read(&key).await?;
        Ok(match (third, &read[..]) {
            (None, b"second") => Ok(()),
            _ => Err("the condition is not looked at".to_owned()),
        })
    }

    async fn remove_seen(&self) -> io::Result<Seen> {
        let key = self.at("removed");
        let put = async |text| {
            let version = self.put(&key, text, &PutMode::Overwrite).await?;
            version.ok_or_else(|| io::Error::other("a put without a condition was refused"))
        };
        let (first, second) = (put(b"first").await?, put(b"second").await?);
        match self
            .bucket_client
            .signed
            .delete_if(&key, Some(&first))
            .await
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Ok(()) => {}
            Err(error) => return Err(error),
        }
        if !self.list(&self.key).await?.contains(&key) {
            return Ok(Err("the condition is not looked at".to_owned()));
        }
        self.bucket_client
            .signed
            .delete_if(&key, Some(&second))
            .await?;
        Ok(match self.list(&self.key).await?.contains(&key) {
            true => Err("it stays though it was the one that was seen".to_owned()),
            false => Ok(()),
        })
    }

    fn checked(&self) -> &'static str {
        match self.bucket_client.signed.provider() {
            Provider::Amazon | Provider::Azure => "CRC-64/NVME checked",
            Provider::Google => "CRC-32C checked",
        }
    }

    async fn checksum(&self) -> io::Result<Seen> {
        let key = self.at("checked");
        if !self.put_nothing(&key, true).await? {
            return Ok(Err("a put with the right checksum was refused".to_owned()));
        }
        Ok(match self.put_nothing(&key, false).await? {
            true => Err("a put with a wrong checksum was taken".to_owned()),
            false => Ok(()),
        })
    }

    /// Puts an empty object with a checksum; returns whether the store accepted it.
    async fn put_nothing(&self, key: &Key, is_right: bool) -> io::Result<bool> {
        match self.bucket_client.signed.put_nothing(key, is_right).await {
            Ok(_) => Ok(true),
            Err(request_error) if request_error.is_passing => Err(request_error.into()),
            Err(_) => Ok(false),
        }
    }

    async fn remove_all(&self) -> io::Result<()> {
        loop {
            let keys = self.bucket_client.some_below(&self.key).await?;
            if keys.is_empty() {
                return Ok(());
            }
            for key in keys {
                self.bucket_client.signed.delete(&key).await?;
            }
        }
    }
}
