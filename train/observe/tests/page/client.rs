//! A client that sends exactly the given bytes, and a run to look at.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kiln_observe::page::{AccessToken, ServeOptions, Server, serve};
use serde_json::Value;

/// The response of a server.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

/// Sends these bytes and returns the answer. A connection closed without an answer has status 0.
pub fn ask(address: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(("127.0.0.1", address.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // A server that refuses early does not read the whole request.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

/// Returns the answer to a `GET` with further header lines.
pub fn get_with(address: SocketAddr, path: &str, headers: &str) -> Answer {
    ask(address, &format!("GET {path} HTTP/1.1\r\nConnection: close\r\n{headers}\r\n"))
}

pub fn get(server: &Server, path: &str) -> Answer {
    get_with(server.address(), path, &format!("Host: {}\r\n", server.address()))
}

pub fn get_json(server: &Server, path: &str) -> Value {
    let answer = get(server, path);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    serde_json::from_str(&answer.body).unwrap()
}

pub fn runs_of(server: &Server) -> Value {
    get_json(server, "/api/runs")["runs"].clone()
}

pub fn options(paths: Vec<PathBuf>, token: Option<AccessToken>) -> ServeOptions {
    ServeOptions {
        address: "127.0.0.1:0".parse().unwrap(),
        paths,
        token,
        names: Vec::new(),
        look_at: Arc::new(|_| Err("no process can be asked".to_owned())),
        timelines_at: None,
        tell: None,
    }
}

pub fn serve_runs(paths: Vec<PathBuf>, token: Option<AccessToken>) -> Server {
    serve(options(paths, token)).unwrap()
}

/// Writes a run of `steps` steps.
pub fn write_run(root: &Path, name: &str, steps: u64) -> PathBuf {
    let folder = root.join(name);
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("run.json"), "{}").unwrap();
    fs::write(folder.join("config.toml"), format!("[train]\nsteps = 10\n[run]\nname = \"{name}\"\n"))
        .unwrap();
    let mut lines = String::new();
    for step in 1..=steps {
        let line = serde_json::json!({ "step": step, "loss": 1.0 / step as f64, "tokens": 100 * step });
        writeln!(lines, "{line}").unwrap();
    }
    fs::write(folder.join("metrics.jsonl"), lines).unwrap();
    folder
}
