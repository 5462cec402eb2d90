//! Decides which requests are answered.
//!
//! Refuses clients without the token, pages of other sites in the user's browser (`Origin`, `Sec-Fetch-Site`), and
//! pages whose host name was rebound to this machine (`Host`).

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, SocketAddr};

use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, COOKIE, HOST, HeaderMap, HeaderName, ORIGIN};
use subtle::ConstantTimeEq;

use super::error::PageError;

const MOST_HOST: usize = 260;

#[derive(Debug)]
pub(super) struct Guard {
    address: SocketAddr,
    token: Option<AccessToken>,
    names: Vec<String>,
}

pub(super) type Refusal = (StatusCode, &'static str);

impl Guard {
    /// Creates a guard for a server bound to `address`. `names` are additional names of this machine.
    pub(super) fn new(address: SocketAddr, token: Option<AccessToken>, names: &[String]) -> Guard {
        Guard { address, token, names: names.iter().map(|name| name.to_ascii_lowercase()).collect() }
    }

    /// Returns a cookie name that is unique per token, because browsers send cookies to all ports of a host.
    fn cookie_name(token: &AccessToken) -> String {
        format!("kiln-{}", token.mark())
    }

    /// Returns the `Set-Cookie` header that makes a browser remember the token.
    pub(super) fn cookie(&self) -> Option<String> {
        let token = self.token.as_ref()?;
        Some(format!("{}={}; HttpOnly; SameSite=Strict; Path=/", Self::cookie_name(token), token.text()))
    }

    /// Checks a request's headers and `?token=`. Returns true if the browser should remember a token from the address.
    pub(super) fn admit(&self, headers: &HeaderMap, token: Option<&str>) -> Result<bool, Refusal> {
        let host = self.host(headers)?;
        is_of_this_site(headers, host)?;
        let Some(expected) = &self.token else { return Ok(false) };
        if token.is_some_and(|shown| expected.is(shown)) {
            return Ok(true);
        }
        match bearer(headers).is_some_and(|shown| expected.is(shown)) || has_cookie(headers, expected) {
            true => Ok(false),
            false => Err((
                StatusCode::UNAUTHORIZED,
                "the token is missing or wrong: open the address with ?token=",
            )),
        }
    }

    /// Returns the `Host` header if it names this machine, with any port: a tunnel may listen on another one.
    fn host<'a>(&self, headers: &'a HeaderMap) -> Result<&'a str, Refusal> {
        const WRONG: Refusal = (StatusCode::MISDIRECTED_REQUEST, "this server has another host name");
        let mut hosts = headers.get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(WRONG) };
        let host = host.to_str().map_err(|_| WRONG)?;
        let name = name_of(host).ok_or(WRONG)?.to_ascii_lowercase();
        let is_ours = match name.parse::<IpAddr>() {
            Ok(ip) if self.address.ip().is_loopback() => ip.is_loopback(),
            // DNS rebinding does not affect numeric addresses.
            Ok(ip) => ip == self.address.ip() || ip.is_loopback() || self.address.ip().is_unspecified(),
            Err(_) => name == "localhost" || self.names.contains(&name),
        };
        if is_ours { Ok(host) } else { Err(WRONG) }
    }
}

fn has_cookie(headers: &HeaderMap, expected: &AccessToken) -> bool {
    let ours = Guard::cookie_name(expected);
    let texts = headers.get_all(COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let mut pairs = texts.flat_map(|text| text.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.any(|(name, value)| name == ours && expected.is(value))
}

/// Returns the name or address in `NAME:PORT`, `1.2.3.4:PORT` or `[::1]:PORT`.
fn name_of(host: &str) -> Option<&str> {
    if host.len() > MOST_HOST {
        return None;
    }
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(ip, rest)| (ip, rest.strip_prefix(':')))?,
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    port.is_none_or(|port| port.parse::<u16>().is_ok()).then_some(name)
}

/// Checks that the browser does not mark the request as coming from another site.
fn is_of_this_site(headers: &HeaderMap, host: &str) -> Result<(), Refusal> {
    const OTHER: Refusal = (StatusCode::FORBIDDEN, "requests from other sites are refused");
    if let Some(origin) = headers.get(ORIGIN) {
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        let is_same = authority.is_some_and(|(scheme, authority)| {
            matches!(scheme, "http" | "https") && authority.eq_ignore_ascii_case(host)
        });
        if !is_same {
            return Err(OTHER);
        }
    }
    let fetch = |name: &'static str| headers.get(HeaderName::from_static(name)).map(|value| value.as_bytes());
    match fetch("sec-fetch-site") {
        None | Some(b"same-origin" | b"none") => Ok(()),
        // The user followed a link, and the other site cannot read the answer.
        Some(_)
            if fetch("sec-fetch-mode") == Some(b"navigate")
                && fetch("sec-fetch-dest") == Some(b"document") =>
        {
            Ok(())
        }
        Some(_) => Err(OTHER),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

const BYTES: usize = 24;

const LEAST: usize = 16;

/// A secret that clients must present. It is part of the URL that a user opens.
#[derive(Clone)]
pub struct AccessToken(String);

impl AccessToken {
    /// Creates a random token.
    ///
    /// # Errors
    ///
    /// If the system has no random bytes.
    pub fn random() -> io::Result<AccessToken> {
        random_hex::<BYTES>().map(AccessToken)
    }

    /// Creates a token from `text`, such as the value of an environment variable.
    ///
    /// # Errors
    ///
    /// If it is short, or has characters other than letters, digits, `-` and `_`.
    pub fn new(text: impl Into<String>) -> Result<AccessToken, PageError> {
        let text = text.into();
        let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        if is_plain && text.len() >= LEAST { Ok(AccessToken(text)) } else { Err(PageError::WeakToken) }
    }

    /// Returns the token.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns a hash that distinguishes tokens.
    pub(super) fn mark(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// Compares in constant time.
    pub(super) fn is(&self, shown: &str) -> bool {
        bool::from(self.0.as_bytes().ct_eq(shown.as_bytes()))
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken")
    }
}

pub(super) fn random_hex<const N: usize>() -> io::Result<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn status(guard: &Guard, pairs: &[(&'static str, &str)]) -> u16 {
        guard.admit(&headers(pairs), None).map_or_else(|(status, _)| status.as_u16(), |_| 200)
    }

    fn guard(address: &str, token: Option<AccessToken>) -> Guard {
        Guard::new(address.parse().unwrap(), token, &["Trainbox".to_owned()])
    }

    #[test]
    fn only_own_host_names_are_answered() {
        let local = guard("127.0.0.1:6006", None);
        for host in
            ["127.0.0.1:6006", "localhost:6006", "LocalHost:8080", "[::1]:6006", "127.0.0.1", "trainbox:1"]
        {
            assert_eq!(status(&local, &[("host", host)]), 200, "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example:6006",
            "10.0.0.1:6006",
            "",
            "localhost:x",
            "[::1",
            "localhost:99999",
        ] {
            assert_eq!(status(&local, &[("host", host)]), 421, "{host}");
        }
        assert_eq!(status(&local, &[]), 421);
        assert_eq!(status(&local, &[("host", "localhost"), ("host", "localhost")]), 421);
        let open = guard("0.0.0.0:6006", None);
        assert_eq!(status(&open, &[("host", "10.0.0.1:6006")]), 200);
        assert_eq!(status(&open, &[("host", "evil.example:6006")]), 421);
        assert_eq!(status(&guard("10.0.0.2:6006", None), &[("host", "10.0.0.1:6006")]), 421);
    }

    #[test]
    fn other_sites_are_not_answered() {
        let local = guard("127.0.0.1:6006", None);
        let with =
            |pairs: &[(&'static str, &str)]| status(&local, &[&[("host", "localhost:6006")], pairs].concat());
        assert_eq!(with(&[("origin", "http://localhost:6006"), ("sec-fetch-site", "same-origin")]), 200);
        for origin in
            ["http://evil.example", "null", "http://localhost:7007", "file://", "ftp://localhost:6006"]
        {
            assert_eq!(with(&[("origin", origin)]), 403, "{origin}");
        }
        assert_eq!(with(&[("sec-fetch-site", "cross-site")]), 403);
        assert_eq!(with(&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")]), 403);
        let link = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ];
        assert_eq!(with(&link), 200);
        let frame =
            [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")];
        assert_eq!(with(&frame), 403);
    }

    #[test]
    fn token_is_read_from_three_places() {
        let token = |text| AccessToken::new(text).unwrap();
        let guard = guard("0.0.0.0:6006", Some(token("secret-secret-secret")));
        let name = Guard::cookie_name(&token("secret-secret-secret"));
        let other = Guard::cookie_name(&token("secret-secret-other-"));
        assert_ne!(name, other);
        let cookie = |name: &str, value: &str| format!("a=b; {name}={value}");
        let host = ("host", "10.0.0.1:6006");
        for (header, expected) in [
            (("authorization", "Bearer secret-secret-secret".to_owned()), 200),
            (("authorization", "bearer secret-secret-secret".to_owned()), 200),
            (("authorization", "Bearer wrong".to_owned()), 401),
            (("authorization", "Basic secret-secret-secret".to_owned()), 401),
            (("cookie", cookie(&name, "secret-secret-secret")), 200),
            (("cookie", cookie(&other, "secret-secret-secret")), 401),
            (("cookie", cookie(&name, "secret-secret-secre")), 401),
            (("accept", "*/*".to_owned()), 401),
        ] {
            assert_eq!(status(&guard, &[host, (header.0, &header.1)]), expected, "{header:?}");
        }
        let asked = |token| guard.admit(&headers(&[host]), Some(token));
        assert_eq!(asked("secret-secret-secret"), Ok(true));
        assert!(asked("").is_err() && asked("secret-secret-secrets").is_err());
        assert_eq!(
            guard.cookie().unwrap(),
            format!("{name}=secret-secret-secret; HttpOnly; SameSite=Strict; Path=/")
        );
    }

    #[test]
    fn only_the_token_itself_is_right() {
        let token = AccessToken::random().unwrap();
        assert_eq!(token.text().len(), 2 * BYTES);
        assert!(token.is(token.text()) && !token.is("") && !token.is(&token.text()[1..]));
        assert_ne!(token.text(), AccessToken::random().unwrap().text());
        assert!(
            AccessToken::new("0123456789abcde").is_err() && AccessToken::new("0123456789abcde;").is_err()
        );
        assert!(AccessToken::new("0123456789abcde_").is_ok());
        assert!(!format!("{token:?}").contains(token.text()));
    }
}
