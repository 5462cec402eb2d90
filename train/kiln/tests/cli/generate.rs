//! `kiln generate`.

use std::cell::Cell;

use burn::tensor::{Device, Tensor, TensorData};
use kiln::data::Tokenizer;
use kiln::generate::{Batch, Continuation, Counts, End, Sampling, texts};
use kiln_model::decoder::{self, Decoder, Modules, WithLoss};
use kiln_model::layers::{AnyLayer, Embed, Head};
use kiln_model::{Key, Layers, ModelConfig};

use crate::support::{VOCAB, Workspace, tokenizer};

/// Returns a model that has learned that the first letters of the alphabet follow each other. There are seven, so
/// samples of eight tokens start with each of them.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    let ids = tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
    let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
    workspace.write_data("data", &ids);
    workspace.config("run.toml", &[("train.steps", "40"), ("optim.lr", "3e-2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace
}

fn generate(workspace: &Workspace, checkpoint: &str, prompt: &str, options: &[&str]) -> String {
    let arguments = ["generate", "--checkpoint", checkpoint, "--prompt", prompt, "--max-tokens", "12"];
    workspace.succeed(&[&arguments, options].concat())
}

#[test]
fn text_depends_on_the_seed_and_nothing_else() {
    let workspace = trained();
    let hot = |seed: &str| generate(&workspace, "run", "abc", &["--temperature", "3", "--seed", seed]);
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));
    // A run folder stands for its newest checkpoint.
    let from = |checkpoint: &str| generate(&workspace, checkpoint, "abc", &[]);
    assert_eq!(from("run"), from("run/checkpoints/fsdp_cpt40"));
    assert_eq!(from("run"), from("run/checkpoints"));
}

#[test]
fn a_temperature_of_zero_takes_the_likeliest_token() {
    let workspace = trained();
    for seed in ["1", "2"] {
        let options = ["--temperature", "0", "--seed", seed];
        assert_eq!(generate(&workspace, "run", "abc", &options), "abcdefgabcdefga\n");
    }
    // Without a prompt, the text starts like a new document, and is not empty.
    let text = generate(&workspace, "run", "", &["--temperature", "0"]);
    assert!(!text.trim().is_empty(), "{text:?}");
    // A prompt may begin like a flag.
    for prompt in ["-5", "--seed", "- item"] {
        assert!(generate(&workspace, "run", prompt, &["--temperature", "0"]).starts_with(prompt));
    }
}

/// A prompt that exceeds the context is an error; its beginning is not dropped silently.
#[test]
fn prompts_beyond_the_context_are_refused() {
    let workspace = trained();
    let long = "abcdefg".repeat(5);
    let refused = |arguments: &[&str], what: &str, code: i32| {
        let ended = workspace.kiln(arguments);
        assert_eq!(ended.code, Some(code), "{ended:?}");
        let said = format!("{what}: 35 tokens are more than the 8 that the model reads");
        assert!((ended.stdout.clone() + &ended.stderr).contains(&said), "{ended:?}");
    };
    refused(&["generate", "--checkpoint", "run", "--prompt", &long, "--max-tokens", "2"], "--prompt", 2);
    let prompt = format!("sample.prompt={long}");
    refused(&["train", "run.toml", "--out", "other", "--set", &prompt], "a prompt of [sample]", 2);
    refused(&["check", "run.toml", "--set", &prompt], "a prompt of [sample]", 1);
    // A prompt as long as the context is allowed.
    assert!(generate(&workspace, "run", &long[..8], &[]).starts_with(&long[..8]));
}

/// Returns a byte-level tokenizer with more special tokens, whose post-processor puts `<s>` before a text. The ids
/// of these tokens belong to characters that no text here contains.
fn with_special_tokens() -> Tokenizer {
    let workspace = Workspace::new();
    let path = "data/tokenizer.json";
    add_special_tokens(&workspace, path);
    Tokenizer::load(workspace.path(path)).expect("a tokenizer")
}

/// Adds these tokens to the file `path`. Returns the ids of `<s>` and `<|user|>`.
fn add_special_tokens(workspace: &Workspace, path: &str) -> [u32; 2] {
    let mut file = workspace.json(path);
    let vocabulary = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let ids = ["X", "Y"].map(|letter| vocabulary.remove(letter).expect("an id"));
    for (id, content) in ids.iter().zip(["<s>", "<|user|>"]) {
        file["added_tokens"].as_array_mut().expect("a list").push(serde_json::json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
        file["model"]["vocab"][content] = id.clone();
    }
    file["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [ids[0]], "tokens": ["<s>"]}},
    });
    workspace.write(path, file.to_string());
    ids.map(|id| u32::try_from(id.as_u64().expect("an id")).expect("a small id"))
}

/// As in transformers, what the post-processor puts before a text also goes before a prompt.
#[test]
fn prompts_start_as_the_post_processor_says() {
    let tokenizer = with_special_tokens();
    let start = tokenizer.encode_prompt("").expect("ids").1;
    assert_eq!(start.len(), 1);
    let model = opinionated();
    let plain = tokenizer.encode("abc").expect("ids");
    let sampling = greedy(4, 16);
    let mut batch = Batch::new(vec![Continuation::new(&tokenizer, "abc", &sampling).expect("a prompt")]);
    assert!(batch.advance(&model, &Device::flex(), || Ok(())).expect("a token"));
    let text = &batch.texts()[0];
    let expected = likeliest(&model, &[&start[..], &plain].concat());
    assert_ne!(expected, likeliest(&model, &plain));
    // The prefix is not part of the text.
    assert_eq!(text.ids(), [&plain[..], &[expected]].concat());
    assert!(text.text().expect("a text").starts_with("abc"));
    // A prompt that already has the prefix does not get it twice.
    let reading = tokenizer.clone().reading_special_tokens(true);
    assert_eq!(reading.encode_prompt("<s>abc").expect("ids"), (0, [&start[..], &plain].concat()));
    // An empty prompt starts with the prefix, not with the end of another text.
    let empty = continued(&tokenizer, "", &sampling).0;
    assert_eq!(empty[0], likeliest(&model, &start));
}

/// Prompts may contain special tokens, unless they are meant as plain text.
#[test]
fn prompts_have_special_tokens_unless_told_otherwise() {
    let workspace = Workspace::new();
    let [start, user] = add_special_tokens(&workspace, "data/tokenizer.json");
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let loss = |prompt: &str, options: &[&str]| -> f64 {
        let arguments = ["eval", "--checkpoint", "run", "--json", "--prompt", prompt, "--answer", "b"];
        let said = workspace.succeed(&[&arguments, options].concat());
        let line: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        line["loss"].as_f64().expect("a number")
    };
    let ids = [start, user].map(|id| id.to_string()).join(",");
    let a = tokenizer().encode("a").expect("ids")[0];
    let tokens = format!("{ids},{a}");
    workspace.succeed(&["eval", "--checkpoint", "run", "--tokens", &tokens, "--logits", "logits.npy"]);
    let logits = workspace.read("logits.npy");
    let row: Vec<f32> = logits[logits.len() - 4 * VOCAB..]
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect();
    let b = tokenizer().encode("b").expect("ids")[0] as usize;
    let sum: f64 = row.iter().map(|value| f64::from(value - row[b]).exp()).sum();
    let read = loss("<|user|>a", &[]);
    assert!((read - sum.ln()).abs() < 1e-5 * sum.ln().abs().max(1.0), "{read} and {}", sum.ln());
    // As plain text, the prompt is longer than the context.
    let plain = ["eval", "--checkpoint", "run", "--prompt", "<|user|>a", "--answer", "b", "--plain-text"];
    assert_eq!(workspace.kiln(&plain).code, Some(2));
    let generated = |options: &[&str]| {
        workspace.kiln(
            &[&["generate", "--checkpoint", "run", "--prompt", "<s><|user|>", "--max-tokens", "1"], options]
                .concat(),
        )
    };
    assert_eq!(generated(&[]).code, Some(0));
    assert_eq!(generated(&["--plain-text"]).code, Some(2));
}

/// The sample at the end of a run is generated from the weights of its last checkpoint.
#[test]
fn a_run_ends_with_a_sample() {
    let workspace = trained();
    workspace.config(
        "sample.toml",
        &[("sample.prompt", "'abc'"), ("sample.temperature", "0.0"), ("sample.max_tokens", "5")],
    );
    let arguments = ["--resume", "latest", "--out", "run"];
    let said = workspace.succeed(&[&["train", "sample.toml"], &arguments[..]].concat());
    assert!(said.contains("\nsample: abcdefga\nnext "), "{said}");
}

#[test]
fn truncation_narrows_the_choice() {
    let workspace = trained();
    let hot =
        |options: &[&str]| generate(&workspace, "run", "abc", &[&["--temperature", "5"], options].concat());
    let greedy = generate(&workspace, "run", "abc", &["--temperature", "0"]);
    for seed in ["1", "2"] {
        assert_eq!(hot(&["--top-k", "1", "--seed", seed]), greedy);
        assert_eq!(hot(&["--top-p", "0.000001", "--seed", seed]), greedy);
    }
    assert_ne!(hot(&[]), greedy);
    assert_eq!(hot(&["--top-k", "0", "--top-p", "1"]), hot(&[]));
    assert_eq!(hot(&["--top-k", "257"]), hot(&[]));
}

/// Returns an untrained model, with weights large enough for clear preferences.
fn opinionated() -> Decoder {
    in_window(None, None)
}

/// Returns the same model with windows according to `pattern`.
fn in_window(window: Option<usize>, pattern: Option<&str>) -> Decoder {
    let config = ModelConfig {
        window,
        window_pattern: pattern.map(str::to_owned),
        vocab_size: VOCAB,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        d_ff: 32,
        init_std: 0.5,
        ..ModelConfig::preset("10m").expect("a preset")
    };
    Decoder::new(&Layers::default(), &config, Key::new(4), &Device::flex()).expect("built-in layers")
}

fn greedy(max_tokens: usize, context_length: usize) -> Sampling {
    Sampling { max_tokens, temperature: 0.0, context_length, ..Sampling::default() }
}

/// Returns the ids that continue a prompt, and the number of forward passes.
fn continued(tokenizer: &Tokenizer, prompt: &str, sampling: &Sampling) -> (Vec<u32>, usize) {
    continued_by(&opinionated(), tokenizer, prompt, sampling)
}

fn continued_by(
    model: &Decoder,
    tokenizer: &Tokenizer,
    prompt: &str,
    sampling: &Sampling,
) -> (Vec<u32>, usize) {
    let passes = Cell::new(0);
    let mut batch = Batch::new(vec![Continuation::new(tokenizer, prompt, sampling).expect("a prompt")]);
    let after_pass = || {
        passes.set(passes.get() + 1);
        Ok(())
    };
    while batch.advance(model, &Device::flex(), after_pass).expect("a token") {}
    (batch.texts()[0].ids().to_vec(), passes.get())
}

/// Returns the likeliest token after `window`, from a pass over the whole window.
fn likeliest(model: &Decoder, window: &[u32]) -> u32 {
    let ids: Vec<i32> = window.iter().map(|id| i32::try_from(*id).expect("a small id")).collect();
    let tokens = Tensor::from_data(TensorData::new(ids, [1, window.len()]), &Device::flex());
    let logits = decoder::logits(model, tokens).narrow(1, window.len() - 1, 1);
    let logits: Vec<f32> = logits.into_data().try_to_vec().expect("f32");
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("logits");
    u32::try_from(best.0).expect("a small id")
}

/// Like [`continued`], without a cache: every token is computed from the whole window, which restarts from its
/// last half when it is full.
fn recomputed(model: &Decoder, tokenizer: &Tokenizer, prompt: &str, sampling: &Sampling) -> Vec<u32> {
    let end = tokenizer.end_of_text().expect("an end");
    let mut ids = tokenizer.encode(prompt).expect("ids");
    let context = sampling.context_length;
    let mut start = ids.len().saturating_sub(context);
    for _ in 0..sampling.max_tokens {
        if ids.len() - start > context {
            start = ids.len() - (context / 2).max(1);
        }
        let next = likeliest(model, &ids[start..]);
        if next == end {
            break;
        }
        ids.push(next);
    }
    ids
}

#[test]
fn a_cache_changes_no_token() {
    let tokenizer = tokenizer();
    for prompt in ["a", "abcdefg", "the quick brown fox jumps over the lazy dog"] {
        let sampling = greedy(40, 100);
        let (ids, passes) = continued(&tokenizer, prompt, &sampling);
        assert_eq!(ids, recomputed(&opinionated(), &tokenizer, prompt, &sampling), "{prompt}");
        assert_eq!((ids.len() - prompt.len(), passes), (40, 40), "{prompt}");
    }
}

/// With a cache that holds only a window, prompts may be shorter or longer than the window.
#[test]
fn a_cache_of_windows_changes_no_token() {
    let tokenizer = tokenizer();
    let full = continued(&tokenizer, "abcdefg", &greedy(40, 100)).0;
    for (window, pattern) in [(1, None), (5, None), (5, Some("wf")), (7, Some("fw"))] {
        let model = in_window(Some(window), pattern);
        for prompt in ["a", "abcdefg", "the quick brown fox jumps over the lazy dog"] {
            for context in [100, 16] {
                let sampling = greedy(40, context);
                let (ids, _) = continued_by(&model, &tokenizer, prompt, &sampling);
                let expected = recomputed(&model, &tokenizer, prompt, &sampling);
                assert_eq!(ids, expected, "{prompt} in a window of {window} {pattern:?}, context {context}");
            }
        }
        assert_ne!(continued_by(&model, &tokenizer, "abcdefg", &greedy(40, 100)).0, full);
    }
}

/// Texts that exceed the context, and prompts that do not fit into it.
#[test]
fn a_full_context_starts_over_from_its_last_half() {
    let tokenizer = tokenizer();
    for context in [1, 2, 3, 8, 9] {
        for prompt in ["a", "abcdefgh", "abcdefghi", "the quick brown fox jumps"] {
            let sampling = greedy(30, context);
            let (ids, passes) = continued(&tokenizer, prompt, &sampling);
            assert_eq!(
                ids,
                recomputed(&opinionated(), &tokenizer, prompt, &sampling),
                "{prompt} in {context}"
            );
            assert_eq!(passes, 30);
        }
    }
}

#[test]
fn a_text_ends_at_any_of_its_ends() {
    let tokenizer = tokenizer();
    let whole = continued(&tokenizer, "abcd", &greedy(20, 64)).0;
    // Finds the first token that has not occurred before.
    let new = (5..whole.len()).find(|at| !whole[4..*at].contains(&whole[*at]));
    let at = new.expect("a model that says more than one thing");
    let unused = (1..VOCAB as u32).find(|id| !whole.contains(id)).expect("an id");
    let sampling = Sampling { end_ids: vec![unused, whole[at]], ..greedy(20, 64) };
    let (ids, passes) = continued(&tokenizer, "abcd", &sampling);
    assert_eq!(ids, whole[..at]);
    assert_eq!(passes, at - 4 + 1);
}

/// In tokenizers from other sources, the end-of-text token may have any name.
#[test]
fn a_tokenizer_without_an_end_needs_one_from_elsewhere() {
    let workspace = Workspace::new();
    workspace.replace("data/tokenizer.json", "<|endoftext|>", "<|fin|>");
    let tokenizer = Tokenizer::load(workspace.path("data/tokenizer.json")).expect("a tokenizer");
    let sampling = greedy(5, 16);
    let refused = Continuation::new(&tokenizer, "abc", &sampling).map(|_| ());
    assert!(refused.expect_err("no end").to_string().contains("<|endoftext|>"));
    let sampling = Sampling { end_ids: vec![0], ..sampling };
    let (ids, _) = continued(&tokenizer, "abc", &sampling);
    assert!(ids.len() > 3, "{ids:?}");
    // Without a prompt, the text starts after the end token, which is not part of it.
    let (ids, _) = continued(&tokenizer, "", &sampling);
    assert_eq!(ids[0], likeliest(&opinionated(), &[0]));
}

/// All ranks generate the sample together; `kiln generate` continues the checkpoint on one rank.
#[test]
fn sharded_ranks_say_what_one_rank_says() {
    let workspace = trained();
    for strategy in ["FULL_SHARD", "NO_SHARD"] {
        workspace.config(
            "sample.toml",
            &[
                ("shard.strategy", &format!("'{strategy}'")),
                ("sample.prompt", "'abcdefga'"),
                ("sample.temperature", "0.0"),
                ("sample.max_tokens", "12"),
            ],
        );
        let arguments = ["train", "sample.toml", "--resume", "latest", "--out", "run"];
        let said = workspace.succeed(&arguments);
        let text = generate(&workspace, "run", "abcdefga", &["--temperature", "0"]);
        assert!(said.contains(&format!("\nsample: {text}next ")), "{strategy}: {said}");
    }
}

/// Prompts with one, two and three different numbers of tokens.
const PROMPTS: [&str; 5] = ["abc", "d", "the quick", "abc", "x y"];

/// Returns the texts of [`PROMPTS`] in the order in which they come, and the number of forward passes.
fn all_texts<'a>(
    model: &Decoder,
    tokenizer: &'a Tokenizer,
    sampling: &Sampling,
    counts: Counts,
) -> (Vec<(usize, usize, Continuation<'a>)>, usize) {
    let (passes, mut all) = (Cell::new(0), Vec::new());
    let after_pass = || {
        passes.set(passes.get() + 1);
        Ok(())
    };
    let start = |(index, prompt): (u64, &&str)| {
        let start = Continuation::new(tokenizer, prompt, sampling).expect("a prompt");
        start.with_key(sampling.key.fork_index(index))
    };
    let prompts: Vec<_> = (0..).zip(&PROMPTS).map(start).collect();
    let done = |prompt, sample, text: &Continuation<'a>| {
        all.push((prompt, sample, text.clone()));
        Ok(())
    };
    texts(model, &Device::flex(), &prompts, counts, after_pass, Ok, done).expect("texts");
    (all, passes.get())
}

/// Some texts end early, and leave the cache of the others.
#[test]
fn texts_of_a_batch_are_those_of_one_by_one() {
    let tokenizer = tokenizer();
    for (window, pattern) in [(None, None), (Some(5), Some("wf"))] {
        let model = in_window(window, pattern);
        // The end ids are a third of the vocabulary, so that texts end at different lengths.
        for (context, ends) in [(64, VOCAB as u32), (12, 0)] {
            let end_ids = (0..ends).step_by(12).collect();
            let sampling = Sampling { temperature: 2.0, end_ids, ..greedy(24, context) };
            let (alone, _) = all_texts(&model, &tokenizer, &sampling, Counts { samples: 4, rows: 1 });
            let places: Vec<_> = alone.iter().map(|(prompt, sample, _)| (*prompt, *sample)).collect();
            let expected: Vec<_> = (0..PROMPTS.len()).flat_map(|p| (0..4).map(move |s| (p, s))).collect();
            assert_eq!(places, expected);
            let lengths: Vec<_> = alone.iter().map(|(_, _, text)| text.tokens().len()).collect();
            let early = lengths.iter().filter(|length| **length < 24).count();
            assert!(ends == 0 || (5..20).contains(&early), "{lengths:?}");
            for rows in [2, 3, 16] {
                let (batched, _) = all_texts(&model, &tokenizer, &sampling, Counts { samples: 4, rows });
                for ((prompt, sample, a), (_, _, b)) in alone.iter().zip(&batched) {
                    assert_eq!(a.ids(), b.ids(), "prompt {prompt}, sample {sample}, {rows} rows");
                    assert_eq!((a.end(), a.added()), (b.end(), b.added()));
                }
            }
            let ids: std::collections::BTreeSet<_> = alone.iter().map(|(_, _, text)| text.ids()).collect();
            assert_eq!(ids.len(), alone.len(), "each sample of each prompt has its own choices");
        }
    }
}

#[test]
fn eight_samples_take_the_passes_of_one() {
    // No text ends early.
    let tokenizer = tokenizer().ending_with(Some(u32::MAX));
    let sampling = Sampling { temperature: 1.0, ..greedy(20, 64) };
    let passes = |samples, rows| {
        let (all, passes) = all_texts(&opinionated(), &tokenizer, &sampling, Counts { samples, rows });
        assert_eq!(all.len(), PROMPTS.len() * samples);
        passes
    };
    let lengths: std::collections::BTreeSet<_> =
        PROMPTS.iter().map(|prompt| tokenizer.encode(prompt).expect("ids").len()).collect();
    // A pass reads the prompts of one length, and each of the others a token of every text.
    assert_eq!(passes(8, 100), 20 * lengths.len());
    assert_eq!(passes(1, 100), 20 * lengths.len());
    assert_eq!(passes(8, 1), 20 * 8 * PROMPTS.len());
}

/// With a byte-level vocabulary, each character is a separate token, so stop strings straddle tokens.
#[test]
fn a_text_ends_before_a_stop_string() {
    let tokenizer = tokenizer();
    let text = |stop: &[&str], max_tokens: usize| {
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let sampling = Sampling { stop, ..greedy(max_tokens, 64) };
        let mut batch = Batch::new(vec![Continuation::new(&tokenizer, "abcd", &sampling).expect("a prompt")]);
        let mut settled = String::new();
        loop {
            let continues = batch.advance(&opinionated(), &Device::flex(), || Ok(())).expect("a token");
            let now = batch.texts()[0].settled();
            assert!(now.starts_with(&settled), "{now:?} after {settled:?}");
            settled = now.to_owned();
            if !continues {
                break;
            }
        }
        let text = &batch.texts()[0];
        assert_eq!(
            (settled.as_str(), text.text().expect("a text")),
            (text.added(), format!("abcd{settled}"))
        );
        (text.added().to_owned(), text.tokens().len(), text.end())
    };
    let (whole, tokens, end) = text(&[], 30);
    assert_eq!((tokens, end), (30, Some(End::Length)));
    let chars: Vec<_> =
        whole.char_indices().filter(|(_, c)| *c != '\u{FFFD}').map(|(index, _)| index).collect();
    // A string of three characters in the middle of the text.
    let middle = chars.len() / 2;
    let stop = &whole[chars[middle]..chars[middle + 3]];
    let expected = &whole[..whole.find(stop).expect("it is there")];
    for stops in [&[stop][..], &["never said", stop], &[stop, &format!("{stop}{stop}")]] {
        let (found, _, end) = text(stops, 30);
        assert_eq!((found.as_str(), end), (expected, Some(End::StopString)), "{stops:?}");
    }
    // A stop string in the prompt, one that is incomplete at the end, and an empty one end nothing.
    let incomplete = format!("{}never", &whole[*chars.last().expect("a character")..]);
    assert_eq!(text(&["abcd", &incomplete, ""], 30).0.len(), whole.len());
}

/// Several prompts and samples as JSON lines, each of which has what the same text has alone.
#[test]
fn many_texts_are_json_lines() {
    let workspace = trained();
    workspace.write("prompts.txt", "abc\n\n d\n");
    workspace.write("prompts.jsonl", "{\"prompt\": \"abc\"}\n{\"prompt\": \" d\", \"id\": 7}\n");
    let json = |options: &[&str]| -> Vec<serde_json::Value> {
        let arguments = ["generate", "run", "--samples", "3", "--max-tokens", "5", "--temperature", "2"];
        let said = workspace.succeed(&[&arguments, options].concat());
        said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let lines = json(&["--prompts", "prompts.txt", "--json"]);
    assert_eq!(lines, json(&["--prompts", "prompts.jsonl", "--json", "--rows", "1"]));
    assert_eq!(lines[..3], json(&["--prompt", "abc", "--json"]));
    let places: Vec<_> = lines
        .iter()
        .map(|line| {
            (line["prompt"].as_str().unwrap(), line["prompt_index"].as_u64(), line["sample"].as_u64())
        })
        .collect();
    assert_eq!(places[0], ("abc", Some(0), Some(0)));
    assert_eq!(places[5], (" d", Some(1), Some(2)));
    assert!(lines.iter().all(|line| line["finish_reason"] == "length" && line["logprobs"].is_null()));
    // Log-probabilities are those of `eval`, whatever the temperature.
    let with = json(&["--prompt", "ab", "--logprobs", "--top-k", "3", "--repetition-penalty", "1.5"]);
    let losses = with.iter().map(|line| {
        let text = line["text"].as_str().unwrap();
        let evaluated = workspace.succeed(&["eval", "run", "--prompt", "ab", "--answer", text, "--json"]);
        let evaluated: serde_json::Value = serde_json::from_str(&evaluated).expect("JSON");
        evaluated["sum"].as_f64().expect("a number")
    });
    for (line, loss) in with.iter().zip(losses) {
        let sum: f64 = line["logprobs"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).sum();
        assert!((sum + loss).abs() < 1e-4 * loss.max(1.0), "{line}: {loss}");
    }
    // As text, each has a heading if there are several.
    let text = workspace.succeed(&["generate", "run", "--prompts", "prompts.txt", "--max-tokens", "2"]);
    assert!(
        text.starts_with("== prompt 1, sample 1 ==\nabc") && text.contains("\n== prompt 2, sample 1 ==\n d")
    );
    let stopped = generate(&workspace, "run", "abc", &["--temperature", "0", "--stop", "ga"]);
    assert_eq!(stopped, "abcdef\n");
}

#[test]
fn bad_files_of_prompts_are_refused_with_their_line() {
    let workspace = trained();
    workspace.write("empty.txt", "\n \n");
    workspace.write("long.txt", format!("abc\n{}\n", "abcdefg".repeat(3)));
    workspace.write("bad.jsonl", "{\"prompt\": \"a\"}\n\n{\"text\": \"b\"}\n");
    for (file, expected) in [
        ("empty.txt", "empty.txt has no lines: write a prompt on each line"),
        ("long.txt", "long.txt, line 2: 21 tokens are more than the 8 that the model reads"),
        ("bad.jsonl", "bad.jsonl, line 3: missing field `prompt`"),
        ("absent.txt", "cannot read absent.txt"),
    ] {
        let ended = workspace.kiln(&["generate", "run", "--prompts", file]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(expected), "{ended:?}");
    }
}

/// The settings that a model's authors recommend hold unless a flag says otherwise.
#[test]
fn defaults_are_those_of_the_model() {
    let workspace = trained();
    workspace.succeed(&["export", "run", "--out", "hf"]);
    let hot = |checkpoint: &str, options: &[&str]| generate(&workspace, checkpoint, "abc", options);
    let usual = hot("hf", &["--seed", "5"]);
    assert_eq!(usual, hot("hf", &["--seed", "5", "--temperature", "0.8", "--top-p", "1", "--min-p", "0"]));
    let mut config = workspace.json("hf/generation_config.json");
    config["temperature"] = serde_json::json!(5.0);
    config["top_k"] = serde_json::json!(40);
    workspace.write("hf/generation_config.json", config.to_string());
    let recommended = hot("hf", &["--seed", "5"]);
    assert_eq!(recommended, hot("hf", &["--seed", "5", "--temperature", "5", "--top-k", "40"]));
    assert_eq!(usual, hot("hf", &["--seed", "5", "--temperature", "0.8", "--top-k", "0"]));
    assert_ne!(usual, recommended);
    config["top_p"] = serde_json::json!(7);
    workspace.write("hf/generation_config.json", config.to_string());
    let ended = workspace.kiln(&["generate", "hf", "--prompt", "a"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("--top-p = 7"), "{ended:?}");
}

/// A decoder that counts the positions that it computes.
struct Counting(Decoder, Cell<usize>);

impl Modules for Counting {
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        let x = self.0.embed(run);
        let [batch, seq, _] = x.dims();
        self.1.set(self.1.get() + batch * seq);
        x
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        self.0.block(index, x, run)
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        self.0.head(x, run)
    }
}

/// The next turn of a conversation computes only its new tokens, if it begins with the turns before it.
#[test]
fn a_text_that_goes_on_keeps_the_cache() {
    let tokenizer = tokenizer().ending_with(Some(u32::MAX));
    let sampling = greedy(4, 100);
    let model = Counting(opinionated(), Cell::new(0));
    let text = |ids: Vec<u32>| Continuation::from_ids(&tokenizer, ids, &sampling).expect("a text");
    // Runs the batch to its end. Returns the text's ids and the number of positions computed.
    let finish = |batch: &mut Batch| {
        model.1.set(0);
        while batch.advance(&model, &Device::flex(), || Ok(())).expect("a token") {}
        (batch.texts()[0].ids().to_vec(), model.1.get())
    };
    let first = tokenizer.encode("the quick brown fox").expect("ids");
    let mut batch = Batch::new(vec![text(first.clone())]);
    let (mut ids, computed) = finish(&mut batch);
    assert_eq!(computed, first.len() + 3);
    // The second turn needs a larger cache, which also has room for the third.
    for (turn, is_known) in [(0, false), (1, true)] {
        ids.extend(tokenizer.encode(" jumps").expect("ids"));
        batch.follow(text(ids.clone()));
        let (next, computed) = finish(&mut batch);
        // The last token of the turn before was not read.
        assert_eq!(computed, if is_known { 1 + 6 + 3 } else { ids.len() + 3 }, "turn {turn}");
        assert_eq!(next, finish(&mut Batch::new(vec![text(ids.clone())])).0);
        ids = next;
    }
    // Another text, and one that ends within the known tokens, are computed from the start.
    for other in [tokenizer.encode("another text").expect("ids"), ids[..9].to_vec()] {
        batch.follow(text(other.clone()));
        let (next, computed) = finish(&mut batch);
        assert_eq!(computed, other.len() + 3);
        assert_eq!(next, finish(&mut Batch::new(vec![text(other)])).0);
    }
}
