//! The variables that ranks receive.

use std::collections::BTreeMap;

use crate::support::{Job, finish};

const TELL: &str = r#"env | grep -E '^(RANK|LOCAL_|WORLD_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|KILN_)' > env.$RANK
[ "$1 $2 $3 $4" = "train config.toml --out run" ]"#;

fn told(job: &Job, rank: usize) -> BTreeMap<String, String> {
    let text = job.text(&format!("env.{rank}"));
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn a_rank_has_torchruns_variables() {
    let job = Job::new(TELL);
    let flags = "--nnodes=2 --node_rank 1 --nproc_per_node=2 --master_addr=10.0.0.1 \
                 --master_port=1234 --rdzv_id=j7 --max_restarts 3";
    let flags: Vec<_> = flags.split_whitespace().collect();
    let ended = job.launch(&flags, &[("KILN_JOB_SECRET", "open sesame")]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    for local_rank in 0..2 {
        let rank = 2 + local_rank;
        let mut told = told(&job, rank);
        assert!(told.remove("KILN_LAUNCHER_PID").is_some_and(|pid| pid.parse::<u32>().is_ok()));
        for name in ["KILN_LAUNCHER_PIPE", "KILN_LAUNCHER_PAGE"] {
            let file = told.remove(name).expect(name);
            let numbers: Vec<_> = file.split(':').map(str::parse::<u64>).collect();
            assert!(matches!(numbers[..], [Ok(3..), Ok(_)]), "{name}: {file}");
        }
        let (rank, local_rank) = (rank.to_string(), local_rank.to_string());
        let expected = [
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "2"),
            ("KILN_GRACE_S", "30"),
            ("KILN_JOB_SECRET", "open sesame"),
            ("LOCAL_RANK", local_rank.as_str()),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "1234"),
            ("RANK", &rank),
            ("ROLE_NAME", "default"),
            ("ROLE_RANK", &rank),
            ("ROLE_WORLD_SIZE", "4"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_RUN_ID", "j7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("WORLD_SIZE", "4"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(told, BTreeMap::from(expected));
    }
}

#[test]
fn a_single_node_gets_a_free_port_and_a_secret() {
    let launch = || {
        let job = Job::new(TELL);
        let ended = job.launch(&["--nproc-per-node", "2", "--standalone"], &[]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        let (first, second) = (told(&job, 0), told(&job, 1));
        for name in ["MASTER_ADDR", "MASTER_PORT", "KILN_JOB_SECRET", "TORCHELASTIC_RUN_ID"] {
            assert_eq!(first[name], second[name]);
        }
        first
    };
    let (one, other) = (launch(), launch());
    assert_eq!(one["MASTER_ADDR"], "127.0.0.1");
    assert!(one["MASTER_PORT"].parse::<u16>().is_ok_and(|port| port > 0));
    assert_eq!(one["KILN_JOB_SECRET"].len(), 32);
    assert_ne!(one["KILN_JOB_SECRET"], other["KILN_JOB_SECRET"]);
    assert_ne!(one["TORCHELASTIC_RUN_ID"], other["TORCHELASTIC_RUN_ID"]);
}

#[test]
fn an_explicit_port_stays() {
    let job = Job::new(TELL);
    assert_eq!(job.launch(&["--master-port", "29777"], &[]).code, Some(0));
    assert_eq!(told(&job, 0)["MASTER_PORT"], "29777");
}

#[test]
fn several_nodes_without_a_secret_are_warned() {
    let job = Job::new(TELL);
    let flags = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost"];
    let ended = job.launch(&flags, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("anyone who reaches port 29500 of localhost could take"), "{ended:?}");
    assert!(ended.stderr.contains("openssl rand -hex 32"), "{ended:?}");
    assert!(!told(&job, 0).contains_key("KILN_JOB_SECRET"));
}

#[test]
fn words_for_the_number_of_ranks() {
    let job = Job::new(TELL);
    for word in ["cpu", "auto"] {
        assert_eq!(job.launch(&["--nproc_per_node", word], &[]).code, Some(0));
        let cores = std::thread::available_parallelism().expect("cores").to_string();
        assert_eq!(told(&job, 0)["WORLD_SIZE"], cores);
    }
}

/// The launchers of all nodes together start every rank exactly once.
#[test]
fn two_nodes_make_one_job() {
    let job = Job::new(TELL);
    let launch = |node: &'static str| {
        let flags = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "localhost"];
        let variables = [("PET_NODE_RANK", node), ("KILN_JOB_SECRET", "s")];
        job.launcher(&flags, &variables).spawn().expect("the launcher starts")
    };
    for launcher in [launch("0"), launch("1")] {
        assert_eq!(finish(launcher).code, Some(0));
    }
    let places: Vec<_> = (0..4)
        .map(|rank| {
            let told = told(&job, rank);
            ["LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"].map(|name| told[name].clone()).join(" ")
        })
        .collect();
    assert_eq!(places, ["0 0 4", "1 0 4", "0 1 4", "1 1 4"]);
}

/// A shell inside `salloc`, or an editor's terminal, has the variables of a Slurm task, but no other task has been
/// started.
#[test]
fn a_shell_in_an_allocation_is_told_at_once_how_to_run_alone() {
    let job = Job::new("");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/debug.toml");
    std::fs::copy(config, job.path("debug.toml")).expect("a configuration");
    let variables = [
        ("SLURM_JOB_ID", "77"),
        ("SLURM_JOB_NAME", "interactive"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NODEID", "0"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "4"),
    ];
    let train = ["train", "debug.toml", "--out", "run", "--set", "comm.join_timeout_s=1"];
    let ended = finish(job.kiln(&train, &variables).spawn().expect("kiln starts"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let first = ended.stderr.lines().next().unwrap_or_default();
    for part in ["rank 0 of 4", "Slurm has set SLURM_PROCID=0", "env -u SLURM_PROCID kiln"] {
        assert!(first.contains(part), "{part}: {ended:?}");
    }
}
