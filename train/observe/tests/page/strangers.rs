//! Requests that are refused.

use super::client::{ask, get, get_with, serve_runs, write_run};
use kiln_observe::page::AccessToken;

/// A text that only admitted clients may see.
const SECRET: &str = "the-name-of-a-run";

const PATHS: [&str; 6] = [
    "/",
    "/metrics",
    "/api/runs",
    "/api/events?run=the-name-of-a-run",
    "/api/config",
    "/api/keys?run=the-name-of-a-run",
];

#[test]
fn nothing_is_sent_without_the_token() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), SECRET, 3);
    let token = AccessToken::random().unwrap();
    let server = serve_runs(vec![root.path().to_owned()], Some(token.clone()));
    let (address, text) = (server.address(), token.text());
    let host = format!("Host: {address}\r\n");
    let set = get(&server, &format!("/?token={text}")).header("set-cookie").unwrap().to_owned();
    let (cookie, _) = set.split_once('=').unwrap();
    for path in PATHS {
        for header in [
            String::new(),
            "Authorization: Bearer wrong\r\n".to_owned(),
            format!("Authorization: Bearer {}\r\n", &text[1..]),
            format!("Authorization: Bearer {text}x\r\n"),
            format!("Cookie: {cookie}={}\r\n", &text[..10]),
            format!("Cookie: other={text}\r\n"),
        ] {
            let answer = get_with(address, path, &format!("{host}{header}"));
            assert_eq!(answer.status, 401, "{path} {header}");
            assert!(
                !answer.body.contains(SECRET) && answer.header("set-cookie").is_none(),
                "{path} {header}"
            );
        }
        let answer = get_with(address, path, &format!("{host}Authorization: Bearer {text}\r\n"));
        assert_eq!(answer.status, 200, "{path}");
        assert!(path == "/" || answer.body.contains(SECRET), "{path}");
    }
    assert_eq!(get(&server, &format!("/?token={}x", text)).status, 401);
    let page = get(&server, &format!("/?token={text}"));
    assert_eq!(page.status, 200);
    let set = page.header("set-cookie").unwrap().to_owned();
    assert!(set.contains("; HttpOnly; SameSite=Strict"), "{set}");
    let pair = set.split(';').next().unwrap();
    let runs = get_with(address, "/api/runs", &format!("{host}Cookie: a=b; {pair}\r\n"));
    assert!(runs.status == 200 && runs.body.contains(SECRET));
}

#[test]
fn other_sites_get_nothing() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), SECRET, 3);
    // With and without the token: a browser that has the cookie sends it along.
    for token in [None, Some(AccessToken::random().unwrap())] {
        let bearer = token
            .as_ref()
            .map_or_else(String::new, |token| format!("Authorization: Bearer {}\r\n", token.text()));
        let server = serve_runs(vec![root.path().to_owned()], token);
        let (address, port) = (server.address(), server.address().port());
        let host = format!("Host: {address}\r\n");
        let forged = format!("Host: evil.example:{port}\r\n");
        for path in PATHS {
            for (headers, expected) in [
                (forged.clone(), 421),
                (format!("Host: evil.example:{port}\r\nX-Forwarded-Host: localhost\r\n"), 421),
                (String::new(), 421),
                (format!("{host}{host}"), 421),
                (format!("{host}Origin: http://evil.example\r\n"), 403),
                (format!("{host}Origin: null\r\n"), 403),
                (format!("{host}Origin: http://127.0.0.1:1\r\n"), 403),
                (format!("{host}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n"), 403),
                (format!("{host}Origin: http://{address}\r\nSec-Fetch-Site: same-origin\r\n"), 200),
            ] {
                let answer = get_with(address, path, &format!("{headers}{bearer}"));
                assert_eq!(answer.status, expected, "{path} {headers}");
                assert!(expected == 200 || !answer.body.contains(SECRET), "{path} {headers}");
                assert!(answer.header("access-control-allow-origin").is_none());
            }
        }
    }
}

#[test]
fn large_and_unusual_requests_are_refused() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), SECRET, 3);
    std::fs::write(root.path().join("beside"), "not for anybody").unwrap();
    let server = serve_runs(vec![root.path().to_owned()], None);
    let (address, host) = (server.address(), format!("Host: {}\r\n", server.address()));
    for path in [
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/beside",
        "/api/../beside",
        "//etc/passwd",
        "/api/events?run=../beside",
        "/api/events?run=%2e%2e%2fbeside",
        "/api/events?run=",
        "/api/events",
        "/api/series?run=/etc/passwd&key=loss",
        "/api/unknown",
        "/API/runs",
    ] {
        let answer = get(&server, path);
        assert_eq!(answer.status, 404, "{path}");
        assert!(!answer.body.contains("not for anybody") && !answer.body.contains("root:"), "{path}");
    }
    let status = |request: String| ask(address, &request).status;
    let filler = "x".repeat(20_000);
    assert_eq!(status(format!("GET / HTTP/1.1\r\n{host}X-Large: {filler}\r\n\r\n")), 431);
    let many: String = (0..100).map(|number| format!("X-{number}: y\r\n")).collect();
    assert_eq!(status(format!("GET / HTTP/1.1\r\n{host}{many}\r\n")), 431);
    let close = "Connection: close\r\n";
    let long = "x".repeat(5000);
    assert_eq!(status(format!("GET /api/runs?{long} HTTP/1.1\r\n{host}{close}\r\n")), 414);
    assert_eq!(status(format!("GET /api/runs?{filler} HTTP/1.1\r\n{host}{close}\r\n")), 431);
    assert_eq!(status(format!("GET / HTTP/1.1\r\n{host}{close}Content-Length: 5\r\n\r\nhello")), 413);
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"] {
        assert_eq!(status(format!("{method} /api/runs HTTP/1.1\r\n{host}{close}\r\n")), 405, "{method}");
    }
    assert_eq!(status("no request\r\n\r\n".to_owned()), 400);
    assert_eq!(get(&server, "/api/series?run=the-name-of-a-run&key=loss&points=many").status, 400);
    assert_eq!(get(&server, "/api/series?run=the-name-of-a-run&key=loss&points=99999999999").status, 200);
}
