//! Disk space needed for the checkpoints that a run keeps.

use std::path::Path;

use kiln_shard::Optimizer;

use super::env::nearest;
use super::model::Trained;
use crate::findings::{Findings, Stage};
use kiln_checkpoint::sharded::Shapes;
use kiln_checkpoint::{self as checkpoint, Keep};
use kiln_config::{CheckpointSection, Config};
use kiln_sys::words::size;

const SAVE: Stage = Stage::Save;

const F32: u64 = 4;

const OTHER: u64 = 16 << 20;

/// Checks the disk space where `out` is or will be. The run continues after `done` steps.
pub(super) fn examine(out: &Path, parts: &Trained, done: u64, findings: &mut Findings) {
    let Trained { config, optimizer, shapes, .. } = parts;
    let each = bytes_of(config, optimizer, shapes);
    let CheckpointSection { keep, keep_every, .. } = config.checkpoint;
    let kept = Keep { newest: keep, every: keep_every };
    let there = checkpoint::removable(&checkpoint::checkpoints_folder(out), kept, done) as u64;
    let most = most_at_a_time(&config.checkpoint, config.train.steps, done, there);
    let needed = each.saturating_mul(most).saturating_add(OTHER);
    let place = nearest(out);
    let what = format!("{most} x {}", size(each));
    let free = match rustix::fs::statvfs(place) {
        Ok(found) => found.f_bavail.saturating_mul(found.f_frsize),
        Err(error) => {
            let detail = format!("the free space of {} is unknown ({error})", place.display());
            return findings.warn(SAVE, "disk", detail, format!("make sure that it has room for {what}"));
        }
    };
    match needed <= free {
        true => {
            let detail =
                format!("checkpoints take {what} at most; {} has {} free", place.display(), size(free));
            findings.ok(SAVE, "disk", detail);
        }
        false => findings.fail(
            SAVE,
            "disk",
            format!(
                "checkpoints take {what} = {} at most, and {} has {} free",
                size(needed),
                place.display(),
                size(free)
            ),
            "free some space there, name another disk with --out, keep fewer checkpoints (checkpoint.keep, \
             checkpoint.keep_every), or save less often (checkpoint.every)",
        ),
    }
}

fn bytes_of(config: &Config, optimizer: &Optimizer, shapes: &Shapes) -> u64 {
    let is_frozen = config.frozen();
    let bytes = |(name, shape): &(String, Vec<usize>)| {
        let numel = |shape: &[usize]| shape.iter().fold(1, |all: u64, size| all.saturating_mul(*size as u64));
        let weight = numel(shape).saturating_mul(F32);
        if is_frozen(name) {
            // Next to adapters, frozen weights are not saved.
            return if config.lora.adapters().is_some() { 0 } else { weight };
        }
        let slots = optimizer.rule_of(name, shape).slots().len() as u64;
        let owned = optimizer.owned_slots_of(name, shape);
        let owned = owned.iter().map(|slot| numel(&slot.shape)).fold(0, u64::saturating_add);
        weight.saturating_mul(1 + slots).saturating_add(owned.saturating_mul(F32))
    };
    shapes.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Returns how many checkpoints at most a run adds at a time. The run continues after `done` of `steps` steps, and
/// may remove `there` of the existing checkpoints, each once a new one is complete.
fn most_at_a_time(section: &CheckpointSection, steps: u64, done: u64, there: u64) -> u64 {
    let CheckpointSection { every, keep, keep_every, .. } = section;
    let up_to = |step: u64, of: u64| step.checked_div(of).unwrap_or(0);
    let multiples = |of: u64| up_to(steps, of).saturating_sub(up_to(done, of));
    let last = u64::from(*every == 0 || !steps.is_multiple_of(*every));
    let saves = multiples(*every) + last;
    if *keep == 0 {
        return saves;
    }
    let permanent = match (*every, *keep_every) {
        (_, 0) => 0,
        (0, keep) => u64::from(steps.is_multiple_of(keep)),
        (every, keep) => multiples((every / gcd(every, keep)).saturating_mul(keep)),
    };
    let new = (*keep as u64).saturating_sub(there).saturating_add(1);
    saves.min(new.saturating_add(permanent))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_checkpoints_are_counted() {
        let with_existing = |every, keep, keep_every, steps, done, there| {
            let section = CheckpointSection { every, keep, keep_every, ..CheckpointSection::default() };
            most_at_a_time(&section, steps, done, there)
        };
        let most =
            |every, keep, keep_every, steps, done| with_existing(every, keep, keep_every, steps, done, 0);
        assert_eq!(most(0, 2, 0, 100, 0), 1);
        assert_eq!(most(10, 2, 0, 100, 0), 3);
        assert_eq!(most(10, 0, 0, 100, 0), 10);
        assert_eq!(most(10, 0, 0, 100, 70), 3);
        assert_eq!(most(10, 0, 0, 105, 0), 11);
        assert_eq!(most(90, 9, 0, 100, 0), 2);
        assert_eq!(most(20, 1, 60, 120, 0), 4);
        assert_eq!(most(20, 1, 30, 120, 0), 4);
        assert_eq!(most(1, 0, 0, u64::MAX, 0), u64::MAX);
        assert_eq!(most(3, 1, u64::MAX - 1, u64::MAX, 0), 3);
        assert_eq!(with_existing(10, 2, 0, 100, 70, 2), 1);
        assert_eq!(with_existing(10, 2, 0, 100, 70, 5), 1);
        assert_eq!(with_existing(10, 2, 0, 100, 70, 1), 2);
        assert_eq!(with_existing(10, 0, 0, 100, 70, 5), 3);
    }
}
