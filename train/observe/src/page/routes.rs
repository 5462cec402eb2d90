//! The answer to each address of the server.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue, SET_COOKIE};
use hyper::header::{HeaderName, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;

use super::answers::{self, SeriesQuery};
use super::document::{rule, served};
use super::guard::Guard;
use super::kept::{Answer, Kept};
use super::refresh::Refresher;
use super::token::random_hex;
use super::watched::{Watched, WatchedRun};

/// Maximum age of answers, as long as the runs can be read and asked that fast.
const AGE: Duration = Duration::from_millis(900);

/// Maximum time that a client waits for news of folders, and of processes. After that it gets the latest
/// known state.
const PATIENCE: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(3)];

/// Maximum number of characters of an address.
const MOST_URI: usize = 4096;

/// Points of a curve: the default and the maximum.
const POINTS: (usize, usize) = (800, 5000);

/// Maximum number of runs or keys in a request.
const MOST_NAMED: usize = 64;

/// Headers of every answer. Only the page itself may run, and no other page may frame it or learn its
/// address.
const HEADERS: [(&str, &str); 6] = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
];

const JSON: &str = "application/json";

/// A header that an order must have, with any value: no form and no link of another site can send it.
const ORDER: &str = "x-kiln-control";

/// The state from which requests are answered.
pub(super) struct Site {
    pub(super) guard: Guard,
    pub(super) watched: Arc<Watched>,
    /// Reads folders.
    pub(super) reader: Refresher,
    /// Asks processes.
    pub(super) asker: Refresher,
    /// Sends orders to runs, if the server accepts them.
    pub(super) tell: Option<Tell>,
    pub(super) kept: Mutex<Kept>,
}

type Failure = (StatusCode, String);

impl Site {
    /// Answers a request.
    pub(super) async fn answer<B: Body>(self: Arc<Self>, request: Request<B>) -> Response<Full<Bytes>> {
        let uri = request.uri();
        let query = Query::of(uri.query().unwrap_or_default());
        let admitted = match self.guard.admit(request.headers(), query.first("token")) {
            Ok(admitted) => admitted,
            Err((status, why)) => return failure(status, why),
        };
        let (path, method) = (uri.path(), request.method());
        let order = Order::of(path).filter(|_| self.tell.is_some());
        match order {
            Some(_) if method != Method::POST => return not_allowed("POST", "an order is a POST"),
            None if method != Method::GET && method != Method::HEAD => {
                return not_allowed("GET, HEAD", "only GET: this does not change a run");
            }
            _ => {}
        }
        // A body has no meaning here.
        if !request.body().is_end_stream() {
            return failure(StatusCode::PAYLOAD_TOO_LARGE, "requests have no body here");
        }
        if uri.to_string().len() > MOST_URI {
            return failure(StatusCode::URI_TOO_LONG, "the address is too long");
        }
        let mut response = match path {
            _ if let Some(order) = order => return self.give(order, query, request.headers()).await,
            "/" => page(),
            "/metrics" => self.prepared(path, query, true).await,
            _ if path.starts_with("/api/") => {
                let asks = matches!(path, "/api/runs" | "/api/look" | "/api/timeline");
                self.prepared(path, query, asks).await
            }
            _ => failure(StatusCode::NOT_FOUND, "nothing has this address"),
        };
        if admitted.sets_cookie
            && let Some(Ok(cookie)) = self.guard.cookie().map(HeaderValue::try_from)
        {
            response.headers_mut().insert(SET_COOKIE, cookie);
        }
        response
    }

    /// Sends an order to a run, and answers with the run's response.
    async fn give(&self, order: Order, query: Query, headers: &HeaderMap) -> Response<Full<Bytes>> {
        if !Order::is_meant(headers) {
            return failure(StatusCode::FORBIDDEN, "an order has the header x-kiln-control");
        }
        let run = query.first("run").and_then(|id| self.watched.run(id));
        let (Some(run), Some(tell)) = (run, self.tell.clone()) else {
            return failure(StatusCode::NOT_FOUND, "no run has this name");
        };
        let folder = run.read().folder().to_owned();
        match tokio::task::spawn_blocking(move || tell(&folder, order.line())).await {
            Ok(Ok(said)) => match json(&serde_json::json!({ "said": said })) {
                Ok((kind, body)) => response(StatusCode::OK, kind, body),
                Err((status, why)) => failure(status, &why),
            },
            Ok(Err(why)) => failure(StatusCode::CONFLICT, &why),
            Err(_) => failure(StatusCode::INTERNAL_SERVER_ERROR, "the order could not be given"),
        }
    }

    /// Answers from the state of the runs, after refreshing it.
    async fn prepared(self: &Arc<Self>, path: &str, query: Query, asks: bool) -> Response<Full<Bytes>> {
        self.reader.fresh(AGE, PATIENCE[0]).await;
        if path == "/api/timeline" {
            let run = query.first("run").and_then(|id| self.watched.run(id));
            if run.is_some_and(|run| !run.want_timelines()) {
                self.asker.fresh(Duration::ZERO, PATIENCE[1]).await;
            }
        }
        if asks {
            self.asker.fresh(AGE, PATIENCE[1]).await;
        }
        let (site, path) = (self.clone(), path.to_owned());
        // Kept off the thread that serves all connections: a curve of a million steps takes a while.
        let answer = tokio::task::spawn_blocking(move || site.kept_or_made(&path, &query)).await;
        match answer {
            Ok(Ok((kind, body))) => response(StatusCode::OK, kind, body),
            Ok(Err((status, why))) => failure(status, &why),
            Err(_) => failure(StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be made"),
        }
    }

    fn kept_or_made(&self, path: &str, query: &Query) -> Result<Answer, Failure> {
        let version = (self.watched.version(), self.failures().len());
        let asked = query.asked(path);
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = kept().get(version, &asked) {
            return Ok(answer);
        }
        let answer = self.made(path, query)?;
        kept().keep(version, asked, answer.clone());
        Ok(answer)
    }

    /// Returns descriptions of the parts that no longer work.
    fn failures(&self) -> Vec<String> {
        let threads =
            [(&self.reader, "folders are no longer read"), (&self.asker, "ranks are no longer asked")];
        let failed = threads.into_iter().filter(|(thread, _)| thread.has_failed());
        failed.map(|(_, what)| format!("{what}: this server has a bug, start it again")).collect()
    }

    fn made(&self, path: &str, query: &Query) -> Result<Answer, Failure> {
        let run = || -> Result<Arc<WatchedRun>, Failure> {
            let id = query.first("run").unwrap_or_default();
            self.watched.run(id).ok_or((StatusCode::NOT_FOUND, "no run has this name".to_owned()))
        };
        let runs = || -> Vec<Arc<WatchedRun>> {
            let named: Vec<_> = query.all("run").take(MOST_NAMED).collect();
            let all = self.watched.runs().into_iter();
            all.filter(|run| named.is_empty() || named.contains(&run.id.as_str())).collect()
        };
        match path {
            "/metrics" => {
                let text = answers::metrics(&self.watched);
                Ok(("text/plain; version=0.0.4; charset=utf-8", Bytes::from(text)))
            }
            "/api/runs" => {
                let now =
                    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
                json(&answers::runs(&self.watched, now, self.failures(), self.tell.is_some()))
            }
            "/api/series" => json(&answers::series(&*run()?, &query.series()?)),
            "/api/keys" => json(&answers::keys(&*run()?)),
            "/api/config" => json(&answers::config(&runs())),
            "/api/comparison" => json(&answers::comparison(&runs())),
            "/api/samples" => json(&answers::samples(&*run()?)),
            "/api/events" => json(&answers::events(&*run()?)),
            "/api/look" => json(&answers::look(&*run()?)),
            "/api/timeline" => json(&answers::timeline(&*run()?)),
            _ => Err((StatusCode::NOT_FOUND, "nothing has this address".to_owned())),
        }
    }
}

fn json(answer: &impl Serialize) -> Result<Answer, Failure> {
    let body =
        serde_json::to_vec(answer).map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok((JSON, Bytes::from(body)))
}

/// Returns the page, with the policy that it may only run its own script and ask this server.
fn page() -> Response<Full<Bytes>> {
    let Ok(nonce) = random_hex::<16>() else {
        return failure(StatusCode::INTERNAL_SERVER_ERROR, "the system has no random bytes");
    };
    let rule = format!(
        "{}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        rule(&nonce)
    );
    let mut response = response(StatusCode::OK, "text/html; charset=utf-8", served(&nonce));
    if let Ok(rule) = HeaderValue::try_from(rule) {
        response.headers_mut().insert("content-security-policy", rule);
    }
    response
}

fn not_allowed(allowed: &'static str, why: &str) -> Response<Full<Bytes>> {
    let mut response = failure(StatusCode::METHOD_NOT_ALLOWED, why);
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

fn failure(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "error": why }).to_string();
    let mut response = response(status, JSON, Bytes::from(body));
    let headers = response.headers_mut();
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn response(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let rule = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.insert("content-security-policy", rule);
    for (name, value) in HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// Sends a line to the prompt of the run in a folder, as `kiln attach` does, and returns the run's response.
pub type Tell = Arc<dyn Fn(&Path, &str) -> Result<String, String> + Send + Sync>;

/// An order to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Save, and end.
    Checkpoint,
    /// Returns the order with this address.
    Stop,
}

impl Order {
    /// Returns the prompt command for the order.
    fn of(path: &str) -> Option<Order> {
        match path {
            "/api/checkpoint" => Some(Order::Checkpoint),
            "/api/stop" => Some(Order::Stop),
            _ => None,
        }
    }

    /// The line that means it at a prompt.
    fn line(self) -> &'static str {
        match self {
            Order::Checkpoint => "checkpoint",
            Order::Stop => "quit",
        }
    }

    /// Returns true if a request with these headers is an order.
    fn is_meant(headers: &HeaderMap) -> bool {
        headers.contains_key(ORDER)
    }
}

/// The part of an address after `?`.
struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    fn of(text: &str) -> Query {
        let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
        let pairs = pairs.map(|(name, value)| (decoded(name), decoded(value))).collect();
        Query { pairs }
    }

    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.pairs.iter().filter(move |pair| pair.0 == name).map(|pair| pair.1.as_str())
    }

    fn first(&self, name: &str) -> Option<&str> {
        self.pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.as_str())
    }

    /// Returns a key for a request to `path`: queries that differ only in unused parameters have the same
    /// key.
    fn asked(&self, path: &str) -> String {
        let read: &[&str] = match path {
            "/api/series" => &["run", "key", "over", "from", "to", "points", "log"],
            "/api/runs" | "/metrics" => &[],
            _ => &["run"],
        };
        let pairs: Vec<_> = self.pairs.iter().filter(|pair| read.contains(&pair.0.as_str())).collect();
        format!("{path}{pairs:?}")
    }

    fn number(&self, name: &str, otherwise: u64) -> Result<u64, Failure> {
        let Some(text) = self.first(name) else { return Ok(otherwise) };
        text.parse().map_err(|_| (StatusCode::BAD_REQUEST, format!("{name} is no number")))
    }

    fn series(&self) -> Result<SeriesQuery, Failure> {
        let points = self.number("points", POINTS.0 as u64)?.min(POINTS.1 as u64);
        Ok(SeriesQuery {
            keys: self.all("key").take(MOST_NAMED).map(str::to_owned).collect(),
            over: self.first("over").map(str::to_owned),
            steps: (self.number("from", 0)?, self.number("to", u64::MAX)?),
            points: points as usize,
            is_log: self.first("log") == Some("1"),
        })
    }
}

/// Decodes a name or value of a query. Invalid UTF-8 becomes replacement characters.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        let escaped = match (first, others) {
            (b'%', [high, low, ..]) => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                digit(*high).zip(digit(*low)).map(|(high, low)| (high * 16 + low) as u8)
            }
            _ => None,
        };
        bytes.push(escaped.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if escaped.is_some() { &others[2..] } else { others };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_as_browsers_write_them() {
        let query = Query::of("run=a%20b&key=loss&key=x%2Fy&points=1e9&from=2&odd&log=1&z=%e2%82%");
        assert_eq!(query.first("run"), Some("a b"));
        assert_eq!(query.all("key").collect::<Vec<_>>(), ["loss", "x/y"]);
        assert_eq!(query.first("z"), Some("\u{fffd}%"));
        assert_eq!(query.series().unwrap_err().0, StatusCode::BAD_REQUEST);
        let asked = |text| Query::of(text).asked("/api/series");
        assert_eq!(asked("run=a&key=b&now=1"), asked("run=a&no=2&key=b"));
        assert_ne!(asked("run=a&key=b"), asked("run=a&key=c"));
        assert_eq!(Query::of("run=a").asked("/api/runs"), Query::of("x=y").asked("/api/runs"));
        let series = Query::of("points=999999999&key=a").series().unwrap();
        assert_eq!((series.points, series.steps, series.is_log), (POINTS.1, (0, u64::MAX), false));
    }
}
