//! The report of runs.

use super::chapters;
use super::config;
use super::document::{Block, Cell, Document, Table};
use super::parallel;
use super::remarks;
use super::subject::{Subject, subjects};
use super::time;
use crate::run::Run;

/// What a report of `runs` says, in their order. `program` is the version of the program that makes it.
pub fn of_runs(runs: &[Run], program: &str) -> Document {
    let subjects = subjects(runs);
    let mut blocks = vec![introduction(&subjects)];
    let mut add = |title: &str, of_section: Vec<Block>| {
        if !of_section.is_empty() {
            blocks.push(Block::Section(title.to_owned()));
            blocks.extend(of_section);
        }
    };
    add("Results", vec![results(&subjects)]);
    add("Loss", chapters::loss(&subjects));
    add("Gradient norm and learning rate", chapters::optimization(&subjects));
    add("Throughput and memory", chapters::speed(&subjects));
    add("Where the time of a step went", time::blocks(&subjects));
    add("Strategies and ranks", parallel::blocks(&subjects));
    add("Configuration", config::blocks(&subjects));
    add("Environment", vec![environment(&subjects)]);
    add("Samples", remarks::samples(&subjects));
    add("Events", remarks::events(&subjects));
    add("What is missing", remarks::missing(&subjects));
    add("Method, and how to repeat it", remarks::method(&subjects, program));
    Document { title: title(&subjects), blocks }
}

fn title(subjects: &[Subject<'_>]) -> String {
    let names: Vec<_> = subjects.iter().map(|subject| subject.name.as_str()).collect();
    match names.as_slice() {
        [one] => format!("Run {one}"),
        names if names.len() <= 4 => format!("Runs {}", names.join(", ")),
        names => format!("{} runs: {}, …", names.len(), names[..3].join(", ")),
    }
}

fn introduction(subjects: &[Subject<'_>]) -> Block {
    let parameters = |key: &str| subjects.iter().find_map(|subject| subject.run.config().get(key));
    let mut text =
        "Decoder-only language models, trained with Kiln under fully sharded data parallelism. ".to_owned();
    if let (Some(layers), Some(d_model)) = (parameters("model.layers"), parameters("model.d_model"))
        && !config::compare(subjects).0.iter().any(|(key, _)| key.starts_with("model."))
    {
        text += &format!("The model has {layers} layers of width {d_model}. ");
    }
    text += match subjects.len() {
        1 => "Losses are natural logarithms, per token. ",
        _ => {
            "A run has the same colour and the same dashes in all figures. Losses are natural logarithms, per token. "
        }
    };
    text +=
        "The last section says how every number was found, and with which commands the runs can be repeated.";
    Block::Text(text)
}

/// A table with the runs as columns.
fn by_run(subjects: &[Subject<'_>], caption: &str, rows: Vec<Vec<Cell>>) -> Block {
    let names = subjects.iter().map(|subject| subject.name.clone());
    Block::Table(Table {
        caption: caption.to_owned(),
        head: std::iter::once(String::new()).chain(names).collect(),
        rows,
    })
}

fn results(subjects: &[Subject<'_>]) -> Block {
    let columns: Vec<_> = subjects.iter().map(|subject| subject.numbers.rows(&subject.facts)).collect();
    let names = columns.first().into_iter().flatten().map(|(name, _)| *name).enumerate();
    let rows = names.map(|(row, name)| {
        let values = columns.iter().map(|column| Cell::number(column[row].1.clone()));
        std::iter::once(Cell::Text(name.to_owned())).chain(values).collect()
    });
    by_run(
        subjects,
        "Final numbers. Speeds are medians over logged steps after the warm-up, with first and third quartile in \
         brackets. A dash: not recorded.",
        rows.collect(),
    )
}

fn environment(subjects: &[Subject<'_>]) -> Block {
    let row = |name: &str, value: &dyn Fn(&Subject<'_>) -> Option<String>| {
        let values = subjects.iter().map(|subject| Cell::text(value(subject)));
        std::iter::once(Cell::Text(name.to_owned())).chain(values).collect::<Vec<_>>()
    };
    let key = |name: &'static str| move |subject: &Subject<'_>| subject.run.config().get(name).cloned();
    let rows = vec![
        row("Program", &|subject| subject.facts.build.clone()),
        row("Device", &|subject| subject.facts.device.clone()),
        row("Machine of rank 0", &|subject| subject.facts.host.clone()),
        row("Ranks", &|subject| subject.facts.ranks.map(|ranks| ranks.to_string())),
        row("Mesh", &|subject| subject.facts.mesh.clone()),
        row("Strategy", &key("shard.strategy")),
        row("Compute dtype", &key("precision.compute")),
        row("Dtype of reductions", &key("precision.reduce")),
        row("Seed", &key("train.seed")),
        row("SHA-256 of the training data", &|subject| subject.facts.data.clone()),
        row("Began (UTC)", &|subject| subject.facts.created.clone()),
        row("Folder", &|subject| Some(subject.run.folder().display().to_string())),
    ];
    by_run(subjects, "What the runs were computed with, by what their folders say.", rows)
}
