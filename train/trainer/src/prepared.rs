//! Prepared data for a run: existing, or prepared from text first.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::metrics::print_line;
use crate::process::output::ProgressLine;
use kiln_checkpoint::source::ModelSource;
use kiln_config::{BadLines, Config};
use kiln_data::{
    self as data, DataError, DataInfo, PrepareOptions, Progress, SourceInfo, Sources, Stream,
    TokenizerSource, Verified,
};
use kiln_sys::words::number_of;

/// Opens the data of `config`; first prepares missing data from `data.text` or `data.chat`, unless `stop` becomes true,
/// or describes those of `data.source`, one of `sources`.
///
/// A resumed run passes its tokens' SHA-256 as `trained_on`: for the same tokens, changed text only causes a warning.
pub fn open(
    config: &Config,
    sources: &Sources,
    trained_on: Option<&str>,
    stop: &AtomicBool,
) -> Result<DataInfo, DataError> {
    let section = &config.data;
    if let Some(name) = &section.source {
        let (name, extra) = (name.clone(), section.extra.clone());
        let source = SourceInfo { name, extra, ..SourceInfo::default() };
        return sources.prepare(&section.path, &source, section.seq_len);
    }
    if section.inputs().is_empty() {
        return DataInfo::load(&section.path);
    }
    let is_chat = !section.chat.is_empty();
    let tokenizer = match is_chat {
        true => TokenizerSource::named(tokenizer_of_chats(config)?),
        false => TokenizerSource::Train { vocab_size: section.vocab_size },
    };
    let options = PrepareOptions {
        chat: is_chat,
        validation_fraction: section.validation_fraction,
        seed: config.train.seed,
        bos: section.bos.given(),
        end_of_text: section.end_of_text.clone(),
        special_tokens: section.special_tokens,
        skip_bad_lines: section.bad_lines == BadLines::Skip,
        ..PrepareOptions::new(section.inputs().to_vec(), section.path.clone(), tokenizer)
    };
    if !section.path.join("data.json").exists() {
        match prepare(&options, stop) {
            // A run that started at the same time has prepared the data, which this run can use if they are the same.
            Err(DataError::AlreadyPrepared { .. }) => {
                print_line("data: another process has just prepared them");
            }
            prepared => return prepared,
        }
    }
    let info = DataInfo::load(&section.path)?;
    if let Some(source) = &info.source {
        let differences =
            vec![format!("data.source was {} and is not set now, but other inputs are", source.name)];
        return Err(DataError::OtherSource { path: section.path.clone(), differences });
    }
    let path = section.path.display();
    match data::differences(&options)? {
        None => tracing::warn!(
            "{path} does not record its source, because another program or an older build wrote it. The run \
             uses it unchanged and ignores data.text and data.chat; remove them to silence this warning"
        ),
        Some(differences) if differences.is_empty() => {}
        Some(differences) if trained_on.is_some() && trained_on == info.train.sha256.as_deref() => {
            tracing::warn!(
                "{path} was prepared from different text or options than data.text sets now ({}); the run \
                 continues with the data that it was trained on",
                differences.join("; ")
            );
        }
        Some(differences) => {
            let path = section.path.clone();
            return Err(DataError::PreparedFromOther { path, differences });
        }
    }
    Ok(info)
}

/// Returns the tokenizer for `data.chat`: the one that the user names, or that of the initial weights.
fn tokenizer_of_chats(config: &Config) -> Result<PathBuf, DataError> {
    let named = config.data.tokenizer.clone();
    let initial = || ModelSource::open(config.init_from()?).ok().map(|source| source.tokenizer());
    named.or_else(initial).ok_or(DataError::ChatTokenizer)
}

/// Prepares data and shows the progress, until `stop` becomes true.
pub fn prepare(options: &PrepareOptions, stop: &AtomicBool) -> Result<DataInfo, DataError> {
    let line = ProgressLine::start("data", "reading the inputs");
    let prepared =
        data::prepare_until_stopped(stop, options, &mut |progress| tell(&line, options.limit, progress));
    drop(line);
    let info = prepared?;
    let counted = match info.chat {
        Some(_) => number_of(info.documents, "conversation"),
        None => number_of(info.documents, "document"),
    };
    print_line(&format!(
        "data: {counted}, {} training and {} validation tokens, vocabulary {} -> {}",
        info.train.tokens,
        info.validation.tokens,
        info.vocab_size,
        options.out.display()
    ));
    Ok(info)
}

fn tell(line: &ProgressLine, limit: Option<u64>, progress: Progress) {
    match progress {
        Progress::ReadingStreams { streams } => {
            let what = match streams.as_slice() {
                [one] => format!("an input that is {one}"),
                all if all.iter().all(|stream| *stream == Stream::Pipe) => "inputs that are pipes".to_owned(),
                _ => "inputs that are pipes or devices".to_owned(),
            };
            print_line(&format!("data: reading {what}, to the end"));
        }
        Progress::TrainingTokenizer { input_bytes, text_bytes } => {
            let (done, of) = (megabytes(text_bytes), megabytes(input_bytes));
            let (on, counted, input_bytes) = match limit {
                None => (format!("{of:.1} MB of text"), format!("{done:.1} of {of:.1} MB"), input_bytes),
                Some(limit) => {
                    (format!("at most {}", number_of(limit, "document")), format!("{done:.1} MB"), 0)
                }
            };
            if text_bytes == 0 {
                print_line(&format!("data: training a tokenizer on {on}"));
            }
            line.set(format!("counted the words of {counted}"), text_bytes, input_bytes);
        }
        Progress::MergingTokens => line.set("merging pairs of tokens".to_owned(), 0, 0),
        Progress::Encoding { input_bytes, text_bytes, documents, tokens } => match limit {
            None => {
                let (done, of) = (megabytes(text_bytes), megabytes(input_bytes));
                line.set(
                    format!("encoded {done:.1} of {of:.1} MB, {tokens} tokens"),
                    text_bytes,
                    input_bytes,
                );
            }
            Some(limit) => {
                line.set(
                    format!("encoded {documents} of {limit} documents, {tokens} tokens"),
                    documents,
                    limit,
                );
            }
        },
        Progress::Remark(remark) => match remark.is_warning() {
            true => tracing::warn!("{remark}"),
            false => print_line(&format!("data: {remark}")),
        },
    }
}

/// Compares a folder of prepared data with all its checksums; returns a message for the user.
///
/// # Errors
///
/// If something differs or is missing, or cannot be read.
pub fn verify(folder: &Path) -> Result<String, DataError> {
    let line = ProgressLine::start("data", "reading the tokens");
    let verified = data::verify(folder, &mut |read, all| {
        let what = format!("compared {:.1} of {:.1} MB", megabytes(read), megabytes(all));
        line.set(what, read, all);
    });
    drop(line);
    let Verified { files, bytes, unproven, problems } = verified?;
    if !problems.is_empty() {
        let problems = problems.iter().map(ToString::to_string).collect();
        return Err(DataError::Damaged { folder: folder.to_owned(), problems });
    }
    let (folder, size) = (folder.display(), megabytes(bytes));
    Ok(if unproven.is_empty() {
        format!("{folder} is intact: {files} files, {size:.1} MB, all checksums match")
    } else {
        format!(
            "{folder}: {files} files, {size:.1} MB match their checksums; {} cannot be checked, because \
             another program or an earlier version wrote the folder",
            unproven.join(", ")
        )
    })
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
