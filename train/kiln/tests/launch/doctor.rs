//! The report of `kiln doctor` on each source of a rank's place.

use crate::support::{Ended, Job, ended};

fn doctor(variables: &[(&str, &str)], arguments: &[&str]) -> Ended {
    let job = Job::new("");
    let command = [&["doctor"], arguments].concat();
    ended(kiln_testkit::run_to_end(&mut job.kiln(&command, variables)))
}

/// Returns the lines of the table about one subject.
fn part<'a>(ended: &'a Ended, subject: &str) -> Vec<&'a str> {
    let head = format!("  env    {subject} ");
    let (mut lines, mut is_inside) = (Vec::new(), false);
    for line in ended.stdout.lines() {
        match line.split_once(&head) {
            Some((_, detail)) => lines.push(detail.trim()),
            None if is_inside && line.starts_with(' ') => lines.push(line.trim()),
            None => {
                is_inside = false;
                continue;
            }
        }
        is_inside = true;
    }
    lines
}

#[test]
fn alone() {
    let ended = doctor(&[], &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let sources = part(&ended, "sources");
    assert_eq!(
        sources,
        [
            "flags     skipped: no --rank",
            "torchrun  skipped: RANK is not set",
            "PET_*     skipped: no PET_ variable about nodes",
            "Slurm     skipped: SLURM_PROCID is not set",
            "Open MPI  skipped: OMPI_COMM_WORLD_RANK is not set",
            "PMI       skipped: neither PMI_RANK nor PMIX_RANK is set",
            "JobSet    skipped: JOB_COMPLETION_INDEX is not set",
        ]
    );
    assert!(part(&ended, "place")[0].starts_with("alone; "), "{ended:?}");
    let machine = part(&ended, "machine");
    assert!(machine[0].contains("cores for this process"), "{machine:?}");
    assert!(machine.iter().any(|line| line.starts_with("memory: ")), "{machine:?}");
}

#[test]
fn torchrun_with_its_own_store() {
    let variables = [
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_RUN_ID", "j"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("KILN_JOB_SECRET", "hunter2"),
        ("SLURM_PROCID", "7"),
    ];
    let ended = doctor(&variables, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let sources = part(&ended, "sources");
    assert!(sources.contains(&"torchrun  taken: RANK, LOCAL_RANK and WORLD_SIZE are set"), "{sources:#?}");
    assert!(sources.contains(&"Slurm     not checked: torchrun comes first"), "{sources:#?}");
    assert!(sources.contains(&"SLURM_PROCID=7"), "{sources:#?}");
    assert_eq!(
        part(&ended, "place"),
        [
            "rank 1 of 2, from torchrun",
            "local rank 1 of 2 on node 0 (node0)",
            "master localhost:1",
            "job j, restarted 0 times",
            "secret: KILN_JOB_SECRET is set",
            "torchrun keeps its own store on port 1 (TORCHELASTIC_USE_AGENT_STORE=True), so the \
             ranks meet at one of the ports above it",
        ]
    );
    assert!(part(&ended, "network")[0].starts_with("localhost resolves to "), "{ended:?}");
    assert!(!ended.stdout.contains("hunter2"), "{ended:?}");
}

#[test]
fn every_source_can_be_taken() {
    let slurm = [
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "0"),
    ];
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    for (variables, source) in [(&slurm[..], "Slurm"), (&mpi, "Open MPI"), (&pmi, "PMI")] {
        let ended = doctor(variables, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let place = part(&ended, "place");
        assert_eq!(place[0], format!("rank 1 of 2, from {source}"));
        assert!(place[4].contains("ranks refuse to meet without it, except on a loopback"), "{place:?}");
    }
    let ended = doctor(&[], &["--rank", "0", "--world-size", "2"]);
    assert_eq!(part(&ended, "place")[0], "rank 0 of 2, from flags");
    let jobset = [
        ("JOB_COMPLETION_INDEX", "1"),
        ("WORLD_SIZE", "2"),
        ("JOBSET_NAME", "kiln"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("PET_NPROC_PER_NODE", "4"),
    ];
    for (variables, source) in [
        (&jobset[..], "JobSet"),
        (&[("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "127.0.0.1")], "PET_*"),
        (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")], "torchrun"),
    ] {
        let ended = doctor(variables, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let place = part(&ended, "place");
        assert_eq!(place[0], format!("node 1 of 2, from {source}"));
        assert_eq!(place[2], "master 127.0.0.1:29500");
    }
}

/// The diagnosis as JSON.
#[test]
fn json() {
    let diagnosis = |variables: &[(&str, &str)], arguments: &[&str], code| {
        let ended = doctor(variables, &[&["--json"], arguments].concat());
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), ""), "{ended:?}");
        serde_json::from_str::<serde_json::Value>(&ended.stdout).expect("JSON")
    };
    let alone = diagnosis(&[("OMPI_COMM_WORLD_SIZE", "2")], &[], 0);
    assert_eq!(alone["healthy"], true);
    assert_eq!(alone["place"]["role"], "alone");
    assert_eq!(alone["network"], serde_json::Value::Null);
    let machine = &alone["machine"];
    assert!(machine["cores"].as_u64() >= Some(1), "{machine}");
    assert!(machine["memory_bytes"].as_u64() > machine["memory_free_bytes"].as_u64(), "{machine}");
    assert_eq!(machine["ranks"], 1);
    assert!(alone["gpus"]["lines"].as_array().is_some_and(|lines| !lines.is_empty()));
    assert_eq!(alone["sources"].as_array().map(Vec::len), Some(7));
    assert_eq!(alone["sources"][4]["variables"]["OMPI_COMM_WORLD_SIZE"], "2");

    let rank = ["--rank=1", "--world-size=2", "--master-addr=127.0.0.1", "--master-port=1"];
    let rank = diagnosis(&[("KILN_JOB_SECRET", "not to be shown")], &rank, 0);
    let place = &rank["place"];
    assert_eq!((&place["role"], &place["source"]), (&"rank".into(), &"flags".into()));
    assert_eq!((&place["rank"], &place["world_size"]), (&1.into(), &2.into()));
    assert_eq!((&place["master"], &place["secret"]), (&"127.0.0.1:1".into(), &true.into()));
    assert!(!rank.to_string().contains("not to be shown"));
    let said = &rank["network"]["lines"][1];
    assert!(said.as_str().is_some_and(|line| line.contains("no process listens there yet")), "{said}");

    let wrong = diagnosis(&[("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "many")], &[], 2);
    assert_eq!((&wrong["healthy"], &wrong["place"]["role"]), (&false.into(), &"unknown".into()));
}

/// `kiln check --machine` makes the same examination.
#[test]
fn check_examines_the_machine_alone() {
    let run = |arguments: &[&str]| ended(kiln_testkit::run_to_end(&mut Job::new("").kiln(arguments, &[])));
    let found = run(&["check", "--machine", "--rank", "0", "--world-size", "2"]);
    assert_eq!((found.code, found.stderr.as_str()), (Some(0), ""), "{found:?}");
    for subject in ["sources", "place", "network", "ports", "machine", "GPUs"] {
        assert!(!part(&found, subject).is_empty(), "{subject}: {found:?}");
    }
    let found = run(&["check", "--machine", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&found.stdout).expect("JSON");
    assert_eq!(json["place"]["role"], "alone");
    // With a configuration, these flags are refused: it has its own ports.
    for wrong in [&["check", "run.toml", "--json"][..], &["check", "run.toml", "--machine"], &["check"]] {
        assert_eq!(run(wrong).code, Some(2), "{wrong:?}");
    }
}

#[test]
fn problems_are_usage_errors() {
    let ended = doctor(&[("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "many")], &[]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(part(&ended, "place")[0].starts_with("unknown: WORLD_SIZE=many: not a"), "{ended:?}");
    let sources = part(&ended, "sources");
    assert!(sources.contains(&"Slurm     not checked: torchrun is wrong"), "{sources:#?}");
    assert!(!part(&ended, "machine").is_empty());
}

#[test]
fn network_is_examined() {
    let rank = |rank: &'static str, host: &'static str, port: &str| {
        let variables = [("MASTER_ADDR", host), ("MASTER_PORT", port)];
        let flags = ["--rank", rank, "--world-size", "2", "--local-rank", rank, "--local-world-size", "2"];
        let ended = doctor(&variables, &flags);
        part(&ended, "network").join("\n")
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let text = rank("0", "127.0.0.1", &port);
    assert!(text.contains("another process already listens on 127.0.0.1:"), "{text}");
    let text = rank("1", "127.0.0.1", &port);
    assert!(text.contains("a process listens on 127.0.0.1:"), "{text}");
    drop(listener);
    // The system never assigns port 1 by chance, and nothing uses its service any more.
    let text = rank("1", "127.0.0.1", "1");
    assert!(text.contains("no process listens there yet"), "{text}");
    // A port that was just free may have been taken by another program.
    let free = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port().to_string();
        drop(listener);
        rank("0", "127.0.0.1", &port).contains("rank 0 can listen on 127.0.0.1:")
    };
    assert!((0..20).any(|_| free()));
    // Documentation addresses belong to no machine.
    let text = rank("0", "192.0.2.1", &port);
    assert!(text.contains("is not an address of this machine"), "{text}");
    let text = rank("0", "no-such-host.invalid", &port);
    assert!(text.contains("does not resolve"), "{text}");
}

/// Ranks that cannot find rank 0's machine never meet.
#[test]
fn unknown_master_is_a_problem() {
    let master = [("MASTER_ADDR", "no-such-host.invalid"), ("MASTER_PORT", "29500")];
    for rank in ["0", "1"] {
        let ended = doctor(&master, &["--rank", rank, "--world-size", "2", "--json"]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        let found: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
        assert_eq!(found["healthy"], false, "{found:#}");
        let said = found["network"]["lines"][0].as_str().expect("a line");
        assert!(said.contains("no-such-host.invalid does not resolve"), "{said}");
    }
    let node = [("PET_NNODES", "2"), ("PET_NODE_RANK", "1"), ("PET_MASTER_ADDR", "no-such-host.invalid")];
    assert_eq!(doctor(&node, &[]).code, Some(2));
}

#[test]
fn ports_are_examined() {
    let ended = doctor(&[], &[]);
    assert!(part(&ended, "ports")[0].contains("unless comm.ports is set"), "{ended:?}");
    let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = other.local_addr().expect("an address").port();
    let taken = doctor(&[], &["--comm-ports", &port.to_string()]);
    assert_eq!(taken.code, Some(2), "{taken:?}");
    let says = format!("comm.ports {port}: 1 port, 0 of which are free; taken: {port}; too few for 1 rank");
    assert!(part(&taken, "ports")[0].starts_with(&says), "{taken:?}");
    let first = port.min(u16::MAX - 20);
    let wide = doctor(&[], &["--comm-ports", &format!("{first}-{}", first + 20)]);
    assert_eq!(wide.code, Some(0), "{wide:?}");
    assert!(part(&wide, "ports")[0].contains(": 21 ports, "), "{wide:?}");
    let nonsense = doctor(&[], &["--comm-ports", "many"]);
    assert_eq!(nonsense.code, Some(2));
    assert!(nonsense.stderr.contains("is not a range of ports"), "{nonsense:?}");
}

/// `benches/gpu.sh` reads the lines about GPUs: on the day when there is a GPU, it must find them.
#[test]
fn the_script_for_gpus_reads_its_lines() {
    let ended = doctor(&[], &[]);
    let expected = part(&ended, "GPUs");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("doctor.log"), &ended.stdout).expect("a file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/gpu.sh");
    let words = "eval \"$(sed -n '/^lines_of()/,/^}/p' \"$2\")\"; lines_of GPUs \"$1\"";
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", words, "bash"]).arg(folder.path().join("doctor.log")).arg(script);
    let read = text_of(kiln_testkit::run_to_end(&mut bash));
    assert!(!expected.is_empty(), "{ended:?}");
    assert_eq!(read.lines().collect::<Vec<_>>(), expected);
}

fn text_of(output: std::process::Output) -> String {
    String::from_utf8(output.stdout).expect("UTF-8")
}
