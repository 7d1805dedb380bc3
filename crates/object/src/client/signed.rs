//! Signs and sends the requests that the client library has no call for.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use http::{Method, StatusCode};
use object_store::client::HttpClient;
use object_store::path::Path as Key;

use super::access::Access;
use super::ask::{Answer, Ask};
use super::retry::Retry;
use crate::provider::Provider;
use crate::request_error::RequestError;

const SNAPSHOTS: HeaderName = HeaderName::from_static("x-ms-delete-snapshots");
const INCLUDE: HeaderValue = HeaderValue::from_static("include");

/// Sends signed requests to a store.
#[derive(Clone)]
pub(crate) struct Signed {
    client: HttpClient,
    access: Arc<dyn Access>,
    provider: Provider,
    patience: Duration,
}

impl Signed {
    /// `client` has no time limit of its own, because that would include sending the body.
    pub(crate) fn new(
        provider: Provider,
        access: Arc<dyn Access>,
        client: HttpClient,
        patience: Duration,
    ) -> Signed {
        Signed {
            client,
            access,
            provider,
            patience,
        }
    }

    /// The protocol of the store.
    pub(crate) fn provider(&self) -> Provider {
        self.provider
    }

    /// A retry counter for one request.
    pub(crate) fn retry(&self) -> Retry {
        Retry::new(self.patience)
    }

    /// Removes an object. The client library's bulk deletion is not used: some stores report a
    /// missing object there as an error without a status.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the store reports that there is none.
    pub(crate) async fn delete(&self, key: &Key) -> io::Result<()> {
        Ok(self.ask(&self.deletion(key)).await.map(drop)?)
    }

    fn deletion<'a>(&self, key: &'a Key) -> Ask<'a> {
        let ask = Ask::new(Method::DELETE, key);
        match self.provider {
            Provider::Amazon | Provider::Google => ask,
            // Azure keeps an object with snapshots unless they are deleted with it.
            Provider::Azure => ask.header(SNAPSHOTS, INCLUDE),
        }
    }

    /// Removes an object if it still has this version.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is none or it has another version, and
    /// [`io::ErrorKind::Unsupported`] without a version. The retry of a request whose response was
    /// lost gives the first error too, if that request was carried out.
    pub(crate) async fn delete_if(&self, key: &Key, version: Option<&str>) -> io::Result<()> {
        let condition = version.and_then(|version| self.provider.condition(version));
        let (name, value) = condition.ok_or(io::ErrorKind::Unsupported)?;
        let ask = self.deletion(key).header(name, value);
        let mut retry = self.retry();
        loop {
            let request_error = match self.send(&ask).await {
                Ok((status, answer)) => match self.accept(status, answer) {
                    Ok(_) => return Ok(()),
                    // Another request for the object was in progress, which decides nothing.
                    Err(request_error) if request_error.is_passing => request_error,
                    Err(request_error)
                        if request_error.is_of_condition(status, false)
                            || request_error.is_of_nothing() =>
                    {
                        return Err(io::ErrorKind::NotFound.into());
                    }
                    Err(request_error) => request_error,
                },
                Err(request_error) => request_error,
            };
            retry.back_off(request_error).await?;
        }
    }

    /// Sends a request, retrying where that may help, each time with a new signature.
    pub(crate) async fn ask(&self, ask: &Ask<'_>) -> Result<Answer, RequestError> {
        self.ask_for(ask, Ok).await
    }

    /// Sends a request, retrying it until `read` can interpret the response.
    pub(crate) async fn ask_for<T>(
        &self,
        ask: &Ask<'_>,
        read: impl Fn(Answer) -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let mut retry = self.retry();
        loop {
            match self.ask_once(ask).await.and_then(&read) {
                Ok(answer) => return Ok(answer),
                Err(request_error) => retry.back_off(request_error).await?,
            }
        }
    }

    pub(crate) async fn ask_once(&self, ask: &Ask<'_>) -> Result<Answer, RequestError> {
        let (status, answer) = self.send(ask).await?;
        let makes = matches!(ask.method, Method::PUT | Method::POST);
        self.accept(status, answer).map_err(|request_error| {
            if makes {
                request_error.of_making()
            } else {
                request_error
            }
        })
    }

    async fn send(&self, ask: &Ask<'_>) -> Result<(StatusCode, Answer), RequestError> {
        let sent = tokio::time::timeout(ask.time_max(), self.send_unbounded(ask));
        sent.await.unwrap_or_else(|_| Err(RequestError::silent()))
    }

    async fn send_unbounded(&self, ask: &Ask<'_>) -> Result<(StatusCode, Answer), RequestError> {
        let request = self.access.request(ask).await?;
        let answer = self.client.execute(request).await;
        let (parts, body) = answer
            .map_err(|error| RequestError::of_transport(&error))?
            .into_parts();
        let body = body.bytes().await;
        let answer = Answer {
            headers: parts.headers,
            body: body.map_err(|error| RequestError::of_transport(&error))?,
        };
        Ok((parts.status, answer))
    }

    fn accept(&self, status: StatusCode, answer: Answer) -> Result<Answer, RequestError> {
        match status.is_success() {
            true => Ok(answer),
            false => Err(RequestError::of_answer(
                self.provider,
                status,
                &answer.headers,
                &answer.body,
            )),
        }
    }
}
