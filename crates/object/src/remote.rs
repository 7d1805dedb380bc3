//! How a store of objects is reached, as far as a URL does not say.

use std::env;
use std::io;
use std::time::Duration;

use crate::connection::Connection;
use crate::credentials::Credentials;
use crate::profile::Profile;
use crate::provider::Provider;
use crate::refusal::Refusal;

/// What a caller may say of a store of objects.
#[derive(Clone, Debug, Default)]
pub struct Remote {
    /// Where the store answers, such as `http://127.0.0.1:7070`; that of the provider if it is not given.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: Option<String>,
    /// Who asks. Where it is not given: what the environment says (a key, a web identity), a profile of
    /// AWS's files, a container's role, the instance's, in this order.
    pub credentials: Option<Credentials>,
    /// Bytes of a part of an upload, a whole number of MiB.
    pub part_bytes: Option<usize>,
    /// Requests at a time.
    pub connections: Option<usize>,
    /// For how long a request is repeated that gets no answer.
    pub patience: Option<Duration>,
    /// Whether what is put has a checksum of its bytes, which the store checks; false is for a store
    /// that refuses requests with one.
    pub checksums: Option<bool>,
}

/// Bytes of a part where nothing else is asked for: the most of one request that is repeated, and few
/// enough that many are under way.
const PART_BYTES: usize = 8 << 20;

/// S3 takes no smaller ones, but for the last.
const PART_BYTES_MIN: usize = 5 << 20;

const MIB: usize = 1 << 20;

/// Requests at a time where nothing else is asked for.
const CONNECTIONS: usize = 24;

const CONNECTIONS_MAX: usize = 256;

/// As long as a server takes to start again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the environment says that the store answers.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// With one of these the environment says who asks, before any file does.
const KEYS: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"];

/// With one of these the environment says who asks of Google.
const GOOGLE_KEYS: [&str; 7] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "SERVICE_ACCOUNT",
    "GOOGLE_APPLICATION_DEFAULT_CREDENTIALS",
];

fn told(names: &[&str]) -> Option<String> {
    let value = |name: &&str| env::var(name).ok().filter(|value| !value.is_empty());
    names.iter().find_map(value)
}

/// Where tools of Google are told that an emulator answers, with or without the scheme.
fn emulator() -> Option<String> {
    let host = told(&["STORAGE_EMULATOR_HOST"])?;
    Some(match host.contains("://") {
        true => host,
        false => format!("http://{host}"),
    })
}

impl Remote {
    /// With what it leaves open taken from the environment and from the files of the provider's tools,
    /// as far as the client library does not read them by itself.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for what has no meaning with this provider, and for files that say
    /// nothing that makes sense.
    pub(crate) fn completed(&self, provider: Provider) -> io::Result<Remote> {
        let mut remote = self.clone();
        let told = match provider {
            Provider::Amazon => return self.completed_for_amazon(),
            Provider::Google => emulator().or_else(|| told(&["GOOGLE_BASE_URL"])),
            Provider::Azure => Connection::of_environment()
                .endpoint()
                .or_else(|| told(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])),
        };
        remote.endpoint = remote.endpoint.or(told);
        match remote.region {
            None => Ok(remote),
            Some(_) => {
                let text = format!("{}:// has no regions: leave it out", provider.scheme());
                Err(Refusal::new(io::ErrorKind::InvalidInput, text).into())
            }
        }
    }

    /// Whether an emulator of Google's answers, and nobody has said who asks: as Google's own tools do,
    /// nobody is asked for a key then, and none is sent there.
    pub(crate) fn is_of_emulator(&self) -> bool {
        let is_there = self.endpoint.is_some() && self.endpoint == emulator();
        is_there && self.credentials.is_none() && told(&GOOGLE_KEYS).is_none()
    }

    fn completed_for_amazon(&self) -> io::Result<Remote> {
        let mut remote = self.clone();
        remote.endpoint = remote.endpoint.or_else(|| told(&ENDPOINTS));
        remote.region = remote.region.or_else(|| told(&REGIONS));
        if remote.credentials.is_some() || told(&KEYS).is_some() {
            return Ok(remote);
        }
        let profile = Profile::of_environment()?;
        remote.credentials = profile.credentials;
        remote.endpoint = remote.endpoint.or(profile.endpoint);
        remote.region = remote.region.or(profile.region);
        Ok(remote)
    }

    /// Bytes of a part: whole MiB, so that digests of chunks are digests of parts.
    pub fn part_bytes(&self) -> usize {
        let wanted = self.part_bytes.unwrap_or(PART_BYTES);
        wanted.clamp(PART_BYTES_MIN, 1 << 30).next_multiple_of(MIB)
    }

    /// Requests at a time.
    pub fn connections(&self) -> usize {
        self.connections
            .unwrap_or(CONNECTIONS)
            .clamp(1, CONNECTIONS_MAX)
    }

    /// For how long a request is repeated that gets no answer.
    pub fn patience(&self) -> Duration {
        self.patience.unwrap_or(PATIENCE)
    }

    /// Whether what is put has a checksum.
    pub fn has_checksums(&self) -> bool {
        self.checksums.unwrap_or(true)
    }
}
