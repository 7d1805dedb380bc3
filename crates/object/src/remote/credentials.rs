//! Keys that sign requests, and their renewal before they expire.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderValue;
use object_store::aws::AwsCredential;
use object_store::azure::{AzureAccessKey, AzureCredential};
use object_store::gcp::GcpCredential;
use object_store::{CredentialProvider, Result};
use tokio::sync::Mutex;

use crate::request_error::RequestError;

/// How long before its expiry a key is renewed: uploads in flight sign their next part with it.
const EARLY: Duration = Duration::from_secs(5 * 60);

/// A key, its secret and its expiry; or a token, which needs no key.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// The key's name, or the account's on Azure; empty for a token alone.
    pub id: String,
    /// The secret that signs requests; empty for a token alone.
    pub secret: String,
    /// On S3, the session token of a temporary key; elsewhere the token that each request carries.
    pub token: Option<String>,
    /// When it expires, if it does.
    pub expires: Option<SystemTime>,
}

impl Keys {
    /// Refuses characters that no header may contain, on which the client library would panic.
    fn check(&self) -> io::Result<()> {
        let texts = [Some(&self.id), self.token.as_ref()];
        match texts
            .into_iter()
            .flatten()
            .all(|text| HeaderValue::from_str(text).is_ok())
        {
            true => Ok(()),
            false => Err(unfit(
                "a key's name or a token has a character that is none of one, such as a line's end",
            )),
        }
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys")
            .field("id", &self.id)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

/// A function that returns a key, called again before that key expires. It runs on its own thread,
/// so it may block.
pub type AskForKeys = Arc<dyn Fn() -> io::Result<Keys> + Send + Sync>;

/// Source of a key.
#[derive(Clone)]
pub enum Credentials {
    /// A fixed key.
    Given(Keys),
    /// A function that is called for one.
    Asked(AskForKeys),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Credentials::Given(keys) => keys.fmt(f),
            Credentials::Asked(_) => f.write_str("Asked"),
        }
    }
}

impl Credentials {
    /// A credential provider for the client of a store.
    pub(crate) fn provider<C: OfKeys>(&self) -> Arc<dyn CredentialProvider<Credential = C>> {
        self.provider_of(None)
    }

    /// A credential provider for a named account, if the provider has accounts.
    pub(crate) fn provider_of<C: OfKeys>(
        &self,
        account: Option<String>,
    ) -> Arc<dyn CredentialProvider<Credential = C>> {
        let ask = match self.clone() {
            Credentials::Given(keys) => Arc::new(move || Ok(keys.clone())),
            Credentials::Asked(ask) => ask,
        };
        let held = Mutex::default();
        Arc::new(Renewed::<C> { ask, account, held })
    }
}

/// A credential of the client library.
pub(crate) trait OfKeys: fmt::Debug + Send + Sync + Sized + 'static {
    /// Makes a credential from keys; refuses keys of another provider with
    /// [`io::ErrorKind::InvalidInput`].
    fn of(keys: Keys) -> io::Result<Self>;
}

impl OfKeys for AwsCredential {
    fn of(keys: Keys) -> io::Result<AwsCredential> {
        if keys.id.is_empty() {
            return Err(unfit("a token is no key of S3: give penstock.Credentials"));
        }
        Ok(AwsCredential {
            key_id: keys.id,
            secret_key: keys.secret,
            token: keys.token,
        })
    }
}

impl OfKeys for GcpCredential {
    fn of(keys: Keys) -> io::Result<GcpCredential> {
        match keys.token {
            Some(bearer) if keys.id.is_empty() => Ok(GcpCredential { bearer }),
            _ => Err(unfit(
                "gs:// takes no keys: give penstock.Token, or set GOOGLE_APPLICATION_CREDENTIALS",
            )),
        }
    }
}

impl OfKeys for AzureCredential {
    fn of(keys: Keys) -> io::Result<AzureCredential> {
        match keys.token {
            Some(token) if keys.id.is_empty() => Ok(AzureCredential::BearerToken(token)),
            Some(_) => Err(unfit("az:// takes an account and its key, or a token")),
            None => {
                let key = AzureAccessKey::try_new(&keys.secret);
                let key = key.map_err(|_| unfit("the key of the account is not base64"))?;
                Ok(AzureCredential::AccessKey(key))
            }
        }
    }
}

fn unfit(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Caches a key until it expires.
struct Renewed<C> {
    ask: AskForKeys,
    account: Option<String>,
    held: Mutex<Option<Held<C>>>,
}

struct Held<C> {
    credential: Arc<C>,
    expires: Option<SystemTime>,
}

impl<C> Held<C> {
    fn is_good(&self, at: SystemTime) -> bool {
        self.expires.is_none_or(|end| at < end)
    }
}

impl<C> fmt::Debug for Renewed<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renewed")
    }
}

impl<C> Renewed<C> {
    fn check_account(&self, keys: &Keys) -> io::Result<()> {
        match &self.account {
            Some(account) if !keys.id.is_empty() && keys.id != *account => {
                let id = &keys.id;
                let text = format!("the key is that of the account {id}, and {account} is reached");
                Err(unfit(&text))
            }
            _ => Ok(()),
        }
    }
}

#[async_trait::async_trait]
impl<C: OfKeys> CredentialProvider for Renewed<C> {
    type Credential = C;

    async fn get_credential(&self) -> Result<Arc<C>> {
        let mut held = self.held.lock().await;
        let now = SystemTime::now();
        if let Some(held) = &*held
            && held.is_good(now + EARLY)
        {
            return Ok(Arc::clone(&held.credential));
        }
        let ask = Arc::clone(&self.ask);
        let asked = tokio::task::spawn_blocking(move || ask()).await;
        let keys = asked.unwrap_or_else(|panic| Err(io::Error::other(panic)));
        let had = keys.and_then(|keys| {
            keys.check()?;
            self.check_account(&keys)?;
            Ok((keys.expires, Arc::new(C::of(keys)?)))
        });
        match had {
            Ok((expires, credential)) => {
                *held = Some(Held {
                    credential: Arc::clone(&credential),
                    expires,
                });
                Ok(credential)
            }
            // An early renewal may fail: the old key is valid for some minutes more.
            Err(error) => match &*held {
                Some(held) if held.is_good(now) => Ok(Arc::clone(&held.credential)),
                _ => {
                    let text = format!("no credentials were had: {error}");
                    let request_error = RequestError::new(io::ErrorKind::PermissionDenied, text);
                    Err(object_store::Error::Generic {
                        store: "credentials",
                        source: request_error.into(),
                    })
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::runtime;

    fn asked(lasts: Option<Duration>, fails_from: usize) -> (Arc<AtomicUsize>, Credentials) {
        let times = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&times);
        let ask = move || {
            let time = count.fetch_add(1, Ordering::Relaxed);
            if time >= fails_from {
                return Err(io::Error::other("nobody is at home"));
            }
            Ok(Keys {
                id: format!("key {time}"),
                secret: "secret".into(),
                token: None,
                expires: lasts.map(|lasts| SystemTime::now() + lasts),
            })
        };
        (times, Credentials::Asked(Arc::new(ask)))
    }

    fn ids(credentials: &Credentials, times: usize) -> Vec<io::Result<String>> {
        let provider = credentials.provider::<AwsCredential>();
        let next = || {
            let provider = Arc::clone(&provider);
            runtime::wait(async move {
                let credential = provider.get_credential().await;
                Ok(credential.map_err(io::Error::other)?.key_id.clone())
            })
        };
        (0..times).map(|_| next()).collect()
    }

    #[test]
    fn a_key_is_asked_for_once_as_long_as_it_is_good() {
        for lasts in [None, Some(Duration::from_secs(3600))] {
            let (times, credentials) = asked(lasts, usize::MAX);
            let ids = ids(&credentials, 3);
            assert!(ids.iter().all(|id| id.as_ref().unwrap() == "key 0"));
            assert_eq!(times.load(Ordering::Relaxed), 1);
        }
    }

    #[test]
    fn one_that_ends_soon_is_asked_for_anew_and_used_until_then() {
        let (_, credentials) = asked(Some(Duration::from_secs(60)), 2);
        let ids = ids(&credentials, 4);
        let ids: Vec<_> = ids.iter().map(|id| id.as_ref().unwrap()).collect();
        assert_eq!(ids, ["key 0", "key 1", "key 1", "key 1"]);
    }

    #[test]
    fn one_that_has_ended_is_no_key() {
        let (_, credentials) = asked(Some(Duration::ZERO), 1);
        let ids = ids(&credentials, 2);
        assert!(ids[0].is_ok());
        let text = ids[1].as_ref().unwrap_err().to_string();
        assert!(text.contains("nobody is at home"), "{text}");
    }

    #[test]
    fn what_makes_no_header_is_refused() {
        for (id, token) in [("", "token\n"), ("key\n", "token")] {
            let keys = Keys {
                id: id.into(),
                secret: "secret".into(),
                token: Some(token.into()),
                expires: None,
            };
            let text = ids(&Credentials::Given(keys), 1).remove(0).unwrap_err();
            assert!(text.to_string().contains("a line's end"), "{text}");
        }
    }

    #[test]
    fn no_secret_is_shown() {
        let keys = Keys {
            id: "me".into(),
            secret: "hidden".into(),
            token: Some("hidden".into()),
            expires: None,
        };
        let shown = format!("{:?}", Credentials::Given(keys));
        assert!(shown.contains("me") && !shown.contains("hidden"), "{shown}");
    }
}
