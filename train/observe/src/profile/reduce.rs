//! Reducing a recording to a profile.

use super::model::{Band, Peak, Profile, Recorded, Sample};

/// Number of parts of a step; of each, the moment with most bytes is kept.
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
        // Another thread may free memory from before the step slightly before the release is recorded.
        let sample = |after, now: &[i64]| {
            let bytes = now.iter().map(|bytes| u64::try_from(*bytes).unwrap_or(0)).collect();
            Sample { after, bytes }
        };
        let mut samples = vec![sample(0.0, &now)];
        let (mut peak, mut most) = (samples[0].clone(), total);
        // These describe the current part of the step.
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
        Profile {
            rank,
            step,
            seconds,
            holders,
            samples,
            bands: bands(&doings, seconds),
            peak: Peak { held: peak, activity: activity.to_owned(), module },
            changes: changes.len(),
            unexplained: held_at_end as i64 - total,
            missing,
        }
    }
}

/// Converts the activities of the rank to consecutive phases.
fn bands(doings: &[(f64, String, Option<String>)], seconds: f64) -> Vec<Band> {
    let mut bands: Vec<Band> = Vec::new();
    for (start, activity, _) in doings {
        if let Some(last) = bands.last_mut() {
            if last.activity == *activity {
                continue;
            }
            last.end = *start;
        }
        bands.push(Band { activity: activity.clone(), start: *start, end: seconds });
    }
    bands
}
