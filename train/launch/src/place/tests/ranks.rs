use super::*;

#[test]
fn torchrun() {
    let env = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 \
               GROUP_WORLD_SIZE=2 MASTER_ADDR=gpu01 MASTER_PORT=29501 TORCHELASTIC_RUN_ID=job7 \
               TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True";
    let place = rank(env);
    assert_eq!(place.source, Source::Torchrun);
    assert_eq!(numbers(&place), (3, 4, 1, 2, 1));
    assert_eq!(master(&place), ("gpu01", 29501));
    assert!(place.master.shared_port);
    assert_eq!((&place.job, place.node.as_str()), (&job("job7", 2), "node1"));
    assert!(!rank(&env.replace("=True", "=False")).master.shared_port);
}

#[test]
fn torchrun_set_by_hand() {
    let place = rank("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2");
    assert_eq!(numbers(&place), (1, 2, 1, 2, 0));
    assert_eq!(master(&place), ("127.0.0.1", 29500));
    let place = rank("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=[::1]");
    assert_eq!(master(&place), ("::1", 29500));
    let far = "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 MASTER_ADDR=a";
    assert!(error(far).starts_with("LOCAL_WORLD_SIZE is not set"), "{}", error(far));
    assert_eq!(numbers(&rank(&format!("{far} GROUP_WORLD_SIZE=2"))), (3, 4, 1, 2, 1));
    // With a cyclic distribution, only GROUP_RANK shows the node.
    let turns = "RANK=1 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a";
    assert!(error(turns).starts_with("GROUP_RANK is not set"), "{}", error(turns));
    assert_eq!(rank(&format!("{turns} GROUP_RANK=1")).node_rank, 1);
}

#[test]
fn invalid_torchrun() {
    for (env, says) in [
        ("RANK=x", "RANK=x: not a whole number"),
        ("RANK=-1", "RANK=-1: not a whole number"),
        ("RANK=+1", "RANK=+1: not a whole number"),
        ("RANK=", "RANK=: empty"),
        ("RANK=99999999999999999999999", "not a whole number from 0 to 1048576"),
        ("RANK=0 LOCAL_RANK=0", "WORLD_SIZE is not set"),
        ("RANK=2 LOCAL_RANK=0 WORLD_SIZE=2", "RANK=2 and WORLD_SIZE=2 contradict each other"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=0", "RANK=0 and WORLD_SIZE=0 contradict"),
        ("RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=1", "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1"),
        ("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2"),
        ("RANK=0 LOCAL_RANK=1 WORLD_SIZE=2", "LOCAL_RANK=1 and RANK=0 contradict"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 GROUP_RANK=5", "GROUP_RANK=5 and WORLD_SIZE=2"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1", "MASTER_ADDR is not set"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=a:1", "MASTER_ADDR=a:1: not a host name"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=0", "MASTER_PORT=0: not a port"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=65536", "MASTER_PORT=65536: not a port"),
    ] {
        let message = error(env);
        assert!(message.contains(says), "{env}: {message}");
    }
}

#[test]
fn flags() {
    let flags = |text: &[&str]| {
        let get = |name: &str| {
            let at = text.iter().position(|flag| *flag == name)?;
            Some(text[at + 1].to_owned())
        };
        Flags {
            rank: get("--rank"),
            world_size: get("--world-size"),
            local_rank: get("--local-rank"),
            local_world_size: get("--local-world-size"),
            master_addr: get("--master-addr"),
            master_port: get("--master-port"),
        }
    };
    let env = Env::new("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_PORT=1234");
    let find = |text: &[&str]| survey(&flags(text), &|name| env.0.get(name).cloned()).0;
    let rank = |text: &[&str]| match find(text) {
        Ok(Role::Rank(place)) => place,
        other => panic!("{text:?}: {other:?}"),
    };
    let place = rank(&["--rank", "1", "--world-size", "2"]);
    assert_eq!(place.source, Source::Flags);
    assert_eq!(numbers(&place), (1, 2, 1, 2, 0));
    assert_eq!(master(&place), ("127.0.0.1", 1234));
    let place = rank(&["--rank", "1", "--world-size", "2", "--master-addr", "a"]);
    assert_eq!(numbers(&place), (1, 2, 0, 1, 1));
    // Flags for the address override the winning source.
    let place = rank(&["--master-addr", "b", "--master-port", "99"]);
    assert_eq!((place.source, master(&place)), (Source::Torchrun, ("b", 99)));
    for (text, says) in [
        (&["--rank", "1"][..], "--world-size is not set"),
        (&["--world-size", "2"], "--rank is not set"),
        (&["--rank", "2", "--world-size", "2"], "--rank=2 and --world-size=2 contradict"),
        (&["--rank", "one", "--world-size", "2"], "--rank=one: not a whole number"),
        (
            &["--rank", "1", "--world-size", "4", "--master-addr", "a", "--local-rank", "1"],
            "--local-world-size is not set",
        ),
    ] {
        let message = find(text).unwrap_err().to_string();
        assert!(message.contains(says), "{text:?}: {message}");
    }
    let alone = survey(&flags(&["--master-addr", "a"]), &|_| None).0.unwrap_err();
    assert!(alone.to_string().starts_with("--rank is not set"), "{alone}");
}

const SLURM: &str = "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=1 \
                     SLURM_NODEID=2 SLURM_TASKS_PER_NODE=2(x3) SLURM_NNODES=3 SLURM_STEP_NODELIST=gpu[07-09]";

#[test]
fn slurm() {
    let place = rank(&format!("{SLURM} SLURM_RESTART_COUNT=1"));
    assert_eq!(place.source, Source::Slurm);
    assert_eq!(numbers(&place), (5, 6, 1, 2, 2));
    assert_eq!((place.meeting.as_str(), place.job), ("4711.0", job("4711", 1)));
    assert_eq!(place.master.host, "gpu07");
    let port = place.master.port;
    assert!((15_000..31_384).contains(&port), "{port}");
    assert_eq!(
        rank(&SLURM.replace("PROCID=5", "PROCID=4").replace("LOCALID=1", "LOCALID=0")).master.port,
        port
    );
    assert_ne!(rank(&SLURM.replace("4711", "4712")).master.port, port);
    let place = rank(&format!("{SLURM} MASTER_ADDR=head MASTER_PORT=5"));
    assert_eq!(master(&place), ("head", 5));
    let uneven = SLURM.replace("2(x3)", "3,2,1").replace("LOCALID=1", "LOCALID=0");
    assert_eq!(numbers(&rank(&uneven)), (5, 6, 0, 1, 2));
    let here = rank("SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0");
    assert_eq!((numbers(&here), here.master.host.as_str()), ((1, 2, 1, 2, 0), "127.0.0.1"));
}

#[test]
fn inapplicable_slurm() {
    assert_eq!(alone(&SLURM.replace("SLURM_STEP_ID=0", "X=0")), job("4711", 0));
    let batch = SLURM.replace("SLURM_STEP_ID=0", "SLURM_STEPID=4294967291");
    assert_eq!(alone(&format!("{batch} SLURM_RESTART_COUNT=2")), job("4711", 2));
    let one = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_ID=4711";
    assert_eq!(alone(&format!("{one} SLURM_RESTART_COUNT=1")), job("4711", 1));
    let mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
               OMPI_COMM_WORLD_LOCAL_SIZE=2";
    assert_eq!(rank(&format!("{SLURM} {mpi}")).source, Source::OpenMpi);
    let pmi = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    assert_eq!(rank(&format!("{SLURM} {pmi}")).source, Source::Pmi);
    assert_eq!(rank(&format!("{SLURM} PMI_RANK=5 PMI_SIZE=6")).source, Source::Slurm);
}

/// Launchers in a requeued job count no restart, and may choose different names.
#[test]
fn launchers_in_requeued_jobs() {
    let torchrun = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 TORCHELASTIC_RESTART_COUNT=0";
    let one_node = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=88";
    for launched in [
        &format!("{torchrun} TORCHELASTIC_RUN_ID=none"),
        &format!("{torchrun} TORCHELASTIC_RUN_ID=a-random-one"),
        one_node,
        "PMI_RANK=1 PMI_SIZE=2",
    ] {
        let place = rank(&format!("{launched} SLURM_JOB_ID=12 SLURM_RESTART_COUNT=1"));
        assert_eq!(place.job, job("12", 1), "{launched}");
        assert_eq!(place.meeting, rank(launched).meeting, "{launched}");
    }
    let own = format!("{torchrun} TORCHELASTIC_RUN_ID=12/a SLURM_JOB_ID=12 SLURM_RESTART_COUNT=1");
    assert_eq!(rank(&own).job, job("12/a", 1));
    let other = own.replace("=12/a", "=123/a");
    assert_eq!(rank(&other).job, job("12", 1));
    let again = torchrun.replace("COUNT=0", "COUNT=3");
    assert_eq!(rank(&format!("{again} SLURM_JOB_ID=12 SLURM_RESTART_COUNT=1")).job, job("12", 3));
}

#[test]
fn invalid_slurm() {
    for (from, to, says) in [
        ("PROCID=5", "PROCID=6", "SLURM_PROCID=6 and SLURM_NTASKS=6 contradict"),
        ("gpu[07-09]", "gpu[07-", "SLURM_STEP_NODELIST=gpu[07-: a bracket that is not closed"),
        ("gpu[07-09]", "a;b", "an invalid host name"),
        ("gpu[07-09]", "a[x]", "not a number"),
        ("2(x3)", "2(x2)", "it has no node 2"),
        ("2(x3)", "two", "SLURM_TASKS_PER_NODE=two"),
        ("SLURM_LOCALID=1", "X=1", "SLURM_LOCALID is not set"),
    ] {
        let message = error(&SLURM.replace(from, to));
        assert!(message.contains(says), "{to}: {message}");
    }
}

#[test]
fn host_lists() {
    use crate::place::node_list::first_of;
    use crate::place::slurm::tasks_of_node;
    for (list, first) in [
        ("a", "a"),
        ("gpu[01-03,7],login-2", "gpu01"),
        ("login-2,gpu[01-03,7]", "login-2"),
        ("rack[1-2]n[01-16]-ib", "rack1n01-ib"),
        ("n[08,10-12].cluster.org", "n08.cluster.org"),
    ] {
        assert_eq!(first_of(list).as_deref(), Ok(first), "{list}");
    }
    for list in ["", ",", "[", "]", "a[1", "a]1", "a[[1]]", "a[]", "a[-]", "a[x]", "a b", "ä"] {
        assert!(first_of(list).is_err(), "{list}");
    }
    assert_eq!(tasks_of_node("2(x3),1", 2), Ok(Some(2)));
    assert_eq!(tasks_of_node("2(x3),1", 3), Ok(Some(1)));
    assert_eq!(tasks_of_node("2(x3),1", 4), Ok(None));
    assert!(tasks_of_node("2(x", 0).is_err());
}

const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 \
                        OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";

#[test]
fn open_mpi() {
    let needs = error(OPEN_MPI);
    assert!(needs.starts_with("MASTER_ADDR is not set"), "{needs}");
    let place = rank(&format!("{OPEN_MPI} MASTER_ADDR=a PMIX_HOSTNAME=b PMIX_NAMESPACE=88 HOSTNAME=c"));
    assert_eq!(place.source, Source::OpenMpi);
    assert_eq!(numbers(&place), (3, 4, 1, 2, 1));
    assert_eq!((place.node.as_str(), &place.job), ("b", &job("88", 0)));
    assert_ne!(place.master.port, 29500);
    let here =
        rank(&OPEN_MPI.replace("LOCAL_RANK=1", "LOCAL_RANK=3").replace("LOCAL_SIZE=2", "LOCAL_SIZE=4"));
    assert_eq!((master(&here), here.node.as_str()), (("127.0.0.1", 29500), "node0"));
    let one = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 \
               OMPI_COMM_WORLD_LOCAL_SIZE=1";
    assert_eq!(alone(one), Job::default());
    assert!(error("OMPI_COMM_WORLD_RANK=0").starts_with("OMPI_COMM_WORLD_SIZE is not set"));
    let wrong = error(&OPEN_MPI.replace("WORLD_RANK=3", "WORLD_RANK=4"));
    assert!(wrong.contains("OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_SIZE=4"), "{wrong}");
}

#[test]
fn pmi() {
    let place = rank("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2");
    assert_eq!((place.source, numbers(&place)), (Source::Pmi, (1, 2, 1, 2, 0)));
    assert_eq!(numbers(&rank("PMI_RANK=1 PMI_SIZE=2")), (1, 2, 1, 2, 0));
    assert_eq!(numbers(&rank("PMIX_RANK=1 WORLD_SIZE=2")), (1, 2, 1, 2, 0));
    let far = "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=a";
    assert!(error(far).starts_with("MPI_LOCALRANKID is not set"), "{}", error(far));
    let place = rank(&format!("{far} PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=1 HOSTNAME=h"));
    assert_eq!((numbers(&place), place.node.as_str()), ((1, 2, 0, 1, 1), "h"));
    assert!(error("PMIX_RANK=1").starts_with("PMI_SIZE is not set"));
    assert_eq!(alone("PMI_RANK=0 PMI_SIZE=1"), Job::default());
}
