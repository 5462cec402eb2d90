//! The answer to each address of the server.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue, SET_COOKIE};
use hyper::header::{HeaderName, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;

use super::comparison::comparison;
use super::details::{SeriesQuery, config, events, keys, look, samples, series};
use super::document::{rule, served};
use super::guard::{Guard, random_hex};
use super::prometheus::metrics;
use super::refresh::Refresher;
use super::summary::runs as summaries;
use super::timeline::timeline;
use super::watched::{Watched, WatchedRun};

/// Maximum age of answers, if the runs can be read and asked that fast.
const AGE: Duration = Duration::from_millis(900);

/// Maximum time that a client waits for new data of folders, and of processes. Then it gets the latest known state.
const PATIENCE: [Duration; 2] = [Duration::from_secs(20), Duration::from_secs(3)];

const MOST_URI: usize = 4096;

const POINTS: (usize, usize) = (800, 5000);

const MOST_NAMED: usize = 64;

/// Headers of every answer. No other page may frame the page or learn its address.
const HEADERS: [(&str, &str); 6] = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
];

const JSON: &str = "application/json";

/// Header that every order needs: forms and links of other sites cannot send it.
const ORDER: &str = "x-kiln-control";

pub(super) struct Site {
    pub(super) guard: Guard,
    pub(super) watched: Arc<Watched>,
    pub(super) reader: Refresher,
    pub(super) asker: Refresher,
    pub(super) tell: Option<Tell>,
}

type Failure = (StatusCode, String);

impl Site {
    pub(super) async fn answer<B: Body>(self: Arc<Self>, request: Request<B>) -> Response<Full<Bytes>> {
        let query = Query::of(request.uri().query().unwrap_or_default());
        let sets_cookie = match self.guard.admit(request.headers(), query.first("token")) {
            Ok(sets_cookie) => sets_cookie,
            Err((status, why)) => return failure(status, why),
        };
        let result = self.respond(request, query).await;
        let mut response = result.unwrap_or_else(|(status, why)| failure(status, &why));
        if sets_cookie && let Some(Ok(cookie)) = self.guard.cookie().map(HeaderValue::try_from) {
            response.headers_mut().insert(SET_COOKIE, cookie);
        }
        response
    }

    async fn respond<B: Body>(
        self: &Arc<Self>,
        request: Request<B>,
        query: Query,
    ) -> Result<Response<Full<Bytes>>, Failure> {
        let (path, method) = (request.uri().path(), request.method());
        let refusal = |status: StatusCode, why: &str| Err((status, why.to_owned()));
        let order = order_at(path).filter(|_| self.tell.is_some());
        let (allowed, why) = match order {
            Some(_) => (&[Method::POST][..], "orders must be sent with POST"),
            None => (&[Method::GET, Method::HEAD][..], "this address only accepts GET"),
        };
        if !allowed.contains(method) {
            let mut response = failure(StatusCode::METHOD_NOT_ALLOWED, why);
            let allow = if order.is_some() { "POST" } else { "GET, HEAD" };
            response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
            return Ok(response);
        }
        if !request.body().is_end_stream() {
            return refusal(StatusCode::PAYLOAD_TOO_LARGE, "this address accepts no request body");
        }
        if request.uri().to_string().len() > MOST_URI {
            return refusal(StatusCode::URI_TOO_LONG, "the address is too long");
        }
        let (kind, body) = match path {
            "/" => return Ok(page()),
            _ if let Some(order) = order => {
                if !request.headers().contains_key(ORDER) {
                    return refusal(StatusCode::FORBIDDEN, "an order needs the header x-kiln-control");
                }
                self.give(order, query).await?
            }
            _ if path == "/metrics" || path.starts_with("/api/") => self.prepared(path, query).await?,
            _ => return refusal(StatusCode::NOT_FOUND, "there is no such address"),
        };
        Ok(response(StatusCode::OK, kind, body))
    }

    async fn give(&self, order: &'static str, query: Query) -> Result<Answer, Failure> {
        self.reader.fresh(AGE, PATIENCE[0]).await;
        let run = query.first("run").and_then(|id| self.watched.run(id));
        let (Some(run), Some(tell)) = (run, self.tell.clone()) else {
            return Err((StatusCode::NOT_FOUND, "no run has this name".to_owned()));
        };
        let folder = run.read().folder().to_owned();
        let sent = tokio::task::spawn_blocking(move || tell(&folder, order)).await;
        let sent =
            sent.map_err(|_| (StatusCode::INTERNAL_SERVER_ERROR, "cannot send the order".to_owned()))?;
        json(&serde_json::json!({ "said": sent.map_err(|why| (StatusCode::CONFLICT, why))? }))
    }

    async fn prepared(self: &Arc<Self>, path: &str, query: Query) -> Result<Answer, Failure> {
        self.reader.fresh(AGE, PATIENCE[0]).await;
        if path == "/api/timeline" {
            let run = query.first("run").and_then(|id| self.watched.run(id));
            if run.is_some_and(|run| !run.want_timelines()) {
                self.asker.fresh(Duration::ZERO, PATIENCE[1]).await;
            }
        }
        if matches!(path, "/metrics" | "/api/runs" | "/api/look" | "/api/timeline") {
            self.asker.fresh(AGE, PATIENCE[1]).await;
        }
        let (site, path) = (self.clone(), path.to_owned());
        // Long curves take a while, and the current thread serves all connections.
        let answer = tokio::task::spawn_blocking(move || site.made(&path, &query)).await;
        answer.map_err(|_| (StatusCode::INTERNAL_SERVER_ERROR, "cannot create the answer".to_owned()))?
    }

    fn failures(&self) -> Vec<String> {
        let threads =
            [(&self.reader, "folders are no longer read"), (&self.asker, "ranks are no longer queried")];
        let failed = threads.into_iter().filter(|(thread, _)| thread.has_failed());
        failed.map(|(_, what)| format!("{what}: this is a bug in kiln; restart the server")).collect()
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
                let text = metrics(&self.watched);
                Ok(("text/plain; version=0.0.4; charset=utf-8", Bytes::from(text)))
            }
            "/api/runs" => {
                let now =
                    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
                json(&summaries(&self.watched, now, self.failures(), self.tell.is_some()))
            }
            "/api/series" => json(&series(&*run()?, &query.series()?)),
            "/api/keys" => json(&keys(&*run()?)),
            "/api/config" => json(&config(&runs())),
            "/api/comparison" => json(&comparison(&runs())),
            "/api/samples" => json(&samples(&*run()?)),
            "/api/events" => json(&events(&*run()?)),
            "/api/look" => json(&look(&*run()?)),
            "/api/timeline" => json(&timeline(&*run()?)),
            _ => Err((StatusCode::NOT_FOUND, "there is no such address".to_owned())),
        }
    }
}

fn json(answer: &impl Serialize) -> Result<Answer, Failure> {
    let body =
        serde_json::to_vec(answer).map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok((JSON, Bytes::from(body)))
}

/// Returns the page. Its content security policy allows only its own script, and requests to this server.
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

fn failure(status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "error": why }).to_string();
    let mut response = response(status, JSON, Bytes::from(body));
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
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

fn order_at(path: &str) -> Option<&'static str> {
    match path {
        "/api/checkpoint" => Some("checkpoint"),
        "/api/stop" => Some("quit"),
        _ => None,
    }
}

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

    fn number(&self, name: &str, otherwise: u64) -> Result<u64, Failure> {
        let Some(text) = self.first(name) else { return Ok(otherwise) };
        text.parse().map_err(|_| (StatusCode::BAD_REQUEST, format!("{name} is not a number")))
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

type Answer = (&'static str, Bytes);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = Query::of("run=a%20b&key=loss&key=x%2Fy&points=1e9&from=2&odd&log=1&z=%e2%82%");
        assert_eq!(query.first("run"), Some("a b"));
        assert_eq!(query.all("key").collect::<Vec<_>>(), ["loss", "x/y"]);
        assert_eq!(query.first("z"), Some("\u{fffd}%"));
        assert_eq!(query.series().unwrap_err().0, StatusCode::BAD_REQUEST);
        let series = Query::of("points=999999999&key=a").series().unwrap();
        assert_eq!((series.points, series.steps, series.is_log), (POINTS.1, (0, u64::MAX), false));
    }
}
