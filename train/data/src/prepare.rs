//! From text to a folder of tokens.

use super::document::Corpus;
use super::entropy::unigram_entropy;
use super::info::{FORMAT_VERSION, INFO_FILE, TOKENIZER_FILE};
use super::inputs::{INPUTS_FILE, Inputs};
use super::listing::{Listing, list};
use super::options::{PrepareOptions, TokenizerSource};
use super::output::OutputFolder;
use super::pass::Pass;
use super::progress::{OnProgress, Progress, check};
use super::remark::Remark;
use super::sums::Sums;
use super::tokenizer::read_named_tokenizer;
use super::{DataError, DataInfo, Result, Split, Stream, TokenWidth, Tokenizer};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Text that a tokenizer is trained on, at most. More of it changes the merges little,
/// and the counts of the trainer stay within their range.
const TOKENIZER_TRAINING_BYTES: u64 = 1 << 30;

/// Text between two reports of how far the training of a tokenizer is.
const REPORT_BYTES: u64 = 2 << 20;

/// Writes a folder of tokens from text; [the module](super) describes its form.
///
/// Documents are cut to chunks of a few kilobytes, and a seeded hash assigns every chunk to one of the
/// splits: a corpus of few long files gets as fair a split as one of many short ones, and the same inputs and
/// options give the same files. The folder appears complete or not at all.
///
/// # Errors
///
/// Before any work when an option is out of range, an input is missing or `out` is in use; later when an
/// input cannot be read, holds too little text, or `out` cannot be written.
pub fn prepare(options: &PrepareOptions, progress: OnProgress<'_>) -> Result<DataInfo> {
    prepare_unless(&AtomicBool::new(false), options, progress)
}

/// [`prepare()`] that ends with [`DataError::Stopped`], and without a folder, soon after `stop` has become
/// true. Merging the tokens of a tokenizer is one piece of work that is not interrupted.
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
    // Written so that a fraction that is no number is refused as well.
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(DataError::ValidationFraction { fraction });
    }
    if let TokenizerSource::Train { vocab_size } = options.tokenizer {
        Tokenizer::check_size(vocab_size)?;
    }
    let Listing { files: listed, passed_over } = list(&options.inputs)?;
    let output = OutputFolder::create(&options.out)?;
    for left in output.left_behind() {
        progress(Progress::Remark(Remark::LeftBehind(left.clone())));
    }
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
    let corpus = Corpus::open(listed, output.path(), stop)?;
    let empty = corpus.empty();
    match empty.len() {
        0 => {}
        count if count == corpus.files() => {
            return Err(DataError::EmptyInputs { inputs: empty });
        }
        _ => progress(Progress::Remark(Remark::Empty { inputs: empty })),
    }
    // Before they are read for tokens: a file that changes from here on differs from what is recorded.
    let given = match &options.tokenizer {
        TokenizerSource::File(path) => read_named_tokenizer(path, stop)?,
        TokenizerSource::Train { .. } => Vec::new(),
    };
    let inputs = Inputs::of(&corpus, options, &given)?;
    let groups = inputs.repeated();
    if !groups.is_empty() {
        progress(Progress::Remark(Remark::SameContent { groups }));
    }
    let tokenizer = match &options.tokenizer {
        TokenizerSource::File(path) => Tokenizer::from_file(given, path)?,
        TokenizerSource::Train { vocab_size } => {
            let wanted = *vocab_size;
            let tokenizer = train_tokenizer(&corpus, wanted, stop, progress)?;
            let reached = tokenizer.vocab_size();
            if reached < wanted {
                progress(Progress::Remark(Remark::SmallVocabulary { wanted, reached }));
            }
            tokenizer
        }
    };

    let mut pass = Pass::new(&tokenizer, output.path(), options, stop)?;
    pass.run(&corpus, progress)?;
    let (files, skipped_files) = (corpus.files(), pass.passed_over.count() as u64);
    if skipped_files > 0 {
        let passed_over = pass.passed_over.clone();
        progress(Progress::Remark(Remark::PassedOver { files: passed_over, of: files }));
    }
    match pass.chunks {
        0 => {
            return Err(DataError::NoText { files, skipped: skipped_files });
        }
        1 => {
            return Err(DataError::TooLittleText { bytes: pass.text_bytes });
        }
        _ => {}
    }
    if let Some(empty) = pass.empty_split() {
        // By chance, no chunk went there. This takes a corpus so small that a second pass, with one chunk
        // assigned by hand, costs nothing. That is the second longest: long enough to be of use there, and
        // not the longest, which the other split may consist of.
        let forced = Some((pass.longest[1].1, empty));
        // Its writers still hold tokens, which must not reach the new files.
        drop(pass);
        pass = Pass::new(&tokenizer, output.path(), options, stop)?;
        pass.forced = forced;
        pass.run(&corpus, progress)?;
    }

    let (train, train_counts) = pass.train.finish()?;
    let (validation, validation_counts) = pass.validation.finish()?;
    let info = DataInfo {
        format_version: FORMAT_VERSION,
        dtype: TokenWidth::of_vocabulary(tokenizer.vocab_size()),
        vocab_size: tokenizer.vocab_size(),
        end_of_text: pass.end_of_text,
        train,
        validation,
        documents: pass.documents,
        skipped_files,
        unigram_entropy: Some(unigram_entropy(&train_counts, &validation_counts)),
    };
    check(stop)?;
    tokenizer.save(output.path().join(TOKENIZER_FILE))?;
    inputs.save(output.path())?;
    info.save(output.path())?;
    sums_of(output.path(), &info)?.save(output.path())?;
    output.commit()?;
    Ok(info)
}

/// Of every file of a folder that is whole but for them.
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
    // Of what is large, they are known.
    let known = [train, validation].map(|split| (split.file_name(), info.split(split).sha256.as_ref()));
    Sums::of(folder, &files, &known)
}

/// How `options` differ from what the prepared folder `options.out` was made from: a line for each
/// difference, or `None` if the folder does not say what it was made from. The seed is no difference.
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
    stop: &AtomicBool,
    progress: OnProgress<'_>,
) -> Result<Tokenizer> {
    let input_bytes = corpus.bytes().min(TOKENIZER_TRAINING_BYTES);
    let mut chunks = corpus.chunks();
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
    let tokenizer = Tokenizer::train(std::iter::from_fn(|| next().transpose()), vocab_size)?;
    check(stop)?;
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use super::super::verify;
    use std::sync::atomic::Ordering;

    use super::*;
    use std::fs;

    fn options(inputs: &[&Path], out: &Path) -> PrepareOptions {
        PrepareOptions {
            inputs: inputs.iter().map(|path| path.to_path_buf()).collect(),
            out: out.to_path_buf(),
            tokenizer: TokenizerSource::Train { vocab_size: 300 },
            validation_fraction: PrepareOptions::VALIDATION_FRACTION,
            seed: 1,
        }
    }

    fn run(options: &PrepareOptions) -> Result<DataInfo, DataError> {
        prepare(options, &mut |_| {})
    }

    /// Every checksum of the folder is right.
    fn assert_whole(folder: &Path) {
        let found = verify(folder, &mut |_, _| {}).unwrap();
        assert!(found.problems.is_empty() && found.unproven.is_empty(), "{found:?}");
        assert_eq!(found.files, 7);
    }

    /// The text of a split.
    fn text(folder: &Path, split: Split) -> String {
        let bytes = fs::read(folder.join(split.file_name())).unwrap();
        let id = |pair: &[u8]| u32::from(u16::from_le_bytes([pair[0], pair[1]]));
        let ids: Vec<u32> = bytes.chunks_exact(2).map(id).collect();
        let tokenizer = Tokenizer::load(folder.join(TOKENIZER_FILE)).unwrap();
        tokenizer.decode(&ids).unwrap()
    }

    fn sorted_lines(text: &str) -> Vec<String> {
        let text = text.replace("<|endoftext|>", "");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[test]
    fn builtin_text_gives_a_complete_folder() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("data");
        let mut stages = Vec::new();
        let mut record = |progress| stages.push(progress);
        let options = options(&[Path::new("builtin:arithmetic")], &out);
        let info = prepare(&options, &mut record).unwrap();
        assert!(matches!(stages[0], Progress::TrainingTokenizer { .. }));
        assert!(matches!(stages.last(), Some(Progress::Encoding { documents: 400, .. })));
        assert_eq!(DataInfo::load(&out).unwrap(), info);
        assert_eq!((info.documents, info.vocab_size, info.end_of_text), (400, 300, 0));
        let share = info.validation.tokens as f64 / info.train.tokens as f64;
        assert!((0.02..0.1).contains(&share), "{share}");
        let figures = info.unigram_entropy.unwrap();
        assert!(figures.validation > 2.0 && figures.validation < 6.0, "{figures:?}");
        assert!(figures.validation_under_train > figures.validation);
        for split in [Split::Train, Split::Validation] {
            assert!(text(&out, split).ends_with(".\n<|endoftext|>"));
        }
        assert_whole(&out);
        // The temporary folder is gone.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_stop_is_noticed_at_every_stage_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("data");
        let options = options(&[Path::new("builtin:arithmetic")], &out);
        let wanted = |progress: &Progress| matches!(progress, Progress::Encoding { .. });
        for stage in [false, true] {
            let stop = AtomicBool::new(false);
            let mut seen = 0;
            let mut progress = |progress: Progress| {
                seen += 1;
                stop.fetch_or(wanted(&progress) == stage, Ordering::Relaxed);
            };
            let stopped = prepare_unless(&stop, &options, &mut progress);
            assert!(matches!(stopped, Err(DataError::Stopped)), "{stopped:?}");
            assert_eq!(seen, 1 + usize::from(stage), "it goes no further");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn the_same_options_give_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("a.txt");
        let content: String = (0..2000).map(|line| format!("line {line}\n")).collect();
        fs::write(&input, content).unwrap();
        let prepared = |out: &str, seed| {
            let out = folder.path().join(out);
            run(&PrepareOptions { seed, validation_fraction: 0.3, ..options(&[&input], &out) }).unwrap()
        };
        let first = prepared("a", 1);
        assert_eq!(first, prepared("b", 1));
        assert_ne!(first.train, prepared("c", 2).train);
    }

    #[test]
    fn no_text_of_a_long_document_is_lost_and_stretches_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("long.txt"), folder.path().join("data"));
        let long: String = (0..9000).map(|line| format!("line number {line}\n")).collect();
        fs::write(&input, &long).unwrap();
        let options = PrepareOptions { validation_fraction: 0.3, ..options(&[&input], &out) };
        let info = run(&options).unwrap();
        let (train, validation) = (text(&out, Split::Train), text(&out, Split::Validation));
        assert_eq!(sorted_lines(&(train.clone() + &validation)), sorted_lines(&long));
        let bytes = [&info.train, &info.validation].map(|split| split.text_bytes.unwrap());
        assert_eq!(bytes[0] + bytes[1], long.len() as u64);
        // Between two ends of text, every stretch is text as it stands in the document.
        for stretch in train.split("<|endoftext|>").chain(validation.split("<|endoftext|>")) {
            assert!(long.contains(stretch));
        }
        let share = bytes[1] as f64 / long.len() as f64;
        assert!((0.2..0.4).contains(&share), "{share}");
    }

    #[test]
    fn two_pieces_are_enough_for_two_splits() {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("a.jsonl");
        fs::write(&input, "{\"text\": \"a longer text\"}\n{\"text\": \"short\"}\n").unwrap();
        for (index, fraction) in [1e-9, 1.0 - 1e-9].into_iter().enumerate() {
            let out = folder.path().join(index.to_string());
            let options = PrepareOptions { validation_fraction: fraction, ..options(&[&input], &out) };
            let info = run(&options).unwrap();
            assert!(info.train.tokens > 1 && info.validation.tokens > 1);
            let short = if index == 0 { Split::Validation } else { Split::Train };
            assert_eq!(text(&out, short), "short<|endoftext|>");
            assert_whole(&out);
        }
    }

    #[test]
    fn a_large_vocabulary_takes_four_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("data");
        let file = folder.path().join("tokenizer.json");
        let tokenizer = Tokenizer::train(std::iter::empty(), 257).unwrap();
        tokenizer.save(&file).unwrap();
        let content = fs::read_to_string(&file).unwrap();
        fs::write(&file, content.replace("\"Z\": ", "\"Z\": 70000")).unwrap();
        let input = folder.path().join("a.txt");
        // So few chunks, and so little chance, that the second pass is taken.
        fs::write(&input, "Zebras and lines\n".repeat(500)).unwrap();
        let options = PrepareOptions {
            tokenizer: TokenizerSource::File(file),
            validation_fraction: 1e-9,
            ..options(&[&input], &out)
        };
        let info = run(&options).unwrap();
        assert_eq!(info.dtype, TokenWidth::U32);
        let size = fs::metadata(out.join("train.bin")).unwrap().len();
        assert_eq!(size, info.train.tokens * 4);
        assert_whole(&out);
    }

    #[test]
    fn options_and_inputs_of_no_use_are_refused_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (empty, out) = (folder.path().join("empty"), folder.path().join("data"));
        fs::create_dir(&empty).unwrap();
        let good = options(&[&empty], &out);
        let fails = |options: &PrepareOptions| run(options).unwrap_err();
        for fraction in [0.0, 1.0, -0.5, f64::NAN] {
            let options = PrepareOptions { validation_fraction: fraction, ..good.clone() };
            assert!(matches!(fails(&options), DataError::ValidationFraction { .. }));
        }
        let tokenizer = TokenizerSource::Train { vocab_size: 0 };
        let small = PrepareOptions { tokenizer, ..good.clone() };
        assert!(matches!(fails(&small), DataError::VocabularyTooSmall { .. }));
        let tokenizer = TokenizerSource::File(folder.path().join("none.json"));
        let missing = PrepareOptions { tokenizer, ..good.clone() };
        assert!(matches!(fails(&missing), DataError::Missing { .. }));
        let nothing = PrepareOptions { inputs: Vec::new(), ..good.clone() };
        assert!(matches!(fails(&nothing), DataError::NoInputs));
        assert!(matches!(fails(&good), DataError::NoText { files: 0, .. }));
        fs::write(empty.join("image"), b"\xFF").unwrap();
        assert!(matches!(fails(&good), DataError::NoText { files: 1, skipped: 1 }));
        fs::write(empty.join("short.txt"), "word").unwrap();
        assert!(matches!(fails(&good), DataError::TooLittleText { bytes: 4 }));
        let nothing = empty.join("nothing.txt");
        fs::write(&nothing, "").unwrap();
        let nothing = PrepareOptions { inputs: vec![nothing], ..good.clone() };
        assert!(matches!(fails(&nothing), DataError::EmptyInputs { .. }));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        fs::create_dir(&out).unwrap();
        fs::write(out.join("data.json"), "{}").unwrap();
        assert!(matches!(fails(&good), DataError::AlreadyPrepared { .. }));
    }
}
