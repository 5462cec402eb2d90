use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::{Samples, Sources, differences, prepare, verify};
use super::*;
use crate::TokenizerSource;

/// Formats of well-known models, in our own words: name, template, special tokens (the first two start and end a text).
pub(super) const FORMATS: [(&str, &str, &[&str]); 5] = [
    (
        "llama3",
        include_str!("../chat/formats/llama3.jinja"),
        &["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    ),
    ("qwen", include_str!("../chat/formats/qwen.jinja"), &["<|endoftext|>", "<|im_end|>", "<|im_start|>"]),
    ("mistral", include_str!("../chat/formats/mistral.jinja"), &["<s>", "</s>", "[INST]", "[/INST]"]),
    ("gemma", include_str!("../chat/formats/gemma.jinja"), &["<bos>", "<end_of_turn>", "<start_of_turn>"]),
    (
        "chatml",
        include_str!("../chat/formats/chatml.jinja"),
        &["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
    ),
];

/// Writes a byte-level tokenizer with special tokens, and a template.
fn model(template: &str, special: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(TOKENIZER_FILE);
    let texts = ["Hello there, what is it?", "It is what it is."].map(|text| Ok(text.repeat(20)));
    Tokenizer::train(texts.into_iter(), 280).unwrap().save(&path).unwrap();
    let mut content: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let added = content["added_tokens"].as_array_mut().unwrap();
    for spelling in special.iter().filter(|spelling| **spelling != "<|endoftext|>") {
        let (id, flags) = (added.len() + 400, false);
        added.push(json!({
            "id": id, "content": spelling, "single_word": flags, "lstrip": flags, "rstrip": flags,
            "normalized": flags, "special": true,
        }));
    }
    fs::write(&path, content.to_string()).unwrap();
    let config = json!({ "bos_token": special[0], "eos_token": { "content": special[1] } });
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

fn open(model: &TempDir) -> (Tokenizer, ChatTemplate) {
    let tokenizer = Tokenizer::load(model.path().join(TOKENIZER_FILE)).unwrap().for_rendered_text();
    (tokenizer, ChatTemplate::load(model.path()).unwrap().unwrap())
}

fn options(model: &TempDir, lines: &str) -> PrepareOptions {
    let input = model.path().join("chats.jsonl");
    fs::write(&input, lines).unwrap();
    let tokenizer = TokenizerSource::named(model.path().to_path_buf());
    let out = model.path().join("data");
    PrepareOptions { chat: true, ..PrepareOptions::new(vec![input], out, tokenizer) }
}

fn refused(options: &PrepareOptions) -> String {
    prepare(options, &mut |_| {}).unwrap_err().to_string()
}

fn line(index: usize) -> String {
    let answer = "It is what it is. ".repeat(index % 7);
    let turns = json!([
        { "role": "user", "content": format!("What is {index}?") },
        { "role": "assistant", "content": format!("{answer}{index}") },
        { "role": "user", "content": "Is it?" },
        { "role": "assistant", "content": "It is." },
    ]);
    json!({ "messages": turns }).to_string() + "\n"
}

#[test]
fn the_answers_and_their_ends_count() {
    for (name, source, special) in FORMATS {
        let (tokenizer, template) = open(&model(source, special));
        let mut messages = vec![
            Message::new("user", "Hi"),
            Message::new("assistant", "Hé!\n\nWhat is it?"),
            Message::new("user", "<|x|> bye"),
            Message::new("assistant", "Bye."),
        ];
        if name != "gemma" {
            messages.insert(0, Message::new("system", "It is."));
        }
        let Encoded { ids, counting } = encode(&tokenizer, &template, &messages).unwrap().unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), template.render(&messages, false).unwrap(), "{name}");
        let space = if name == "mistral" { " " } else { "" };
        let counted = counting.iter().map(|range| tokenizer.decode(&ids[range.clone()]).unwrap());
        let expected = ["Hé!\n\nWhat is it?", "Bye."].map(|answer| format!("{space}{answer}{}", special[1]));
        assert_eq!(counted.collect::<Vec<_>>(), expected, "{name}");
        // One token each, and the template writes the only start of the text.
        let id = |spelling: &str| tokenizer.inner().token_to_id(spelling).unwrap();
        assert_eq!(
            ids.iter().filter(|token| **token == id(special[1])).count(),
            match name {
                "llama3" => 5,
                "qwen" | "chatml" => 5,
                "gemma" => 4,
                _ => 2,
            }
        );
        assert!(ids.iter().filter(|token| **token == id(special[0])).count() <= 1, "{name}");
    }
}

#[test]
fn marked_blocks_count_in_templates_that_change_earlier_turns() {
    let source = "{% for m in messages %}{{ m.role }}{{ loop.length }}: {% if m.role == 'assistant' %}MARK{{ m.content }}<|im_end|>END{% else %}{{ m.content }}{% endif %}\n{% endfor %}";
    let special = ["<|endoftext|>", "<|im_end|>"];
    let messages = vec![Message::new("user", "Hi"), Message::new("assistant", "It is.")];
    let encoded = |source: &str| {
        let (tokenizer, template) = open(&model(source, &special));
        let encoded = encode(&tokenizer, &template, &messages).map_err(|error| error.to_string())?.unwrap();
        Ok::<_, String>(tokenizer.decode(&encoded.ids[encoded.counting[0].clone()]).unwrap())
    };
    let problem = encoded(&source.replace("MARK", "").replace("END", "")).unwrap_err();
    assert!(problem.contains("the answer in message 2 differently"), "{problem}");
    assert!(problem.contains("from byte 4") && problem.contains("{% generation %}"), "{problem}");
    let marked = source.replace("MARK", "{% generation %}").replace("END", "{% endgeneration %}");
    assert_eq!(encoded(&marked).unwrap(), "It is.<|im_end|>");
}

#[test]
fn packed_samples_have_every_conversation_once() {
    let (_, source, special) = FORMATS[4];
    let model = model(source, special);
    let lines: String = (0..40).map(line).collect();
    let options = options(&model, &(lines + "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n"));
    let mut remarks = Vec::new();
    let mut record = |progress| {
        if let Progress::Remark(remark) = progress {
            remarks.push(remark.to_string());
        }
    };
    let info = prepare(&options, &mut record).unwrap();
    assert_eq!(remarks, ["1 conversation without a turn of the assistant skipped: no token of them counts"]);
    assert_eq!(info.documents, 40);
    assert!(verify(&options.out, &mut |_, _| {}).unwrap().problems.is_empty());
    assert_eq!(differences(&options).unwrap(), Some(Vec::new()));
    let counting = info.chat.unwrap().counting;
    assert!(counting[0] > 10 * counting[1] && counting[1] > 0, "{counting:?}");

    let samples = |seq_len| Samples::open(&options.out, Split::Train, seq_len, &Sources::default()).unwrap();
    let tokenizer = Tokenizer::load(options.out.join(TOKENIZER_FILE)).unwrap();
    let (mut texts, mut sum) = (String::new(), 0.0);
    let all = samples(300);
    for index in 0..all.num_samples().unwrap() {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        let weights = all.read(index, &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs.len(), weights.len(), &inputs[1..]), (300, 300, &targets[..299]));
        let counted = targets.iter().zip(&weights).filter(|(_, weight)| **weight == 1.0);
        let counted: Vec<u32> = counted.map(|(id, _)| *id as u32).collect();
        let counted = tokenizer.decode(&counted).unwrap();
        assert!(counted.ends_with("It is.<|im_end|>") && !counted.contains("user"), "{counted}");
        sum += weights.iter().sum::<f32>();
        texts += &tokenizer.decode(&inputs.iter().map(|id| *id as u32).collect::<Vec<_>>()).unwrap();
    }
    assert_eq!(sum as u64, counting[0]);
    let found = (0..40).filter(|index| texts.contains(&format!("What is {index}?"))).count();
    let validation = Samples::open(&options.out, Split::Validation, 300, &Sources::default()).unwrap();
    let Samples::Chats(validation) = validation else { panic!("conversations") };
    assert_eq!(found as u64 + validation.conversations(), 40);
    assert!(all.num_samples().unwrap() < 20, "several conversations per sample");

    // Shorter samples cut and omit conversations, and report it.
    let Samples::Chats(short) = samples(60) else { panic!("conversations") };
    let remark = short.too_long().unwrap();
    assert!(remark.contains("cut at the end") && remark.contains("data.seq_len = 60"), "{remark}");
    let Samples::Chats(long) = all else { panic!("conversations") };
    assert_eq!(long.too_long(), None);
    let none = Samples::open(&options.out, Split::Train, 5, &Sources::default()).unwrap_err().to_string();
    assert!(none.contains("no conversation has an answer within its first 5 tokens"), "{none}");
}

#[test]
fn damaged_conversations_are_named_or_skipped() {
    let (_, source, special) = FORMATS[3];
    let model = model(source, special);
    for (damaged, expected) in [
        ("{\"messages\": ", "chats.jsonl, line 3: EOF while parsing a value"),
        (&"[".repeat(100_000), "line 3: recursion limit exceeded"),
        (
            "{\"messages\": [{\"role\": \"tool\", \"content\": \"7\"}]}",
            "line 3: message 1: messages of tools",
        ),
        (
            "{\"messages\": [{\"role\": \"system\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
            "line 3: the chat template of ",
        ),
    ] {
        let lines = format!("{}\n{}{damaged}\n{}", line(0), line(1), line(2));
        let options = options(&model, &lines.replacen("\n\n", "\n", 1));
        let message = refused(&options);
        assert!(message.contains(expected) && message.contains("data.bad_lines"), "{message}");
        assert!(!options.out.exists());
        let skipping = PrepareOptions { skip_bad_lines: true, ..options };
        assert_eq!(prepare(&skipping, &mut |_| {}).unwrap().documents, 3);
        fs::remove_dir_all(&skipping.out).unwrap();
    }
}

#[test]
fn a_hostile_template_ends_the_preparation_once() {
    let source = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
    let model = model(source, &["<|endoftext|>", "<|im_end|>"]);
    let options = options(&model, &(0..500).map(line).collect::<String>());
    let start = std::time::Instant::now();
    let message = refused(&PrepareOptions { skip_bad_lines: true, ..options });
    assert!(message.contains("is stopped: it takes "), "{message}");
    assert!(start.elapsed() < std::time::Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn missing_parts_are_named() {
    let (_, source, special) = FORMATS[0];
    let model = model(source, special);
    assert!(refused(&options(&model, &line(0))).contains("the inputs hold 1 usable conversations"));
    let good = options(&model, &(line(0) + &line(1)));
    let text = PrepareOptions { inputs: vec![model.path().join("chat_template.jinja")], ..good.clone() };
    assert!(refused(&text).contains("chat_template.jinja has no conversations"), "{}", refused(&text));
    let trained = PrepareOptions { tokenizer: TokenizerSource::Train { vocab_size: 300 }, ..good.clone() };
    assert!(refused(&trained).contains("data.tokenizer"));
    prepare(&good, &mut |_| {}).unwrap();
    fs::write(model.path().join("chat_template.jinja"), FORMATS[1].1).unwrap();
    let changed = differences(&good).unwrap().unwrap();
    assert!(changed.len() == 1 && changed[0].starts_with("chat template: one with SHA-256"), "{changed:?}");
    fs::remove_file(model.path().join("chat_template.jinja")).unwrap();
    let other = PrepareOptions { out: model.path().join("other"), ..good };
    assert!(refused(&other).contains("has no chat template"), "{}", refused(&other));
}
