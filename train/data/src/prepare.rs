//! Turning text into a folder of tokens.

use super::cut::Cuts;
use super::division::{Division, SURVEYED};
use super::document::Corpus;
use super::entropy::unigram_entropy;
use super::info::{FORMAT_VERSION, INFO_FILE, TOKENIZER_FILE};
use super::inputs::{INPUTS_FILE, Inputs};
use super::listing::{Listing, list};
use super::options::{PrepareOptions, TokenizerSource};
use super::output::OutputFolder;
use super::pass::{Encoder, Pass};
use super::progress::{OnProgress, Progress, check};
use super::remark::Remark;
use super::sums::Sums;
use super::token_names::TokenNames;
use super::tokenizer::read_named_tokenizer;
use super::{DataError, DataInfo, Result, Split, Stream, TokenWidth, Tokenizer};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Maximum number of bytes of text that a tokenizer is trained on. More text changes the merges little, and
/// the counts of the trainer stay within their range.
const TOKENIZER_TRAINING_BYTES: u64 = 1 << 30;

/// Bytes of text between two progress reports while a tokenizer is trained.
const REPORT_BYTES: u64 = 2 << 20;

/// Writes a folder of tokens from text; [the module](super) describes its form.
///
/// A seeded hash assigns every document to one of the splits; with fewer than twenty documents, the end of
/// each is held out. A document is tokenized as a whole. The same inputs and options give the same files. The
/// folder appears complete or not at all.
///
/// # Errors
///
/// Before any work when an option is out of range, an input is missing or `out` is in use; later when an
/// input cannot be read, holds too little text, or `out` cannot be written.
pub fn prepare(options: &PrepareOptions, progress: OnProgress<'_>) -> Result<DataInfo> {
    prepare_unless(&AtomicBool::new(false), options, progress)
}

/// Runs [`prepare()`], but ends with [`DataError::Stopped`], and without a folder, soon after `stop` becomes
/// true. Only the merging of a tokenizer's tokens cannot be interrupted.
///
/// # Errors
///
/// As for [`prepare()`], and if it was stopped.
pub fn prepare_unless(
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<DataInfo> {
    let fraction = options.validation_fraction;
    // Written so that NaN is rejected as well.
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(DataError::ValidationFraction { fraction });
    }
    if let TokenizerSource::Train { vocab_size } = options.tokenizer {
        Tokenizer::check_size(vocab_size)?;
    }
    let listing = list(&options.inputs)?;
    let output = OutputFolder::create(&options.out)?;
    let info = fill(output.path(), listing, stop, options, progress)?;
    output.commit()?;
    Ok(info)
}

/// Writes all files of the folder.
fn fill(
    folder: &Path,
    Listing { files: listed, passed_over }: Listing,
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<DataInfo> {
    if passed_over.count() > 0 {
        progress(Progress::Remark(Remark::NotFollowed { entries: passed_over }));
    }
    let mut streams: Vec<_> = listed.iter().filter_map(|listed| listed.stream).collect();
    if let TokenizerSource::File(path) = &options.tokenizer {
        streams.extend(Stream::at(path));
    }
    if !streams.is_empty() {
        progress(Progress::ReadingStreams { streams });
    }
    let corpus =
        Corpus::open(listed, folder, stop)?.take(options.limit).skip_bad_lines(options.skip_bad_lines);
    let empty = corpus.empty();
    match empty.len() {
        0 => {}
        count if count == corpus.files() => {
            return Err(DataError::EmptyInputs { inputs: empty });
        }
        _ => progress(Progress::Remark(Remark::Empty { inputs: empty })),
    }
    // Recorded before the files are read for tokens: a file that changes later differs from its record.
    let given = match &options.tokenizer {
        TokenizerSource::File(path) => read_named_tokenizer(path, stop)?,
        TokenizerSource::Train { .. } => Vec::new(),
    };
    let names = match &options.tokenizer {
        TokenizerSource::File(path) if Stream::at(path).is_none() => TokenNames::beside(path)?,
        _ => TokenNames::default(),
    };
    let inputs = Inputs::of(&corpus, options, &given)?;
    let groups = inputs.repeated();
    if !groups.is_empty() {
        progress(Progress::Remark(Remark::SameContent { groups }));
    }
    let tokenizer_file = folder.join(TOKENIZER_FILE);
    tokenizer(&corpus, given, stop, options, progress)?.save(&tokenizer_file)?;
    // Loaded from the file, as the readers of the folder do.
    let tokenizer = Tokenizer::load(tokenizer_file)?
        .reading_special_tokens(options.special_tokens)
        .ending_as_named(options.end_of_text.as_deref(), &names)?;
    let (end, start) = (tokenizer.end_of_text()?, tokenizer.start_of_document(options.bos, &names)?);
    let (sizes, is_all) = corpus.sizes(SURVEYED, stop)?;
    let division = &Division::new(&sizes, is_all, options.validation_fraction, options.seed);
    let pass = Encoder { tokenizer: &tokenizer, start, end, division };
    let pass = encode(folder, &corpus, &pass, stop, progress)?;
    remark_on_text(&pass, division, options, progress);

    let (train, train_counts) = pass.train.finish()?;
    let (validation, validation_counts) = pass.validation.finish()?;
    let info = DataInfo {
        format_version: FORMAT_VERSION,
        dtype: TokenWidth::of_vocabulary(tokenizer.vocab_size()),
        vocab_size: tokenizer.vocab_size(),
        end_of_text: end,
        train,
        validation,
        documents: pass.documents,
        skipped_files: pass.passed_over.count() as u64,
        unknown: pass.unknown,
        unigram_entropy: Some(unigram_entropy(&train_counts, &validation_counts)),
    };
    check(stop)?;
    inputs.save(folder)?;
    info.save(folder)?;
    sums_of(folder, &info)?.save(folder)?;
    Ok(info)
}

/// Trains or loads the tokenizer that `options` request; `given` is the content of its file.
fn tokenizer(
    corpus: &Corpus,
    given: Vec<u8>,
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<Tokenizer> {
    match &options.tokenizer {
        TokenizerSource::File(path) => Tokenizer::from_file(given, path),
        TokenizerSource::Train { vocab_size } => {
            let wanted = *vocab_size;
            let tokenizer = train_tokenizer(corpus, wanted, options.end_of_text.as_deref(), stop, progress)?;
            let reached = tokenizer.vocab_size();
            if reached < wanted {
                progress(Progress::Remark(Remark::SmallVocabulary { wanted, reached }));
            }
            Ok(tokenizer)
        }
    }
}

/// Encodes the text into the two token files.
fn encode<'a>(
    folder: &Path,
    corpus: &Corpus,
    encoder: &'a Encoder<'a>,
    stop: &'a AtomicBool,
    progress: OnProgress<'_>,
) -> Result<Pass<'a>> {
    let mut pass = Pass::new(encoder, folder, stop)?;
    pass.run(corpus, progress)?;
    let (files, skipped_files) = (corpus.files(), pass.passed_over.count() as u64);
    if skipped_files > 0 {
        let passed_over = pass.passed_over.clone();
        progress(Progress::Remark(Remark::PassedOver { files: passed_over, of: files }));
    }
    if pass.documents == 0 {
        return Err(DataError::NoText { files, skipped: skipped_files });
    }
    if pass.has_empty_split() {
        return Err(DataError::TooLittleText { bytes: pass.text_bytes });
    }
    Ok(pass)
}

/// Reports findings about the text to its owner.
fn remark_on_text(pass: &Pass<'_>, division: &Division, options: &PrepareOptions, progress: OnProgress<'_>) {
    let mut remark = |is_due: bool, remark: Remark| {
        if is_due {
            progress(Progress::Remark(remark));
        }
    };
    let documents = division.divided();
    remark(documents > 0, Remark::DividedDocuments { documents });
    let tokens = pass.train.tokens() + pass.validation.tokens();
    let Pass { bad_lines, json, spellings, unknown, .. } = pass;
    remark(bad_lines.count > 0, Remark::BadLines(bad_lines.clone()));
    remark(json.count() > 0, Remark::Json(json.clone()));
    let (count, read) = (spellings.total(), options.special_tokens);
    remark(count > 0, Remark::SpecialTokens { count, read, tokens: spellings.seen() });
    remark(*unknown > 0, Remark::Unknown { unknown: *unknown, tokens });
}

/// Computes the checksums of all files in an otherwise complete folder.
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
    // Those of the large files are already known.
    let known = [train, validation].map(|split| (split.file_name(), info.split(split).sha256.as_ref()));
    Sums::of(folder, &files, &known)
}

/// Compares `options` with those that the prepared folder `options.out` was made from. Returns a line for
/// each difference, or `None` if the folder does not record its inputs. A different seed does not count.
///
/// # Errors
///
/// When the record or an input cannot be read.
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
    let input_bytes = corpus.bytes().min(TOKENIZER_TRAINING_BYTES);
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
