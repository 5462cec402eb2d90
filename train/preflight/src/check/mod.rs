//! `kiln check CONFIG`: checks in seconds that a run would start and save.
//!
//! Stages come in the order of [`Stage`]. Each process first checks its own part (`machine.rs`, `data.rs`,
//! `model.rs`). Then processes connect and compare (`comm.rs`, `links.rs`). Finally all ranks take a reduced
//! step and save it (`step.rs`, `disk.rs`). Rank 0 prints one table (`report.rs`).

mod arguments;
mod comm;
mod data;
mod disk;
mod links;
mod machine;
mod model;
mod report;
mod step;

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Instant;

use kiln_collectives::Communicator;
use kiln_shard::ranks::panic_message;

pub use arguments::CheckArgs;
use kiln_launch::place::{self, RankEnv, Role};
use kiln_train::error::{Result, TrainError};
use kiln_train::fault::{self, Fault, FaultKind};
use kiln_train::launch;
use kiln_train::process::output::{complain, say};
use kiln_train::registry::Registry;
use kiln_train::world::{self, Ranks};
use machine::Setup;
use model::{Sources, Trained};
use report::{Check, Checks, Level, Report, Stage};
use step::Shrunk;

/// Checks that a step depends on, on all ranks.
const STEP_NEEDS: [(Stage, &str); 10] = [
    (Stage::Env, "device"),
    (Stage::Model, "model"),
    (Stage::Model, "optimizer"),
    (Stage::Model, "loss"),
    (Stage::Model, "parameters"),
    (Stage::Model, "init.from"),
    (Stage::Comm, "arguments"),
    (Stage::Comm, "data"),
    (Stage::Comm, "init.from"),
    (Stage::Comm, "devices"),
];

/// Additional checks that a save depends on.
const SAVE_NEEDS: [(Stage, &str); 3] =
    [(Stage::Env, "run folder"), (Stage::Comm, "run folder"), (Stage::Save, "disk")];

/// The results of one process's own checks.
struct Found {
    setup: Option<Setup>,
    trained: Option<Trained>,
}

impl CheckArgs {
    /// Runs the checks, or starts the ranks of a node. Returns the exit code.
    ///
    /// # Errors
    ///
    /// If a check finds a problem that would end the run.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let began = Instant::now();
        let place = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let rank = place.as_ref().map_or(0, |place| place.rank);
        let mut report = Report { ranks: Vec::new(), processes: place.is_some() };
        self.look(registry, place, &mut report);
        // Only rank 0 reports successes.
        report.keep(|stage| rank == 0 && (self.stage.is_empty() || self.stage.contains(&stage)));
        let text = report.to_text(began.elapsed().as_secs_f64());
        let failures = report.failures();
        match rank {
            0 => say(&text),
            _ if failures == 0 => {}
            _ => complain(&text),
        }
        if failures == 0 { Ok(0) } else { Err(TrainError::Check { failures }) }
    }

    /// Runs all checks. On rank 0, `report` receives the results of all ranks; on another rank, the results
    /// that rank 0 does not have.
    fn look(&self, registry: &Registry, place: Option<RankEnv>, report: &mut Report) {
        let mut checks = Checks::default();
        let rank = place.as_ref().map_or(0, |place| place.rank);
        let found = self.alone(registry, place, &mut checks);
        let Some(setup) = &found.setup else {
            let rest = [Stage::Data, Stage::Model, Stage::Comm, Stage::Step, Stage::Save];
            rest.into_iter().for_each(|stage| checks.skip(stage, "a configuration that can be used"));
            report.ranks.push((rank, checks));
            return;
        };
        if !self.wants(&[Stage::Comm, Stage::Step, Stage::Save]) {
            report.ranks.push((rank, checks));
            return;
        }
        let ranks = match &setup.options.place {
            None => {
                checks.ok(Stage::Comm, "links", "ranks are threads of one process: there are none");
                Some(Ranks::Threads)
            }
            Some(_) if !setup.meets => {
                checks.skip(Stage::Comm, "a secret and a port at which ranks can meet");
                None
            }
            Some(place) => comm::meet(setup, place, &mut checks),
        };
        let (all, together) = match &ranks {
            Some(ranks) => self.compare(setup, ranks, checks),
            None => (vec![(rank, checks)], false),
        };
        report.ranks = all;
        match &ranks {
            Some(ranks) if together => {
                let checks = self.try_out(&found, setup, ranks, report);
                if rank != 0 {
                    // Rank 0 has gathered the others.
                    report.ranks = vec![(rank, checks)];
                    return;
                }
                // A success is the same on all ranks. Each rank reports its own failures.
                for (other, found) in &mut report.ranks {
                    let is_theirs = |check: &&Check| *other == 0 || check.level != Level::Fail;
                    found.0.extend(checks.0.iter().filter(is_theirs).cloned());
                }
            }
            _ => {
                for stage in [Stage::Step, Stage::Save] {
                    let own = report.ranks.iter_mut();
                    own.for_each(|(_, checks)| checks.skip(stage, Stage::Comm.name()));
                }
            }
        }
    }

    /// Runs the checks that do not need other processes.
    fn alone(&self, registry: &Registry, place: Option<RankEnv>, checks: &mut Checks) -> Found {
        let setup = machine::examine(self, registry, place, checks);
        let mut found = Found { setup, trained: None };
        let needs_model = self.wants(&[Stage::Model, Stage::Step, Stage::Save]);
        let Some(setup) = found.setup.as_ref().filter(|_| needs_model || self.wants(&[Stage::Data])) else {
            return found;
        };
        let sources = Sources::open(setup, checks);
        let data = data::examine(&setup.config, sources.resume.as_ref(), checks);
        if needs_model {
            // Creates layers, optimizers and losses of the program, whose code may panic.
            let examined =
                panic::catch_unwind(AssertUnwindSafe(|| model::examine(setup, &sources, &data, checks)));
            found.trained = examined.unwrap_or_else(|panic| {
                let text = format!("a part of this program panics: {}", panic_message(&*panic));
                checks.failed(Stage::Model, "model", TrainError::Crash(text));
                None
            });
        }
        let first = setup.options.place.as_ref().is_none_or(|place| place.local_rank == 0);
        if let (Some(trained), Some((_, out)), true) = (&found.trained, &setup.out, first)
            && self.wants(&[Stage::Save])
        {
            disk::examine(out, trained, sources.resume.map_or(0, |from| from.state().step), checks);
        }
        found
    }

    /// Compares this process with the others and shares the results of all. The flag is `false` if it could
    /// not.
    fn compare(&self, setup: &Setup, ranks: &Ranks<'_>, checks: Checks) -> (Vec<(usize, Checks)>, bool) {
        let Ranks::Processes(met, place) = ranks else { return (vec![(0, checks)], true) };
        let (rank, timeout) = (place.rank, setup.config.comm.timeout());
        let fault = self.fault.as_ref();
        let ahead = match fault {
            Some(Fault { kind: FaultKind::Clock(seconds), rank: other, .. }) if *other == rank => *seconds,
            _ => 0.0,
        };
        let own = checks.clone();
        let compared = ranks.run(&setup.config, |world| {
            let (world, _) = fault::rehearse(world, fault, place.job.restarts);
            let mut checks = own.clone();
            comm::examine(setup, &*world, ahead, &mut checks)?;
            comm::devices(setup, met, &*world, &mut checks)?;
            let told = serde_json::to_vec(&checks).unwrap_or_default();
            let told = world::gather(&*world, "checks", &told, timeout)?;
            let read = |(rank, bytes): (usize, &Vec<u8>)| {
                (rank, serde_json::from_slice::<Checks>(bytes).unwrap_or_default())
            };
            Ok(told.iter().enumerate().map(read).collect::<Vec<_>>())
        });
        match compared {
            Ok(all) => (all, true),
            Err(error) => {
                let mut checks = checks;
                checks.failed(Stage::Comm, "meeting", error);
                (vec![(rank, checks)], false)
            }
        }
    }

    /// Takes a step and saves it on all ranks, unless a check they depend on has failed on any of them.
    /// Returns the results of this rank: a failure may concern one rank only, so each rank reports its own.
    fn try_out(&self, found: &Found, setup: &Setup, ranks: &Ranks<'_>, report: &Report) -> Checks {
        let missing = |needs: &[(Stage, &str)]| {
            let failed = needs.iter().find(|(stage, what)| report.has_failed(*stage, Some(what)));
            failed.map(|(stage, what)| format!("{}: {what}", stage.name()))
        };
        // Each process has read its own data, which determines the vocabulary.
        let other_data = report.processes && report.has_failed(Stage::Data, None);
        let needed = match other_data {
            true => Some(Stage::Data.name().to_owned()),
            false => missing(&STEP_NEEDS),
        };
        let save_needs = missing(&SAVE_NEEDS);
        let mut checks = Checks::default();
        let shrunk = match (&found.trained, &setup.device, needed) {
            (Some(trained), Some(device), None) => {
                let registry = &setup.options.registry;
                checks.take(Stage::Step, "step", Shrunk::new(trained, registry, device))
            }
            (_, _, needed) => {
                let needed = needed.unwrap_or_else(|| Stage::Model.name().to_owned());
                [Stage::Step, Stage::Save].into_iter().for_each(|stage| checks.skip(stage, &needed));
                None
            }
        };
        if let Some(shrunk) = &shrunk {
            let config = &setup.config;
            let run =
                |body: &(dyn Fn(Arc<dyn Communicator>) -> Result<String> + Sync)| ranks.run(config, body);
            let stepped = !self.wants(&[Stage::Step]) || {
                let said = checks.take(Stage::Step, "step", run(&|world| shrunk.step(world)));
                said.map(|said| checks.ok(Stage::Step, "step", said)).is_some()
            };
            match (&setup.out, save_needs) {
                _ if !self.wants(&[Stage::Save]) => {}
                (Some((named, _)), None) if stepped => {
                    let said = checks.take(Stage::Save, "save", run(&|world| shrunk.save(world, named)));
                    said.into_iter().for_each(|said| checks.ok(Stage::Save, "save", said));
                }
                (_, needed) => {
                    let needed = needed.unwrap_or_else(|| Stage::Step.name().to_owned());
                    checks.skip(Stage::Save, &needed);
                }
            }
        }
        checks
    }
}
