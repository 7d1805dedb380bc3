//! Inspects a store's error responses before the client library sees them.
//!
//! The library keeps only a repetitive text of an error response and none of its headers, such as
//! the bucket's region.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http::header::IF_MATCH;
use http::{Method, StatusCode};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::{ClientOptions, Result};

use super::RequestError;
use crate::provider::Provider;

/// Query parameter of a request whose URL carries its signature.
const SIGNED_URL: &str = "X-Amz-Signature=";

/// How long to retry a store that has never answered: its name is more likely wrong than the
/// server restarting.
const SEARCH_MAX: Duration = Duration::from_secs(5);

/// Makes HTTP clients whose errors say why a store refused.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    provider: Provider,
    /// Whether unsigned requests go to the store rather than to a credential service.
    is_anonymous: bool,
    reached: Arc<Reached>,
}

impl Connector {
    pub(crate) fn new(provider: Provider, is_anonymous: bool) -> Connector {
        Connector {
            provider,
            is_anonymous,
            reached: Arc::default(),
        }
    }
}

/// Whether the store has ever answered, and when the first attempt failed.
#[derive(Debug, Default)]
struct Reached {
    has_answered: AtomicBool,
    tried: OnceLock<Instant>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(Answers {
            client: ReqwestConnector::default().connect(options)?,
            connector: self.clone(),
        }))
    }
}

#[derive(Debug)]
struct Answers {
    client: HttpClient,
    connector: Connector,
}

#[async_trait]
impl HttpService for Answers {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let Connector {
            provider,
            is_anonymous,
            reached,
        } = &self.connector;
        let is_of_library = provider.is_asked(request.headers());
        let query = request.uri().query().unwrap_or_default();
        let has_signed_url = query.contains(SIGNED_URL);
        let is_listing = provider.is_listing(query);
        let is_for_credentials = !(is_of_library || has_signed_url || *is_anonymous);
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let is_conditional = provider.is_conditional(request.headers());
        let replaces = request.headers().contains_key(IF_MATCH);
        let makes = matches!(*request.method(), Method::PUT | Method::POST) && !replaces;
        let answer = self.client.execute(request).await;
        let answer =
            answer.map_err(|error| reached.failed(*provider, error, is_for_credentials))?;
        reached.has_answered.store(true, Ordering::Relaxed);
        let status = answer.status();
        let is_fine = status.is_success() || status == StatusCode::NOT_MODIFIED;
        if is_for_credentials && (status.is_client_error() || status.is_server_error()) {
            let request_error = RequestError::of_service(*provider, status);
            // The library interprets AWS's permanent errors of this kind itself.
            if request_error.is_passing || *provider != Provider::Amazon {
                return Err(HttpError::new(HttpErrorKind::Unknown, request_error));
            }
        }
        if !is_of_library || is_fine {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        let body = body.bytes().await?;
        let mut request_error = RequestError::of_answer(*provider, status, &parts.headers, &body);
        if is_listing && request_error.is_of_nothing() {
            // An empty prefix gives an empty listing, never 404.
            request_error = RequestError::nonsense("there is no such listing");
        }
        if makes {
            request_error = request_error.of_making();
        }
        // The library interprets these responses. A condition cannot fail for a request that has
        // none.
        let is_answer = is_read || is_conditional;
        if request_error.is_of_nothing()
            || (is_answer && request_error.is_of_condition(status, is_read))
        {
            return Ok(HttpResponse::from_parts(parts, body.into()));
        }
        // The library retries nothing, whatever this error's kind.
        Err(HttpError::new(HttpErrorKind::Unknown, request_error))
    }
}

impl Reached {
    /// Stops retries of a store that has never answered, after [`SEARCH_MAX`].
    fn failed(&self, provider: Provider, error: HttpError, is_for_credentials: bool) -> HttpError {
        let since = self.tried.get_or_init(Instant::now).elapsed();
        let is_hopeless = since > SEARCH_MAX && !self.has_answered.load(Ordering::Relaxed);
        let mut request_error = match (is_for_credentials, error.kind()) {
            (true, _) => RequestError::of_nobody(provider),
            (false, HttpErrorKind::Connect) if is_hopeless => RequestError::of_transport(&error),
            _ => return error,
        };
        request_error.is_passing = !is_hopeless;
        let kind = match is_hopeless {
            true => HttpErrorKind::Unknown,
            false => error.kind(),
        };
        HttpError::new(kind, request_error)
    }
}
