use super::super::verify;
use std::sync::atomic::Ordering;

use super::*;
use rustix::process::{Signal, getpid, kill_process};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

fn options(inputs: &[&Path], out: &Path) -> PrepareOptions {
    let inputs = inputs.iter().map(|path| path.to_path_buf()).collect();
    let tokenizer = TokenizerSource::Train { vocab_size: 300 };
    PrepareOptions { seed: 1, ..PrepareOptions::new(inputs, out.to_path_buf(), tokenizer) }
}

fn run(options: &PrepareOptions) -> Result<DataInfo, DataError> {
    prepare(options, &mut |_| {})
}

fn assert_whole(folder: &Path) {
    let found = verify(folder, &mut |_, _| {}).unwrap();
    assert!(found.problems.is_empty() && found.unproven.is_empty(), "{found:?}");
    assert_eq!(found.files, 7);
}

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
        let stopped = prepare_until_stopped(&stop, &options, &mut progress);
        assert!(matches!(stopped, Err(DataError::Stopped)), "{stopped:?}");
        assert_eq!(seen, 1 + usize::from(stage), "it goes no further");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
    run(&options).unwrap();
    assert_whole(&out);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_limit_takes_the_first_documents() {
    let folder = tempfile::tempdir().unwrap();
    let line = |number: usize| format!("{{\"text\": \"{}\"}}\n", "a line ".repeat(number * 7));
    let (all, some) = (folder.path().join("all.jsonl"), folder.path().join("some.jsonl"));
    // An empty document does not count, and documents beyond the limit are not parsed.
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
fn thread_count_changes_no_bit() {
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
    let input = folder.path().join("a.jsonl");
    fs::write(&input, lines((0..200).map(|line| format!("line {line}\n")))).unwrap();
    let prepared = |out: &str, seed| {
        let out = folder.path().join(out);
        run(&PrepareOptions { seed, validation_fraction: 0.3, ..options(&[&input], &out) }).unwrap()
    };
    let first = prepared("a", 1);
    assert_eq!(first, prepared("b", 1));
    assert_ne!(first.train, prepared("c", 2).train);
}

fn lines(documents: impl IntoIterator<Item = String>) -> String {
    documents.into_iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect()
}

fn ids(folder: &Path, split: Split) -> Vec<u32> {
    let bytes = fs::read(folder.join(split.file_name())).unwrap();
    bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]))).collect()
}

fn count(folder: &Path, id: u32) -> usize {
    let all = [Split::Train, Split::Validation].map(|split| ids(folder, split)).concat();
    all.into_iter().filter(|other| *other == id).count()
}

#[test]
fn documents_stay_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("books.jsonl"), folder.path().join("data"));
    let book = |number: usize| -> String {
        (0..900).map(|line| format!("Line {line} of book {number} goes on for a while.\n")).collect()
    };
    fs::write(&input, lines((0..60).map(book))).unwrap();
    let info = run(&options(&[&input], &out)).unwrap();
    assert_eq!(info.documents, 60);
    let mut seen = Vec::new();
    for (split, expected) in [(Split::Train, 57), (Split::Validation, 3)] {
        let text = text(&out, split);
        let documents: Vec<_> = text.split_terminator("<|endoftext|>").collect();
        assert_eq!(documents.len(), expected);
        seen.extend(documents.into_iter().map(str::to_owned));
    }
    let mut books: Vec<_> = (0..60).map(book).collect();
    seen.sort();
    books.sort();
    assert!(seen == books);
}

/// Writes a byte-level `tokenizer.json` whose special tokens, after the first, have ids from 257.
fn write_tokenizer(path: &Path, special: &[&str], change: impl FnOnce(&mut serde_json::Value)) {
    let tokenizer = Tokenizer::train_ending_with(std::iter::empty(), 257, special[0]).unwrap();
    tokenizer.save(path).unwrap();
    let mut file: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (id, content) in (257..).zip(&special[1..]) {
        let token = serde_json::json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        });
        file["added_tokens"].as_array_mut().unwrap().push(token);
        file["model"]["vocab"][content] = id.into();
    }
    change(&mut file);
    fs::write(path, file.to_string()).unwrap();
}

fn starting_with(token: &str, id: u32) -> serde_json::Value {
    serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    })
}

fn with_tokenizer(
    special: &[&str],
    change: impl FnOnce(&mut serde_json::Value),
) -> (tempfile::TempDir, PrepareOptions) {
    let folder = tempfile::tempdir().unwrap();
    let (input, file) = (folder.path().join("a.jsonl"), folder.path().join("tokenizer.json"));
    fs::write(&input, lines((0..40).map(|number| format!("<s>document {number} <|user|>")))).unwrap();
    write_tokenizer(&file, special, change);
    let tokenizer = TokenizerSource::File(file);
    let options = PrepareOptions { tokenizer, ..options(&[&input], &folder.path().join("data")) };
    (folder, options)
}

fn run_again(options: &PrepareOptions, remarks: &mut Vec<Remark>) -> Result<DataInfo> {
    let _ = fs::remove_dir_all(&options.out);
    prepare(options, &mut |progress| {
        if let Progress::Remark(remark) = progress {
            remarks.push(remark);
        }
    })
}

#[test]
fn bos_overrides_the_post_processor() {
    let (_folder, options) = with_tokenizer(&["</s>", "<s>"], |file| {
        file["post_processor"] = starting_with("<s>", 257);
    });
    for (bos, expected) in [(None, 40), (Some(true), 40), (Some(false), 0)] {
        run_again(&PrepareOptions { bos, ..options.clone() }, &mut Vec::new()).unwrap();
        assert_eq!(count(&options.out, 257), expected, "{bos:?}");
        assert_eq!(count(&options.out, 0), 40);
    }
    assert_eq!(ids(&options.out, Split::Train).last(), Some(&0));
    // Without a post-processor, the token is found by its usual name or by its name in another file, if any.
    let (folder, options) = with_tokenizer(&["</s>", "<s>", "<|start|>"], |_| {});
    for (bos, expected) in [(None, 0), (Some(true), 40)] {
        run_again(&PrepareOptions { bos, ..options.clone() }, &mut Vec::new()).unwrap();
        assert_eq!(count(&options.out, 257), expected, "{bos:?}");
    }
    fs::write(folder.path().join("config.json"), r#"{"bos_token_id": 258}"#).unwrap();
    run_again(&PrepareOptions { bos: Some(true), ..options.clone() }, &mut Vec::new()).unwrap();
    assert_eq!((count(&options.out, 257), count(&options.out, 258)), (0, 40));
    let (_folder, options) = with_tokenizer(&["</s>"], |_| {});
    let refused = run_again(&PrepareOptions { bos: Some(true), ..options }, &mut Vec::new());
    assert!(matches!(refused, Err(DataError::NoStartOfText)), "{refused:?}");
}

#[test]
fn special_tokens_are_read_on_request() {
    let (_folder, options) = with_tokenizer(&["</s>", "<s>", "<|user|>", "<|other|>"], |_| {});
    for read in [false, true] {
        let mut remarks = Vec::new();
        run_again(&PrepareOptions { special_tokens: read, ..options.clone() }, &mut remarks).unwrap();
        let expected = match read {
            true => "the text has 80 spellings of special tokens, which became these tokens: <s>, <|user|>",
            false => "the text has 80 spellings of special tokens (<s>, <|user|>), which are ordinary text: ",
        };
        assert!(remarks.len() == 1 && remarks[0].to_string().starts_with(expected), "{remarks:?}");
        let expected = if read { 40 } else { 0 };
        assert_eq!([257, 258, 259].map(|id| count(&options.out, id)), [expected, expected, 0]);
        assert_eq!(count(&options.out, 0), 40);
    }
}

#[test]
fn end_of_text_follows_the_named_token() {
    let end = |options: &PrepareOptions| run_again(options, &mut Vec::new()).map(|info| info.end_of_text);
    // An ordinary vocabulary entry is not a special token, even with a usual name.
    let ordinary = |file: &mut serde_json::Value| file["model"]["vocab"]["</s>"] = 300.into();
    let (_folder, options) = with_tokenizer(&["<|begin_of_text|>", "<|end_of_text|>"], ordinary);
    assert_eq!(end(&options).unwrap(), 257);
    let named = PrepareOptions { end_of_text: Some("</s>".to_owned()), ..options };
    assert_eq!(end(&named).unwrap(), 300);
    assert_eq!(count(&named.out, 300), 40);
    let unknown = PrepareOptions { end_of_text: Some("<|no|>".to_owned()), ..named };
    assert!(end(&unknown).unwrap_err().to_string().contains("<|begin_of_text|>, <|end_of_text|>"));

    let (_folder, options) = with_tokenizer(&["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], |_| {});
    assert_eq!(end(&options).unwrap(), 257);

    let (folder, options) = with_tokenizer(&["<|fin|>", "<|im_end|>", "</s>"], |_| {});
    let write = |file: &str, content: &str| fs::write(folder.path().join(file), content).unwrap();
    assert_eq!(end(&options).unwrap(), 258);
    write("tokenizer_config.json", r#"{"eos_token": "<|im_end|>"}"#);
    assert_eq!(end(&options).unwrap(), 257);
    write("config.json", r#"{"eos_token_id": 1000}"#);
    assert_eq!(end(&options).unwrap(), 257);
    write("config.json", r#"{"eos_token_id": [0, 258]}"#);
    assert_eq!(end(&options).unwrap(), 0);

    let (_folder, options) = with_tokenizer(&["<|fin|>"], |_| {});
    let error = end(&options).unwrap_err().to_string();
    assert!(
        error.contains("Its special tokens are: <|fin|>") && error.contains("data.end_of_text"),
        "{error}"
    );
    let trained = PrepareOptions {
        tokenizer: TokenizerSource::Train { vocab_size: 300 },
        end_of_text: Some("<|fin|>".to_owned()),
        ..options
    };
    assert_eq!(end(&trained).unwrap(), 0);
    assert!(text(&trained.out, Split::Train).ends_with("<|fin|>"));
}

/// Dropout makes the training of a BPE random, but must not affect data.
#[test]
fn dropout_is_off_and_stays_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let [file, random] = ["tokenizer.json", "random.json"].map(|name| folder.path().join(name));
    let text = "the same words again and again\n".repeat(2000);
    Tokenizer::train(std::iter::once(Ok(text.clone())), 300).unwrap().save(&file).unwrap();
    let content = fs::read_to_string(&file).unwrap();
    assert!(content.contains("\"dropout\": null"));
    fs::write(&random, content.replace("\"dropout\": null", "\"dropout\": 0.5")).unwrap();
    let input = folder.path().join("a.txt");
    fs::write(&input, text).unwrap();
    let prepared = |name: &str, file: &Path| {
        let out = folder.path().join(name);
        let tokenizer = TokenizerSource::File(file.to_owned());
        run(&PrepareOptions { tokenizer, ..options(&[&input], &out) }).unwrap();
        [fs::read(out.join("train.bin")), fs::read(out.join("tokenizer.json"))].map(Result::unwrap)
    };
    let [[plain, _], [first, stored], [second, _]] =
        [("plain", &file), ("first", &random), ("second", &random)].map(|(name, file)| prepared(name, file));
    assert!(plain == first && first == second);
    assert!(String::from_utf8(stored).unwrap().contains("\"dropout\": 0.5"));
}

#[test]
fn unknown_text_is_counted() {
    for (unknown, expected) in [(Some("<unk>"), 40 * 3), (None, 40 * 3)] {
        let (folder, options) = with_tokenizer(&["</s>", "<unk>"], |file| {
            let vocabulary = file["model"]["vocab"].as_object_mut().unwrap();
            vocabulary.retain(|token, _| token.len() > 1 || token.is_ascii());
            vocabulary.retain(|token, _| token.chars().count() > 1 || token.is_ascii() || token == "Ġ");
            vocabulary.insert("<unk>".to_owned(), 257.into());
            file["model"]["unk_token"] = unknown.into();
        });
        fs::write(folder.path().join("a.jsonl"), lines((0..40).map(|number| format!("a {number} 漢!"))))
            .unwrap();
        let mut remarks = Vec::new();
        let info = run_again(&options, &mut remarks).unwrap();
        let tokens = info.train.tokens + info.validation.tokens;
        assert_eq!(info.unknown, expected);
        let message = format!("{expected} unknown or omitted tokens, ");
        assert!(remarks.len() == 1 && remarks[0].to_string().contains(&message), "{remarks:?}");
        assert!(remarks[0].is_warning() && remarks[0].to_string().contains(&format!(" % of {tokens}; ")));
        assert_eq!(count(&options.out, 257), if unknown.is_some() { 120 } else { 0 });
    }
}

/// As in Llama 2 and Mistral, a space is added only at the start of a text.
#[test]
fn a_long_document_gets_one_space_in_front() {
    let (folder, options) = with_tokenizer(&["</s>", "<s>"], |file| {
        file["pre_tokenizer"] = serde_json::json!(null);
        file["decoder"] = serde_json::json!(null);
        file["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]});
        file["model"]["vocab"]["▁"] = 300.into();
        file["model"]["vocab"]["\n"] = 301.into();
    });
    let text = "a line of some words, and more of them.\n".repeat(3000);
    fs::write(folder.path().join("a.jsonl"), lines(std::iter::repeat_n(text.clone(), 20))).unwrap();
    let info = run(&options).unwrap();
    let TokenizerSource::File(file) = &options.tokenizer else { unreachable!() };
    let whole = tokenizers::Tokenizer::from_file(file).unwrap().encode_fast(text, false).unwrap();
    let expected = [whole.get_ids(), &[0]].concat();
    for split in [Split::Train, Split::Validation] {
        assert!(ids(&options.out, split).chunks(expected.len()).all(|document| document == expected));
    }
    assert_eq!(info.train.tokens + info.validation.tokens, 20 * expected.len() as u64);
}

#[test]
fn skip_bad_lines_skips_and_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("a.ndjson"), folder.path().join("data"));
    let good = lines((0..30).map(|number| format!("document {number}")));
    fs::write(&input, format!("{good}{{\"text\": \"a\", \"score\": NaN}}\n{good}{{\"text\": null}}\n"))
        .unwrap();
    let options = options(&[&input], &out);
    let error = run(&options).unwrap_err().to_string();
    assert!(error.contains("a.ndjson, line 31: NaN is not JSON"), "{error}");
    let mut remarks = Vec::new();
    let info = run_again(&PrepareOptions { skip_bad_lines: true, ..options }, &mut remarks).unwrap();
    assert_eq!(info.documents, 60);
    let last = remarks[remarks.len() - 1].to_string();
    assert!(last.starts_with("2 lines cannot be used and were skipped: "), "{last}");
    assert!(last.ends_with("a.ndjson, line 31: NaN is not JSON (column 24), and 1 more"), "{last}");
}

#[test]
fn json_read_as_text_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join("texts").join(name);
    fs::create_dir(folder.path().join("texts")).unwrap();
    let array = format!(
        "[{}]",
        lines((0..30).map(|number| format!("document {number}"))).trim_end().replace('\n', ",\n")
    );
    fs::write(file("array.json"), array).unwrap();
    // Other JSON files in folders are read as text without a remark.
    fs::write(file("settings.json"), "{\"key\": [1, 2]}").unwrap();
    fs::write(file("a.txt"), "some text\n".repeat(100)).unwrap();
    let mut remarks = Vec::new();
    let named = |inputs: &[&Path]| options(inputs, &folder.path().join("data"));
    run_again(&named(&[&folder.path().join("texts")]), &mut remarks).unwrap();
    let json = |remarks: &[Remark]| -> Vec<String> {
        remarks.iter().map(ToString::to_string).filter(|remark| remark.contains(" of JSON ")).collect()
    };
    let found = json(&remarks);
    assert!(found.len() == 1 && found[0].starts_with("1 file of JSON was read as plain text"), "{found:?}");
    assert!(found[0].contains("array.json"), "{found:?}");
    remarks.clear();
    run_again(&named(&[&file("settings.json"), &file("a.txt")]), &mut remarks).unwrap();
    assert!(json(&remarks)[0].contains("settings.json"));
}

#[test]
fn divided_document_keeps_all_text() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("long.txt"), folder.path().join("data"));
    let long: String = (0..9000).map(|line| format!("line number {line}\n")).collect();
    fs::write(&input, &long).unwrap();
    let options = PrepareOptions { validation_fraction: 0.3, ..options(&[&input], &out) };
    let mut remarks = Vec::new();
    let info = run_again(&options, &mut remarks).unwrap();
    let expected = "the text has so few documents that the end of one is held out for validation, ";
    assert!(remarks.len() == 1 && remarks[0].to_string().starts_with(expected), "{remarks:?}");
    let (train, validation) = (text(&out, Split::Train), text(&out, Split::Validation));
    assert_eq!(sorted_lines(&(train.clone() + &validation)), sorted_lines(&long));
    let bytes = [&info.train, &info.validation].map(|split| split.text_bytes.unwrap());
    assert_eq!(bytes[0] + bytes[1], long.len() as u64);
    for stretch in train.split("<|endoftext|>").chain(validation.split("<|endoftext|>")) {
        assert!(long.contains(stretch));
    }
    let share = bytes[1] as f64 / long.len() as f64;
    assert!((0.299..0.301).contains(&share), "{share}");
    assert!(long.starts_with(train.trim_end_matches("<|endoftext|>")));
}

#[test]
fn two_documents_are_enough_for_two_splits() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("a.jsonl");
    fs::write(&input, "{\"text\": \"a longer text\"}\n{\"text\": \"short\"}\n").unwrap();
    for (index, fraction) in [1e-9, 1.0 - 1e-9].into_iter().enumerate() {
        let out = folder.path().join(index.to_string());
        let options = PrepareOptions { validation_fraction: fraction, ..options(&[&input], &out) };
        let info = run(&options).unwrap();
        assert!(info.train.tokens > 1 && info.validation.tokens > 1);
        let texts = [Split::Train, Split::Validation].map(|split| text(&out, split));
        match index {
            0 => assert_eq!(texts[1], " text<|endoftext|>"),
            _ => assert!(texts.contains(&"short<|endoftext|>".to_owned()), "{texts:?}"),
        }
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
fn invalid_options_and_inputs_are_refused() {
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
    fs::write(empty.join("short.txt"), "w").unwrap();
    assert!(matches!(fails(&good), DataError::TooLittleText { bytes: 1 }));
    let nothing = empty.join("nothing.txt");
    fs::write(&nothing, "").unwrap();
    let nothing = PrepareOptions { inputs: vec![nothing], ..good.clone() };
    assert!(matches!(fails(&nothing), DataError::EmptyInputs { .. }));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

    fs::create_dir(&out).unwrap();
    fs::write(out.join("data.json"), "{}").unwrap();
    assert!(matches!(fails(&good), DataError::AlreadyPrepared { .. }));
}

/// Environment variables for the killed process: its folder, and the number of reports before it is killed.
const FOLDER: &str = "KILN_TEST_FOLDER";
const REPORTS: &str = "KILN_TEST_REPORTS";

#[test]
#[ignore = "a program for the other tests"]
fn killed() {
    let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    let mut left: u32 = std::env::var(REPORTS).expect("a number").parse().expect("a number");
    let options = options(&[&folder.join("a.jsonl")], &folder.join("data"));
    let mut count_down = |progress: Progress| {
        left -= u32::from(matches!(progress, Progress::Encoding { .. }));
        if left == 0 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    };
    prepare(&options, &mut count_down).unwrap();
}

#[test]
fn killed_prepare_starts_over_to_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let input = folder.join("a.jsonl");
    let document = |number: usize| format!("line {number} of a document\n").repeat(number % 90 + 1);
    fs::write(&input, lines((0..600).map(document))).unwrap();
    let [whole, out] = ["whole", "data"].map(|name| options(&[&input], &folder.join(name)));
    run(&whole).unwrap();
    for reports in [1, 3] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "prepare::tests::killed", "--ignored"]);
        let ended = command.env(FOLDER, folder).env(REPORTS, reports.to_string()).output().unwrap();
        assert_eq!(ended.status.signal(), Some(Signal::KILL.as_raw()), "{ended:?}");
        assert!(!out.out.exists());
        assert_eq!(fs::read_dir(folder).unwrap().count(), 3, "the hidden folder is left");
        run(&out).unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 3, "it was removed");
        for file in fs::read_dir(&whole.out).unwrap() {
            let name = file.unwrap().file_name();
            assert!(
                fs::read(whole.out.join(&name)).unwrap() == fs::read(out.out.join(&name)).unwrap(),
                "{name:?}"
            );
        }
        assert_whole(&out.out);
        fs::remove_dir_all(&out.out).unwrap();
    }
}
