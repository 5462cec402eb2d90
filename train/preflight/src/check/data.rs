//! The stage `data`: checks that the prepared data can be read, and reports its size and a sample.

use std::sync::atomic::AtomicBool;

use crate::findings::{Findings, Stage};
use kiln_checkpoint::Checkpoint;
use kiln_config::Config;
use kiln_data::{self as data, BatchSource, DataError, DataInfo, Samples, Sources, Split, Tokenizer};
use kiln_sys::words::number_of;
use kiln_train::error::{Result, TrainError};
use kiln_train::eval::Pair;
use kiln_train::prepared;
use kiln_train::process;
use kiln_train::registry::Registry;
use kiln_train::run::prompts;

const DATA: Stage = Stage::Data;

const READ: u64 = 2048;

/// Number of samples to read from a source whose samples the program makes.
const MADE: u64 = 32;

const SHOWN: usize = 24;

pub(super) enum Found {
    Prepared(Box<DataInfo>, Vec<u8>),
    Later,
    /// No usable data; the vocabulary size, if it is known.
    Unusable(Option<usize>),
}

pub(super) fn examine(
    config: &Config,
    registry: &Registry,
    resume: Option<&Checkpoint>,
    findings: &mut Findings,
) -> Found {
    let section = &config.data;
    if !section.inputs().is_empty() && !section.path.join("data.json").exists() {
        return inputs(config, findings);
    }
    let trained_on = resume.and_then(|from| from.state().data_sha256.as_deref());
    // The data is prepared already, so this call does not prepare any.
    let sources = registry.sources();
    let open = || prepared::open(config, sources, trained_on, &AtomicBool::new(false));
    let opened = process::in_pool(open).map_err(TrainError::threads("threads that check the data"));
    let opened = opened.and_then(|opened| Ok(opened?));
    let Some(info) = findings.take(DATA, "data", opened) else {
        return Found::Unusable(DataInfo::load(&section.path).ok().map(|info| info.vocab_size));
    };
    let tokenizer = tokenizer(config, &info, findings);
    for (split, what) in [(Split::Train, "training"), (Split::Validation, "validation")] {
        let checked =
            check_split(config, sources, split, tokenizer.as_ref().map(|(_, tokenizer)| tokenizer), findings);
        findings.take(DATA, what, checked);
    }
    if let Some(pairs) = pairs(config, findings)
        && let Some((content, _)) = &tokenizer
    {
        let context = context(config, resume);
        let tokens = prompts::tokenize(config, &pairs, content, info.end_of_text, context);
        let tokens = findings.take(DATA, "prompts", tokens);
        if let (Some(path), Some(tokens)) = (&config.eval.prompts, tokens) {
            let answers = number_of(tokens.len(), "answer");
            findings.ok(DATA, "eval.prompts", format!("{} has {answers}", path.display()));
        }
    }
    match tokenizer {
        Some((content, _)) if !findings.has_failed(DATA) => Found::Prepared(Box::new(info), content),
        _ => Found::Unusable(Some(info.vocab_size)),
    }
}

fn inputs(config: &Config, findings: &mut Findings) -> Found {
    let (path, text) = (config.data.path.display(), config.data.inputs());
    for input in text {
        findings.take(DATA, "text", data::check_input(input));
    }
    if findings.has_failed(DATA) {
        return Found::Unusable(None);
    }
    pairs(config, findings);
    let inputs = number_of(text.len(), "input");
    findings.ok(DATA, "data", format!("{path} does not exist yet: the run prepares it first, from {inputs}"));
    Found::Later
}

/// Reads the pairs of `eval.prompts` without tokenizing them, because the tokenizer may not exist yet.
fn pairs(config: &Config, findings: &mut Findings) -> Option<Vec<(usize, Pair)>> {
    findings.take(DATA, "eval.prompts", prompts::read(config))
}

/// Returns the token limit of a `[sample]` prompt, as far as known before the weights are opened.
fn context(config: &Config, resume: Option<&Checkpoint>) -> usize {
    let seq_len = config.data.seq_len;
    match (config.model.context_length, resume) {
        (Some(context), _) => context,
        (None, Some(checkpoint)) => checkpoint.context_length().max(seq_len),
        (None, None) if config.init_from().is_some() => usize::MAX,
        (None, None) => seq_len,
    }
}

fn tokenizer(config: &Config, info: &DataInfo, findings: &mut Findings) -> Option<(Vec<u8>, Tokenizer)> {
    let folder = &config.data.path;
    let load = || {
        let (path, content) = (data::tokenizer_of(folder)?, data::read_tokenizer_of(folder)?);
        Ok::<_, DataError>((content.clone(), Tokenizer::from_file(content, &path)?))
    };
    let (content, tokenizer) = findings.take(DATA, "tokenizer", load())?;
    let (own, stated) = (tokenizer.end_of_text().ok(), info.end_of_text);
    match own {
        Some(own) if own != stated => findings.warn(
            DATA,
            "tokenizer",
            format!(
                "it ends a text with token {own}, and the data in {} with token {stated}",
                folder.display()
            ),
            "put the tokenizer of the prepared data into its folder",
        ),
        _ => findings.ok(DATA, "tokenizer", number_of(tokenizer.vocab_size(), "token")),
    }
    Some((content, tokenizer))
}

fn check_split(
    config: &Config,
    sources: &Sources,
    split: Split,
    tokenizer: Option<&Tokenizer>,
    findings: &mut Findings,
) -> Result<()> {
    let (section, is_train) = (&config.data, split == Split::Train);
    let what = if is_train { "training" } else { "validation" };
    let file = Samples::open(&section.path, split, section.seq_len, sources)?;
    file.check()?;
    let endless = u64::MAX;
    let samples = file.num_samples().unwrap_or(endless);
    let mut text = match &file {
        Samples::File(file) => {
            format!("{} tokens, {}", file.info().split(split).tokens, number_of(samples, "sequence"))
        }
        Samples::Chats(chats) => {
            if let Some(warning) = chats.too_long().filter(|_| is_train) {
                findings.warn(DATA, what, warning, "raise data.seq_len, or shorten the conversations");
            }
            let conversations = number_of(chats.conversations(), "conversation");
            format!("{conversations} in {}", number_of(samples, "sequence"))
        }
        Samples::Own(_) if samples == endless => "sequences without end".to_owned(),
        Samples::Own(_) => number_of(samples, "sequence"),
    };
    if is_train && samples != endless {
        let taken = config.train.steps.saturating_mul(config.train.global_batch as u64);
        text += &format!("; the run takes {taken}, which is {:.2} epochs", taken as f64 / samples as f64);
    }
    let source = BatchSource::new(file, is_train && section.shuffle, config.train.seed)?;
    let read = samples.min(if matches!(source.samples(), Samples::Own(_)) { MADE } else { READ });
    let known = tokenizer.map_or(usize::MAX, Tokenizer::vocab_size);
    for index in 0..read {
        let sample = ((index + 1) as u128 * u128::from(samples) / u128::from(read)) as u64 - 1;
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        source.samples().read(sample, &mut inputs, &mut targets)?;
        let unknown =
            inputs.iter().chain(&targets).find(|id| usize::try_from(**id).is_ok_and(|id| id >= known));
        if let Some(id) = unknown {
            findings.fail(
                DATA,
                "tokenizer",
                format!("sequence {sample} of {what} has the id {id}, and the tokenizer has {known} tokens"),
                "put the tokenizer of the prepared data into its folder, or prepare the data again",
            );
            return Ok(());
        }
    }
    findings.ok(DATA, what, format!("{text}; ids of {read} sequences are in range"));
    if let Some(tokenizer) = tokenizer.filter(|_| is_train) {
        let first = source.fetch(0, 1)?;
        let ids: Vec<u32> = first.inputs.iter().take(SHOWN).map(|id| id.cast_unsigned()).collect();
        findings.ok(DATA, "first tokens", format!("{:?}", tokenizer.decode(&ids)?));
    }
    Ok(())
}
