//! Samples, events, what is missing, and the method.

use std::fs;
use std::path::Path;

use super::document::{Block, Cell, Table};
use super::statistics::count;
use super::subject::Subject;
use super::text::{cut, quoted};
use super::time;
use crate::run::{Event, Sample};

/// Prompts of a run whose samples are shown.
const PROMPTS: usize = 4;
/// Characters of a sample.
const CHARACTERS: usize = 1500;
/// Events of a run that are shown.
const EVENTS: usize = 60;

/// The last sample of each prompt.
pub(super) fn samples(subjects: &[Subject<'_>]) -> Vec<Block> {
    let mut blocks = Vec::new();
    for subject in subjects {
        let mut last: Vec<&Sample> = Vec::new();
        for sample in subject.run.samples() {
            match last.iter_mut().find(|known| known.prompt == sample.prompt) {
                Some(known) => *known = sample,
                None => last.push(sample),
            }
        }
        let others = last.len().saturating_sub(PROMPTS);
        for sample in last.iter().take(PROMPTS) {
            blocks.push(Block::Text(format!(
                "{} after step {}, continuing “{}”:",
                subject.name,
                count(sample.step),
                cut(&sample.prompt, 200)
            )));
            blocks.push(Block::Lines(cut(&sample.text, CHARACTERS)));
        }
        if others > 0 {
            blocks
                .push(Block::Text(format!("{}: {others} more prompts are in samples.jsonl.", subject.name)));
        }
    }
    blocks
}

/// What has happened to the runs.
pub(super) fn events(subjects: &[Subject<'_>]) -> Vec<Block> {
    let all: usize = subjects.iter().map(|subject| subject.run.events().len()).sum();
    if all == 0 {
        return Vec::new();
    }
    let shown: Vec<_> = subjects
        .iter()
        .flat_map(|subject| most_telling(subject.run.events()).into_iter().map(move |event| (subject, event)))
        .collect();
    let began = |subject: &Subject<'_>| subject.run.events().first().map_or(0.0, |event| event.time);
    let rows = shown.iter().map(|(subject, event)| {
        vec![
            Cell::Text(subject.name.clone()),
            Cell::Number(count(event.step)),
            Cell::Number(format!("{:.1}", event.time - began(subject))),
            Cell::Text(event.kind.clone()),
            Cell::Text(cut(&event.text, 300)),
        ]
    });
    let mut caption =
        "Events: the optimizer step before each, and the seconds since the first of its run.".to_owned();
    if shown.len() < all {
        caption += &format!(
            " {} of {all} events, at most {EVENTS} of a run: earlier checkpoints are left out first, and then what \
             lies in the middle. All are in events.jsonl.",
            shown.len()
        );
    }
    let head = ["Run", "Step", "Time (s)", "Kind", "What happened"].map(str::to_owned).to_vec();
    vec![Block::Table(Table { caption, head, rows: rows.collect() })]
}

/// As many events of a run as are shown: without its earlier checkpoints where there are too many, and if that is not
/// enough, the first and the last of the others. How the run ended is always among them.
fn most_telling(events: &[Event]) -> Vec<&Event> {
    let mut excess = events.len().saturating_sub(EVENTS);
    let mut shown = Vec::new();
    for event in events {
        if excess > 0 && event.kind == "checkpoint" {
            excess -= 1;
        } else {
            shown.push(event);
        }
    }
    if excess > 0 {
        shown.drain(EVENTS / 2..EVENTS / 2 + excess);
    }
    shown
}

/// Folders with steps that a run has taken and gone back from, by their names.
fn superseded(folder: &Path) -> Vec<String> {
    let is_one = |path: &Path| path.join("metrics.jsonl").is_file();
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries
        .filter(|entry| is_one(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("superseded-")).collect();
    names.sort();
    names
}

/// What the report cannot say, and why.
pub(super) fn missing(subjects: &[Subject<'_>]) -> Vec<Block> {
    let mut items = Vec::new();
    for subject in subjects {
        let Subject { run, name, facts, numbers } = subject;
        let mut say = |what: &str| items.push(format!("{name}: {what}"));
        run.problems().iter().for_each(|problem| say(problem));
        facts.missing.iter().for_each(|missing| say(missing));
        if numbers.loss.is_none() {
            say("no training step is recorded.");
        }
        if let (Some(done), Some(steps)) = (numbers.last_step, numbers.steps)
            && done < steps
        {
            say(&format!(
                "the run is not complete: it is recorded up to step {} of {}.",
                count(done),
                count(steps)
            ));
        }
        let none = run
            .metrics()
            .get("loss")
            .map_or(0, |loss| loss.values().iter().filter(|value| !value.is_finite()).count());
        if none > 0 {
            say(&format!("{none} logged losses are not finite; curves have gaps there."));
        }
        if numbers.loss.is_some() && numbers.last_validation.is_none() {
            say("no validation loss is recorded.");
        }
        if time::seconds_of(run).is_none() {
            say(
                "where the time of a step went is not recorded: the run is of an older build, or has no steps.",
            );
        }
        if numbers.resumes.is_none() {
            say("events.jsonl is not there, so restarts are unknown.");
        }
        let mut earlier: Vec<_> =
            superseded(run.folder()).into_iter().map(|name| format!("{name}/metrics.jsonl")).collect();
        if run.folder().join("metrics-superseded.jsonl").is_file() {
            earlier.insert(0, "metrics-superseded.jsonl".to_owned());
        }
        if !earlier.is_empty() {
            say(&format!(
                "steps that were taken again after a restart are shown once, as they were taken last; the earlier \
                 lines are in {}.",
                earlier.join(", ")
            ));
        }
    }
    let differ = |what: &str, value: &dyn Fn(&Subject<'_>) -> Option<String>| {
        let known: Vec<_> = subjects.iter().filter_map(value).collect();
        known.iter().any(|one| *one != known[0]).then(|| {
            format!("The runs are of different {what}, so that their speeds and bits need not agree: see Environment.")
        })
    };
    items.extend(differ("builds of the program", &|subject| subject.facts.build.clone()));
    items.extend(differ("devices", &|subject| subject.facts.device.clone()));
    items.extend(differ("training data", &|subject| subject.facts.data.clone()));
    match items.is_empty() {
        true => vec![Block::Text("Nothing that a report shows.".to_owned())],
        false => vec![Block::List(items)],
    }
}

/// How numbers were found, and the commands that repeat runs and report.
pub(super) fn method(subjects: &[Subject<'_>], program: &str) -> Vec<Block> {
    let every: Vec<_> = subjects
        .iter()
        .filter_map(|subject| Some(format!("{} {}", subject.name, subject.run.config().get("log.every")?)))
        .collect();
    let logged = match every.is_empty() {
        true => String::new(),
        false => format!(" Steps between log lines: {}.", every.join(", ")),
    };
    let items = vec![
        format!("All numbers are read from metrics.jsonl of the runs, which rank 0 writes.{logged}"),
        "The training loss of a step is the sum of the losses of all tokens of the global batch over their number, \
         before the update. Validation loss is the mean over the validation tokens of eval.samples sequences, \
         after the update of the step that is named."
            .to_owned(),
        "Throughput is the tokens of the global batch over the time of the step, of all ranks together. Of the \
         logged steps of a run, the first tenth (one at least) is a warm-up: medians, quartiles and means of \
         speeds and times are over the others. Quartiles between two values are interpolated linearly."
            .to_owned(),
        "MFU is the FLOP/s that the model needs in theory, without recomputation, over the peak of the devices."
            .to_owned(),
        "Peak memory is the most bytes that any rank held since the start of the run."
            .to_owned(),
        "Moving averages are exponential, over a twentieth of the logged steps, without the bias of their start."
            .to_owned(),
        "Each number is of one run with one seed, which the environment names; the report makes no claim on the \
         spread between seeds."
            .to_owned(),
        format!("The report was made by kiln {program}."),
    ];
    let folder = |subject: &Subject<'_>| subject.run.folder().display().to_string();
    let mut lines = String::new();
    for subject in subjects {
        let config = quoted(&format!("{}/config.toml", folder(subject).trim_end_matches('/')));
        lines += &format!("kiln train {config} --out {}\n", quoted(&format!("{}-again", subject.run.name())));
    }
    let runs: Vec<_> = subjects.iter().map(|subject| quoted(&folder(subject))).collect();
    lines += &format!("kiln report {} --out report-again\n", runs.join(" "));
    vec![
        Block::List(items),
        Block::Text(
            "These commands repeat the runs, with ranks as threads of one process, and the report, in the \
                     folder in which the runs were started:"
                .to_owned(),
        ),
        Block::Lines(lines),
    ]
}
