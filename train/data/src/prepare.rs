use super::corpus::{Corpus, Findings};
use super::counts::unigram_entropy;
use super::cut::Cuts;
use super::division::{Division, SURVEYED};
use super::encode::{Encoded, Encoder};
use super::info::{FORMAT_VERSION, INFO_FILE, TOKENIZER_FILE};
use super::inputs::{INPUTS_FILE, Inputs};
use super::listing::{Listing, list};
use super::options::{PrepareOptions, TokenizerSource};
use super::output::OutputFolder;
use super::progress::{Counted, OnProgress, Progress, Remark, check};
use super::sums::Sums;
use super::tokenizer::{TokenNames, read_named_tokenizer};
use super::{DataError, DataInfo, Result, Split, Stream, TokenWidth, Tokenizer, prepare_chat};
use kiln_sys::words::number_of;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Maximum number of bytes of text to train a tokenizer on, so that the trainer's counts do not overflow.
const TOKENIZER_TRAINING_BYTES: u64 = 1 << 30;

const REPORT_BYTES: u64 = 2 << 20;

/// Writes a folder of tokens from text; [the module](super) describes the folder.
///
/// A seeded hash assigns every document to a split. With fewer than twenty documents, the end of each is held out. The
/// same inputs and options give the same files. The folder appears complete or not at all.
///
/// # Errors
///
/// If an option is out of range, an input is missing, unreadable or too small, or `out` is in use or cannot be written.
pub fn prepare(options: &PrepareOptions, progress: OnProgress<'_>) -> Result<DataInfo> {
    prepare_until_stopped(&AtomicBool::new(false), options, progress)
}

/// Runs [`prepare()`] until `stop` becomes true. The merge phase of tokenizer training cannot be interrupted.
///
/// # Errors
///
/// Those of [`prepare()`], and [`DataError::Stopped`] after a stop; no folder is left then.
pub fn prepare_until_stopped(
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<DataInfo> {
    let fraction = options.validation_fraction;
    // Also rejects NaN.
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(DataError::ValidationFraction { fraction });
    }
    if let TokenizerSource::Train { vocab_size } = options.tokenizer {
        Tokenizer::check_size(vocab_size)?;
    }
    let listing = list(&options.inputs)?;
    let output = OutputFolder::create(&options.out)?;
    let fill = if options.chat { prepare_chat::fill } else { fill };
    let info = fill(output.path(), listing, stop, options, progress)?;
    output.commit()?;
    Ok(info)
}

fn fill(
    folder: &Path,
    Listing { files: listed, skipped }: Listing,
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<DataInfo> {
    if skipped.count > 0 {
        progress(Progress::Remark(Remark::warning(format!(
            "{} {} of the input folders {} skipped: {skipped}; to read one, name it as an input",
            skipped.count,
            skipped.choose("entry", "entries"),
            skipped.choose("was", "were"),
        ))));
    }
    let mut streams: Vec<_> = listed.iter().filter_map(|listed| listed.stream).collect();
    if let TokenizerSource::File(path) = &options.tokenizer {
        streams.extend(Stream::from_path(path));
    }
    if !streams.is_empty() {
        progress(Progress::ReadingStreams { streams });
    }
    let corpus = Corpus::open(listed, options.limit, options.skip_bad_lines, folder, stop)?;
    let empty = corpus.empty();
    if !empty.is_empty() {
        if empty.len() == corpus.files() {
            return Err(DataError::EmptyInputs { inputs: empty });
        }
        let empty: Counted = empty.iter().map(|path| path.display().to_string()).collect();
        progress(Progress::Remark(Remark::warning(format!("no text came from {empty}"))));
    }
    // Hash the files before tokenizing them: a file that changes later then differs from its record.
    let (given, names) = match &options.tokenizer {
        TokenizerSource::File(path) if Stream::from_path(path).is_some() => {
            (read_named_tokenizer(path, stop)?, TokenNames::default())
        }
        TokenizerSource::File(path) => (read_named_tokenizer(path, stop)?, TokenNames::next_to(path)?),
        TokenizerSource::Train { .. } => (Vec::new(), TokenNames::default()),
    };
    let inputs = Inputs::new(corpus.digests()?, options, &given)?;
    let repeated = inputs.repeated();
    if repeated.count > 0 {
        let message = format!("the same content occurs more than once: {repeated}");
        progress(Progress::Remark(Remark::note(message)));
    }
    let tokenizer = match &options.tokenizer {
        TokenizerSource::File(path) => Tokenizer::from_file(given, path)?,
        TokenizerSource::Train { vocab_size } => {
            let end_of_text = options.end_of_text.as_deref();
            let tokenizer = train_tokenizer(&corpus, *vocab_size, end_of_text, stop, progress)?;
            let reached = tokenizer.vocab_size();
            if reached < *vocab_size {
                progress(Progress::Remark(Remark::note(format!(
                    "the vocabulary has {reached} tokens instead of the requested {vocab_size}: no other pair of \
                     tokens occurs twice in this text"
                ))));
            }
            tokenizer
        }
    };
    let path = folder.join(TOKENIZER_FILE);
    tokenizer.save(&path)?;
    // Loads the saved file, as readers of the folder do.
    let tokenizer = Tokenizer::load(path)?
        .reading_special_tokens(options.special_tokens)
        .ending_as_named(options.end_of_text.as_deref(), &names)?;
    let (end, start) = (tokenizer.end_of_text()?, tokenizer.start_of_document(options.bos, &names)?);
    let (sizes, is_all) = corpus.sizes(SURVEYED, stop)?;
    let division = &Division::new(&sizes, is_all, options.validation_fraction, options.seed);
    let encoder = Encoder { tokenizer: &tokenizer, start, end, division };
    let encoded = encoder.encode(&corpus, folder, stop, progress)?;
    for remark in remarks(&encoded, corpus.files(), division, options) {
        progress(Progress::Remark(remark));
    }
    let skipped_files = encoded.findings.not_text.count;
    if encoded.documents == 0 {
        return Err(DataError::NoText { files: corpus.files(), skipped: skipped_files });
    }
    if encoded.train.tokens() == 0 || encoded.validation.tokens() == 0 {
        return Err(DataError::TooLittleText { bytes: encoded.text_bytes });
    }

    let (train, train_counts) = encoded.train.finish()?;
    let (validation, validation_counts) = encoded.validation.finish()?;
    let info = DataInfo {
        format_version: FORMAT_VERSION,
        dtype: TokenWidth::for_vocabulary(tokenizer.vocab_size()),
        vocab_size: tokenizer.vocab_size(),
        end_of_text: end,
        train,
        validation,
        documents: encoded.documents,
        skipped_files,
        unknown: encoded.unknown,
        unigram_entropy: Some(unigram_entropy(&train_counts, &validation_counts)),
        source: None,
        chat: None,
    };
    check(stop)?;
    inputs.save(folder)?;
    info.save(folder)?;
    sums_of(folder, &info)?.save(folder)?;
    Ok(info)
}

fn remarks(encoded: &Encoded, files: usize, division: &Division, options: &PrepareOptions) -> Vec<Remark> {
    let mut remarks = Vec::new();
    let Findings { not_text, bad_lines, json } = &encoded.findings;
    if not_text.count > 0 {
        remarks.push(Remark::note(format!(
            "{} of {files} files {} not UTF-8 text and {} skipped: {not_text}; convert or unpack files to read them",
            not_text.count,
            not_text.choose("is", "are"),
            not_text.choose("was", "were"),
        )));
    }
    let divided = division.divided();
    if divided > 0 {
        remarks.push(Remark::note(format!(
            "the text has so few documents that the end of {} is held out for validation, instead of whole documents",
            if divided == 1 { "one".to_owned() } else { format!("{divided} of them") },
        )));
    }
    if bad_lines.count > 0 {
        let one = Counted { first: bad_lines.first[..1].to_vec(), ..*bad_lines };
        let (lines, was) = (number_of(one.count, "line"), one.choose("was", "were"));
        remarks.push(Remark::warning(format!("{lines} cannot be used and {was} skipped: {one}")));
    }
    if json.count > 0 {
        remarks.push(Remark::warning(format!(
            "{} of JSON {} read as plain text, with all braces and quotes: {json}; to read documents from JSON, write \
             one object with the field \"text\" per line to a .jsonl file",
            number_of(json.count, "file"),
            json.choose("was", "were"),
        )));
    }
    let count = encoded.spellings.total();
    if count > 0 {
        let spellings = number_of(count, "spelling");
        let tokens: Counted = encoded.spellings.seen().into_iter().collect();
        remarks.push(Remark::note(match options.special_tokens {
            true => format!("the text has {spellings} of special tokens, which became these tokens: {tokens}"),
            false => format!(
                "the text has {spellings} of special tokens ({tokens}), which {} ordinary text: set \
                 data.special_tokens = true (`kiln data prepare --special-tokens`) if the author of the text may write \
                 them",
                if count == 1 { "is" } else { "are" }
            ),
        }));
    }
    if encoded.unknown > 0 {
        let tokens = encoded.train.tokens() + encoded.validation.tokens();
        remarks.push(Remark::warning(format!(
            "the tokenizer cannot express all of the text: {} unknown or omitted tokens, {:.2} % of {tokens}; use a \
             tokenizer that knows these characters, such as a byte-level one",
            encoded.unknown,
            encoded.unknown as f64 * 100.0 / tokens.max(1) as f64
        )));
    }
    remarks
}

fn sums_of(folder: &Path, info: &DataInfo) -> Result<Sums> {
    let [train, validation] = [Split::Train, Split::Validation];
    let files = [
        INFO_FILE,
        INPUTS_FILE,
        TOKENIZER_FILE,
        train.file_name(),
        train.block_sums_name(),
        validation.file_name(),
        validation.block_sums_name(),
    ];
    let known = [train, validation].map(|split| (split.file_name(), info.split(split).sha256.as_ref()));
    Sums::compute(folder, &files, &known)
}

/// Compares `options` with those that the prepared folder `options.out` was made from, except for the seed. Returns a
/// line for each difference, or `None` if the folder does not record its inputs.
///
/// # Errors
///
/// If the record or an input cannot be read.
pub fn differences(options: &PrepareOptions) -> Result<Option<Vec<String>>> {
    let inputs = Inputs::load(&options.out)?;
    inputs.map(|inputs| inputs.differences(options)).transpose()
}

fn train_tokenizer(
    corpus: &Corpus,
    vocab_size: usize,
    end_of_text: Option<&str>,
    stop: &AtomicBool,
    progress: OnProgress<'_>,
) -> Result<Tokenizer> {
    let input_bytes = corpus.bytes.min(TOKENIZER_TRAINING_BYTES);
    let division = Division::default();
    let mut chunks = corpus.chunks(Cuts::AT_WORDS, &division);
    let (mut text_bytes, mut reported) = (0, 0);
    progress(Progress::TrainingTokenizer { input_bytes, text_bytes });
    let mut next = || -> Result<Option<String>> {
        check(stop)?;
        let chunk = chunks.next().transpose()?.filter(|chunk| {
            text_bytes += chunk.text.len() as u64;
            text_bytes <= TOKENIZER_TRAINING_BYTES
        });
        if chunk.is_none() && reported > 0 {
            progress(Progress::MergingTokens);
        } else if text_bytes - reported >= REPORT_BYTES {
            reported = text_bytes;
            progress(Progress::TrainingTokenizer { input_bytes, text_bytes });
        }
        Ok(chunk.map(|chunk| chunk.text))
    };
    let texts = std::iter::from_fn(|| next().transpose());
    let tokenizer = match end_of_text {
        Some(end) => Tokenizer::train_ending_with(texts, vocab_size, end)?,
        None => Tokenizer::train(texts, vocab_size)?,
    };
    check(stop)?;
    Ok(tokenizer)
}

#[cfg(test)]
mod tests;
