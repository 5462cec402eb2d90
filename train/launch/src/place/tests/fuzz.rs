//! Random environments must not panic, and every result must be possible.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::place::node_list::first_of;
use crate::place::slurm::tasks_of_node;
use crate::place::{Flags, MAX_RANKS, NodeFlags, Role, SOURCES, node, survey};

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => (0u32..9).prop_map(|number| number.to_string()),
        2 => any::<i128>().prop_map(|number| number.to_string()),
        2 => "[a-z0-9]{1,6}(\\[[0-9]{1,3}-[0-9]{1,12}(,[0-9]{1,2})?\\])?(,[a-z]{1,3})?",
        1 => "[0-9]{1,2}\\(x[0-9]{1,20}\\)(,[0-9]{1,2})?",
        1 => "[a-z.0-9:\\[\\]%]{0,12}(:[0-9]{1,6})?",
        1 => "\\PC{0,20}",
        1 => prop::sample::select(vec!["", " ", "localhost", "127.0.0.1", "::1", "auto", "True"])
            .prop_map(str::to_owned),
    ]
}

fn environment() -> impl Strategy<Value = BTreeMap<&'static str, String>> {
    let mut all: Vec<_> = SOURCES.iter().flat_map(|(_, names, _)| *names).copied().collect();
    all.extend(["HOSTNAME", "SLURM_NODELIST", "KILN_JOB_SECRET"]);
    prop::collection::btree_map(prop::sample::select(all), value(), 0..16)
}

fn flag() -> impl Strategy<Value = Option<String>> {
    prop_oneof![9 => Just(None), 1 => value().prop_map(Some)]
}

fn flags() -> impl Strategy<Value = Flags> {
    (flag(), flag(), flag(), flag(), flag(), flag()).prop_map(
        |(rank, world_size, local_rank, local_world_size, master_addr, master_port)| Flags {
            rank,
            world_size,
            local_rank,
            local_world_size,
            master_addr,
            master_port,
        },
    )
}

fn check(flags: &Flags, env: &BTreeMap<&'static str, String>) -> Result<(), TestCaseError> {
    let lookup = |name: &str| env.get(name).cloned();
    let (role, considered) = survey(flags, &lookup);
    prop_assert_eq!(considered.len(), SOURCES.len());
    match role {
        Ok(Role::Alone(job)) => prop_assert!(job.name.is_none_or(|name| !name.is_empty())),
        Ok(Role::Rank(place)) => {
            prop_assert!(place.rank < place.world_size && place.world_size <= MAX_RANKS);
            prop_assert!(place.local_rank < place.local_world_size);
            prop_assert!(place.local_world_size <= place.world_size);
            prop_assert!(place.node_rank < place.world_size, "{:?}", place);
            prop_assert!(!place.master.host.is_empty() && place.master.port > 0);
            prop_assert!(!place.node.is_empty() && !place.meeting.is_empty());
        }
        Ok(Role::Node(node)) => {
            prop_assert!(node.node_rank < node.nodes && node.nproc_per_node >= 1);
            prop_assert!(node.nodes * node.nproc_per_node <= MAX_RANKS);
            prop_assert!(node.nodes == 1 || node.master.port > 0);
        }
        Err(error) => prop_assert!(error.to_string().len() < 2048),
    }
    let _ = node(&NodeFlags::default(), &lookup);
    Ok(())
}

fn run(cases: u32) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new(config);
    if let Err(error) = runner.run(&(flags(), environment()), |(flags, env)| check(&flags, &env)) {
        panic!("{error}");
    }
    let lists = prop_oneof![value(), "[a\\[\\],0-9(x)-]{0,40}"];
    let parse = |list: String| {
        if let Ok(host) = first_of(&list) {
            prop_assert!(!host.is_empty());
        }
        let _ = tasks_of_node(&list, 3);
        Ok(())
    };
    if let Err(error) = runner.run(&lists, parse) {
        panic!("{error}");
    }
}

#[test]
fn random_environments() {
    run(4_000);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln-launch -- --ignored"]
fn a_million_random_environments() {
    run(1_000_000);
}
