//! Two machines made of network namespaces, with their own addresses and a cable between them.
//!
//! Needs root and iproute2: `cargo test --release -p kiln --test faults -- --ignored netns`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kiln_testkit::run_to_end;

use crate::held::Prompt;
use crate::support::{Ended, Run, config, end};

/// Ranks on each machine.
const RANKS_PER_NODE: usize = 2;

/// Address of each machine.
const ADDRESSES: [&str; 2] = ["10.117.0.1", "10.117.0.2"];

/// The machines have a private network, so any port is free.
const PORT: &str = "29500";

/// Longest duration of both lives of a run whose network is cut. A hang takes longer.
const LIMIT: Duration = Duration::from_secs(180);

/// Two namespaces and a cable, removed on drop.
struct Machines {
    names: [String; 2],
    cables: [String; 2],
}

fn ip(arguments: &[&str]) {
    let output = run_to_end(Command::new("ip").args(arguments));
    assert!(output.status.success(), "ip {arguments:?}: {output:?}; this test needs root");
}

impl Machines {
    fn new(tag: &str) -> Machines {
        let id = std::process::id();
        let names = ["a", "b"].map(|side| format!("kiln-{tag}-{id}-{side}"));
        let cables = ["a", "b"].map(|side| format!("k{tag}{}{side}", id % 100_000));
        let machines = Machines { names, cables };
        let [a, b] = &machines.names;
        let [end_a, end_b] = &machines.cables;
        ip(&["netns", "add", a]);
        ip(&["netns", "add", b]);
        ip(&["link", "add", end_a, "netns", a, "type", "veth", "peer", "name", end_b, "netns", b]);
        for ((name, cable), address) in machines.names.iter().zip(&machines.cables).zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", cable]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        machines.plug_in();
        machines
    }

    fn plug_in(&self) {
        for (name, cable) in self.names.iter().zip(&self.cables) {
            ip(&["-n", name, "link", "set", cable, "up"]);
        }
    }

    /// Writes a program that cuts the cable; a rank on machine a runs it.
    fn scissors(&self, folder: &Path) -> PathBuf {
        let path = folder.join("cut.sh");
        fs::write(&path, format!("#!/bin/sh\nexec ip link set {} down\n", self.cables[0])).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Starts the launcher of machine `node`, as a user would on the machine itself.
    fn start(&self, run: &Run, node: usize, restarts: &str, train: &[&str]) -> Child {
        let rank = node.to_string();
        let launch = [
            &["--nnodes", "2", "--node-rank", &rank, "--master-addr", ADDRESSES[0]][..],
            &["--master-port", PORT, "--max-restarts", restarts],
        ]
        .concat();
        let inner = run.launcher(RANKS_PER_NODE, &launch, train);
        Command::new("ip")
            .args(["netns", "exec", &self.names[node]])
            .arg(inner.get_program())
            .args(inner.get_args())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("KILN_JOB_SECRET", "of both machines")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ip starts")
    }

    /// Runs both launchers until they end.
    fn run(&self, run: &Run, restarts: &str, train: &[&str]) -> [Ended; 2] {
        let children = [0, 1].map(|node| self.start(run, node, restarts, train));
        children.map(end)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// `HYBRID_SHARD` on four threads, in groups of two.
fn threads() -> Run {
    let run = Run::new();
    let sets = ["shard.strategy=HYBRID_SHARD", "shard.shard_size=2"];
    let ended = run.train_alone(4, &["--set", sets[0], "--set", sets[1]]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    run
}

#[test]
#[ignore = "needs root and iproute2: cargo test --release -p kiln --test faults -- --ignored netns"]
fn netns_hybrid_takes_its_groups_from_the_machines() {
    config();
    let machines = Machines::new("h");
    let run = Run::new();
    let ended = machines.run(&run, "0", &["--set", "shard.strategy=HYBRID_SHARD"]);
    assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(0); 2], "{ended:#?}");
    assert_eq!(run.losses(), threads().losses());
}

#[test]
#[ignore = "needs root and iproute2: cargo test --release -p kiln --test faults -- --ignored netns"]
fn netns_a_rank_dies_and_both_machines_start_again() {
    config();
    let machines = Machines::new("r");
    let run = Run::new();
    let sets = ["--set", "shard.strategy=HYBRID_SHARD", "--fault", "kill@backward:5:3"];
    let ended = machines.run(&run, "1", &sets);
    assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(0); 2], "{ended:#?}");
    assert!(ended[1].stderr.contains("rank 3 "), "{ended:#?}");
    assert_eq!(run.losses(), threads().losses());
}

#[test]
#[ignore = "needs root and iproute2: cargo test --release -p kiln --test faults -- --ignored netns"]
fn netns_a_cut_cable_is_noticed_everywhere() {
    config();
    let expected = threads().losses();
    for place in ["start:0", "forward:3", "backward:3", "optimizer:3", "checkpoint:4"] {
        let machines = Machines::new("c");
        let folder = tempfile::tempdir().unwrap();
        let cut = machines.scissors(folder.path());
        // Rank 1 is on machine a.
        let fault = format!("run={}@{place}:1", cut.display());
        eprintln!("{fault}");
        let run = Run::new();
        let sets = ["--set", "shard.strategy=HYBRID_SHARD", "--set", "comm.timeout_s=4"];
        let started = Instant::now();
        let ended = machines.run(&run, "0", &[&sets[..], &["--fault", &fault]].concat());
        assert!(started.elapsed() < LIMIT, "{place}: {:?}", started.elapsed());
        assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(1); 2], "{place}: {ended:#?}");
        let logs = run.logs(2 * RANKS_PER_NODE, 0);
        let says = |ranks: [usize; 2], words: &[&str]| {
            ranks.iter().any(|rank| words.iter().any(|words| logs[*rank].contains(words)))
        };
        let of_b = [
            "ranks 2, 3 have not answered for ",
            "world rank 2): the connection to it",
            "world rank 3): the connection to it",
        ];
        let of_a =
            ["rank 0, which keeps the rendezvous, has not answered for ", "world rank 0): the connection to"];
        assert!(says([0, 1], &of_b), "{place}: {logs:#?}");
        assert!(says([2, 3], &of_a), "{place}: {logs:#?}");
        assert_eq!(run.orphans(), Vec::<String>::new(), "{place}");

        machines.plug_in();
        let saved = run.check_checkpoints();
        let resume: &[&str] = if saved.is_empty() { &[] } else { &["--resume", "latest"] };
        if saved.is_empty() {
            fs::remove_dir_all(run.out()).unwrap();
        }
        let ended = machines.run(&run, "0", &[&sets[..], resume].concat());
        assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(0); 2], "{place}: {ended:#?}");
        assert_eq!(run.losses(), expected, "{place}");
    }
}

#[test]
#[ignore = "needs root and iproute2: cargo test --release -p kiln --test faults -- --ignored netns"]
fn netns_ranks_of_another_machine_are_held_for_longer_than_the_deadline() {
    config();
    let machines = Machines::new("b");
    for (at, node) in [("backward:layers.1@3 rank 3 run", 1), ("backward:layers.1@3 rank 3", 0)] {
        let run = Run::new();
        let sets = ["--set", "shard.strategy=HYBRID_SHARD", "--set", "comm.timeout_s=4", "--break", at];
        let children = [0, 1].map(|node| machines.start(&run, node, "0", &sets));
        let out = run.out().display().to_string();
        // Rank 3 is on machine b. If all ranks are held, machine a also looks at it.
        let mut prompt = Prompt::started(|| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &machines.names[node], env!("CARGO_BIN_EXE_kiln")]);
            command.args(["attach", &out, "--rank", "3"]);
            command
        });
        // Waits longer than three deadlines.
        std::thread::sleep(Duration::from_secs(12));
        prompt.enter("w");
        prompt.expect("rank 3 is at step 3");
        prompt.enter("delete all");
        prompt.expect("there are no breakpoints");
        prompt.enter("c");
        prompt.leave();
        let ended = children.map(end);
        assert_eq!(ended.each_ref().map(|ended| ended.code), [Some(0); 2], "{at}: {ended:#?}");
        assert_eq!(run.losses(), threads().losses(), "{at}");
    }
}
