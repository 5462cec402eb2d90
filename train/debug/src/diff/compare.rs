//! Comparison of two subjects: hashes, metrics and weights, the most precise first; then configurations and data.

use super::cause::{self, Facts};
use super::difference::{Expected, Verdict};
use super::hashes::{self, Compared};
use super::keys::{self, Effect, KeyDifference};
use super::report::Report;
use super::subject::{Subject, SubjectKind, models_of};
use super::values;
use crate::error::DiffError;
use crate::error::Result;
use crate::hash::{StepHashes, read};
use kiln_config::load;

pub fn subjects(a: &Subject, b: &Subject) -> Result<Report> {
    let mut report = Report::new([a, b].map(|subject| subject.path.display().to_string()));
    let both = |of: fn(&Subject) -> Option<std::path::PathBuf>| of(a).zip(of(b));
    let mut expected = Expected::default();
    let keys = match both(Subject::config) {
        Some((a, b)) => match (load(&a, &[]), load(&b, &[])) {
            (Ok(a), Ok(b)) => {
                let keys = keys::differences(&a, &b);
                expected = keys::expected(&a, &b, &keys);
                Some(keys)
            }
            (Err(error), _) | (_, Err(error)) => {
                report.compared.push(format!("the configurations could not be compared ({error})"));
                None
            }
        },
        None => None,
    };
    let facts = [a, b].map(Facts::of);
    expected.is_strict &= facts[0].is_on_device_of(&facts[1]);
    let mut has_any = keys.is_some();
    let mut compared = None;
    if let Some((a, b)) = both(Subject::hashes) {
        has_any = true;
        let (a, b) = (read(&a).map_err(DiffError::from)?, read(&b).map_err(DiffError::from)?);
        compared = add_hashes(&mut report, &a, &b, expected);
    }
    if report.verdict != Verdict::Different
        && let Some((a, b)) = both(Subject::metrics)
    {
        has_any = true;
        match values::metrics(&a, &b, expected, report.largest)? {
            Some(found) => report.add(found.judge, found.what),
            None => report.compared.push("metrics, which have no step in common".to_owned()),
        }
    }
    // Different steps imply different weights. If steps differ by rounding only, the weights only have to be finite.
    if report.verdict != Verdict::Different
        && let Some((a, b)) = models_of(a, b)
    {
        has_any = true;
        let found = values::models(&a, &b, expected)?;
        if report.verdict == Verdict::Equal || found.judge.worst == f64::INFINITY {
            report.add(found.judge, found.what);
        }
    }
    if (a.kind, b.kind) == (SubjectKind::Data, SubjectKind::Data) {
        has_any = true;
        let found = values::data(&a.path, &b.path)?;
        report.add(found.judge, found.what);
    }
    let what = || format!("{}, and {}", a.describe(), b.describe());
    if !has_any {
        return Err(DiffError::Nothing { what: what() }.into());
    }
    let is_of_configurations = [a, b].iter().any(|subject| subject.kind == SubjectKind::Config);
    if report.places == 0 && !is_of_configurations {
        let reason = "they have no step in common".to_owned();
        return Err(DiffError::Apart { what: what(), reason }.into());
    }
    if report.verdict != Verdict::Equal && a.kind != SubjectKind::Data {
        report.likely_cause = likely(compared.as_ref(), &report, keys.as_deref(), [&facts[0], &facts[1]]);
    }
    report.keys = keys.unwrap_or_default();
    if is_of_configurations && !report.keys.is_empty() {
        report.verdict = Verdict::Different;
        report.is_of_another_kind = true;
    }
    Ok(report)
}

/// Compares the hashes of two runs whose configurations differ in `keys`.
pub fn steps(
    names: [String; 2],
    a: &[StepHashes],
    b: &[StepHashes],
    keys: Vec<KeyDifference>,
    expected: Expected,
) -> Report {
    let mut report = Report::new(names);
    let compared = add_hashes(&mut report, a, b, expected);
    if report.verdict != Verdict::Equal {
        let facts = Facts::default();
        report.likely_cause = likely(compared.as_ref(), &report, Some(&keys), [&facts, &facts]);
    }
    report.keys = keys;
    report
}

fn likely(
    compared: Option<&Compared>,
    report: &Report,
    keys: Option<&[KeyDifference]>,
    facts: [&Facts; 2],
) -> Option<String> {
    if report.verdict == Verdict::Rounding {
        let of_rounding = |key: &&KeyDifference| key.effect == Effect::Rounding;
        let mut names: Vec<_> = keys?.iter().filter(of_rounding).map(KeyDifference::describe).collect();
        names.extend(cause::other_devices(facts[0], facts[1]));
        return (!names.is_empty()).then(|| format!("sums in another order: {}", names.join(" or ")));
    }
    let parted = compared.filter(|compared| compared.judge.parted.is_some());
    let phase = parted.and_then(|compared| compared.phase);
    Some(cause::likely(phase, compared, keys, facts))
}

fn add_hashes(
    report: &mut Report,
    a: &[StepHashes],
    b: &[StepHashes],
    expected: Expected,
) -> Option<Compared> {
    let compared = hashes::compare(a, b, expected);
    let (Some(first), Some(last)) = (compared.steps.first(), compared.steps.last()) else {
        report.compared.push("hashes, which have no step in common".to_owned());
        return None;
    };
    let ends = [a, b].map(|steps| steps.last().map_or(0, |step| step.step));
    let more = match compared.judge.parted {
        None if ends[0] > *last => format!(", of {} in the first", ends[0]),
        None if ends[1] > *last => format!(", of {} in the second", ends[1]),
        _ => String::new(),
    };
    report.add(compared.judge.clone(), format!("hashes of steps {first} to {last}{more}"));
    if !compared.unpaired.is_empty() {
        let some: Vec<_> = compared.unpaired.iter().take(4).map(String::as_str).collect();
        let all = compared.unpaired.len();
        report.compared.push(format!(
            "not compared: {all} tensors that only one of them has, such as {}",
            some.join(", ")
        ));
        // A different set of tensors counts, even if the common tensors agree.
        report.verdict = Verdict::Different;
        report.is_of_another_kind = true;
    }
    Some(compared)
}
