//! `kiln bisect`: finds the key responsible for a difference between two configurations, by delta debugging (Zeller and
//! Hildebrandt, 2002).

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::cause::{self, Facts};
use super::command::config_of;
use super::compare;
use super::difference::{Difference, Expected, Verdict};
use super::hashes;
use super::keys::{self, Effect, KeyDifference};
use super::subject::{Subject, SubjectKind};
use super::trial;
use crate::error::Result;
use crate::hash::StepHashes;
use kiln_config::Config;
use kiln_sys::words::number_of;
use kiln_train::process::output::{eprint_line, print_line};
use kiln_train::registry::Registry;

/// Number of steps to train if the first diverging step is unknown.
const STEPS: u64 = 3;

/// Arguments of `kiln bisect`.
#[derive(Args)]
pub struct BisectArgs {
    /// Run folder, checkpoint or configuration with the expected result.
    good: PathBuf,
    /// Run folder, checkpoint or configuration with the wrong result.
    bad: PathBuf,
    /// Maximum number of steps of a trial [default: up to the first difference of two runs, else 3].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Override a value of the good configuration; may be repeated.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set_good: Vec<String>,
    /// Override a value of the bad configuration; may be repeated.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set_bad: Vec<String>,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Same,
    /// The trial diverges from the good configuration at this place.
    PartsAt(Option<Difference>),
    Fails(String),
    Impossible(String),
}

impl Outcome {
    fn differs(&self) -> bool {
        matches!(self, Outcome::PartsAt(_) | Outcome::Fails(_))
    }

    fn describe(&self) -> String {
        match self {
            Outcome::Same => "equal to the good configuration".to_owned(),
            Outcome::PartsAt(Some(at)) => format!("diverges at {at}"),
            Outcome::PartsAt(None) => "has different tensors".to_owned(),
            Outcome::Fails(why) => format!("fails: {why}"),
            Outcome::Impossible(why) => format!("cannot be run: {why}"),
        }
    }
}

#[derive(Debug, Serialize)]
struct Trial {
    keys: Vec<String>,
    outcome: Outcome,
}

/// A smallest set of keys that makes a difference.
#[derive(Debug, Serialize)]
struct Culprit {
    keys: Vec<KeyDifference>,
    outcome: Outcome,
}

struct Bisection<'a> {
    good: Config,
    bad: Config,
    registry: &'a Registry,
    steps: u64,
    known: Vec<StepHashes>,
    /// Set if any difference in bits counts, because no larger difference was found.
    is_strict: bool,
    trials: Vec<Trial>,
}

impl BisectArgs {
    /// Runs the trials and prints the result. Returns the exit code: 0 if a key was found.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let (a, b) = (Subject::find(&self.good)?, Subject::find(&self.bad)?);
        let (good, bad) = (config_of(&a, &self.set_good, None)?, config_of(&b, &self.set_bad, None)?);
        let steps = self.steps.unwrap_or_else(|| steps_of(&a, &b));
        let mut keys = keys::differences(&good, &bad);
        // Keys that can change numbers come first.
        keys.sort_by_key(|key| match key.effect {
            Effect::Numbers(phase) => (0, Some(phase)),
            Effect::Rounding => (1, None),
            Effect::Neither => (2, None),
        });
        let mut bisection =
            Bisection { good, bad, registry, steps, known: Vec::new(), is_strict: false, trials: Vec::new() };
        let culprits = if keys.is_empty() { Vec::new() } else { bisection.culprits(&keys)? };
        let builds = cause::other_builds(&Facts::of(&a), &Facts::of(&b));
        print_line(&match self.json {
            true => json(&culprits, &bisection.trials, builds.as_deref()),
            false => text(&culprits, &keys, steps, builds.as_deref()),
        });
        Ok(u8::from(culprits.is_empty()))
    }
}

/// Returns the step in which two runs diverge, or the default if unknown.
fn steps_of(a: &Subject, b: &Subject) -> u64 {
    if a.kind != SubjectKind::Run || b.kind != SubjectKind::Run {
        return STEPS;
    }
    let report = compare::subjects(a, b).ok();
    let known = report.and_then(|report| report.parted.or(report.first)?.at.step);
    known.unwrap_or(STEPS)
}

impl Bisection<'_> {
    fn culprits(&mut self, keys: &[KeyDifference]) -> Result<Vec<Culprit>> {
        eprint_line(&format!("training the good configuration for {}", number_of(self.steps, "step")));
        self.known = trial::run(&self.good, self.registry, self.steps, None)?;
        let mut left: Vec<&KeyDifference> = keys.iter().collect();
        let mut culprits = Vec::new();
        let mut outcome = self.attempt(&left)?;
        if !outcome.differs() {
            // Only the order of sums can differ, which changes single bits.
            self.is_strict = true;
            outcome = self.attempt(&left)?;
        }
        while outcome.differs() {
            let (culprit, outcome_of_it) = self.smallest(left.clone(), outcome)?;
            left.retain(|key| !culprit.iter().any(|other| other.key == key.key));
            culprits.push(Culprit { keys: culprit.into_iter().cloned().collect(), outcome: outcome_of_it });
            if left.is_empty() {
                break;
            }
            outcome = self.attempt(&left)?;
        }
        Ok(culprits)
    }

    /// Reduces `keys`, which together make a difference, to a smallest subset that still makes one.
    fn smallest<'k>(
        &mut self,
        mut keys: Vec<&'k KeyDifference>,
        mut outcome: Outcome,
    ) -> Result<(Vec<&'k KeyDifference>, Outcome)> {
        let mut pieces = 2;
        'smaller: while keys.len() > 1 {
            let size = keys.len().div_ceil(pieces);
            let parts: Vec<Vec<_>> = keys.chunks(size).map(<[_]>::to_vec).collect();
            for part in &parts {
                let of_part = self.attempt(part)?;
                if of_part.differs() {
                    (keys, outcome, pieces) = (part.clone(), of_part, 2);
                    continue 'smaller;
                }
            }
            // With two parts, each is the complement of the other.
            for index in (0..parts.len()).filter(|_| parts.len() > 2) {
                let rest = parts.iter().enumerate().filter(|(other, _)| *other != index);
                let rest: Vec<_> = rest.flat_map(|(_, part)| part.iter().copied()).collect();
                let of_rest = self.attempt(&rest)?;
                if of_rest.differs() {
                    (keys, outcome, pieces) = (rest, of_rest, (pieces - 1).max(2));
                    continue 'smaller;
                }
            }
            if pieces >= keys.len() {
                break;
            }
            pieces = (2 * pieces).min(keys.len());
        }
        Ok((keys, outcome))
    }

    fn attempt(&mut self, keys: &[&KeyDifference]) -> Result<Outcome> {
        let outcome = match keys::with_keys(&self.good, &self.bad, keys) {
            Err(error) => Outcome::Impossible(error.to_string()),
            Ok(config) => {
                let differ = keys::differences(&self.good, &config);
                let expected = keys::expected(&self.good, &config, &differ);
                let expected = Expected { is_strict: self.is_strict, ..expected };
                let until = Some((&self.known[..], expected));
                match trial::run(&config, self.registry, self.steps, until) {
                    Err(error) if error.is_stop() => return Err(error),
                    Err(error) if error.is_usage() => Outcome::Impossible(error.to_string()),
                    Err(error) => Outcome::Fails(error.to_string()),
                    Ok(found) => self.judged(&found, Expected { is_strict: false, ..expected }),
                }
            }
        };
        let keys: Vec<_> = keys.iter().map(|key| key.key.clone()).collect();
        eprint_line(&format!("trial {}: {}: {}", self.trials.len() + 1, keys.join(", "), outcome.describe()));
        self.trials.push(Trial { keys, outcome: outcome.clone() });
        Ok(outcome)
    }

    fn judged(&self, found: &[StepHashes], expected: Expected) -> Outcome {
        let compared = hashes::compare(&self.known, found, expected);
        let judge = compared.judge;
        match judge.verdict() {
            _ if !compared.unpaired.is_empty() => Outcome::PartsAt(judge.parted.or(judge.first)),
            Verdict::Equal => Outcome::Same,
            Verdict::Rounding if !self.is_strict => Outcome::Same,
            Verdict::Rounding | Verdict::Different => Outcome::PartsAt(judge.parted.or(judge.first)),
        }
    }
}

fn json(culprits: &[Culprit], trials: &[Trial], builds: Option<&str>) -> String {
    let all = serde_json::json!({ "culprits": culprits, "trials": trials, "builds": builds });
    format!("{all:#}")
}

fn text(culprits: &[Culprit], keys: &[KeyDifference], steps: u64, builds: Option<&str>) -> String {
    let mut lines = Vec::new();
    for Culprit { keys, outcome } in culprits {
        let names: Vec<_> = keys.iter().map(KeyDifference::describe).collect();
        match &names[..] {
            [name] => lines.push(format!("key responsible for the difference: {name}")),
            names => lines.push(format!("keys responsible only together: {}", names.join(", "))),
        }
        lines.push(format!("  with it, the good configuration {}", outcome.describe()));
    }
    let others = keys.len() - culprits.iter().map(|culprit| culprit.keys.len()).sum::<usize>();
    let steps = number_of(steps, "step");
    match (culprits.is_empty(), keys.len()) {
        (true, 0) => lines.push("the configurations are the same, so no key can be responsible".to_owned()),
        (true, _) => {
            lines.push(format!("no key changes the result within {steps}; differing keys: {others}"))
        }
        (false, _) => {
            lines.push(format!("other differing keys, which change nothing within {steps}: {others}"))
        }
    }
    if let Some(builds) = builds {
        lines.push(format!("the runs used different builds, which bisect cannot test: {builds}"));
    }
    lines.join("\n")
}
