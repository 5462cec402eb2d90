//! A run that is watched in every possible way trains like an unwatched run. Observers may be slow, silent,
//! numerous or gone, and files for them may not fit on the disk.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};

use kiln_testkit::{PATIENCE, Said, output_of, run_to_end, status_of, wait_for};

use crate::support::{Ended, Run, config, kiln, undisturbed};

/// Number of steps: enough to keep the run busy while clients connect.
const STEPS: &str = "train.steps=300";

/// Settings that enable every way to watch a run.
const EVERYTHING: [&str; 12] = [
    "--set",
    "log.http=127.0.0.1:0",
    "--set",
    "log.tensorboard=true",
    "--set",
    "log.histograms=50",
    "--set",
    "sample.every=50",
    "--set",
    "sample.prompts=[\"1 + \", \"2 + \"]",
    "--set",
    "sample.max_tokens=4",
];

/// Starts a run. Returns its process, the address of its page, and its output.
fn start(run: &Run, arguments: &[&str]) -> (Child, String, Said) {
    let mut child = kiln(run.train_arguments(arguments)).spawn().expect("kiln starts");
    let mut said = Said::of(child.stdout.take().expect("it is piped"));
    let at = "this run is at http://";
    let line = said.expect(at);
    let address =
        line.trim_end().strip_prefix(at).expect("it begins the line").trim_end_matches('/').to_owned();
    (child, address, said)
}

fn end(child: Child, said: Said) -> Ended {
    let ended = Ended::from(output_of(child));
    Ended { stdout: said.all(), ..ended }
}

fn ask(address: &str, path: &str) -> String {
    request(address, &format!("GET {path}"), "")
}

fn request(address: &str, what: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the page is there");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    write!(stream, "{what} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n")
        .expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// Returns the weights of the last checkpoint, byte for byte.
fn weights(run: &Run) -> Vec<(String, Vec<u8>)> {
    fn files(folder: &Path, into: &mut Vec<(String, Vec<u8>)>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            match entry.path() {
                path if path.is_dir() => files(&path, into),
                path if path.extension().is_some_and(|end| end == "safetensors") => {
                    let name = path.file_name().expect("a name").to_string_lossy().into_owned();
                    into.push((name, fs::read(&path).expect("a file")));
                }
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    files(&run.out().join("checkpoints/fsdp_cpt300"), &mut found);
    assert!(!found.is_empty());
    found.sort();
    found
}

#[test]
fn a_hundred_clients_and_everything_else_that_shows_a_run_change_nothing_of_it() {
    config();
    let alone = Run::new();
    let no_saves = ["--ranks", "2", "--set", STEPS, "--set", "checkpoint.every=0"];
    assert_eq!(end_of(&alone, &no_saves).code, Some(0));

    let watched = Run::new();
    let (child, address, said) = start(&watched, &[&no_saves[..], &EVERYTHING].concat());
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    let mut clients = Vec::new();
    for index in 0..100 {
        let Ok(mut stream) = TcpStream::connect(&address) else { continue };
        let sent = match index % 4 {
            0 => String::new(),
            1 => "GET / HTTP/1.1\r\nHos".to_owned(),
            // This client sends the request repeatedly, and never reads.
            2 => get("/").repeat(20),
            _ => get("/api/runs"),
        };
        // The write fails if the client was rejected.
        let _ = stream.write_all(sent.as_bytes());
        clients.push(stream);
    }
    assert!(clients.len() >= 50);
    let ended = end(child, said);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    drop(clients);
    assert_eq!(watched.losses(), alone.losses());
    assert!(weights(&watched) == weights(&alone), "the weights of a run that was watched");
    assert!(watched.out().join("samples.jsonl").exists() && watched.out().join("tensorboard").exists());
    assert_eq!(watched.orphans(), Vec::<String>::new());
}

fn end_of(run: &Run, arguments: &[&str]) -> Ended {
    run_to_end(&mut kiln(run.train_arguments(arguments))).into()
}

#[test]
fn a_run_of_processes_shows_itself_and_goes_on_without_a_page_whose_address_is_taken() {
    config();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let http = format!("log.http={}", taken.local_addr().expect("an address"));
    let run = Run::new();
    let ended = run.launch(2, &[], &["--set", &http, "--set", "log.tensorboard=true"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let log = run.logs(2, 0).concat();
    assert!(log.contains("log.http: cannot serve the page at "), "{log}");
    assert_eq!(run.losses(), undisturbed(2));
    // Only rank 0 writes TensorBoard files.
    assert_eq!(fs::read_dir(run.out().join("tensorboard")).expect("a folder").count(), 1);
}

#[test]
fn the_page_of_a_run_shows_its_ranks_and_a_stranger_gets_nothing() {
    config();
    let run = Run::new();
    let slow = ["--fault", "slow=100000@backward:60:1"];
    let fixed =
        ["--ranks", "2", "--set", STEPS, "--set", "log.http=127.0.0.1:0", "--set", "comm.timeout_s=1000"];
    let (mut child, address, _said) = start(&run, &[&fixed[..], &slow].concat());
    // The run's last completed step is at least 60.
    let is_at_60 = || {
        let runs = ask(&address, "/api/runs");
        if runs.contains("\"step\":59,") { Ok(()) } else { Err(runs) }
    };
    wait_for("step 59", is_at_60);
    let look = ask(&address, "/api/look?run=run");
    assert!(look.starts_with("HTTP/1.1 200") && look.contains("\"rank\":1"), "{look}");
    let timeline = ask(&address, "/api/timeline?run=run");
    for word in ["layers.0", "forward", "backward", "\"step\":59"] {
        assert!(timeline.contains(word), "{word}: {timeline}");
    }
    let metrics = ask(&address, "/metrics");
    assert!(metrics.contains("kiln_loss{run=\"run\"}"), "{metrics}");
    let mut stranger = TcpStream::connect(&address).expect("the page is there");
    stranger.set_read_timeout(Some(PATIENCE)).expect("a socket");
    write!(stranger, "GET /api/runs HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        .expect("sent");
    let mut answer = String::new();
    stranger.read_to_string(&mut answer).expect("an answer");
    assert!(!answer.starts_with("HTTP/1.1 200") && !answer.contains("\"step\""), "{answer}");
    child.kill().expect("it goes on");
    status_of(&mut child);
}

/// A page with `--control` saves a checkpoint of a run and ends it. Until then the run trains like an
/// undisturbed one, and it resumes from the checkpoint.
#[test]
fn a_page_with_control_saves_and_ends_a_run() {
    config();
    let run = Run::new();
    let fixed = ["--ranks", "2", "--set", "log.http=127.0.0.1:0", "--set", "checkpoint.every=0"];
    let (child, _, said) = start(&run, &[&fixed[..], &["--set", "train.steps=100000000"]].concat());
    let out = run.out().display().to_string();
    let mut page = kiln(["watch", &out, "--http", "127.0.0.1:0", "--control"]).spawn().expect("kiln starts");
    let line = Said::of(page.stdout.take().expect("it is piped")).expect("serving ");
    let (address, token) = line
        .strip_prefix("serving http://")
        .and_then(|rest| rest.split(' ').next()?.split_once("/?token="))
        .unwrap_or_else(|| panic!("an address with a token: {line}"));
    let headers = format!("Authorization: Bearer {token}\r\nX-Kiln-Control: 1\r\n");
    let order = |path: &str| request(address, &format!("POST {path}?run=run"), &headers);
    // The page knows a run once its folder has been read, and the run accepts commands once it trains.
    let answer = wait_for("an order that is taken", || {
        let answer = order("/api/checkpoint");
        if answer.starts_with("HTTP/1.1 200") { Ok(answer) } else { Err(answer) }
    });
    assert!(answer.ends_with("{\"said\":\"a checkpoint is saved after this step\"}"), "{answer}");
    wait_for("a checkpoint among the events", || {
        let events = fs::read_to_string(run.out().join("events.jsonl")).unwrap_or_default();
        if events.contains("\"kind\":\"checkpoint\"") { Ok(()) } else { Err(events) }
    });
    // Requests without the required headers do not affect the run.
    let refused = request(address, "POST /api/stop?run=run", "X-Kiln-Control: 1\r\n");
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    let answer = order("/api/stop");
    assert!(answer.ends_with("{\"said\":\"the run saves and ends\"}"), "{answer}");
    let ended = end(child, said);
    // Like every run that was asked to stop, this one can be resumed.
    assert_eq!(ended.code, Some(75), "{ended:?}");
    assert!(ended.stdout.contains("stopped on request"), "{ended:?}");
    let answer = order("/api/stop");
    assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
    page.kill().expect("it goes on");
    status_of(&mut page);

    let losses = run.losses();
    let more = format!("train.steps={}", losses.len() + 5);
    let resumed = end_of(&run, &[&fixed[..], &["--set", &more, "--resume", "latest"]].concat());
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    assert_eq!(run.losses().len(), losses.len() + 5);
}

/// Files for observers do not fit: the limit on file sizes is the size of a checkpoint.
#[test]
fn files_for_tensorboard_that_find_no_room_end_nothing() {
    config();
    let run = Run::new();
    let more = ["--set", STEPS, "--set", "checkpoint.every=0", "--set", "log.histograms=1"];
    let arguments = run.train_arguments(&[&more[..], &["--set", "log.tensorboard=true"]].concat());
    let mut shell = Command::new("sh");
    let text = "trap '' XFSZ; exec prlimit --fsize=400000 \"$0\" \"$@\"";
    shell.arg("-c").arg(text).arg(env!("CARGO_BIN_EXE_kiln")).args(arguments);
    let ended = Ended::from(run_to_end(&mut shell));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("done: 300 steps"), "{ended:?}");
    let told = ended.stderr.lines().filter(|line| line.contains("tensorboard")).count();
    // A short event may still fit where a long event did not.
    assert!((2..30).contains(&told), "{}", ended.stderr);
    assert_eq!(run.losses().len(), 300);
}
