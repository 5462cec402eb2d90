//! `kiln check CONFIG`: checks in seconds that a run would start and save.
//!
//! Each process checks its own part, then processes compare, then all ranks take and save a reduced step.

mod arguments;
mod comm;
mod data;
mod disk;
mod env;
mod layers;
mod model;
mod ring;
mod step;

use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kiln_collectives::Communicator;
use kiln_shard::ranks::panic_message;

use crate::findings::{Finding, Findings, Level, Report, Stage};
pub use arguments::CheckArgs;
use env::Setup;
use kiln_launch::place::{self, RankEnv, Role};
use kiln_train::error::{Result, TrainError};
use kiln_train::fault::{self, Fault, FaultKind};
use kiln_train::launch;
use kiln_train::process::output::{eprint_line, print_line};
use kiln_train::registry::Registry;
use kiln_train::world::{self, Ranks};
use model::{Sources, Trained};
use step::Shrunk;

/// Checks that must have succeeded on all ranks before a step.
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

const SAVE_NEEDS: [(Stage, &str); 3] =
    [(Stage::Env, "run folder"), (Stage::Comm, "run folder"), (Stage::Save, "disk")];

impl CheckArgs {
    /// Runs the checks as one rank, or launches the ranks of this node. Returns the exit code.
    ///
    /// # Errors
    ///
    /// If a check finds a problem that would end the run.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let Some(path) = &self.config else { return Ok(self.machine.run(&self.place)) };
        if self.machine.is_set() {
            return Err(TrainError::usage("--json, --comm-ports and --gpu are for --machine"));
        }
        let start = Instant::now();
        let place = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let rank = place.as_ref().map_or(0, |place| place.rank);
        let mut report = self.check(path, registry, place);
        // Only rank 0 reports successes; other ranks report failures.
        report.keep(|stage| rank == 0 && (self.stage.is_empty() || self.stage.contains(&stage)));
        let text = report.to_text(start.elapsed().as_secs_f64());
        let failures = report.failures();
        match rank {
            0 => print_line(&text),
            _ if failures == 0 => {}
            _ => eprint_line(&text),
        }
        if failures == 0 { Ok(0) } else { Err(TrainError::Check { failures }) }
    }

    /// Runs all checks. Rank 0 returns all ranks' findings; another rank returns findings that rank 0 does not have.
    fn check(&self, path: &Path, registry: &Registry, place: Option<RankEnv>) -> Report {
        let (rank, processes) = (place.as_ref().map_or(0, |place| place.rank), place.is_some());
        let own = |findings| Report { ranks: vec![(rank, findings)], processes };
        let mut findings = Findings::default();
        let (setup, trained) = self.check_alone(path, registry, place, &mut findings);
        let Some(setup) = &setup else {
            let rest = [Stage::Data, Stage::Model, Stage::Comm, Stage::Step, Stage::Save];
            rest.into_iter().for_each(|stage| findings.skip(stage, "a usable configuration"));
            return own(findings);
        };
        if !self.wants(&[Stage::Comm, Stage::Step, Stage::Save]) {
            return own(findings);
        }
        let ranks = match &setup.options.place {
            None => {
                findings.ok(Stage::Comm, "links", "none: ranks are threads of one process");
                Some(Ranks::Threads)
            }
            Some(_) if !setup.meets => {
                findings.skip(Stage::Comm, "a secret and a free port");
                None
            }
            Some(place) => comm::meet(setup, place, &mut findings),
        };
        let compared = ranks.and_then(|ranks| {
            let all = self.compare(setup, &ranks, &mut findings)?;
            Some((ranks, all))
        });
        let Some((ranks, all)) = compared else {
            [Stage::Step, Stage::Save].into_iter().for_each(|stage| findings.skip(stage, Stage::Comm.name()));
            return own(findings);
        };
        let mut report = Report { ranks: all, processes };
        let findings = self.try_out(trained.as_ref(), setup, &ranks, &report);
        if rank != 0 {
            return own(findings);
        }
        // Successes are the same on all ranks, so rank 0's are copied. Each rank reports its own failures.
        for (other, found) in &mut report.ranks {
            let is_theirs = |finding: &&Finding| *other == 0 || finding.level != Level::Fail;
            found.0.extend(findings.0.iter().filter(is_theirs).cloned());
        }
        report
    }

    fn check_alone(
        &self,
        path: &Path,
        registry: &Registry,
        place: Option<RankEnv>,
        findings: &mut Findings,
    ) -> (Option<Setup>, Option<Trained>) {
        let needs_model = self.wants(&[Stage::Model, Stage::Step, Stage::Save]);
        let setup = match env::examine(self, path, registry, place, findings) {
            Some(setup) if needs_model || self.wants(&[Stage::Data]) => setup,
            setup => return (setup, None),
        };
        let sources = Sources::open(&setup, findings);
        let data = data::examine(&setup.config, &setup.options.registry, sources.resume.as_ref(), findings);
        if !needs_model {
            return (Some(setup), None);
        }
        let first = setup.options.place.as_ref().is_none_or(|place| place.local_rank == 0);
        // The program's custom layers, optimizers and losses may panic.
        let examined = panic::catch_unwind(AssertUnwindSafe(|| {
            let trained = model::examine(&setup, &sources, &data, findings);
            if let Some(trained) = trained.as_ref().filter(|_| first) {
                layers::examine(trained, registry, findings);
            }
            trained
        }));
        let trained = examined.unwrap_or_else(|panic| {
            let text = format!("a part of this program panicked: {}", panic_message(&*panic));
            findings.failed(Stage::Model, "model", TrainError::Crash(text));
            None
        });
        if let (Some(trained), Some((_, out)), true) = (&trained, &setup.out, first)
            && self.wants(&[Stage::Save])
        {
            disk::examine(out, trained, sources.resume.map_or(0, |from| from.state().step), findings);
        }
        (Some(setup), trained)
    }

    fn compare(
        &self,
        setup: &Setup,
        ranks: &Ranks<'_>,
        findings: &mut Findings,
    ) -> Option<Vec<(usize, Findings)>> {
        let Ranks::Processes(met, place) = ranks else { return Some(vec![(0, findings.clone())]) };
        let fault = self.fault.as_ref();
        let ahead = match fault {
            Some(Fault { kind: FaultKind::Clock(seconds), rank, .. }) if *rank == place.rank => *seconds,
            _ => 0.0,
        };
        let compared = ranks.run(&setup.config, |world| {
            let (world, _) = fault::rehearse(world, fault, place.job.restarts);
            let mut findings = findings.clone();
            comm::examine(setup, &*world, ahead, &mut findings)?;
            comm::devices(setup, met, &*world, &mut findings)?;
            let mine = serde_json::to_vec(&findings).unwrap_or_default();
            let all = world::gather(&*world, "checks", &mine, setup.config.comm.timeout())?;
            let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).unwrap_or_default();
            Ok(all.iter().map(read).enumerate().collect())
        });
        compared.map_err(|error| findings.failed(Stage::Comm, "meeting", error)).ok()
    }

    /// Takes and saves a step, unless a check that it needs has failed on any rank. Returns this rank's results.
    fn try_out(
        &self,
        trained: Option<&Trained>,
        setup: &Setup,
        ranks: &Ranks<'_>,
        report: &Report,
    ) -> Findings {
        let missing = |needs: &[(Stage, &str)]| {
            let failed = needs.iter().find(|(stage, what)| report.has_failed(*stage, Some(what)));
            failed.map(|(stage, what)| format!("{}: {what}", stage.name()))
        };
        // Each process has read its own data, which determines the vocabulary size.
        let other_data = report.processes && report.has_failed(Stage::Data, None);
        let needed = match other_data {
            true => Some(Stage::Data.name().to_owned()),
            false => missing(&STEP_NEEDS),
        };
        let save_needs = missing(&SAVE_NEEDS);
        let mut findings = Findings::default();
        let shrunk = match (trained, &setup.device, needed) {
            (Some(trained), Some(device), None) => {
                let registry = &setup.options.registry;
                findings.take(Stage::Step, "step", Shrunk::new(trained, registry, device))
            }
            (_, _, needed) => {
                let needed = needed.unwrap_or_else(|| Stage::Model.name().to_owned());
                [Stage::Step, Stage::Save].into_iter().for_each(|stage| findings.skip(stage, &needed));
                None
            }
        };
        if let Some(shrunk) = &shrunk {
            let config = &setup.config;
            let run =
                |body: &(dyn Fn(Arc<dyn Communicator>) -> Result<String> + Sync)| ranks.run(config, body);
            let stepped = !self.wants(&[Stage::Step]) || {
                let report = findings.take(Stage::Step, "step", run(&|world| shrunk.step(world)));
                report.map(|report| findings.ok(Stage::Step, "step", report)).is_some()
            };
            match (&setup.out, save_needs) {
                _ if !self.wants(&[Stage::Save]) => {}
                (Some((named, _)), None) if stepped => {
                    let report = findings.take(Stage::Save, "save", run(&|world| shrunk.save(world, named)));
                    report.into_iter().for_each(|report| findings.ok(Stage::Save, "save", report));
                }
                (_, needed) => {
                    let needed = needed.unwrap_or_else(|| Stage::Step.name().to_owned());
                    findings.skip(Stage::Save, &needed);
                }
            }
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use clap::Args as _;

    use super::*;

    #[test]
    fn machine_replaces_the_configuration() {
        let command = CheckArgs::augment_args(clap::Command::new("check"));
        let parse = |arguments: &[&str]| {
            let arguments = [&["check"], arguments].concat();
            let matches = command.clone().try_get_matches_from(arguments).ok()?;
            CheckArgs::from_arg_matches(&matches).ok()
        };
        assert!(parse(&["--machine", "--json", "--gpu"]).is_some_and(|args| args.config.is_none()));
        for wrong in [&["run.toml", "--machine"][..], &["--machine", "--stage", "env"], &[]] {
            assert!(parse(wrong).is_none(), "{wrong:?}");
        }
        let unused = parse(&["run.toml", "--json"]).expect("arguments").run(&Registry::default());
        assert!(unused.is_err_and(|error| error.to_string().contains("are for --machine")));
    }
}
