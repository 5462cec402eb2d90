//! Ranks that know only their own arguments, as processes do. Here they are threads with separate worlds, so
//! that each can get different arguments.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use kiln::config::{CommBackend, Config};
use kiln::place::{Job, Master, RankEnv, Source};
use kiln::run::{PositionKey, Resume, RunFolder, RunOptions, Summary, TrainError, train, train_joined};
use kiln_collectives::{Communicator, LocalGroup, tcp};
use kiln_shard::Strategy;

use crate::support::{Workspace, assert_same_curve};

/// One rank's arguments.
#[derive(Clone)]
struct Arguments {
    config: Config,
    options: RunOptions,
}

fn place(rank: usize, world_size: usize) -> RankEnv {
    RankEnv {
        source: Source::Torchrun,
        rank,
        world_size,
        local_rank: rank,
        local_world_size: world_size,
        node_rank: 0,
        node: "here".to_owned(),
        master: Master { host: "127.0.0.1".to_owned(), port: 1, shared_port: false },
        meeting: "job".to_owned(),
        job: Job { name: Some("job".to_owned()), restarts: 0 },
        secret: None,
    }
}

/// Returns a configuration that works from any directory.
fn config(workspace: &Workspace, changes: &[(&str, &str)]) -> Config {
    let data = format!("'{}'", workspace.path("data").display());
    workspace.config("run.toml", &[&[("data.path", data.as_str())], changes].concat())
}

/// Runs `ranks` ranks into `out`; `change` changes one rank's arguments.
fn processes(
    config: &Config,
    out: PathBuf,
    ranks: usize,
    change: impl Fn(usize, &mut Arguments),
) -> Vec<Result<Summary, TrainError>> {
    processes_in(LocalGroup::new(ranks), config, out, change)
}

fn processes_in<C: Communicator + 'static>(
    worlds: Vec<C>,
    config: &Config,
    out: PathBuf,
    change: impl Fn(usize, &mut Arguments),
) -> Vec<Result<Summary, TrainError>> {
    let ranks = worlds.len();
    thread::scope(|scope| {
        let running: Vec<_> = worlds
            .into_iter()
            .enumerate()
            .map(|(rank, world)| {
                let options = RunOptions {
                    out: RunFolder::At(out.clone()),
                    place: Some(place(rank, ranks)),
                    ..RunOptions::default()
                };
                let mut arguments = Arguments { config: config.clone(), options };
                change(rank, &mut arguments);
                let Arguments { config, options } = arguments;
                scope.spawn(move || train_joined(Arc::new(world), config, &options))
            })
            .collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

fn messages(outcomes: &[Result<Summary, TrainError>]) -> Vec<String> {
    let error = |outcome: &Result<_, TrainError>| match outcome {
        Ok(_) => panic!("it worked"),
        Err(error) => error.to_string(),
    };
    outcomes.iter().map(error).collect()
}

fn assert_all_work(outcomes: Vec<Result<Summary, TrainError>>) -> Vec<Summary> {
    let summary = |outcome: Result<_, TrainError>| outcome.unwrap_or_else(|error| panic!("{error}"));
    outcomes.into_iter().map(summary).collect()
}

#[test]
fn processes_train_as_threads_do() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[("train.ranks", "2")]);
    let threads =
        RunOptions { out: workspace.path("threads").into(), ranks: Some(4), ..RunOptions::default() };
    let summary = train(config.clone(), &threads).expect("threads");
    // The number of ranks in the configuration is ignored.
    let all = assert_all_work(processes(&config, workspace.path("run"), 4, |_, _| {}));
    assert_same_curve("processes", &workspace.steps("run"), &workspace.steps("threads"), 0.0);
    for rank in &all {
        assert_eq!((rank.loss, rank.val_loss), (summary.loss, summary.val_loss));
        assert_eq!(rank.checkpoint, workspace.path("run/checkpoints/fsdp_cpt4"));
    }
    let resolved: Config = toml::from_str(&workspace.text("run/config.toml")).expect("TOML");
    assert_eq!(resolved.train.ranks, 4);
}

#[test]
fn what_rank_0_cannot_do_ends_all_ranks() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[]);
    assert_all_work(processes(&config, workspace.path("run"), 2, |_, _| {}));
    let outcomes = processes(&config, workspace.path("run"), 2, |_, _| {});
    let said = messages(&outcomes);
    assert!(said[0].contains("already holds a run"), "{said:?}");
    assert_eq!(said[1], format!("rank 0 could not start the run: {}", said[0]));
    let usage = |outcome: &Result<_, TrainError>| outcome.as_ref().is_err_and(TrainError::is_usage);
    assert!(outcomes.iter().all(usage), "{said:?}");
}

#[test]
fn ranks_that_were_started_differently_are_named_on_every_rank() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[]);
    type Change = fn(&mut Arguments);
    let changes: [Change; 3] = [
        |arguments| arguments.config.optim.lr = 1.0,
        |arguments| arguments.options.out = RunFolder::default(),
        |arguments| arguments.options.resume = Some(Resume::Latest),
    ];
    for change in changes {
        let outcomes = processes(&config, workspace.path("run"), 4, |rank, arguments| {
            if rank == 2 {
                change(arguments);
            }
        });
        for said in messages(&outcomes) {
            assert!(said.starts_with("ranks [2] do not have the same"), "{said}");
        }
        assert!(!workspace.path("run").exists());
    }
}

#[test]
fn arguments_that_contradict_the_launcher_are_refused() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[]);
    let refused = |change: fn(&mut Arguments)| {
        let outcomes = processes(&config, workspace.path("run"), 2, |_, all| change(all));
        let usage = |o: &Result<_, TrainError>| o.as_ref().is_err_and(TrainError::is_usage);
        assert!(outcomes.iter().all(usage));
        messages(&outcomes).swap_remove(1)
    };
    let text = [
        refused(|arguments| arguments.options.ranks = Some(3)),
        refused(|arguments| arguments.config.comm.backend = CommBackend::Local),
        refused(|arguments| arguments.config.train.global_batch = 7),
    ];
    insta::assert_snapshot!(text.join("\n"));
    assert_all_work(processes(&config, workspace.path("run"), 2, |_, arguments| {
        arguments.options.ranks = Some(2);
        arguments.config.comm.backend = CommBackend::Tcp;
    }));
}

#[test]
fn ranks_on_connections_train_as_threads_do() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[]);
    let threads = RunOptions { out: workspace.path("threads").into(), ..RunOptions::default() };
    train(config.clone(), &threads).expect("threads");
    let worlds = tcp::loopback(2, |_| {}).expect("a world");
    assert_all_work(processes_in(worlds, &config, workspace.path("run"), |_, _| {}));
    assert_same_curve("tcp", &workspace.steps("run"), &workspace.steps("threads"), 0.0);
}

#[test]
fn hybrid_groups_are_the_machines_unless_named() {
    let workspace = Workspace::new();
    let mut config = config(&workspace, &[("train.micro_batch", "1")]);
    config.shard.strategy = Strategy::HybridShard;
    let on_machines = |config: &Config, out: &str, machines: [&'static str; 4]| {
        let name = |options: &mut tcp::JoinOptions| machines[options.rank].clone_into(&mut options.node);
        let worlds = tcp::loopback(4, name).expect("a world");
        processes_in(worlds, config, workspace.path(out), |_, _| {})
    };
    for (out, machines, shard_size, expected) in [
        ("two", ["a", "a", "b", "b"], None, 2),
        ("one", ["a", "a", "a", "a"], None, 4),
        ("four", ["a", "b", "c", "d"], None, 1),
        ("named", ["a", "b", "a", "b"], Some(2), 2),
    ] {
        config.shard.shard_size = shard_size;
        assert_all_work(on_machines(&config, out, machines));
        let resolved: Config = toml::from_str(&workspace.text(format!("{out}/config.toml"))).expect("TOML");
        assert_eq!(resolved.shard.shard_size, Some(expected), "{out}");
    }
    config.shard.shard_size = None;
    let refused = [["a", "a", "a", "b"], ["a", "b", "a", "b"]].map(|machines| {
        let outcomes = on_machines(&config, "refused", machines);
        assert!(outcomes.iter().all(|o| o.as_ref().is_err_and(TrainError::is_usage)));
        messages(&outcomes).swap_remove(3)
    });
    insta::assert_snapshot!(refused.join("\n"));
    assert!(!workspace.path("refused").exists());
}

/// A job fails in step 5 and resumes from the checkpoint of step 4 in the same folder. It does not fail again.
#[test]
fn a_job_that_is_started_again_goes_on_where_it_was() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[("train.steps", "8"), ("checkpoint.every", "2")]);
    assert_all_work(processes(&config, workspace.path("straight"), 2, |_, _| {}));
    let life = |restarts: u64, job: &str| {
        processes(&config, workspace.path("run"), 2, |_, arguments| {
            arguments.options.fault = "error@data:5:1".parse().ok();
            if let Some(place) = &mut arguments.options.place {
                place.job = Job { name: Some(job.to_owned()), restarts };
            }
        })
    };
    let said = messages(&life(0, "mine"));
    assert!(said[1].contains("fault drill"), "{said:?}");
    assert!(said[0].contains("aborted by rank 1"), "{said:?}");
    // The leftovers of an interrupted save are not a checkpoint.
    workspace.write("run/checkpoints/.fsdp_cpt6.partial/manifest.json", "{}");
    workspace.write("run/checkpoints/fsdp_cpt7/model.safetensors.index.json", "{}");

    // Another job must not take over the folder, even if it is started as a restart.
    for said in messages(&life(1, "other")) {
        assert!(said.contains("already holds a run"), "{said}");
    }
    let all = assert_all_work(life(1, "mine"));
    assert_eq!(all[0].steps, 8);
    assert_same_curve("again", &workspace.steps("run"), &workspace.steps("straight"), 0.0);
    assert!(!workspace.path("run/flight").exists());
    assert!(workspace.path("run/flight-before-restart-1/rank_1.json").exists());
}

/// A job that goes back moves later checkpoints aside once. When the job is restarted, it resumes from the
/// checkpoints that it has written since.
#[test]
fn a_job_that_goes_back_goes_on_from_there() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[("train.steps", "8"), ("checkpoint.every", "2")]);
    assert_all_work(processes(&config, workspace.path("run"), 2, |_, _| {}));
    let straight = workspace.steps("run");
    let life = |restarts: u64| {
        processes(&config, workspace.path("run"), 2, |_, arguments| {
            let from = workspace.path("run/checkpoints/fsdp_cpt2");
            arguments.options.resume = Some(Resume::Path(from));
            arguments.options.fault = "error@data:7:1".parse().ok();
            if let Some(place) = &mut arguments.options.place {
                place.job = Job { name: Some("going back".to_owned()), restarts };
            }
        })
    };
    messages(&life(0));
    assert_eq!(workspace.checkpoints("run/superseded-1"), ["fsdp_cpt4", "fsdp_cpt6", "fsdp_cpt8"]);
    assert_eq!(workspace.checkpoints("run").last().map(String::as_str), Some("latest"));
    assert!(workspace.checkpoints("run").contains(&"fsdp_cpt6".to_owned()));
    assert_all_work(life(1));
    assert_same_curve("again", &workspace.steps("run"), &straight, 0.0);
    assert!(!workspace.path("run/superseded-2").exists());
}

#[test]
fn another_position_in_the_data_is_refused_on_every_rank() {
    let workspace = Workspace::new();
    let mut config = config(&workspace, &[]);
    assert_all_work(processes(&config, workspace.path("run"), 2, |_, _| {}));
    (config.train.seed, config.train.steps) = (7, 6);
    let resume = |allowed: fn(usize) -> bool| {
        processes(&config, workspace.path("run"), 2, |rank, arguments| {
            arguments.options.resume = Some(Resume::Latest);
            if allowed(rank) {
                arguments.options.allow_changed = vec![PositionKey::Seed];
            }
        })
    };
    let outcomes = resume(|_| false);
    assert!(outcomes.iter().all(|o| o.as_ref().is_err_and(TrainError::is_usage)));
    for said in messages(&outcomes) {
        assert!(said.contains("train.seed was 0 and is 7 now"), "{said}");
    }
    for said in messages(&resume(|rank| rank == 0)) {
        assert!(said.starts_with("ranks [1] do not have the same"), "{said}");
    }
    assert_all_work(resume(|_| true));
    assert_eq!(workspace.steps("run").len(), 6);
}

/// Without a checkpoint, the job starts over, and the metrics of its first life do not appear twice.
#[test]
fn a_job_without_a_checkpoint_starts_anew_in_its_folder() {
    let workspace = Workspace::new();
    let config = config(&workspace, &[]);
    let life = |restarts: u64| {
        processes(&config, workspace.path("run"), 2, |_, arguments| {
            arguments.options.fault = "panic@backward:3:0".parse().ok();
            if let Some(place) = &mut arguments.options.place {
                place.job.restarts = restarts;
            }
        })
    };
    let said = messages(&life(0));
    assert!(said[0].contains("rank 0 panicked: fault drill in backward of step 3"), "{said:?}");
    assert_eq!(workspace.steps("run").len(), 2);
    assert_all_work(life(1));
    assert_eq!(workspace.steps("run").len(), 4);
}
