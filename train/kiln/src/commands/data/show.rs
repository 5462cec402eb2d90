//! `kiln data show`: shows the content of a folder of prepared data, and samples as a model sees them.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use kiln_data::{
    BatchSource, DataError, DataInfo, Samples, Sources, Split, TokenFile, Tokenizer, read_tokenizer_of,
    tokenizer_of,
};
use kiln_sys::words::number_of;

/// Maximum number of tokens of the training split that are read to measure the lengths of documents.
const LOOKED_AT: u64 = 1 << 22;

/// Tokens of a sequence that is shown.
const SEQ_LEN: usize = 64;

const BORDER: char = '|';

/// Arguments of `kiln data show`.
#[derive(Args)]
pub(crate) struct ShowArgs {
    /// Folder of prepared data.
    folder: PathBuf,
    /// Number of training sequences to show as text, with borders between tokens.
    #[arg(long, default_value_t = 3)]
    samples: usize,
    /// Tokens per sequence, as in data.seq_len; by default 64, or as many as the program's own samples have.
    #[arg(long)]
    seq_len: Option<usize>,
    /// Show the first sequences of a run with this train.seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl ShowArgs {
    pub(crate) fn run(self, sources: &Sources) -> Result<String, DataError> {
        let info = DataInfo::load(&self.folder)?;
        let path = tokenizer_of(&self.folder)?;
        let tokenizer = Tokenizer::from_file(read_tokenizer_of(&self.folder)?, &path)?;
        let own = info.source.as_ref().map(|source| source.seq_len);
        let seq_len = self.seq_len.or(own).unwrap_or(SEQ_LEN);
        let open = |split| Samples::open(&self.folder, split, seq_len, sources);
        let (train, validation) = (open(Split::Train)?, open(Split::Validation)?);
        let mut text = summary(&self.folder, &info, &tokenizer)?;
        match (&train, &validation) {
            (Samples::File(train), Samples::File(validation)) => {
                let sequences = format!("sequences of {seq_len}");
                text += &row("split", ["tokens", "text", "bytes per token", &sequences]);
                text += &split_row("training", train, Split::Train);
                text += &split_row("validation", validation, Split::Validation);
                text += &lengths(train)?;
            }
            (Samples::Chats(train), Samples::Chats(validation)) => {
                for (name, split, chats) in
                    [("training", Split::Train, train), ("validation", Split::Validation, validation)]
                {
                    let counting = info.chat.as_ref().map_or(0, |chat| chat.counting[split as usize]);
                    text += &format!(
                        "  {name:<10} {:>14} conversations in {} sequences of {seq_len}, {counting} of {} tokens count\n",
                        chats.conversations(),
                        chats.num_samples(),
                        info.split(split).tokens,
                    );
                }
                text += &train.too_long().map_or_else(String::new, |remark| remark + "\n");
            }
            _ => {
                let count =
                    |samples: &Samples| samples.num_samples().map_or("endless".to_owned(), |n| n.to_string());
                text += &format!("  training   {:>14} sequences\n", count(&train));
                text += &format!("  validation {:>14} sequences\n", count(&validation));
            }
        }
        if info.unknown > 0 {
            let all = info.train.tokens + info.validation.tokens;
            text += &format!(
                "{} of {all} tokens are unknown or were dropped: text that the tokenizer cannot express\n",
                info.unknown
            );
        }
        let most = train.num_samples().and_then(|count| usize::try_from(count).ok());
        let samples = self.samples.min(most.unwrap_or(usize::MAX));
        let source = BatchSource::new(train, true, self.seed)?;
        for index in 0..samples {
            let batch = source.fetch(index as u64, 1)?;
            let of = source.num_samples().map_or_else(String::new, |count| format!(" of {count}"));
            let _ = write!(text, "\nsequence {}{of}:\n", source.sample_at(index as u64));
            text += &bordered(&tokenizer, &batch.inputs)?;
            text += "\n";
            if let Some(weights) = &batch.weights {
                text += &format!("targets: {}\n", counted(&tokenizer, &batch.targets, weights)?);
            }
        }
        Ok(text.trim_end().to_owned())
    }
}

fn summary(folder: &Path, info: &DataInfo, tokenizer: &Tokenizer) -> Result<String, DataError> {
    let end = tokenizer.decode(&[info.end_of_text])?;
    let documents = match info.documents {
        // Data that another program has written does not count documents.
        0 => String::new(),
        documents => {
            let what = if info.chat.is_some() { "conversation" } else { "document" };
            format!("{} in both splits, ", number_of(documents, what))
        }
    };
    Ok(format!(
        "{}: {documents}vocabulary {}, ids of {} bytes, end of a document {} ({end})\n",
        folder.display(),
        info.vocab_size,
        info.dtype.bytes(),
        info.end_of_text,
    ))
}

fn row(name: &str, [tokens, bytes, ratio, samples]: [&str; 4]) -> String {
    format!("  {name:<10}  {tokens:>14}  {bytes:>12}  {ratio:>15}  {samples:>20}\n")
}

fn split_row(name: &str, file: &TokenFile, split: Split) -> String {
    let info = file.info().split(split);
    let (bytes, ratio) = match info.text_bytes {
        Some(bytes) => (
            format!("{:.1} MB", bytes as f64 / 1e6),
            format!("{:.2}", bytes as f64 / info.tokens.max(1) as f64),
        ),
        None => ("not counted".to_owned(), String::new()),
    };
    row(name, [&info.tokens.to_string(), &bytes, &ratio, &file.num_samples().to_string()])
}

fn lengths(file: &TokenFile) -> Result<String, DataError> {
    let end = file.info().end_of_text as i32;
    let samples = file.num_samples().min(LOOKED_AT / file.seq_len() as u64).max(1);
    let (mut lengths, mut length) = (Vec::new(), 0_u64);
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for sample in 0..samples {
        inputs.clear();
        targets.clear();
        file.read_sample(sample, &mut inputs, &mut targets)?;
        for token in &inputs {
            length += 1;
            if *token == end {
                lengths.push(length);
                length = 0;
            }
        }
    }
    let tokens = samples * file.seq_len() as u64;
    lengths.sort_unstable();
    Ok(match lengths[..] {
        [] => format!("no document ends in the first {tokens} training tokens\n"),
        [shortest, ..] => format!(
            "{} end in the first {tokens} training tokens: {shortest} to {} tokens, median {}\n",
            number_of(lengths.len(), "document"),
            lengths[lengths.len() - 1],
            lengths[lengths.len() / 2]
        ),
    })
}

/// Returns the targets that count, with their weights if they are not 1, and `_` for each masked one.
fn counted(tokenizer: &Tokenizer, targets: &[i32], weights: &[f32]) -> Result<String, DataError> {
    let mut text = String::from(BORDER);
    for (id, weight) in targets.iter().zip(weights) {
        match *weight {
            0.0 => text.push('_'),
            1.0 => text += &escaped(tokenizer, *id)?,
            weight => text += &format!("{} ({weight})", escaped(tokenizer, *id)?),
        }
        text.push(BORDER);
    }
    Ok(text)
}

/// Returns the text of each token, between borders. Control characters are escaped as in Rust.
fn bordered(tokenizer: &Tokenizer, ids: &[i32]) -> Result<String, DataError> {
    let mut text = String::from(BORDER);
    for id in ids {
        text += &escaped(tokenizer, *id)?;
        text.push(BORDER);
    }
    Ok(text)
}

fn escaped(tokenizer: &Tokenizer, id: i32) -> Result<String, DataError> {
    let mut text = String::new();
    for letter in tokenizer.decode(&[id as u32])?.chars() {
        match letter {
            BORDER => text += "\\|",
            letter if letter.is_control() => text.extend(letter.escape_default()),
            letter => text.push(letter),
        }
    }
    Ok(text)
}
