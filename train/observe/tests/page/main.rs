//! The page's server, from the view of its clients.

mod client;
mod strangers;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use client::{Answer, get, get_json, runs_of, serve_runs, write_run};
use kiln_collectives::{Span, StepTimeline};
use kiln_observe::page::{AccessToken, PageError, ServeOptions, serve};
use kiln_observe::status::Look;
use kiln_testkit::{PATIENCE, receive};

#[test]
fn growing_runs_are_shown() {
    let root = tempfile::tempdir().unwrap();
    let folder = write_run(root.path(), "one", 3);
    let server = serve_runs(vec![root.path().to_owned()], None);
    let runs = runs_of(&server);
    assert_eq!((runs[0]["id"].as_str(), runs[0]["step"].as_u64()), (Some("one"), Some(3)));
    assert_eq!(runs[0]["steps"], 10);
    assert!(runs[0]["text"].as_str().unwrap().contains("no process can be asked"), "{}", runs[0]);
    let series = get_json(&server, "/api/series?run=one&key=loss&key=lr&over=tokens");
    assert_eq!(series["series"]["loss"]["mean"], serde_json::json!([1.0, 0.5, 0.333333]));
    assert_eq!(series["series"]["loss"]["over"], serde_json::json!([100.0, 200.0, 300.0]));
    assert!(series["series"].get("lr").is_none());
    assert_eq!(get_json(&server, "/api/keys?run=one")["keys"], serde_json::json!(["loss", "tokens"]));

    let mut metrics = fs::OpenOptions::new().append(true).open(folder.join("metrics.jsonl")).unwrap();
    metrics.write_all(b"{\"step\":4,\"loss\":0.25}\n").unwrap();
    write_run(root.path(), "two", 1);
    // The folders are only read again after a while; until then clients get the last known state.
    let mut asked = std::iter::repeat_with(|| runs_of(&server));
    let grown = asked.find(|runs| runs.as_array().unwrap().len() == 2).unwrap();
    assert_eq!((grown[0]["step"].as_u64(), grown[1]["id"].as_str()), (Some(4), Some("two")));
    let config = get_json(&server, "/api/config?run=one&run=two");
    let differing: Vec<_> =
        config["keys"].as_array().unwrap().iter().filter(|key| key["differs"] == true).collect();
    assert_eq!(differing.len(), 1, "{config}");
    assert_eq!(differing[0]["values"], serde_json::json!(["one", "two"]));
}

#[test]
fn broken_runs_are_shown_in_part() {
    let root = tempfile::tempdir().unwrap();
    let folder = write_run(root.path(), "killed", 2);
    fs::write(folder.join("config.toml"), "[train\n").unwrap();
    fs::write(folder.join("samples.jsonl"), "{\"step\":1,\"prompt\":\"a\",\"text\":\"b\"}\nno line\n")
        .unwrap();
    fs::write(folder.join("events.jsonl"), "{\"time\":1,\"step\":1,\"kind\":\"new\",\"text\":\"<b>\"}\n")
        .unwrap();
    let mut metrics = fs::OpenOptions::new().append(true).open(folder.join("metrics.jsonl")).unwrap();
    metrics
        .write_all(b"{\"future\":[{}]}\n{\"step\":3,\"loss\":null,\"x\":{\"y\":1}}\n{\"step\":4,\"lo")
        .unwrap();
    let missing = root.path().join("missing");
    let server = serve_runs(vec![folder, missing, root.path().join("killed/metrics.jsonl")], None);
    let all = get_json(&server, "/api/runs");
    let problems = all["problems"].as_array().unwrap();
    assert!(
        problems.len() == 2 && problems[0].as_str().unwrap().contains("it does not exist"),
        "{problems:?}"
    );
    let run = &all["runs"][0];
    assert_eq!(
        (run["step"].as_u64(), &run["loss"], run["steps"].is_null()),
        (Some(3), &serde_json::Value::Null, true)
    );
    let told = run["problems"].as_array().unwrap();
    assert!(
        told.len() == 2 && told[1].as_str().unwrap().contains("skipped 2 lines that this build cannot read"),
        "{told:?}"
    );
    assert_eq!(get_json(&server, "/api/samples?run=killed")["total"], 1);
    assert_eq!(get_json(&server, "/api/events?run=killed")["events"][0]["kind"], "new");
    assert_eq!(get_json(&server, "/api/look?run=killed")["look"], serde_json::Value::Null);
    let timeline = get_json(&server, "/api/timeline?run=killed");
    assert!(timeline["problem"].is_string(), "{timeline}");
    let text = get(&server, "/metrics").body;
    assert!(
        text.contains("kiln_step{run=\"killed\"} 3\n") && text.contains("kiln_loss{run=\"killed\"} NaN\n"),
        "{text}"
    );
}

#[test]
fn no_runs_are_no_error() {
    let root = tempfile::tempdir().unwrap();
    let server = serve_runs(vec![root.path().to_owned()], None);
    let all = get_json(&server, "/api/runs");
    assert_eq!((all["runs"].as_array().unwrap().len(), all["problems"].as_array().unwrap().len()), (0, 1));
    assert!(get(&server, "/metrics").body.starts_with("# HELP kiln_build_info"));
}

#[test]
fn stalled_clients_slow_no_one() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), "one", 2000);
    let server = serve_runs(vec![root.path().to_owned()], None);
    let connect = || TcpStream::connect(server.address()).unwrap();
    let mut slow = Vec::new();
    for number in 0..300 {
        let mut stream = connect();
        let host = format!("Host: {}\r\n", server.address());
        let text = match number % 3 {
            // No bytes, half a request, and a request whose answers are never read.
            0 => String::new(),
            1 => format!("GET / HTTP/1.1\r\n{host}X-Slow: "),
            _ => format!("GET / HTTP/1.1\r\n{host}\r\n").repeat(40),
        };
        // The oldest ones are closed when there are too many.
        let _ = stream.write_all(text.as_bytes());
        slow.push(stream);
    }
    for _ in 0..3 {
        assert_eq!(get(&server, "/api/runs").status, 200);
    }
    drop(slow);
}

#[test]
fn hung_processes_slow_no_client() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), "one", 3);
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let look_at = move |_: &Path| -> Result<Look, String> {
        // Blocks until the test is over.
        let _ = held.lock().unwrap().recv();
        Err("no process can be asked".to_owned())
    };
    let options = client::options(vec![root.path().to_owned()], None);
    let server = serve(ServeOptions { look_at: Arc::new(look_at), ..options }).unwrap();
    assert_eq!(get_json(&server, "/api/series?run=one&key=loss")["last_step"], 3);
    server.stop();
    drop(release);
}

#[test]
fn stopped_server_frees_its_address() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), "one", 3);
    let server = serve_runs(vec![root.path().to_owned()], None);
    let address = server.address();
    let mut stream = TcpStream::connect(address).unwrap();
    assert_eq!(get(&server, "/api/runs").status, 200);
    let again = serve(ServeOptions { address, ..client::options(Vec::new(), None) });
    assert!(matches!(again, Err(PageError::Bind { .. })));
    server.stop();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match stream.read(&mut [0]) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("the connection stays open"),
        read => assert_eq!(read.unwrap_or(0), 0),
    }
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn timelines_share_one_clock() {
    let root = tempfile::tempdir().unwrap();
    write_run(root.path(), "one", 3);
    let timeline = |rank: usize, created: f64| StepTimeline {
        rank,
        node: "a".to_owned(),
        step: 7,
        start: 2.0,
        end: 2.5,
        created,
        spans: vec![Span {
            activity: "forward".to_owned(),
            module: Some("layers.0".to_owned()),
            waits_for: (rank == 1).then(|| ("shard".to_owned(), 3)),
            start: 2.1,
            end: 2.2,
            bytes: 5,
        }],
        records: Vec::new(),
    };
    let options = client::options(vec![root.path().to_owned()], None);
    let timelines_at = move |_: &Path| Ok(vec![timeline(1, 10.25), timeline(0, 10.0)]);
    let server = serve(ServeOptions { timelines_at: Some(Arc::new(timelines_at)), ..options }).unwrap();
    let told = get_json(&server, "/api/timeline?run=one");
    assert_eq!((told["step"].as_u64(), told["length"].as_u64()), (Some(7), Some(750_000)));
    assert_eq!(told["names"], serde_json::json!(["forward", "layers.0", "call 3 of group shard"]));
    assert_eq!(told["ranks"][0]["spans"], serde_json::json!([[0, 1, 100_000, 200_000, 5, -1]]));
    assert_eq!(told["ranks"][1]["spans"], serde_json::json!([[0, 1, 350_000, 450_000, 5, 2]]));
}

#[test]
fn page_has_few_permissions() {
    let root = tempfile::tempdir().unwrap();
    let server = serve_runs(vec![root.path().to_owned()], None);
    let page = get(&server, "/");
    let nonce = |page: &Answer| {
        let rule = page.header("content-security-policy").unwrap().to_owned();
        assert!(
            rule.starts_with("default-src 'none'; script-src 'nonce-")
                && rule.contains("frame-ancestors 'none'")
        );
        rule.split('\'').find_map(|part| part.strip_prefix("nonce-")).unwrap().to_owned()
    };
    assert!(page.body.contains(&format!("<script nonce=\"{}\">", nonce(&page))));
    assert_ne!(nonce(&page), nonce(&get(&server, "/")));
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        assert_eq!(page.header(name), Some(value));
        assert_eq!(get(&server, "/nothing").header(name), Some(value));
    }
    let head =
        client::ask(server.address(), "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert_eq!((head.status, head.body.as_str()), (200, ""));
}

#[test]
fn other_machines_need_a_token() {
    let options =
        |token| ServeOptions { address: "0.0.0.0:0".parse().unwrap(), ..client::options(Vec::new(), token) };
    assert!(matches!(serve(options(None)), Err(PageError::TokenNeeded { .. })));
    let token = AccessToken::random().unwrap();
    let server = serve(options(Some(token.clone()))).unwrap();
    assert!(server.url().ends_with(&format!("/?token={}", token.text())));
}

#[test]
fn orders_reach_the_named_run() {
    let root = tempfile::tempdir().unwrap();
    let folder = write_run(root.path(), "one", 3);
    write_run(root.path(), "two", 3);
    let (tells, told) = mpsc::channel();
    let tells = Mutex::new(tells);
    let tell = move |run: &Path, line: &str| match run.ends_with("one") {
        true => {
            tells.lock().unwrap().send((run.to_owned(), line.to_owned())).unwrap();
            Ok(format!("it does: {line}"))
        }
        false => Err("it is over".to_owned()),
    };
    let token = AccessToken::new("a-token-of-this-test").unwrap();
    let options = client::options(vec![root.path().to_owned()], Some(token));
    let server = serve(ServeOptions { tell: Some(Arc::new(tell)), ..options }).unwrap();
    let (address, host) = (server.address(), format!("Host: {}\r\n", server.address()));
    let bearer = "Authorization: Bearer a-token-of-this-test\r\n";
    let ours = format!("{host}{bearer}X-Kiln-Control: 1\r\n");
    // The folders have been read by then.
    let runs = client::get_with(address, "/api/runs", &format!("{host}{bearer}"));
    assert!(runs.body.contains("\"orders\":true"), "{}", runs.body);
    let post = |path: &str, headers: &str| {
        client::ask(address, &format!("POST {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n"))
    };
    let answer = post("/api/checkpoint?run=one", &ours);
    assert_eq!((answer.status, answer.body.as_str()), (200, "{\"said\":\"it does: checkpoint\"}"));
    assert_eq!(receive("an order", &told), (folder.clone(), "checkpoint".to_owned()));
    assert_eq!(post("/api/stop?run=one", &ours).status, 200);
    assert_eq!(receive("an order", &told), (folder, "quit".to_owned()));
    let answer = post("/api/stop?run=two", &ours);
    assert_eq!((answer.status, answer.body.as_str()), (409, "{\"error\":\"it is over\"}"));
    for (path, headers, status) in [
        ("/api/stop?run=three", ours.clone(), 404),
        ("/api/stop", ours.clone(), 404),
        ("/api/runs", ours.clone(), 405),
        ("/api/stop?run=one", format!("{host}{bearer}"), 403),
        ("/api/stop?run=one", format!("{host}X-Kiln-Control: 1\r\n"), 401),
        ("/api/stop?run=one", format!("{ours}Origin: http://evil.example\r\n"), 403),
        ("/api/stop?run=one", ours.replace(&host, "Host: evil.example\r\n"), 421),
        ("/api/stop?run=one", format!("{ours}Sec-Fetch-Site: cross-site\r\n"), 403),
        ("/api/stop?run=one", format!("{ours}Content-Length: 2\r\n"), 413),
    ] {
        assert_eq!(post(path, &headers).status, status, "{path} {headers}");
    }
    // A link, such as one that a browser prefetches, gives no order.
    assert_eq!(client::get_with(address, "/api/stop?run=one", &ours).status, 405);
    assert!(told.try_recv().is_err());

    let options = client::options(Vec::new(), None);
    let without = serve(ServeOptions { tell: Some(Arc::new(|_, _| Ok(String::new()))), ..options });
    assert!(matches!(without, Err(PageError::TokenNeededForOrders)));
    let server = serve_runs(vec![root.path().to_owned()], None);
    let host = format!("Host: {}\r\n", server.address());
    let order =
        format!("POST /api/stop?run=one HTTP/1.1\r\nConnection: close\r\n{host}X-Kiln-Control: 1\r\n\r\n");
    assert_eq!(client::ask(server.address(), &order).status, 405);
}
