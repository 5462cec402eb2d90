use super::*;
use crate::place::{NodeFlags, PerGpu, node as launched};

#[test]
fn rank_without_local_rank_is_a_node() {
    let env = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a PET_NPROC_PER_NODE=4";
    let found = node(env);
    assert_eq!((found.source, found.node_rank, found.nodes), (Source::Torchrun, 1, 2));
    assert_eq!((found.nproc_per_node, found.master.port), (4, 29500));
    assert_eq!(node("RANK=0 WORLD_SIZE=1").master.port, 0);
    assert!(error("RANK=0").starts_with("WORLD_SIZE is not set"));
    assert!(error("RANK=2 WORLD_SIZE=2 MASTER_ADDR=a").contains("RANK=2 and WORLD_SIZE=2"));
    assert!(error("RANK=1 WORLD_SIZE=2").starts_with("--master-addr is not set"));
}

#[test]
fn pet() {
    let env = "PET_NNODES=2:2 PET_NPROC_PER_NODE=3 PET_NODE_RANK=1 PET_MASTER_ADDR=a \
               PET_MASTER_PORT=77 PET_RDZV_ID=j PET_MAX_RESTARTS=5";
    let found = node(env);
    assert_eq!((found.source, found.node_rank, found.nodes), (Source::Pet, 1, 2));
    assert_eq!((found.nproc_per_node, found.max_restarts), (3, 5));
    assert_eq!((found.master.host.as_str(), found.master.port), ("a", 77));
    assert_eq!(found.job.name.as_deref(), Some("j"));
    let endpoint = |value: &str| {
        let found = node(&format!("PET_NNODES=2 PET_NODE_RANK=0 PET_RDZV_ENDPOINT={value}"));
        (found.master.host, found.master.port)
    };
    assert_eq!(endpoint("h:5"), ("h".to_owned(), 5));
    assert_eq!(endpoint("h"), ("h".to_owned(), 29500));
    assert_eq!(endpoint("[::2]:5"), ("::2".to_owned(), 5));
    assert_eq!(endpoint("::2"), ("::2".to_owned(), 29500));
    let standalone = node("PET_STANDALONE=1 PET_NPROC_PER_NODE=2");
    assert_eq!((standalone.nodes, standalone.master.port), (1, 0));
    for (env, says) in [
        ("PET_NNODES=1:4", "use 4"),
        ("PET_NNODES=0", "PET_NNODES=0: not a whole number from 1"),
        ("PET_NNODES=2 PET_MASTER_ADDR=a", "--node-rank is not set"),
        ("PET_NNODES=2 PET_NODE_RANK=2 PET_MASTER_ADDR=a", "PET_NODE_RANK=2 and PET_NNODES=2"),
        ("PET_NODE_RANK=1", "PET_NODE_RANK=1 and --nnodes=1"),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=gpus", "none of `gpu`, `cpu` and `auto`"),
        ("PET_NNODES=1 PET_NPROC_PER_NODE=100000", "from 1 to 1024"),
        ("PET_NNODES=1000000 PET_NODE_RANK=0 PET_NPROC_PER_NODE=1000", "at most 1048576 ranks"),
        ("PET_STANDALONE=maybe", "neither 1 nor 0"),
        ("PET_NNODES=2 PET_NODE_RANK=0 PET_RDZV_ENDPOINT=h:x", "not a port"),
    ] {
        let message = error(env);
        assert!(message.contains(says), "{env}: {message}");
    }
}

#[test]
fn ranks_per_node_alone() {
    let found = node("PET_NPROC_PER_NODE=4");
    assert_eq!((found.source, found.nodes, found.nproc_per_node), (Source::Pet, 1, 4));
    let jobset = "JOB_COMPLETION_INDEX=1 WORLD_SIZE=2 MASTER_ADDR=a PET_NPROC_PER_NODE=4";
    let found = node(jobset);
    assert_eq!((found.source, found.nodes, found.nproc_per_node), (Source::JobSet, 2, 4));
    assert!(node("PET_NNODES=1 PET_NPROC_PER_NODE=cpu").nproc_per_node >= 1);
}

#[test]
fn jobset() {
    let env = "JOB_COMPLETION_INDEX=1 JOBSET_NAME=kiln REPLICATED_JOB_NAME=node WORLD_SIZE=2 \
               JOBSET_RESTART_ATTEMPT=3";
    let found = node(env);
    assert_eq!((found.source, found.node_rank, found.nodes), (Source::JobSet, 1, 2));
    assert_eq!(found.master.host, "kiln-node-0-0.kiln");
    assert_eq!((found.job.name.as_deref(), found.job.restarts), (Some("kiln"), 3));
    assert_eq!(node(&format!("{env} JOBSET_COORDINATOR=c")).master.host, "c");
    assert_eq!(node(&format!("{env} MASTER_ADDR=m")).master.host, "m");
    // Pods of an indexed Job may be independent.
    assert_eq!(alone("JOB_COMPLETION_INDEX=1"), Job::default());
    assert!(error("JOB_COMPLETION_INDEX=1 MASTER_ADDR=a").starts_with("WORLD_SIZE is not set"));
    let far = error("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2");
    assert!(far.starts_with("--master-addr is not set"), "{far}");
    let beyond = error("JOB_COMPLETION_INDEX=2 WORLD_SIZE=2 MASTER_ADDR=a");
    assert!(beyond.contains("JOB_COMPLETION_INDEX=2 and WORLD_SIZE=2"), "{beyond}");
}

#[test]
fn flags_override_the_environment() {
    let env = Env::new("PET_NNODES=4 PET_NODE_RANK=3 PET_MASTER_ADDR=a PET_NPROC_PER_NODE=8");
    let lookup = |name: &str| env.0.get(name).cloned();
    let flags = NodeFlags { nnodes: Some("2".into()), node_rank: Some("1".into()), ..NodeFlags::default() };
    let found = launched(&flags, &lookup).unwrap();
    assert_eq!((found.source, found.nodes, found.node_rank), (Source::Flags, 2, 1));
    assert_eq!((found.nproc_per_node, found.master.host.as_str()), (8, "a"));
    let standalone = NodeFlags { standalone: true, ..NodeFlags::default() };
    let found = launched(&standalone, &lookup).unwrap();
    assert_eq!((found.nodes, found.node_rank, found.master.port), (1, 0, 0));
    // Inside a rank of another launcher's job, a launcher without flags starts a separate job.
    let inside = Env::new("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 MASTER_ADDR=b SLURM_NODEID=7");
    let found = launched(&NodeFlags::default(), &|name| inside.0.get(name).cloned()).unwrap();
    assert_eq!((found.nodes, found.node_rank, found.master.port), (1, 0, 0));
}

#[test]
fn nodes_come_from_slurm() {
    let env = Env::new("SLURM_NODEID=1 SLURM_JOB_NODELIST=n[3-4] SLURM_JOB_ID=12");
    let flags = NodeFlags { nnodes: Some("2".into()), ..NodeFlags::default() };
    let found = launched(&flags, &|name| env.0.get(name).cloned()).unwrap();
    assert_eq!((found.node_rank, found.master.host.as_str()), (1, "n3"));
    assert_eq!(found.job.name.as_deref(), Some("12"));
}

#[test]
fn launches_in_a_job_have_separate_names() {
    let named = |env: &str, id: Option<&str>| {
        let env = Env::new(env);
        let flags = NodeFlags { rdzv_id: id.map(str::to_owned), ..NodeFlags::default() };
        launched(&flags, &|name| env.0.get(name).cloned()).unwrap().job.name
    };
    let name = |name: &str| Some(name.to_owned());
    assert_eq!(named("SLURM_JOB_ID=12", None), name("12"));
    assert_eq!(named("SLURM_JOB_ID=12", Some("a")), name("12/a"));
    assert_eq!(named("SLURM_JOB_ID=12", Some("12")), name("12"));
    assert_eq!(named("SLURM_JOB_ID=12 PET_RDZV_ID=b", None), name("12/b"));
    assert_eq!(named("SLURM_JOB_ID=12 TORCHELASTIC_RUN_ID=12/a", None), name("12/a"));
    assert_eq!((named("", Some("a")), named("", None)), (name("a"), None));
}

#[test]
fn contradicting_flags() {
    let node = |flags: &NodeFlags, env: &str| {
        let env = Env::new(env);
        launched(flags, &|name| env.0.get(name).cloned()).map_err(|error| error.to_string())
    };
    let some = |text: &str| Some(text.to_owned());
    let standalone = NodeFlags { standalone: true, ..NodeFlags::default() };
    let two = NodeFlags { nnodes: some("2"), ..standalone.clone() };
    let error = node(&two, "").unwrap_err();
    let says = "--standalone=1 and --nnodes=2 contradict each other: a standalone job has one node; remove \
                one of them";
    assert_eq!(error, says);
    assert!(node(&NodeFlags::default(), "PET_STANDALONE=1 PET_NNODES=2").is_err());
    assert!(node(&NodeFlags { nnodes: some("1"), ..standalone.clone() }, "").is_ok());
    assert!(node(&standalone, "PET_NNODES=2").is_ok());

    let endpoint = |addr: &str, port: &str| NodeFlags {
        rdzv_endpoint: some("a:1"),
        master_addr: some(addr).filter(|addr| !addr.is_empty()),
        master_port: some(port).filter(|port| !port.is_empty()),
        ..NodeFlags::default()
    };
    let error = node(&endpoint("b", ""), "").unwrap_err();
    assert!(error.starts_with("--master-addr=b and --rdzv-endpoint=a contradict each other"), "{error}");
    let error = node(&endpoint("a", "2"), "").unwrap_err();
    assert!(error.starts_with("--master-port=2 and --rdzv-endpoint=1 contradict each other"), "{error}");
    let meets = |flags: &NodeFlags, env: &str| {
        let master = node(flags, env).unwrap().master;
        (master.host, master.port)
    };
    assert_eq!(meets(&endpoint("a", "1"), ""), ("a".to_owned(), 1));
    assert_eq!(meets(&endpoint("", ""), "PET_MASTER_ADDR=b PET_MASTER_PORT=2"), ("a".to_owned(), 1));
    let flags = NodeFlags { master_addr: some("b"), ..NodeFlags::default() };
    assert_eq!(meets(&flags, "PET_RDZV_ENDPOINT=a:1"), ("b".to_owned(), 1));
}

/// As in torchrun: `gpu` requires GPUs, `auto` uses GPUs if there are any.
#[test]
fn ranks_per_gpu() {
    let per = |word: &str| node(&format!("PET_NNODES=1 PET_NPROC_PER_NODE={word}"));
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let none = || Err("there is no driver".to_owned());
    let ranks = |node: Node, gpus| node.with_gpus(|| gpus).map(|node| node.nproc_per_node);
    assert_eq!(ranks(per("gpu"), Ok(8)), Ok(8));
    assert_eq!(ranks(per("auto"), Ok(8)), Ok(8));
    assert_eq!(ranks(per("auto"), none()), Ok(cores));
    assert_eq!(ranks(per("auto"), Ok(0)), Ok(cores));
    for (word, expected) in [("cpu", cores), ("3", 3)] {
        let node = per(word).with_gpus(|| panic!("nobody asks"));
        assert_eq!(node.map(|node| node.nproc_per_node), Ok(expected), "{word}");
    }
    let error = ranks(per("gpu"), none()).map_err(|error| error.to_string());
    let says = "PET_NPROC_PER_NODE=gpu: cannot count GPUs (there is no driver; `kiln doctor` shows \
                more); set a number, or `cpu` for one per core";
    assert_eq!(error, Err(says.to_owned()));
    assert!(ranks(per("gpu"), Ok(0)).is_err());
    assert_eq!(per("auto").per_gpu, Some(PerGpu::IfAny));
    let many = node("PET_NNODES=1048576 PET_NODE_RANK=0 PET_MASTER_ADDR=a PET_NPROC_PER_NODE=gpu");
    assert!(ranks(many, Ok(2)).is_err_and(|error| error.to_string().contains("at most 1048576")));
}
