//! `kiln eval`.

use serde_json::Value as Json;

use crate::messages::Messages;
use crate::support::{SEQ_LEN, VOCAB, Workspace, tokenizer};

/// Trains a few steps, after which the model prefers some letters.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace
}

/// Returns the output lines of `kiln eval --json`.
fn lines(workspace: &Workspace, options: &[&str]) -> Vec<Json> {
    let arguments = [&["eval", "--checkpoint", "run", "--json"], options].concat();
    let said = workspace.succeed(&arguments);
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Returns the only output line of `kiln eval --json`.
fn line(workspace: &Workspace, options: &[&str]) -> Json {
    let mut lines = lines(workspace, options);
    assert_eq!(lines.len(), 1, "{options:?}: {lines:?}");
    lines.remove(0)
}

fn number(line: &Json, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"))
}

fn assert_close(what: &str, a: f64, b: f64, tolerance: f64) {
    assert!((a - b).abs() <= tolerance * b.abs(), "{what}: {a} and {b}");
}

/// Returns the token ids of a text.
fn ids(text: &str) -> Vec<u32> {
    tokenizer().encode(text).expect("ids")
}

/// Returns the shape and values of an f32 `.npy` file in C order, following NumPy's description of the format.
fn read_npy(bytes: &[u8]) -> (Vec<usize>, Vec<f32>) {
    assert_eq!(bytes[..8], *b"\x93NUMPY\x01\x00");
    let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!(start % 64, 0);
    let header = std::str::from_utf8(&bytes[10..start]).expect("text");
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': ("), "{header}");
    assert!(header.ends_with('\n'), "{header}");
    let shape = header.split(['(', ')']).nth(1).expect("a shape");
    let shape = shape.split(", ").map(|size| size.parse().expect("a size")).collect();
    let (values, rest) = bytes[start..].as_chunks();
    assert!(rest.is_empty());
    (shape, values.iter().map(|value| f32::from_le_bytes(*value)).collect())
}

/// Returns the logits that `kiln eval` writes for `tokens`, one row per token.
fn logits(workspace: &Workspace, tokens: &[u32], options: &[&str]) -> Vec<Vec<f32>> {
    let list: Vec<_> = tokens.iter().map(u32::to_string).collect();
    let list = list.join(",");
    line(workspace, &[&["--tokens", &list, "--logits", "logits.npy"], options].concat());
    let (shape, values) = read_npy(&workspace.read("logits.npy"));
    assert_eq!(shape, [tokens.len(), VOCAB]);
    assert_eq!(values.len(), tokens.len() * VOCAB);
    values.chunks(VOCAB).map(<[f32]>::to_vec).collect()
}

/// `-log softmax(row)[id]`.
fn cross_entropy(row: &[f32], id: u32) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|value| f64::from(value - most).exp()).sum();
    sum.ln() - f64::from(row[id as usize] - most)
}

#[test]
fn validation_loss_is_that_of_the_run() {
    let workspace = trained();
    let metrics = workspace.metrics("run");
    let last = metrics.iter().rfind(|line| line.get("val_loss").is_some()).expect("an evaluation");
    // The same evaluation as at the end of the run.
    let line = line(&workspace, &["--samples", "8", "--rows", "2", "--ranks", "2"]);
    assert_close("loss", number(&line, "val_loss"), number(last, "val_loss"), 1e-12);
    assert_close("perplexity", number(&line, "perplexity"), number(&line, "val_loss").exp(), 1e-12);
    assert_eq!(line["tokens"], last["val_tokens"]);
    assert_eq!((line["ranks"].as_u64(), line["strategy"].as_str()), (Some(2), Some("FULL_SHARD")));

    let said = workspace.succeed(&["eval", "--checkpoint", "run/checkpoints", "--samples", "8"]);
    let loss = format!("validation loss {:.4} nats per token, ", number(last, "val_loss"));
    assert!(said.starts_with(&loss), "{said}");
    assert!(said.ends_with(", 64 tokens in sequences of 8 (FULL_SHARD, 1 rank)\n"), "{said}");
}

/// 160 validation tokens make 19 sequences of 8 tokens, each with the token after it.
#[test]
fn all_validation_data_counts_unless_told_otherwise() {
    let workspace = trained();
    let all = line(&workspace, &[]);
    assert_eq!(all["tokens"], 19 * SEQ_LEN);
    // Asks for more samples than there are.
    for samples in ["1000", "18446744073709551615"] {
        assert_eq!(line(&workspace, &["--samples", samples]), all);
    }
    assert_ne!(line(&workspace, &["--samples", "8"])["val_loss"], all["val_loss"]);
    assert_eq!(line(&workspace, &["--seq-len", "4"])["tokens"], 39 * 4);
    for rows in ["1", "7", "30", "18446744073709551615"] {
        let loss = number(&line(&workspace, &["--rows", rows]), "val_loss");
        assert_close(rows, loss, number(&all, "val_loss"), 1e-6);
    }
    let most = ["--samples", "18446744073709551615", "--rows", "18446744073709551615"];
    let all_on_two = line(&workspace, &[&most[..], &["--ranks", "2"]].concat());
    assert_close("most", number(&all_on_two, "val_loss"), number(&all, "val_loss"), 1e-6);
    assert_eq!(all_on_two["tokens"], all["tokens"]);
    // The data may have moved, or the user may choose other data.
    workspace.copy("data", "moved");
    assert_eq!(line(&workspace, &["--data", "moved"]), all);
    workspace.write("moved/val.bin", workspace.read("data/train.bin"));
    workspace.replace("moved/data.json", "160", "1801");
    assert_eq!(line(&workspace, &["--data", "moved"])["tokens"], 225 * SEQ_LEN);
}

#[test]
fn answers_have_the_loss_that_their_logits_have() {
    let workspace = trained();
    for (prompt, answer) in [("abc", "dea"), ("", "cb"), ("a", "b"), ("abcdabc", "d")] {
        let answer_ids = ids(answer);
        let mut tokens = ids(prompt);
        if tokens.is_empty() {
            tokens.push(tokenizer().end_of_text().expect("an end"));
        }
        let before = tokens.len();
        tokens.extend(&answer_ids);
        let rows = logits(&workspace, &tokens[..tokens.len() - 1], &[]);
        let expected: f64 =
            answer_ids.iter().zip(&rows[before - 1..]).map(|(id, row)| cross_entropy(row, *id)).sum();
        let line = line(&workspace, &["--prompt", prompt, "--answer", answer]);
        assert_eq!(line["tokens"], answer_ids.len(), "{prompt:?} {answer:?}");
        assert_close(prompt, number(&line, "sum"), expected, 1e-6);
        let mean = expected / answer_ids.len() as f64;
        assert_close(prompt, number(&line, "loss"), mean, 1e-6);
        assert_close(prompt, number(&line, "perplexity"), mean.exp(), 1e-5);
    }
}

/// As in lm-evaluation-harness: the answer begins at the first token that contains some of it, including the
/// white space before it.
#[test]
fn an_answer_is_tokenized_with_its_prompt() {
    let workspace = Workspace::new();
    let mut file = workspace.json("data/tokenizer.json");
    // A space belongs to the following letter, and two letters form one token.
    let vocabulary = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let [spaced, pair] = ["X", "Y"].map(|letter| vocabulary.remove(letter).expect("an id"));
    vocabulary.extend([("\u{120}c".to_owned(), spaced.clone()), ("de".to_owned(), pair.clone())]);
    file["model"]["merges"] = serde_json::json!([["\u{120}", "c"], ["d", "e"]]);
    workspace.write("data/tokenizer.json", file.to_string());
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let [spaced, pair] = [spaced, pair].map(|id| u32::try_from(id.as_u64().expect("an id")).expect("small"));
    for (prompt, answer, before, expected) in [
        ("a b ", "c", [ids("a b"), vec![]].concat(), vec![spaced]),
        ("a b", " c", [ids("a b"), vec![]].concat(), vec![spaced]),
        ("ad", "ea", ids("a"), [vec![pair], ids("a")].concat()),
        ("d", "e", vec![tokenizer().end_of_text().expect("an end")], vec![pair]),
        ("-5", "-6", ids("-5"), ids("-6")),
    ] {
        let tokens = [&before[..], &expected].concat();
        let rows = logits(&workspace, &tokens[..tokens.len() - 1], &[]);
        let sum: f64 =
            expected.iter().zip(&rows[before.len() - 1..]).map(|(id, row)| cross_entropy(row, *id)).sum();
        let line = line(&workspace, &["--prompt", prompt, "--answer", answer]);
        assert_eq!(line["tokens"], expected.len(), "{prompt:?} {answer:?}");
        assert_close(prompt, number(&line, "sum"), sum, 1e-6);
    }
}

/// With a long context and little validation data, the default sequence length is at most that of the data.
#[test]
fn a_default_length_fits_the_data() {
    let workspace = trained();
    workspace.succeed(&["export", "--checkpoint", "run", "--out", "there"]);
    workspace.replace(
        "there/config.json",
        "\"max_position_embeddings\": 8",
        "\"max_position_embeddings\": 131072",
    );
    let eval = |options: &[&str]| {
        let arguments = ["eval", "--checkpoint", "there", "--data", "data", "--json"];
        workspace.kiln(&[&arguments, options].concat())
    };
    let line = |options: &[&str]| -> Json {
        let ended = eval(options);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        serde_json::from_str(&ended.stdout).expect("JSON")
    };
    let default = line(&[]);
    assert_eq!((&default["seq_len"], &default["tokens"]), (&159.into(), &159.into()));
    assert_eq!(line(&["--seq-len", "8"])["tokens"], 19 * SEQ_LEN);
    let ended = eval(&["--seq-len", "160"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("lower --seq-len") && !ended.stderr.contains("data.seq_len"), "{ended:?}");
    // A sequence longer than the default.
    let long: Vec<u16> = crate::support::tokens(5000);
    workspace.write_data("long", &long);
    workspace.write("long/val.bin", workspace.read("long/train.bin"));
    workspace.replace("long/data.json", "\"tokens\":160", "\"tokens\":5000");
    let said = workspace.succeed(&["eval", "--checkpoint", "there", "--data", "long", "--json"]);
    assert!(said.contains("\"seq_len\":2048"), "{said}");
}

/// Five answers of one to four tokens, and one blank line.
const PAIRS: &str = r#"{"prompt": "abc", "answer": "dea"}
{"prompt": "", "answer": "c", "source": "other keys are passed over"}

{"prompt": "bca", "answer": "bcda"}
{"prompt": "a", "answer": "ba"}
{"prompt": "bb", "answer": "zz"}
"#;

#[test]
fn a_file_of_pairs_is_the_sum_of_its_pairs() {
    let workspace = trained();
    workspace.write("pairs.jsonl", PAIRS);
    let mut lines = lines(&workspace, &["--pairs", "pairs.jsonl"]);
    workspace.write("marked.jsonl", format!("\u{FEFF}{PAIRS}"));
    assert_eq!(self::lines(&workspace, &["--pairs", "marked.jsonl"]), lines);
    let total = lines.pop().expect("a summary");
    let pairs: Vec<Json> = PAIRS.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!((lines.len(), pairs.len()), (5, 5));
    let (mut sum, mut tokens) = (0.0, 0.0);
    for (index, (pair, line)) in pairs.iter().zip(&lines).enumerate() {
        let text = |key: &str| pair[key].as_str().expect("a text");
        let prompt = ["--prompt", text("prompt"), "--answer", text("answer")];
        let alone = self::line(&workspace, &prompt);
        assert_eq!(line["pair"], index + 1);
        for key in ["loss", "sum", "tokens"] {
            assert_eq!(line[key], alone[key], "pair {index}: {key}");
        }
        sum += number(line, "sum");
        tokens += number(line, "tokens");
    }
    assert_eq!((number(&total, "pairs"), number(&total, "tokens")), (5.0, tokens));
    assert_close("per token", number(&total, "loss"), sum / tokens, 1e-12);
    assert_close("perplexity", number(&total, "perplexity"), (sum / tokens).exp(), 1e-12);
    assert_close("per answer", number(&total, "mean_sum"), sum / 5.0, 1e-12);
    let said = workspace.succeed(&["eval", "--checkpoint", "run", "--pairs", "pairs.jsonl"]);
    let expected = format!("answer loss {:.4} nats per token, ", sum / tokens);
    assert!(said.starts_with(&expected), "{said}");
    assert!(said.contains("12 tokens of 5 answers; mean sum per answer"), "{said}");
}

/// The result does not depend on how the model is sharded. None of these numbers of ranks divides five pairs or
/// nineteen sequences.
#[test]
fn ranks_and_strategies_agree() {
    let workspace = trained();
    workspace.write("pairs.jsonl", PAIRS);
    let tokens = ids("abcde");
    let validation = line(&workspace, &[]);
    let answers = lines(&workspace, &["--pairs", "pairs.jsonl"]);
    let rows = logits(&workspace, &tokens, &[]);
    for (ranks, strategy, shard_size) in [
        ("1", "NO_SHARD", None),
        ("2", "FULL_SHARD", None),
        ("2", "SHARD_GRAD_OP", None),
        ("2", "NO_SHARD", None),
        ("2", "HYBRID_SHARD", None),
        ("2", "hybrid_shard", Some("1")),
        ("3", "FULL_SHARD", None),
        ("3", "SHARD_GRAD_OP", None),
        ("3", "NO_SHARD", None),
        ("4", "HYBRID_SHARD_GRAD_OP", Some("2")),
    ] {
        let what = format!("{strategy} on {ranks}");
        let mut spread = vec!["--ranks", ranks, "--strategy", strategy];
        spread.extend(shard_size.iter().flat_map(|size| ["--shard-size", size]));
        let with = |options: &[&'static str]| lines(&workspace, &[options, &spread].concat());
        let here = with(&["--rows", "2"]).remove(0);
        assert_close(&what, number(&here, "val_loss"), number(&validation, "val_loss"), 1e-6);
        assert_eq!(here["tokens"], validation["tokens"], "{what}");
        assert_eq!(here["ranks"].to_string(), ranks, "{what}");
        assert!(here["strategy"].as_str().is_some_and(|s| s.eq_ignore_ascii_case(strategy)));
        let here = with(&["--pairs", "pairs.jsonl"]);
        assert_eq!(here.len(), answers.len(), "{what}");
        for (a, b) in here.iter().zip(&answers) {
            assert_close(&what, number(a, "loss"), number(b, "loss"), 1e-6);
            assert_eq!(a["tokens"], b["tokens"], "{what}");
        }
        for (a, b) in logits(&workspace, &tokens, &spread).iter().zip(&rows) {
            let most = b.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * most), "{what}");
        }
    }
}

/// Only rank 0 prints, and it prints the same as a single process.
#[test]
fn processes_agree_with_threads() {
    let workspace = trained();
    workspace.write("pairs.jsonl", PAIRS);
    let tasks: [&[&str]; 3] =
        [&[], &["--pairs", "pairs.jsonl"], &["--tokens", "98,99", "--logits", "logits.npy"]];
    for task in tasks {
        let eval = [&["eval", "--checkpoint", "run", "--json"], task].concat();
        let threads = workspace.succeed(&[&eval[..], &["--ranks", "2"]].concat());
        let written = workspace.path("logits.npy").exists().then(|| workspace.read("logits.npy"));
        let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
        let ended = workspace.kiln(&[&launch, &eval[..]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let said: String = ended
            .stdout
            .lines()
            .filter_map(|line| line.find('{').map(|start| format!("{}\n", &line[start..])))
            .collect();
        assert_eq!(said, threads, "{ended:?}");
        if let Some(written) = written {
            assert!(workspace.read("logits.npy") == written, "{task:?}");
        }
    }
}

#[test]
fn evaluations_that_cannot_be_are_refused() {
    let mut messages = Messages::default();
    let workspace = trained();
    workspace.write("empty.jsonl", "\n");
    workspace.write("broken.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n\n{\"prompt\": \n");
    workspace.write("half.jsonl", "{\"prompt\": \"a\"}\n");
    workspace.write("list.jsonl", "[\"a\"]\n");
    workspace.write("silent.jsonl", "{\"prompt\": \"a\", \"answer\": \"\"}\n");
    workspace.write("long.jsonl", "\n{\"prompt\": \"abcdefg\", \"answer\": \"hij\"}\n");
    let mut refused = |title: &str, arguments: &[&str]| {
        let arguments = [&["eval", "--checkpoint", "run"], arguments].concat();
        messages.refused(title, &workspace, &arguments);
    };
    refused("answer without a prompt", &["--answer", "a"]);
    refused("prompt without an answer", &["--prompt", "a"]);
    refused("tokens without a place for logits", &["--tokens", "1,2"]);
    refused("logits of no tokens", &["--logits", "logits.npy"]);
    refused("two tasks", &["--pairs", "half.jsonl", "--tokens", "1", "--logits", "logits.npy"]);
    refused("data for answers", &["--pairs", "half.jsonl", "--data", "data"]);
    refused("samples of answers", &["--prompt", "a", "--answer", "b", "--samples", "3"]);
    refused("no samples", &["--samples", "0"]);
    refused("no ranks", &["--ranks", "0"]);
    refused("unknown strategy", &["--strategy", "ZERO"]);
    refused("groups that do not fill the ranks", &["--ranks", "3", "--shard-size", "2"]);
    refused(
        "hybrid groups that do not fill the ranks",
        &["--ranks", "3", "--strategy", "HYBRID_SHARD", "--shard-size", "2"],
    );
    refused("data that is not there", &["--data", "none"]);
    refused("sequences beyond the context", &["--seq-len", "9"]);
    refused("empty answer", &["--prompt", "a", "--answer", ""]);
    refused("answer too long", &["--prompt", "abcd", "--answer", "efghij"]);
    refused("missing file", &["--pairs", "none.jsonl"]);
    refused("file without pairs", &["--pairs", "empty.jsonl"]);
    refused("line that is not JSON", &["--pairs", "broken.jsonl"]);
    refused("line without an answer", &["--pairs", "half.jsonl"]);
    refused("line that is not an object", &["--pairs", "list.jsonl"]);
    refused("line with an empty answer", &["--pairs", "silent.jsonl"]);
    refused("line that is too long", &["--pairs", "long.jsonl"]);
    refused("token that is not a number", &["--tokens", "1,x", "--logits", "logits.npy"]);
    refused("token outside the vocabulary", &["--tokens", "1,257", "--logits", "logits.npy"]);
    refused("too many tokens", &["--tokens", "1,2,3,4,5,6,7,8,9", "--logits", "logits.npy"]);
    messages.refused("no model", &workspace, &["eval"]);
    messages.refused("no checkpoint", &workspace, &["eval", "--checkpoint", "none"]);
    workspace.write("text.txt", "some text, and some more of it\n".repeat(50));
    workspace.succeed(&["data", "prepare", "--input", "text.txt", "--out", "other", "--vocab-size", "300"]);
    let other = ["eval", "--checkpoint", "run", "--data", "other"];
    messages.refused("data of another tokenizer", &workspace, &other);
    workspace.remove("data");
    messages.refused("data that is gone", &workspace, &["eval", "--checkpoint", "run"]);
    insta::assert_snapshot!(messages.finish());
}

/// A path in a configuration is relative to where the run was started; an evaluation may start elsewhere.
#[test]
fn the_data_of_a_run_are_found_from_elsewhere() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let prepare = |text: &str, out: &str| {
        workspace.write("text.txt", text.repeat(50));
        let input = ["data", "prepare", "--input", "text.txt", "--out", out];
        workspace.succeed(&[&input[..], &["--vocab-size", "300"]].concat());
    };
    prepare("some text, and some more of it\n", "own");
    workspace.config("run.toml", &[("data.path", "'own'")]);
    workspace.succeed(&["train", "run.toml", "--out", "runs/mine"]);
    let json = ["--json", "--checkpoint"];
    let here = workspace.succeed(&[&["eval"], &json[..], &["runs/mine"]].concat());
    let elsewhere = |folder: &str| {
        let checkpoint = workspace.path("runs/mine");
        let arguments = ["eval", "--json", "--checkpoint", checkpoint.to_str().expect("UTF-8")];
        let mut command = workspace.command(&arguments);
        command.current_dir(workspace.path(folder));
        workspace.end(command.spawn().expect("the binary starts"))
    };
    // From folders where other data has the same name, and where no data has it.
    prepare("other text, of another book\n", "elsewhere/own");
    for folder in ["elsewhere", "runs", "runs/mine/checkpoints"] {
        let ended = elsewhere(folder);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), here.as_str()), "{ended:?}");
    }
    workspace.remove("own");
    workspace.write("own/notes.txt", "a folder of this name, but not of data");
    messages.record("others of the same name", &elsewhere("elsewhere"), 2);
    messages.record("none of the name", &elsewhere("runs"), 2);
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn evaluations_that_fail_say_why() {
    let mut messages = Messages::default();
    let workspace = trained();
    let logits = ["eval", "--checkpoint", "run", "--tokens", "1", "--logits", "none/logits.npy"];
    messages.fails("logits that cannot be written", &workspace, &logits);
    workspace.write("text.txt", "some text, and some more of it\n".repeat(50));
    workspace.succeed(&["data", "prepare", "--input", "text.txt", "--out", "other", "--vocab-size", "300"]);
    workspace.write("run/checkpoints/fsdp_cpt4/tokenizer.json", workspace.read("other/tokenizer.json"));
    let answer = ["eval", "--checkpoint", "run", "--prompt", "a", "--answer", "b"];
    messages.fails("tokenizer of another model", &workspace, &answer);
    insta::assert_snapshot!(messages.finish());
}

/// Four questions, of which the model answers two as expected, and one blank line.
const TASK: &str = r#"{"prompt": "abc", "answer": " def \n"}
{"prompt": "b", "answer": "cd"}

{"messages": [{"role": "user", "content": "ab"}], "answer": "cde"}
{"prompt": "cdea", "answer": "no"}
"#;

/// Returns a model that has learned to repeat the first letters of the alphabet, with a chat template.
fn with_template() -> Workspace {
    let workspace = Workspace::new();
    let ids: Vec<u16> =
        ids(&"abcdefg".repeat(250)).into_iter().map(|id| u16::try_from(id).expect("small")).collect();
    workspace.write_data("data", &ids);
    workspace.config("run.toml", &[("train.steps", "40"), ("optim.lr", "3e-2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace.succeed(&["export", "run", "--out", "hf"]);
    workspace.write("hf/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    workspace.write("task.jsonl", TASK);
    workspace
}

#[test]
fn a_task_counts_correct_answers() {
    let workspace = with_template();
    let task = |options: &[&str]| -> Vec<Json> {
        let arguments = ["eval", "hf", "--task", "task.jsonl", "--max-tokens", "3", "--json"];
        let said = workspace.succeed(&[&arguments, options].concat());
        said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let lines = task(&[]);
    for (line, prompt) in lines.iter().zip(["abc", "b", "ab", "cdea"]) {
        // The answer is the text that `generate` adds.
        let arguments = ["generate", "hf", "--temperature", "0", "--max-tokens", "3", "--prompt", prompt];
        let text = workspace.succeed(&arguments);
        assert_eq!(text, format!("{prompt}{}\n", line["answer"].as_str().expect("a string")));
        let is_expected = line["answer"].as_str().map(str::trim) == line["expected"].as_str().map(str::trim);
        assert_eq!(line["correct"], is_expected, "{line}");
        assert_eq!(line["finish_reason"], "length");
    }
    let numbers: Vec<_> = lines[..4].iter().map(|line| line["line"].as_u64().expect("a number")).collect();
    assert_eq!(numbers, [1, 2, 4, 5]);
    let correct: Vec<_> =
        lines[..4].iter().map(|line| line["correct"].as_bool().expect("a boolean")).collect();
    assert_eq!(correct, [true, false, true, false], "{lines:?}");
    assert_eq!((&lines[4]["questions"], &lines[4]["correct"]), (&4.into(), &2.into()));
    assert_eq!(number(&lines[4], "accuracy"), 0.5);
    assert_close("standard error", number(&lines[4], "standard_error"), (0.25f64 / 3.0).sqrt(), 1e-12);
    // Ranks and batches change no answer.
    for options in [&["--rows", "1"][..], &["--ranks", "2"], &["--ranks", "3", "--strategy", "NO_SHARD"]] {
        assert_eq!(task(options)[..4], lines[..4], "{options:?}");
    }
    let said = workspace.succeed(&["eval", "hf", "--task", "task.jsonl", "--max-tokens", "3"]);
    assert!(said.contains("line 5: expected \"no\", got \""), "{said}");
    assert!(said.contains("accuracy 0.5000 ± 0.2887 (standard error), 2 of 4 answers correct (FULL_SHARD"));
    // An answer may end at a stop string.
    assert_eq!(task(&["--stop", "f"])[0]["answer"], "de");
}

#[test]
fn bad_tasks_are_refused_with_their_line() {
    let workspace = with_template();
    for (content, checkpoint, expected) in [
        (
            "{\"prompt\": \"a\", \"answer\": \"b\"}\n\n{\"answer\": \"b\"}",
            "hf",
            "task.jsonl, line 3: it has neither",
        ),
        (
            "{\"prompt\": \"a\", \"messages\": [], \"answer\": \"b\"}",
            "hf",
            "line 1: it has both prompt and messages",
        ),
        ("{\"prompt\": \"a\"}", "hf", "line 1: missing field `answer`"),
        ("[]", "hf", "line 1: invalid"),
        ("\n", "hf", "task.jsonl has no lines: write an object with"),
        (
            "{\"prompt\": \"abcabcab\", \"answer\": \"b\"}",
            "hf",
            "task.jsonl, line 1: 9 tokens are more than the 8",
        ),
        ("{\"messages\": [], \"answer\": \"b\"}", "run", "has no chat template"),
    ] {
        workspace.write("task.jsonl", content);
        let ended = workspace.kiln(&["eval", checkpoint, "--task", "task.jsonl"]);
        assert_eq!(ended.code, Some(2), "{content}: {ended:?}");
        assert!(ended.stderr.contains(expected), "{content}: {ended:?}");
    }
}
