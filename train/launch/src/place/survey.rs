//! Asks every source for the place of this process.

use std::io::IsTerminal;
use std::sync::Once;

use super::error::{EnvError, shortened};
use super::flags::Flags;
use super::job::Job;
use super::role::{Finding, Role, Source};
use super::vars::{Lookup, Vars};
use super::{jobset, mpi, node, pet, slurm, stray, torchrun};

/// A function that reads the place of this process from flags and variables.
type Read = fn(&Flags, &Vars) -> Result<Finding, EnvError>;

/// The sources in the order in which they are asked, and the variables that each reads, without the secret.
pub(super) const SOURCES: [(Source, &[&str], Read); 7] = [
    (Source::Flags, &[], Flags::read),
    (Source::Torchrun, torchrun::NAMES, |_, vars| torchrun::read(vars)),
    (Source::Pet, pet::NAMES, |_, vars| pet::read(vars)),
    (Source::Slurm, slurm::NAMES, |_, vars| slurm::read(vars)),
    (Source::OpenMpi, mpi::OPEN_MPI, |_, vars| mpi::read_open_mpi(vars)),
    (Source::Pmi, mpi::PMI, |_, vars| mpi::read_pmi(vars)),
    (Source::JobSet, jobset::NAMES, |_, vars| node::read_jobset(vars)),
];

/// A source's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Considered {
    /// The source.
    pub source: Source,
    /// Its variables that are set, with values shortened.
    pub found: Vec<(String, String)>,
    /// Reason why it was used or skipped.
    pub verdict: String,
}

/// Finds the role of a process without flags. Never panics, and its memory use is proportional to the size of
/// the values, regardless of their contents.
pub fn find(lookup: &Lookup) -> Result<(Role, Vec<Considered>), EnvError> {
    let (role, considered) = survey(&Flags::default(), lookup);
    Ok((role?, considered))
}

/// Returns the role of this process. Warns once if it is alone though variables describe several ranks, or if it may
/// wait in vain for other ranks.
pub fn find_here(flags: &Flags) -> Result<Role, EnvError> {
    static TOLD: Once = Once::new();
    let role = survey(flags, &environment).0?;
    let remark = match &role {
        Role::Alone(_) => stray::remark(&environment),
        role => stray::inherited(role, &environment, std::io::stdin().is_terminal()),
    };
    if let Some(remark) = remark {
        TOLD.call_once(|| tracing::warn!("{remark}"));
    }
    Ok(role)
}

/// Returns a variable of this process, or its host name if a shell has not exported it.
pub fn environment(name: &str) -> Option<String> {
    let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    if name == "HOSTNAME" && value.is_none() {
        return Some(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    value
}

/// Asks every source, and returns the answer of each, even if one of them is invalid.
pub fn survey(flags: &Flags, lookup: &Lookup) -> (Result<Role, EnvError>, Vec<Considered>) {
    // Flags may set the address where the ranks meet, whichever source provides the rest.
    let overlaid = |name: &str| flags.overlay(name).or_else(|| lookup(name));
    let vars = Vars(&overlaid);
    let mut considered = Vec::new();
    let mut outcome = None;
    for (source, names, read) in SOURCES {
        let named = names.iter().filter_map(|name| Some(((*name).to_owned(), shortened(&lookup(name)?))));
        let found = if source == Source::Flags { flags.found() } else { named.collect() };
        let verdict = match &outcome {
            Some((winner, Ok(_))) => format!("not asked: {winner} comes first"),
            Some((winner, Err(_))) => format!("not asked: {winner} is wrong"),
            None => match read(flags, &vars) {
                Ok(Finding::Taken(role, why)) => {
                    outcome = Some((source, Ok(role)));
                    format!("taken: {why}")
                }
                Ok(Finding::Passed(why)) => format!("passed over: {why}"),
                Err(error) => {
                    let verdict = format!("wrong: {error}");
                    outcome = Some((source, Err(error)));
                    verdict
                }
            },
        };
        considered.push(Considered { source, found, verdict });
    }
    let role = match outcome {
        Some((_, role)) => role,
        // The flags show that this process is meant to be one of several.
        None if !flags.found().is_empty() => Err(EnvError::missing(
            "--rank",
            "where to meet is given, but not who meets; add --rank and --world-size",
        )),
        None => Ok(Role::Alone(Job::of_scheduler(&vars))),
    };
    (role, considered)
}
