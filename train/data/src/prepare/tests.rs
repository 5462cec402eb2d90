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
        limit: None,
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
fn a_stop_is_noticed_at_every_stage() {
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
        // Text that is encoded is kept for the next one.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), usize::from(stage));
    }
    run(&options).unwrap();
    assert_whole(&out);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// The tokens of the folder are those of a file that has no other documents.
#[test]
fn a_limit_takes_the_first_documents() {
    let folder = tempfile::tempdir().unwrap();
    let line = |number: usize| format!("{{\"text\": \"{}\"}}\n", "a line ".repeat(number * 7));
    let (all, some) = (folder.path().join("all.jsonl"), folder.path().join("some.jsonl"));
    // One without text does not count, and what comes behind the limit is not looked at.
    let first = "{\"text\": \"\"}\n".to_owned() + &(1..=20).map(line).collect::<String>();
    fs::write(&some, &first).unwrap();
    fs::write(&all, first + &(21..30).map(line).collect::<String>() + "no JSON\n").unwrap();
    let prepared = |input: &Path, limit, out: &str| {
        let options = PrepareOptions { limit, ..options(&[input], &folder.path().join(out)) };
        (run(&options).unwrap(), options)
    };
    let (limited, options) = prepared(&all, Some(20), "limited");
    let (exact, _) = prepared(&some, None, "exact");
    assert_eq!((limited.documents, &limited), (20, &exact));
    let (more, _) = prepared(&some, Some(21), "more");
    assert_eq!(more, exact);
    let now = PrepareOptions { limit: None, ..options.clone() };
    assert_eq!(differences(&options).unwrap(), Some(Vec::new()));
    assert_eq!(differences(&now).unwrap(), Some(vec!["documents: the first 20 then, all now".to_owned()]));
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.txt");
    let content: String = (0..20_000).map(|line| format!("line {line} of {}\n", line % 97)).collect();
    fs::write(&input, content).unwrap();
    let files = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let out = folder.path().join(threads.to_string());
        pool.install(|| run(&options(&[&input], &out))).unwrap();
        ["train.bin", "val.bin", "tokenizer.json", "data.json"].map(|file| fs::read(out.join(file)).unwrap())
    });
    assert!(files[0] == files[1] && files[0] == files[2]);
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
