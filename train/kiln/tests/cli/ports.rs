//! `comm.ports`: where processes listen for each other.

use std::net::TcpListener;

use crate::support::{Ended, Workspace};

fn launch(workspace: &Workspace, ports: &str, more: &[&str]) -> Ended {
    let ports = format!("comm.ports={ports:?}");
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let train = ["train", "run.toml", "--out", "run", "--set", &ports];
    workspace.kiln(&[&launch, &train[..], more].concat())
}

#[test]
fn a_run_keeps_to_its_ports() {
    let workspace = Workspace::new();
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("its address").port();
    let first = taken.min(u16::MAX - 50);
    let ended = launch(&workspace, &format!("{first}-{}", first + 50), &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(workspace.text("run/config.toml").contains(&format!("ports = \"{first}-")));

    // Ranks that find no free port report the ports they have tried.
    let workspace = Workspace::new();
    let both = launch(&workspace, &format!("{}-{taken}", taken - 1), &["--set", "comm.join_timeout_s=2"]);
    assert_eq!(both.code, Some(1), "{both:?}");
    assert!(both.stderr.contains(&format!("ports {}-{taken} (comm.ports) are all taken", taken - 1)));
}

#[test]
fn ports_that_cannot_be_are_refused() {
    let workspace = Workspace::new();
    for (ports, says) in [
        ("29600", "has fewer ports than this machine has ranks: 1 for 2"),
        ("29700-29600", "ends before it begins; write \\\"29600-29700\\\""),
        ("some", "is not a range of ports; write the first and the last"),
    ] {
        let ended = launch(&workspace, ports, &[]);
        assert_eq!(ended.code, Some(2), "{ports}: {ended:?}");
        let text = ended.stderr.replace('\\', "");
        assert!(text.contains(&says.replace('\\', "")), "{ports}: {ended:?}");
        assert!(!workspace.path("run").exists());
    }
    let ended = launch(&workspace, "29600-29700", &["--set", "comm.backend=mpi"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("comm.backend = \"mpi\" has its own"), "{ended:?}");
}
