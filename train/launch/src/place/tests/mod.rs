mod fuzz;
mod nodes;
mod ranks;

use std::collections::BTreeMap;

use super::{Considered, EnvError, Flags, Job, Node, RankEnv, Role, SOURCES, Source, survey};

struct Env(BTreeMap<String, String>);

impl Env {
    fn new(text: &str) -> Self {
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').expect("NAME=value");
            (name.to_owned(), value.to_owned())
        };
        Env(text.split_whitespace().map(pair).collect())
    }

    fn survey(&self) -> (Result<Role, EnvError>, Vec<Considered>) {
        survey(&Flags::default(), &|name| self.0.get(name).cloned())
    }
}

fn role(env: &str) -> Role {
    Env::new(env).survey().0.unwrap_or_else(|error| panic!("{env}: {error}"))
}

fn rank(env: &str) -> RankEnv {
    match role(env) {
        Role::Rank(place) => place,
        other => panic!("{env}: {other:?}"),
    }
}

fn node(env: &str) -> Node {
    match role(env) {
        Role::Node(node) => node,
        other => panic!("{env}: {other:?}"),
    }
}

fn alone(env: &str) -> Job {
    match role(env) {
        Role::Alone(job) => job,
        other => panic!("{env}: {other:?}"),
    }
}

fn job(name: &str, restarts: u64) -> Job {
    Job { name: Some(name.to_owned()), restarts }
}

fn error(env: &str) -> String {
    match Env::new(env).survey().0 {
        Err(error) => error.to_string(),
        Ok(role) => panic!("{env}: {role:?}"),
    }
}

fn numbers(place: &RankEnv) -> (usize, usize, usize, usize, usize) {
    (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank)
}

fn master(place: &RankEnv) -> (&str, u16) {
    (&place.master.host, place.master.port)
}

#[test]
fn the_first_source_wins() {
    let torchrun = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_PORT=1234";
    let slurm = "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=3 SLURM_NODEID=0 SLURM_STEP_ID=0";
    let (role, considered) = Env::new(&format!("{torchrun} {slurm} PET_NNODES=2")).survey();
    let Ok(Role::Rank(place)) = role else { panic!("{role:?}") };
    assert_eq!(place.source, Source::Torchrun);
    let sources: Vec<_> = considered.iter().map(|considered| considered.source).collect();
    assert_eq!(sources, SOURCES.map(|(source, ..)| source));
    assert_eq!(considered[0].verdict, "skipped: no --rank");
    assert!(considered[1].verdict.starts_with("taken: RANK"), "{considered:?}");
    assert_eq!(considered[2].verdict, "not checked: torchrun comes first");
    assert_eq!(considered[2].found, [("PET_NNODES".to_owned(), "2".to_owned())]);
    assert_eq!(considered[3].found.len(), 6);
}

#[test]
fn nothing_set_is_alone() {
    assert_eq!(alone(""), Job::default());
    assert_eq!(alone("HOSTNAME=a PATH=b WORLD_SIZE=4 MASTER_ADDR=c"), Job::default());
}

#[test]
fn stray_sizes_are_remarked_on() {
    let remark = |env: &str| {
        let env = Env::new(env);
        super::remark_alone(&|name| env.0.get(name).cloned())
    };
    for (env, says) in [
        ("WORLD_SIZE=2", "WORLD_SIZE=2 is set, but RANK is not: this process runs by itself"),
        ("SLURM_NTASKS=4", "SLURM_NTASKS=4 is set, but SLURM_PROCID is not"),
        ("OMPI_COMM_WORLD_SIZE=2", "Start it with mpirun"),
    ] {
        assert!(remark(env).is_some_and(|remark| remark.contains(says)), "{env}: {:?}", remark(env));
    }
    for quiet in ["", "WORLD_SIZE=1", "WORLD_SIZE=many", "SLURM_NTASKS=4 SLURM_PROCID=0", "PMI_SIZE=1"] {
        assert_eq!(remark(quiet), None, "{quiet}");
    }
}

#[test]
fn waiting_shells_are_remarked_on() {
    let slurm = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NAME=interactive";
    let remark = |env: &str, has_terminal| {
        let env = Env::new(env);
        let lookup = |name: &str| env.0.get(name).cloned();
        super::remark_waiting(&env.survey().0.unwrap(), &lookup, has_terminal)
    };
    let told = remark(slurm, false).expect("a remark");
    for part in ["rank 0 of 4", "Slurm has set SLURM_PROCID=0", "srun", "env -u SLURM_PROCID kiln"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let batch = slurm.replace("interactive", "train");
    assert!(remark(&batch, true).is_some() && remark(&batch, false).is_none());
    let pod = "JOB_COMPLETION_INDEX=0 WORLD_SIZE=2 MASTER_ADDR=a";
    assert!(remark(pod, true).expect("a remark").contains("node 0 of 2"));
    let other = slurm.replace("PROCID=0", "PROCID=1").replace("LOCALID=0", "LOCALID=1");
    for (env, has_terminal) in [(other.as_str(), true), ("", true), (pod, false)] {
        assert_eq!(remark(env, has_terminal), None, "{env}");
    }
}

#[test]
fn the_secret_is_never_shown() {
    let env = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 KILN_JOB_SECRET=hunter2";
    let place = rank(env);
    assert_eq!(place.secret.as_ref().map(|secret| secret.0.as_str()), Some("hunter2"));
    assert!(!format!("{place:?}").contains("hunter2"));
    let (_, considered) = Env::new(env).survey();
    assert!(!format!("{considered:?}").contains("hunter2"));
    let launched = node("PET_NNODES=1 KILN_JOB_SECRET=hunter2");
    assert!(!format!("{launched:?}").contains("hunter2"));
    assert!(error("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 KILN_JOB_SECRET=").contains("empty"));
}

#[test]
fn long_values_are_shortened() {
    let long = "x".repeat(10_000);
    let message = error(&format!("RANK={long}"));
    assert!(message.len() < 400, "{message}");
    let lookup = |name: &str| (name == "RANK").then(|| "1\n2\u{1b}[31m".to_owned());
    let message = survey(&Flags::default(), &lookup).0.unwrap_err().to_string();
    assert!(!message.contains(char::is_control), "{message:?}");
}
