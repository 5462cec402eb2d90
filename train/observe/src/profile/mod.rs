//! The memory profile of a step: bytes by owner over time, as a drawing and as text.

mod draw;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::fmt::{self, Display, Formatter, Write as _};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fresh::write_new;

/// An owner of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Purpose of the memory, such as `activations` or `gradients`.
    pub owner: String,
    /// For activations, the module that they belong to.
    pub module: Option<String>,
}

/// An allocation or a release of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Seconds since the step began.
    pub after: f64,
    /// Index in [`Recorded::holders`].
    pub holder: usize,
    /// Change of the holder's memory in bytes.
    pub bytes: i64,
}

/// All allocations and releases of a rank in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Rank in the world.
    pub rank: usize,
    /// The optimizer step.
    pub step: u64,
    /// Length of the step in seconds.
    pub seconds: f64,
    /// All holders of memory.
    pub holders: Vec<Holder>,
    /// Bytes of each holder at the start of the step.
    pub held: Vec<u64>,
    /// The changes during the step, in order.
    pub changes: Vec<Change>,
    /// Bytes held at the end of the step, counted independently of the changes.
    pub held_at_end: u64,
    /// Number of changes that could not be recorded.
    pub missing: usize,
    /// Activities in order: start in seconds since the step began, activity, and module.
    pub doings: Vec<(f64, String, Option<String>)>,
}

/// Memory of a rank in a step, at as many moments as a drawing can show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Rank in the world.
    pub rank: usize,
    /// The optimizer step.
    pub step: u64,
    /// Length of the step in seconds.
    pub seconds: f64,
    /// All holders of memory.
    pub holders: Vec<Holder>,
    /// Moments in order. Of moments close to each other, only the one with the most bytes is kept.
    pub samples: Vec<Sample>,
    /// The activities of the rank.
    pub bands: Vec<Band>,
    /// The point of peak memory use.
    pub peak: Peak,
    /// Number of allocations and releases in the step.
    pub changes: usize,
    /// Bytes held at the end that the changes do not explain; zero if every change was recorded.
    pub unexplained: i64,
    /// Number of changes that could not be recorded.
    pub missing: usize,
}

/// The memory that a rank held at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Seconds since the step began.
    pub after: f64,
    /// Bytes of each holder.
    pub bytes: Vec<u64>,
}

impl Sample {
    /// Returns the bytes of all holders.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// A phase of the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Band {
    /// The activity, such as `forward`.
    pub activity: String,
    /// Its start, in seconds since the step began.
    pub start: f64,
    /// Its end, in seconds since the step began.
    pub end: f64,
}

/// The moment at which a rank held the most memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// The memory held.
    pub held: Sample,
    /// The activity at that moment.
    pub activity: String,
    /// The module at that moment.
    pub module: Option<String>,
}

/// The step is divided into this many parts; each keeps only its moment with the most bytes.
const PARTS: f64 = 600.0;

impl Profile {
    /// Returns the profile of a rank's recording.
    pub fn of(recorded: Recorded) -> Profile {
        let Recorded { rank, step, holders, held, changes, held_at_end, missing, doings, .. } = recorded;
        let last = changes.last().map_or(0.0, |change| change.after);
        let seconds = recorded.seconds.max(last).max(f64::MIN_POSITIVE);
        let mut now: Vec<i64> =
            (0..holders.len()).map(|at| held.get(at).map_or(0, |bytes| *bytes as i64)).collect();
        let mut total: i64 = now.iter().sum();
        // Bytes may be negative: a release of memory from before the step may be recorded late.
        let sample = |after, now: &[i64]| {
            let bytes = now.iter().map(|bytes| u64::try_from(*bytes).unwrap_or(0)).collect();
            Sample { after, bytes }
        };
        let mut samples = vec![sample(0.0, &now)];
        let (mut peak, mut most) = (samples[0].clone(), total);
        let (mut part, mut most_of_part, mut kept) = (0, i64::MIN, None);
        for change in &changes {
            let Some(bytes) = now.get_mut(change.holder) else { continue };
            let part_now = (change.after / seconds * PARTS) as u64;
            if part_now != part {
                samples.extend(kept.take());
                (part, most_of_part) = (part_now, i64::MIN);
            }
            *bytes += change.bytes;
            total += change.bytes;
            if total > most_of_part {
                most_of_part = total;
                kept = Some(sample(change.after, &now));
            }
            if total > most {
                (peak, most) = (sample(change.after, &now), total);
            }
        }
        samples.extend(kept);
        samples.push(sample(seconds, &now));
        let doing = doings.iter().rev().find(|(start, ..)| *start <= peak.after).or(doings.first());
        let (activity, module) =
            doing.map_or(("the step", None), |(_, activity, module)| (activity, module.clone()));
        let mut bands: Vec<Band> = Vec::new();
        for doings in doings.chunk_by(|(_, one, _), (_, next, _)| one == next) {
            let (start, activity, _) = &doings[0];
            if let Some(last) = bands.last_mut() {
                last.end = *start;
            }
            bands.push(Band { activity: activity.clone(), start: *start, end: seconds });
        }
        Profile {
            rank,
            step,
            seconds,
            holders,
            samples,
            bands,
            peak: Peak { held: peak, activity: activity.to_owned(), module },
            changes: changes.len(),
            unexplained: held_at_end as i64 - total,
            missing,
        }
    }
}

const MODULES: usize = 6;

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Display for Profile {
    /// Writes one line, as in
    /// `peak 21.3 MiB in backward of layers.3: activations 11.0 MiB (layers.0 3.1, layers.1 3.1), weights 4.0 MiB`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Peak { held, activity, module } = &self.peak;
        write!(f, "peak {:.1} MiB in {activity}", mib(held.total()))?;
        module.iter().try_for_each(|module| write!(f, " of {module}"))?;
        let mut separator = ":";
        let mut owners: Vec<(&str, u64)> = Vec::new();
        for (holder, bytes) in self.holders.iter().zip(&held.bytes) {
            match owners.iter_mut().find(|(owner, _)| *owner == holder.owner) {
                Some((_, sum)) => *sum += bytes,
                None => owners.push((&holder.owner, *bytes)),
            }
        }
        owners.retain(|(_, bytes)| *bytes > 0);
        owners.sort_by_key(|(_, bytes)| Reverse(*bytes));
        for (owner, bytes) in owners {
            write!(f, "{separator} {owner} {:.1} MiB", mib(bytes))?;
            let of_owner = self.holders.iter().zip(&held.bytes).filter(|(holder, _)| holder.owner == owner);
            if of_owner.clone().any(|(holder, _)| holder.module.is_some()) {
                let name = |holder: &Holder| holder.module.as_deref().unwrap_or("elsewhere").to_owned();
                let modules = of_owner.filter(|(_, bytes)| **bytes > 0);
                let mut modules: Vec<_> = modules.map(|(holder, bytes)| (name(holder), *bytes)).collect();
                modules.sort_by_key(|(_, bytes)| Reverse(*bytes));
                let rest = modules.split_off(modules.len().min(MODULES));
                let mut parts: Vec<_> =
                    modules.iter().map(|(module, bytes)| format!("{module} {:.1}", mib(*bytes))).collect();
                if !rest.is_empty() {
                    let bytes = rest.iter().map(|(_, bytes)| bytes).sum();
                    parts.push(format!("{} more {:.1}", rest.len(), mib(bytes)));
                }
                write!(f, " ({})", parts.join(", "))?;
            }
            separator = ",";
        }
        if self.missing > 0 {
            write!(f, "; {} allocations could not be recorded", self.missing)?;
        }
        if self.unexplained != 0 {
            write!(f, "; {} bytes at the end of the step are unexplained", self.unexplained)?;
        }
        Ok(())
    }
}

/// Writes an SVG per rank and a text for all ranks into `folder`, without replacing files. Returns the text's path.
///
/// # Errors
///
/// If a file operation fails.
pub fn save(profiles: &[Profile], folder: &Path) -> io::Result<PathBuf> {
    let mut text = String::new();
    let step = profiles.first().map_or(0, |profile| profile.step);
    for profile in profiles {
        let name = format!("step-{step}-rank-{}.svg", profile.rank);
        let drawing = write_new(&folder.join(name), profile.svg().as_bytes())?;
        let drawing = drawing.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let _ = writeln!(text, "rank {}, step {step}: {profile}", profile.rank);
        let after = profile.peak.held.after * 1e3;
        let _ = writeln!(
            text,
            "  {after:.1} ms into a step of {:.1} ms, {} allocations and releases, drawn in {drawing}",
            profile.seconds * 1e3,
            profile.changes
        );
    }
    write_new(&folder.join(format!("step-{step}.txt")), text.as_bytes())
}
