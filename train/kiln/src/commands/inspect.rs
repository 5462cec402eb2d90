//! The command `kiln inspect`, and the text output of flight recorders.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use kiln_collectives::{Call, Flight, Verdict};

use crate::error::InspectError;
use crate::error::Result;
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::{self as checkpoint, Checkpoint, Verified, verify};
use kiln_sys::files;
use kiln_train::flight;

/// Maximum size of a flight recorder's file in bytes; larger files are something else.
const MAX_BYTES: u64 = 256 << 20;

/// Largest number of missing ranks to name individually.
const NAMED: usize = 16;

/// Arguments of `kiln inspect`.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct InspectArgs {
    #[command(subcommand)]
    command: Option<InspectCommand>,
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(required = true)]
    checkpoint: Option<PathBuf>,
    /// Verify all files against their checksums.
    #[arg(long)]
    verify: bool,
}

#[derive(Clone, Debug, Subcommand)]
enum InspectCommand {
    /// Show which rank stalled a failed run, and the activity of every rank.
    Flight {
        /// Run folder, or its folder flight/.
        folder: PathBuf,
    },
}

impl InspectArgs {
    /// Inspects the checkpoint or the flight recorders. Returns the text to print.
    pub fn run(self) -> Result<String> {
        if let Some(InspectCommand::Flight { folder }) = self.command {
            return Ok(flight(&folder)?);
        }
        // The argument parser requires a subcommand or a checkpoint.
        let path = self.checkpoint.unwrap_or_default();
        // A checkpoint of adapters can be inspected without the model that they change.
        let source = match Checkpoint::open(&path) {
            Ok(checkpoint) => ModelSource::Checkpoint(Box::new(checkpoint), None),
            Err(_) => ModelSource::open(&path)?,
        };
        match source {
            ModelSource::Checkpoint(checkpoint, _) if self.verify => {
                let folder = checkpoint.folder().display().to_string();
                let Verified { files, bytes, problems } = verify(&checkpoint);
                if !problems.is_empty() {
                    let problems = problems.iter().map(ToString::to_string).collect();
                    return Err(InspectError::Damaged { folder, problems }.into());
                }
                let size = kiln_sys::words::size(bytes);
                Ok(format!("{folder} is intact: {files} files, {size}, all checksums match"))
            }
            ModelSource::Checkpoint(checkpoint, _) => Ok(checkpoint::describe(&checkpoint)),
            // Opening the folder has already compared names, shapes and lengths.
            ModelSource::HuggingFace(folder) if self.verify => Ok(format!(
                "{} is complete; the layout of Hugging Face has no checksums to compare",
                folder.folder().display()
            )),
            ModelSource::HuggingFace(folder) => Ok(folder.describe()),
            ModelSource::Adapters(adapters, base) => Ok(adapters.describe(base.folder())),
        }
    }
}

struct Found {
    flights: BTreeMap<usize, Flight>,
    skipped: Vec<String>,
}

/// Describes the flight recorders below `folder`: the verdict, then one line per rank. Names and skips unusable files.
pub fn flight(folder: &Path) -> Result<String, InspectError> {
    let inside = flight::flight_folder(folder);
    let folder = if inside.is_dir() { inside } else { folder.to_owned() };
    let Found { flights, skipped } = read(&folder);
    if flights.is_empty() {
        return Err(InspectError::Nothing { folder, skipped });
    }
    let all: Vec<Flight> = flights.values().cloned().collect();
    let mut lines = vec![format!("verdict: {}", Verdict::from_flights(&all))];
    lines.extend(all.iter().map(describe));
    lines.extend(missing(&flights));
    lines.extend(skipped.iter().map(|reason| format!("skipped: {reason}")));
    Ok(lines.join("\n"))
}

fn read(folder: &Path) -> Found {
    let mut found = Found { flights: BTreeMap::new(), skipped: Vec::new() };
    for name in flight::files_in(folder) {
        let Some(rank) = flight::rank_of_file(&name) else { continue };
        match read_one(&folder.join(&name), rank) {
            Ok(flight) => {
                found.flights.insert(rank, flight);
            }
            Err(reason) => found.skipped.push(format!("{name}: {reason}")),
        }
    }
    found
}

fn read_one(path: &Path, rank: usize) -> Result<Flight, String> {
    let text = files::read(path, MAX_BYTES).map_err(|error| error.to_string())?;
    let flight: Flight = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if flight.rank != rank { Err(format!("it is of rank {}", flight.rank)) } else { Ok(flight) }
}

/// Returns one line: the rank's activity, its last call, and the call it waits for.
fn describe(flight: &Flight) -> String {
    let activity = &flight.activity;
    let mut line = format!(
        "rank {} (node {}, process {}): in {} for {:.1} s",
        flight.rank, flight.node, flight.process, activity.name, activity.seconds
    );
    if let Some(last) = flight.records.last() {
        line += &format!(
            "; last operation #{} {} for {}{}",
            last.sequence,
            last.operation,
            last.label,
            group_label(&last.group)
        );
    }
    let waits: Vec<_> = flight
        .groups
        .iter()
        .filter_map(|group| {
            let first = group.pending.first()?;
            let Call { operation, label, .. } = &first.call;
            Some(format!(
                "{:.1} s for #{} {operation} for {label}{}",
                first.seconds,
                first.sequence,
                group_label(&group.name)
            ))
        })
        .collect();
    line + &match waits.as_slice() {
        [] => "; waits for nothing".to_owned(),
        waits => format!("; has waited {}", waits.join(" and ")),
    }
}

fn group_label(name: &str) -> String {
    if name == "world" { String::new() } else { format!(" of group \"{name}\"") }
}

/// Returns a line that names the ranks without a usable file.
fn missing(flights: &BTreeMap<usize, Flight>) -> Option<String> {
    let world_size = flights.values().map(|flight| flight.world_size).max()?;
    let known = flights.range(..world_size).count();
    // The number of names is limited, because a damaged file may claim any world size.
    let names = (0..world_size).filter(|rank| !flights.contains_key(rank)).take(NAMED);
    let names: Vec<_> = names.map(|rank| rank.to_string()).collect();
    let more = (world_size - known).saturating_sub(names.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let word = if names.len() == 1 { "rank" } else { "ranks" };
    (!names.is_empty()).then(|| format!("no record of {word} {}{more}", names.join(", ")))
}
