//! The client of a bucket, of any provider.

mod access;
mod ask;
pub(crate) mod requests;
pub(crate) mod retry;
mod signed;
pub(crate) mod uploads;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::AzureConfigKey;
use object_store::client::HttpConnector;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::list::PaginatedListStore;
use object_store::signer::Signer;
use object_store::{ClientOptions, ObjectMeta, ObjectStore, RetryConfig, UpdateVersion};
use url::Url;

use self::access::{Access, OfAmazon, OfAzure, OfGoogle};
use self::signed::Signed;
use self::uploads::Part;
use crate::address::Address;
use crate::provider::Provider;
use crate::remote::Remote;
use crate::remote::connection::Connection;
use crate::remote::credentials::{Credentials, Keys};
use crate::remote::env_bool::env_bool;
use crate::request_error::RequestError;
use crate::request_error::answers::Connector;

/// A client of a bucket.
#[derive(Clone)]
pub(crate) struct BucketClient {
    /// Sends each request once: a retried conditional request may be refused because its first
    /// attempt succeeded. Requests that may be retried are in [`crate::client::requests`].
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The same client, for paged listings.
    pub(crate) lists: Arc<dyn PaginatedListStore>,
    /// How long an unanswered request is retried.
    pub(crate) patience: Duration,
    /// Sends the requests that the library has no call for.
    pub(crate) signed: Signed,
    /// Whether uploads carry checksums, if the store supports them.
    pub(crate) has_checksums: bool,
}

impl fmt::Debug for BucketClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.store)
    }
}

impl BucketClient {
    /// Opens the client of a bucket; the environment supplies what `remote` leaves unset.
    pub(crate) fn of(address: &Address, remote: &Remote) -> io::Result<BucketClient> {
        let remote = &remote.completed(address.provider)?;
        let open = match address.provider {
            Provider::Amazon => amazon,
            Provider::Google => google,
            Provider::Azure => azure,
        };
        open(address, remote).map_err(|error| RequestError::of_options(&error).into())
    }

    /// The version that identifies this object among others of its key.
    pub(crate) fn version(&self, meta: &ObjectMeta) -> Option<String> {
        self.signed.provider().version(UpdateVersion {
            e_tag: meta.e_tag.clone(),
            version: meta.version.clone(),
        })
    }

    /// Whether the parts of a resumed upload were sent with checksums.
    pub(crate) fn are_checked(&self, parts: &[Part]) -> bool {
        match self.signed.provider() {
            // Google checks the checksums that it receives, and does not report them.
            Provider::Google => self.has_checksums,
            // If one part has no checksum, the object has none.
            Provider::Amazon | Provider::Azure => {
                !parts.is_empty() && parts.iter().all(|part| part.crc64nvme.is_some())
            }
        }
    }
}

/// How long a store may be silent during a read.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// HTTP options of the library's own requests. A time limit for a whole request would fail on slow
/// connections, so the limit is on the silence between two reads. Upload parts use other options.
fn library(remote: &Remote) -> ClientOptions {
    client(remote).with_read_timeout(READ_TIMEOUT)
}

fn client(remote: &Remote) -> ClientOptions {
    // An `http://` endpoint is a deliberate choice.
    let is_plain = remote
        .endpoint
        .as_ref()
        .is_some_and(|endpoint| endpoint.starts_with("http://"));
    // One connection for each request: HTTP/2 would share one among all.
    ClientOptions::new()
        .with_http1_only()
        .with_allow_http(is_plain)
        .with_pool_max_idle_per_host(remote.connections())
        .with_timeout_disabled()
}

/// Turns off the library's own retries.
fn never() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Combines a client of the library with a way to sign requests.
fn bucket_client<Client: ObjectStore + PaginatedListStore>(
    address: &Address,
    remote: &Remote,
    library: Arc<Client>,
    access: Arc<dyn Access>,
    connector: &Connector,
) -> object_store::Result<BucketClient> {
    let client = connector.connect(&client(remote))?;
    Ok(BucketClient {
        store: Arc::clone(&library) as Arc<dyn ObjectStore>,
        lists: library,
        patience: remote.patience(),
        signed: Signed::new(address.provider, access, client, remote.patience()),
        has_checksums: remote.has_checksums(),
    })
}

fn amazon(address: &Address, remote: &Remote) -> object_store::Result<BucketClient> {
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(&address.bucket)
        .with_retry(never())
        .with_client_options(library(remote))
        .with_unsigned_payload(true);
    check_no_encryption(|name| {
        let key: AmazonS3ConfigKey = name.parse().ok()?;
        builder.get_config_value(&key)
    })?;
    let skips = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
    let connector = Connector::new(address.provider, env_bool(skips.as_ref()));
    builder = builder.with_http_connector(connector.clone());
    if remote.has_checksums() {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    if let Some(endpoint) = &remote.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &remote.region {
        builder = builder.with_region(region);
    }
    if let Some(credentials) = &remote.credentials {
        builder = builder.with_credentials(credentials.provider());
    }
    let store = Arc::new(builder.build()?);
    let access = Arc::new(OfAmazon(Arc::clone(&store) as Arc<dyn Signer>));
    bucket_client(address, remote, store, access, &connector)
}

const GOOGLE: &str = "https://storage.googleapis.com";

fn google(address: &Address, remote: &Remote) -> object_store::Result<BucketClient> {
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&address.bucket)
        .with_retry(never())
        .with_client_options(library(remote));
    let skips = builder.get_config_value(&GoogleConfigKey::SkipSignature);
    let is_anonymous = env_bool(skips.as_ref()) || remote.is_of_emulator();
    let connector = Connector::new(address.provider, is_anonymous);
    builder = builder
        .with_skip_signature(is_anonymous)
        .with_http_connector(connector.clone());
    let endpoint = remote.endpoint.as_deref().unwrap_or(GOOGLE);
    let endpoint = endpoint.trim_end_matches('/');
    builder = builder.with_base_url(endpoint);
    let url = below(endpoint, &address.bucket)?;
    if let Some(credentials) = &remote.credentials {
        builder = builder.with_credentials(credentials.provider());
    }
    let store = Arc::new(builder.build()?);
    let access = OfGoogle {
        url,
        credentials: (!is_anonymous).then(|| Arc::clone(store.credentials())),
    };
    bucket_client(address, remote, store, Arc::new(access), &connector)
}

fn azure(address: &Address, remote: &Remote) -> object_store::Result<BucketClient> {
    let connection = Connection::of_environment();
    let mut builder = connection
        .builder()
        .with_container_name(&address.bucket)
        .with_retry(never())
        .with_client_options(library(remote));
    check_no_encryption(|name| {
        let key: AzureConfigKey = name.parse().ok()?;
        builder.get_config_value(&key)
    })?;
    if let Some(endpoint) = &remote.endpoint {
        // With the trailing slash that the portal shows, the library would request `//CONTAINER`.
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    if let Some(Credentials::Given(Keys { id, .. })) = &remote.credentials
        && !id.is_empty()
    {
        builder = builder.with_account(id);
    }
    let said = |key: AzureConfigKey| builder.get_config_value(&key);
    let is_anonymous = env_bool(said(AzureConfigKey::SkipSignature).as_ref());
    let named = said(AzureConfigKey::AccountName).filter(|name| !name.is_empty());
    let account = named.or_else(|| account_of(remote.endpoint.as_deref()?));
    let account = account.ok_or_else(|| {
        wrong("no account is named: set AZURE_STORAGE_ACCOUNT_NAME, or give the account's endpoint")
    })?;
    let is_fabric = env_bool(said(AzureConfigKey::UseFabricEndpoint).as_ref());
    let service = match &remote.endpoint {
        Some(endpoint) => endpoint.clone(),
        None if is_fabric => format!("https://{account}.blob.fabric.microsoft.com"),
        None => format!("https://{account}.blob.core.windows.net"),
    };
    let url = below(&service, &address.bucket)?;
    let connector = Connector::new(address.provider, is_anonymous);
    builder = builder
        .with_account(&account)
        .with_http_connector(connector.clone());
    if let Some(credentials) = &remote.credentials {
        builder = builder.with_credentials(credentials.provider_of(Some(account.clone())));
    }
    let store = Arc::new(builder.build()?);
    let access = OfAzure {
        url,
        account,
        credentials: (!is_anonymous).then(|| Arc::clone(store.credentials())),
    };
    bucket_client(address, remote, store, Arc::new(access), &connector)
}

/// Encryption options that the library sends with its own requests, and this crate with none.
const ENCRYPTION: [&str; 4] = [
    "aws_server_side_encryption",
    "aws_sse_kms_key_id",
    "aws_sse_customer_key_base64",
    "azure_storage_encryption_key",
];

/// Refuses encryption options of single requests; the bucket's own encryption covers every object.
fn check_no_encryption(said: impl Fn(&str) -> Option<String>) -> object_store::Result<()> {
    let given = ENCRYPTION.into_iter().find(|name| said(name).is_some());
    given.map_or(Ok(()), |name| {
        let name = name.to_ascii_uppercase();
        Err(wrong(format!(
            "{name} is not obeyed here: unset it, and have the bucket or account encrypt by itself"
        )))
    })
}

/// The account in an endpoint: `https://ACCOUNT.blob.…`, or `http://HOST:PORT/ACCOUNT`.
fn account_of(endpoint: &str) -> Option<String> {
    let url = Url::parse(endpoint).ok()?;
    let below = url.path().trim_matches('/');
    let name = match below.is_empty() {
        false => below,
        true => url.domain()?.split_once('.')?.0,
    };
    Some(name.to_owned())
}

/// The URL of a bucket or container at an endpoint.
fn below(endpoint: &str, name: &str) -> object_store::Result<Url> {
    let mut url = Url::parse(endpoint).map_err(|error| wrong(format!("{endpoint}: {error}")))?;
    match url.path_segments_mut() {
        Ok(mut path) => path.pop_if_empty().push(name),
        Err(()) => return Err(wrong(format!("{endpoint} is no URL of a server"))),
    };
    Ok(url)
}

fn wrong(text: impl Into<String>) -> object_store::Error {
    object_store::Error::Generic {
        store: "options",
        source: text.into().into(),
    }
}

/// The error that the caller of a request sees.
#[expect(clippy::needless_pass_by_value, reason = "it stands in `map_err`")]
pub(crate) fn kind_of(error: object_store::Error) -> io::Error {
    RequestError::of_request(&error).into()
}
