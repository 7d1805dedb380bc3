//! How a request that the client library has no call for is addressed and signed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderValue};
use http::{Method, Request};
use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::{CredentialProvider, HttpRequest, HttpRequestBody};
use object_store::gcp::GcpCredential;
use object_store::signer::{SignedUrlOptions, Signer};
use url::Url;

use crate::ask::Ask;
use crate::refusal::Refusal;

/// How long a signature is good for: the clocks may differ by some minutes.
const SIGNATURE_MAX: Duration = Duration::from_secs(15 * 60);

/// Makes requests of what is asked, each with a signature of its own.
#[async_trait]
pub(crate) trait Access: Send + Sync {
    /// A request to the store.
    ///
    /// # Errors
    /// Where no credentials were had, or a name makes no request.
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, Refusal>;
}

/// S3: the signature is in the URL.
pub(crate) struct OfAmazon(pub(crate) Arc<dyn Signer>);

#[async_trait]
impl Access for OfAmazon {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, Refusal> {
        let mut options = SignedUrlOptions::new().with_query(ask.query.iter().cloned());
        options.signed_headers = ask.headers.clone();
        let signed = self
            .0
            .signed_url_opts(ask.method.clone(), ask.key, SIGNATURE_MAX, &options);
        let url = signed.await.map_err(|error| Refusal::of_store(&error))?;
        unsigned(ask, &url)
    }
}

type Provided<T> = Arc<dyn CredentialProvider<Credential = T>>;

/// What a request is signed with, if it is.
async fn had<T>(credentials: Option<&Provided<T>>) -> Result<Option<Arc<T>>, Refusal> {
    match credentials {
        Some(credentials) => match credentials.get_credential().await {
            Ok(credential) => Ok(Some(credential)),
            Err(error) => Err(Refusal::of_store(&error)),
        },
        None => Ok(None),
    }
}

/// Google: a token goes with each request.
pub(crate) struct OfGoogle {
    /// That of the bucket.
    pub(crate) url: Url,
    /// None where nobody has to say who asks.
    pub(crate) credentials: Option<Provided<GcpCredential>>,
}

#[async_trait]
impl Access for OfGoogle {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, Refusal> {
        let mut request = unsigned(ask, &url_of(&self.url, ask))?;
        if let Some(credential) = had(self.credentials.as_ref()).await? {
            let value = HeaderValue::from_str(&format!("Bearer {}", credential.bearer));
            let value =
                value.map_err(|_| invalid("the token is of other bytes than tokens are"))?;
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }
}

/// Azure: the whole request is signed, or has a token, or a signature that somebody was given.
pub(crate) struct OfAzure {
    /// That of the container.
    pub(crate) url: Url,
    pub(crate) account: String,
    /// None where nobody has to say who asks.
    pub(crate) credentials: Option<Provided<AzureCredential>>,
}

#[async_trait]
impl Access for OfAzure {
    async fn request(&self, ask: &Ask<'_>) -> Result<HttpRequest, Refusal> {
        let mut request = unsigned(ask, &url_of(&self.url, ask))?;
        if let Some(credential) = had(self.credentials.as_ref()).await? {
            AzureAuthorizer::new(&credential, &self.account)
                .try_authorize(&mut request)
                .map_err(|error| Refusal::of_store(&error))?;
        }
        Ok(request)
    }
}

/// What is asked of an object, or of the bucket where it has no key.
fn url_of(bucket: &Url, ask: &Ask<'_>) -> Url {
    let mut url = bucket.clone();
    if let Ok(mut path) = url.path_segments_mut() {
        path.extend(ask.key.parts());
    }
    for (name, value) in &ask.query {
        url.query_pairs_mut().append_pair(name, value);
    }
    url
}

fn unsigned(ask: &Ask<'_>, url: &Url) -> Result<HttpRequest, Refusal> {
    let request = Request::builder()
        .method(ask.method.clone())
        .uri(url.as_str())
        .body(HttpRequestBody::from(ask.body.clone()));
    let mut request = request.map_err(|error| invalid(&error.to_string()))?;
    let headers = request.headers_mut();
    headers.extend(ask.headers.clone());
    if matches!(ask.method, Method::POST | Method::PUT) {
        // The client says none of a body without bytes, and Google answers that with 411; Azure's signature
        // is of it too.
        headers.insert(CONTENT_LENGTH, HeaderValue::from(ask.body_bytes()));
    }
    Ok(request)
}

fn invalid(text: &str) -> Refusal {
    Refusal::new(io::ErrorKind::InvalidInput, text)
}
