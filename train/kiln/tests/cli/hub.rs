//! Downloads from this test's own hub, a server of a few files. Only with the feature:
//!
//!     cargo test --release -p kiln --features hub --test cli hub::

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use kiln::hugging_face::HuggingFaceFolder;

use crate::hugging_face::{fixture, tensors};
use crate::support::{Ended, Workspace, names};

const REPO: &str = "/someone/tiny/resolve/";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The files that are served, and the requests so far.
struct Hub {
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    /// Serves `files` of the repository `someone/tiny` until the process ends.
    fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let (files, seen) = (Arc::new(files), Arc::clone(&requests));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, seen) = (Arc::clone(&files), Arc::clone(&seen));
                std::thread::spawn(move || serve(&stream.unwrap(), &files, &seen));
            }
        });
        Hub { endpoint, requests }
    }

    fn of_fixture(name: &str) -> Self {
        let folder = fixture(name);
        let read = |file: String| (file.clone(), std::fs::read(folder.join(file)).unwrap());
        Hub::new(names(&folder).into_iter().map(read).collect())
    }
}

/// Answers the requests of one connection, which may end at any time: clients keep spare connections.
fn serve(stream: &TcpStream, files: &BTreeMap<String, Vec<u8>>, seen: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream).lines();
    while let Some(Ok(request)) = lines.next() {
        for header in lines.by_ref() {
            match header {
                Ok(header) if !header.is_empty() => {}
                _ => break,
            }
        }
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        seen.lock().unwrap().push(format!("{method} {path}"));
        let name = path.strip_prefix(REPO).and_then(|path| path.split_once('/'));
        let found = name.and_then(|(_, name)| files.get_key_value(name));
        let head = match found {
            Some((name, content)) => format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: \"{name}\"\r\n\
                 X-Repo-Commit: {COMMIT}\r\n\r\n",
                content.len()
            ),
            None => {
                let code = if name.is_some() { "EntryNotFound" } else { "RepoNotFound" };
                format!("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nX-Error-Code: {code}\r\n\r\n")
            }
        };
        let body = found.filter(|_| method == "GET").map_or(&[][..], |(_, content)| content);
        let mut out = stream;
        if out.write_all(head.as_bytes()).and_then(|()| out.write_all(body)).is_err() {
            return;
        }
    }
}

/// Runs `kiln import` against a hub, with a cache in the working directory.
fn import(workspace: &Workspace, endpoint: &str, repo: &str, out: &str) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command
        .args(["import", "--repo", repo, "--out", out])
        .current_dir(workspace.path(""))
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", workspace.path("cache"))
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_TOKEN")
        .env_remove("KILN_LOG")
        .envs(["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"].map(|name| (name, "")));
    let output = run_to_end(&mut command);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
#[ignore = "builds half of burn again: cargo test --release -p kiln --features hub --test cli -- --ignored hub::"]
fn a_model_is_downloaded_once_and_imported() {
    for name in ["llama_shards", "llama_gqa"] {
        let (workspace, hub) = (Workspace::new(), Hub::of_fixture(name));
        let ended = import(&workspace, &hub.endpoint, "someone/tiny", "new");
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{name}");
        let out = workspace.path("new").display().to_string();
        workspace.succeed(&["export", "--checkpoint", &out, "--out", "back"]);
        assert!(tensors(&workspace.path("back")) == tensors(&fixture(name)), "{name}");
        let model = |folder: &Path| HuggingFaceFolder::open(folder).unwrap().model().clone();
        assert_eq!(model(&workspace.path("back")), model(&fixture(name)));

        let gets = |hub: &Hub| {
            let requests = hub.requests.lock().unwrap();
            requests.iter().filter(|request| request.starts_with("GET ")).count()
        };
        let before = gets(&hub);
        assert!(before >= 3, "{name}");
        let ended = import(&workspace, &hub.endpoint, "someone/tiny", "again");
        assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
        assert_eq!(gets(&hub), before, "{name}: the cache was not used");
    }
}

#[test]
#[ignore = "builds half of burn again: cargo test --release -p kiln --features hub --test cli -- --ignored hub::"]
fn downloads_that_fail_say_what_to_do() {
    let workspace = Workspace::new();
    let mut files = BTreeMap::from([("config.json".to_owned(), b"{}".to_vec())]);
    let fails = |hub: &Hub, repo: &str| {
        let ended = import(&workspace, &hub.endpoint, repo, "new");
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(!workspace.path("new").exists());
        assert!(ended.stderr.contains("HF_ENDPOINT") && ended.stderr.contains("--hf"), "{ended:?}");
        ended.stderr
    };
    let message = fails(&Hub::new(files.clone()), "someone/tiny");
    assert!(message.contains("cannot download model.safetensors of someone/tiny"), "{message}");
    let message = fails(&Hub::new(files.clone()), "someone/other");
    assert!(message.contains("cannot download config.json of someone/other"), "{message}");
    files.clear();
    let message = fails(&Hub::new(files), "someone/tiny");
    assert!(message.contains("cannot download config.json of someone/tiny"), "{message}");

    // A port on which no one listens.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let ended = import(&workspace, &endpoint, "someone/tiny", "new");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("refused"), "{ended:?}");
}

/// An index must not name files outside its folder, neither on the hub nor on disk.
#[test]
#[ignore = "builds half of burn again: cargo test --release -p kiln --features hub --test cli -- --ignored hub::"]
fn an_index_is_checked_before_its_files_are_asked_for() {
    let workspace = Workspace::new();
    let index = br#"{"weight_map": {"a": "../../secret.safetensors"}}"#;
    let hub = Hub::new(BTreeMap::from([
        ("config.json".to_owned(), b"{}".to_vec()),
        ("model.safetensors.index.json".to_owned(), index.to_vec()),
    ]));
    let ended = import(&workspace, &hub.endpoint, "someone/tiny", "new");
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("is ../../secret.safetensors, expected"), "{ended:?}");
    assert!(hub.requests.lock().unwrap().iter().all(|request| !request.contains("secret")));
}
