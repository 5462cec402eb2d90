//! Checks, for many kinds of tokenizers, that pieces of a text give the same tokens as the whole.

use std::io::Cursor;

use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordlevel::{WordLevel, WordLevelTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::super::mix::SplitMix;
use super::super::piece::{CHUNK_BYTES, Cutter};
use super::*;

const PARTS: [&str; 64] = [
    "the",
    "The",
    "word",
    "tokens",
    "don't",
    "we'll",
    "IT'S",
    "x",
    "a",
    "I",
    "2024",
    "3.14",
    "1,000,000",
    "007",
    "5",
    "B2B",
    "naïve",
    "café",
    "e\u{301}",
    "\u{301}",
    "Straße",
    "ŉ",
    "ﬁ",
    "Ⅳ",
    "漢字",
    "かな",
    "カナ",
    "한국",
    "\u{1100}\u{1161}",
    "ไทย",
    "हिन्दी",
    "مرحبا",
    "Привет",
    "🙂",
    "👩‍👩‍👧",
    "\u{1F1E9}\u{1F1EA}",
    "\u{200B}",
    "\u{FEFF}",
    "\u{AD}",
    "▁",
    "Ġ",
    "Ċ",
    "##",
    "</w>",
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<unk>",
    "<0x0A>",
    "<extra>",
    "stop word",
    "def",
    "...",
    "!?",
    "-",
    "--",
    "/",
    "//",
    "_",
    "'",
    "\"",
    "(",
    "}",
    "。",
];

const GAPS: [&str; 24] = [
    " ", " ", " ", " ", " ", " ", " ", " ", "\n", "\n", "\n", "", "", "  ", "   ", "\n\n", "\r\n", "\t",
    " \n", "\n ", "\u{A0}", "\u{3000}", "\u{2028}", "\n/",
];

fn nasty_text(bytes: usize, seed: u64) -> String {
    let mut random = SplitMix::new(seed);
    let mut text = String::new();
    while text.len() < bytes {
        let parts = if random.below(4) == 0 { &PARTS[..] } else { &PARTS[..16] };
        for _ in 0..random.below(30) {
            text += random.choose(parts);
            text += random.choose(if parts.len() == 16 { &GAPS[..12] } else { &GAPS });
        }
    }
    text
}

/// Trains `model` on the words that the tokenizer `parts` produce, and returns it as JSON.
fn trained(model: impl Into<ModelWrapper>, trainer: impl Into<TrainerWrapper>, parts: &Value) -> Value {
    let mut tokenizer = assembled(&serde_json::to_value(model.into()).unwrap(), parts);
    let texts = (0..20).map(|seed| nasty_text(4000, 1000 + seed));
    tokenizer.train(&mut trainer.into(), texts).unwrap();
    serde_json::from_str::<Value>(&tokenizer.to_string(false).unwrap()).unwrap()["model"].clone()
}

fn assembled(model: &Value, parts: &Value) -> Inner {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model,
    });
    for (key, part) in parts.as_object().unwrap() {
        file[key] = part.clone();
    }
    Inner::from_bytes(file.to_string().as_bytes()).unwrap_or_else(|error| panic!("{parts}: {error}"))
}

fn sequence(key: &str, of: &[Value]) -> Value {
    json!({"type": "Sequence", key: of})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn added(id: u32, content: &str, flags: Value) -> Value {
    let mut token = json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": false,
    });
    for (key, flag) in flags.as_object().unwrap() {
        token[key] = flag.clone();
    }
    token
}

/// Name of a tokenizer, whether it allows texts to be cut, and the tokenizer.
type Kind = (&'static str, bool, Inner);

fn kinds() -> Vec<Kind> {
    let bpe = |size: usize| BpeTrainer::builder().show_progress(false).vocab_size(size).min_frequency(0);
    let bytes = trained(
        BPE::default(),
        bpe(700).initial_alphabet(ByteLevel::alphabet().into_iter().collect()).build(),
        &json!({"pre_tokenizer": byte_level(false, true)}),
    );
    let mut whole_words = bytes.clone();
    whole_words["ignore_merges"] = json!(true);
    // As in SentencePiece: spaces begin words, and unknown characters become bytes.
    let fallback: Vec<_> = (0..=255).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false)).collect();
    let mut sentencepiece = trained(
        BPE::builder().unk_token("<unk>".to_owned()).build().unwrap(),
        bpe(900)
            .special_tokens([vec![AddedToken::from("<unk>", true)], fallback].concat())
            .limit_alphabet(60)
            .build(),
        &json!({"pre_tokenizer": metaspace("always", true)}),
    );
    sentencepiece["byte_fallback"] = json!(true);
    sentencepiece["fuse_unk"] = json!(true);
    let mut looked_up = sentencepiece.clone();
    looked_up["ignore_merges"] = json!(true);
    let mut unknown = sentencepiece.clone();
    unknown["byte_fallback"] = json!(false);
    // Models with tokens that span words, for both spellings of a space.
    let phrases = |normalizer: Value| {
        trained(
            BPE::builder().unk_token("<unk>".to_owned()).build().unwrap(),
            bpe(900).special_tokens(vec![AddedToken::from("<unk>", true)]).build(),
            &json!({"normalizer": normalizer, "pre_tokenizer": split("\n")}),
        )
    };
    let (phrases, sentencepiece_phrases) = (phrases(json!(null)), phrases(replace(" ", "▁")));
    let suffixed = trained(
        BPE::builder().end_of_word_suffix("</w>".to_owned()).unk_token("<unk>".to_owned()).build().unwrap(),
        bpe(700)
            .end_of_word_suffix("</w>".to_owned())
            .special_tokens(vec![AddedToken::from("<unk>", true)])
            .build(),
        &json!({"pre_tokenizer": {"type": "WhitespaceSplit"}}),
    );
    let mut unigram_trainer = UnigramTrainer::default();
    unigram_trainer.show_progress = false;
    unigram_trainer.vocab_size = 400;
    unigram_trainer.unk_token = Some("<unk>".to_owned());
    unigram_trainer.special_tokens = vec![AddedToken::from("<unk>", true)];
    let unigram =
        trained(Unigram::default(), unigram_trainer, &json!({"pre_tokenizer": metaspace("always", true)}));
    let unknown_word = vec![AddedToken::from("[UNK]", true)];
    let word_piece = trained(
        WordPiece::builder().unk_token("[UNK]".to_owned()).build().unwrap(),
        WordPieceTrainer::builder()
            .show_progress(false)
            .vocab_size(600)
            .special_tokens(unknown_word.clone())
            .build(),
        &json!({"pre_tokenizer": {"type": "BertPreTokenizer"}}),
    );
    let word_level = trained(
        WordLevel::builder().unk_token("[UNK]".to_owned()).build().unwrap(),
        WordLevelTrainer::builder()
            .show_progress(false)
            .vocab_size(60)
            .special_tokens(unknown_word)
            .build()
            .unwrap(),
        &json!({"pre_tokenizer": {"type": "Whitespace"}}),
    );
    let specials = json!([
        added(700, "<|endoftext|>", json!({"special": true})),
        added(701, "<s>", json!({"special": true, "normalized": true})),
        added(702, "  ", json!({"normalized": true})),
        added(703, "    ", json!({"normalized": true})),
    ]);
    let llama_2 = sequence("normalizers", &[json!({"type": "Prepend", "prepend": "▁"}), replace(" ", "▁")]);
    let pieces = |stages: &[Value]| sequence("pretokenizers", stages);
    let digits = |individual: bool| json!({"type": "Digits", "individual_digits": individual});
    let [gpt_2, gpt_4, qwen_2, qwen_3_5, gpt_4o, tekken, deepseek] = SPLITTING_PATTERNS;
    let with = |pattern: &str| json!({"pre_tokenizer": pieces(&[split(pattern), byte_level(false, false)])});
    let removed =
        json!({"type": "Split", "pattern": {"Regex": gpt_4}, "behavior": "Removed", "invert": true});
    let pattern = json!({"String": " "});
    let merged =
        json!({"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": false});
    let nfc = json!({"type": "NFC"});
    let kinds: Vec<(&'static str, bool, &Value, Value)> = vec![
        ("GPT-2", true, &bytes, json!({"pre_tokenizer": byte_level(false, true), "added_tokens": specials})),
        ("RoBERTa", true, &bytes, json!({"pre_tokenizer": byte_level(true, true)})),
        ("GPT-2's pattern, apart", true, &bytes, with(gpt_2)),
        ("Llama 3", true, &whole_words, with(gpt_4)),
        (
            "GPT-4, matches kept",
            true,
            &bytes,
            json!({"pre_tokenizer": pieces(&[removed, byte_level(false, false)])}),
        ),
        ("Qwen 2", true, &bytes, json!({"normalizer": nfc, "pre_tokenizer": with(qwen_2)["pre_tokenizer"]})),
        (
            "Qwen 3.5",
            true,
            &bytes,
            json!({"normalizer": nfc, "pre_tokenizer": with(qwen_3_5)["pre_tokenizer"]}),
        ),
        ("GPT-4o", true, &whole_words, with(gpt_4o)),
        ("Tekken", true, &bytes, with(tekken)),
        (
            "DeepSeek V3",
            true,
            &bytes,
            json!({"pre_tokenizer": pieces(&[
                split(r"\p{N}{1,3}"), split("[一-龥\u{3040}-ゟ゠-ヿ]+"), split(&deepseek.replace(r"\r\n", "\r\n")), byte_level(false, false),
            ])}),
        ),
        (
            "StarCoder",
            true,
            &bytes,
            json!({"pre_tokenizer": pieces(&[digits(true), byte_level(false, true)])}),
        ),
        (
            "Falcon",
            true,
            &bytes,
            json!({"pre_tokenizer": pieces(&[
                json!({"type": "Punctuation", "behavior": "Contiguous"}), byte_level(false, true), digits(false),
                split("[0-9][0-9][0-9]"),
            ])}),
        ),
        ("bytes without words", true, &bytes, json!({"pre_tokenizer": byte_level(false, false)})),
        (
            "Llama 2",
            true,
            &sentencepiece,
            json!({"normalizer": llama_2, "added_tokens": [
                added(0, "<unk>", json!({"special": true})), added(900, "<s>", json!({"special": true})),
            ]}),
        ),
        ("Llama 2, pieces looked up", false, &looked_up, json!({"normalizer": llama_2})),
        ("Llama 2 without bytes", true, &unknown, json!({"normalizer": llama_2})),
        ("Gemma", true, &sentencepiece, json!({"normalizer": replace(" ", "▁"), "pre_tokenizer": merged})),
        ("Metaspace", true, &sentencepiece, json!({"pre_tokenizer": metaspace("always", true)})),
        ("Metaspace, unbroken", true, &sentencepiece, json!({"pre_tokenizer": metaspace("first", false)})),
        ("Metaspace without a prefix", true, &unknown, json!({"pre_tokenizer": metaspace("never", true)})),
        (
            "Metaspace behind white space",
            true,
            &sentencepiece,
            json!({"pre_tokenizer": pieces(&[json!({"type": "WhitespaceSplit"}), metaspace("always", true)])}),
        ),
        (
            "a prefix for the first word",
            false,
            &sentencepiece,
            json!({"pre_tokenizer": pieces(&[json!({"type": "WhitespaceSplit"}), metaspace("first", true)])}),
        ),
        ("Unigram", true, &unigram, json!({"pre_tokenizer": metaspace("always", true)})),
        ("Unigram, unbroken", false, &unigram, json!({"pre_tokenizer": metaspace("always", false)})),
        (
            "T5",
            false,
            &unigram,
            json!({
                "normalizer": sequence("normalizers", &[
                    json!({"type": "Nmt"}), json!({"type": "NFKC"}),
                    json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
                ]),
                "pre_tokenizer": metaspace("always", true),
            }),
        ),
        (
            "BERT",
            false,
            &word_piece,
            json!({
                "normalizer": {
                    "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                    "lowercase": true,
                },
                "pre_tokenizer": {"type": "BertPreTokenizer"},
            }),
        ),
        ("WordPiece", true, &word_piece, json!({"pre_tokenizer": {"type": "Whitespace"}})),
        (
            "words",
            true,
            &word_level,
            json!({"normalizer": {"type": "NFKD"}, "pre_tokenizer": {"type": "Whitespace"}}),
        ),
        (
            "GPT-1",
            true,
            &suffixed,
            json!({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "WhitespaceSplit"}}),
        ),
        ("ends of words without words", false, &suffixed, json!({})),
        ("phrases", false, &phrases, json!({})),
        ("phrases of SentencePiece", false, &sentencepiece_phrases, json!({"normalizer": llama_2})),
        (
            "fixed length",
            false,
            &bytes,
            json!({"pre_tokenizer": pieces(&[
                json!({"type": "FixedLength", "length": 5}), byte_level(false, true),
            ])}),
        ),
        (
            "fixed length in words",
            true,
            &bytes,
            json!({"pre_tokenizer": pieces(&[
                split(gpt_4), json!({"type": "FixedLength", "length": 5}), byte_level(false, false),
            ])}),
        ),
        (
            "scripts",
            false,
            &bytes,
            json!({"pre_tokenizer": pieces(&[
                json!({"type": "UnicodeScripts"}), byte_level(false, true),
            ])}),
        ),
        (
            "a delimiter",
            false,
            &unknown,
            json!({"pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": "-"}}),
        ),
        ("another pattern", false, &bytes, with(r"\w+ \w+|\s+|[^\w\s]+")),
        ("lines", false, &bytes, with(r"[^\n]+|\n+")),
        (
            "stripped",
            false,
            &bytes,
            json!({
                "normalizer": {"type": "Strip", "strip_left": true, "strip_right": true},
                "pre_tokenizer": byte_level(false, true),
            }),
        ),
        (
            "bytes by the normalizer",
            false,
            &bytes,
            json!({
                "normalizer": {"type": "ByteLevel"}, "pre_tokenizer": split(gpt_4),
            }),
        ),
        ("a prefix alone", false, &unknown, json!({"normalizer": {"type": "Prepend", "prepend": "▁"}})),
        (
            "an added phrase",
            false,
            &bytes,
            json!({
                "pre_tokenizer": byte_level(false, true), "added_tokens": [added(700, "stop word", json!({}))],
            }),
        ),
        (
            "a lone word",
            false,
            &bytes,
            json!({
                "pre_tokenizer": byte_level(false, true),
                "added_tokens": [added(700, "word", json!({"single_word": true}))],
            }),
        ),
        (
            "a token that takes spaces",
            false,
            &bytes,
            json!({
                "pre_tokenizer": byte_level(false, true), "added_tokens": [added(700, "the", json!({"rstrip": true}))],
            }),
        ),
        (
            "an added word",
            true,
            &bytes,
            json!({
                "normalizer": nfc, "pre_tokenizer": byte_level(false, true),
                "added_tokens": [added(700, "def", json!({"normalized": true})), added(701, "<extra>", json!({}))],
            }),
        ),
        (
            "an added word of Llama 2",
            false,
            &sentencepiece,
            json!({
                "normalizer": llama_2, "added_tokens": [added(900, "def", json!({}))],
            }),
        ),
    ];
    kinds.into_iter().map(|(name, is_cut, model, parts)| (name, is_cut, assembled(model, &parts))).collect()
}

fn in_pieces(tokenizer: &Inner, text: &str, limit: usize) -> (Vec<u32>, usize) {
    let cuts = Cuts::of(tokenizer);
    let mut cutter = Cutter::new(Box::new(Cursor::new(text.to_owned())), limit, cuts, None);
    let (mut ids, mut pieces) = (Vec::new(), 0);
    while let Some(piece) = cutter.next().unwrap() {
        let piece = cuts.as_encoded(&piece.text, pieces == 0);
        ids.extend_from_slice(tokenizer.encode_fast(piece, false).unwrap().get_ids());
        pieces += 1;
    }
    (ids, pieces)
}

fn assert_pieces_are_the_whole(text: &str, limits: &[usize]) {
    let kinds = kinds();
    assert!(kinds.iter().filter(|(_, is_cut, _)| *is_cut).count() >= 20);
    for (name, is_cut, mut tokenizer) in kinds {
        for plain in [true, false] {
            tokenizer.set_encode_special_tokens(plain);
            let whole = tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
            for &limit in limits {
                let (ids, pieces) = in_pieces(&tokenizer, text, limit);
                let differs = ids.iter().zip(&whole).position(|(a, b)| a != b);
                assert!(ids == whole, "{name} by {limit}: {differs:?} of {} and {}", ids.len(), whole.len());
                assert_eq!(pieces > 1, is_cut, "{name} by {limit}: {pieces} pieces");
            }
        }
    }
}

#[test]
fn pieces_have_the_tokens_of_the_whole() {
    assert_pieces_are_the_whole(&nasty_text(30_000, 1), &[4, 60, 1000]);
}

#[test]
#[ignore = "minutes: cargo test --release -p kiln-data --lib -- --ignored five_megabytes"]
fn pieces_of_five_megabytes_have_the_tokens_of_the_whole() {
    assert_pieces_are_the_whole(&nasty_text(5_000_000, 2), &[100, CHUNK_BYTES]);
}

#[test]
fn prose_is_cut_to_the_limit() {
    let text =
        "It was the best of times, it was the worst of times.\nIt was the age of wisdom.\n".repeat(400);
    for (name, is_cut, tokenizer) in kinds() {
        let (_, pieces) = in_pieces(&tokenizer, &text, 1000);
        let expected = if is_cut { text.len().div_ceil(1000)..=text.len() / 900 } else { 1..=1 };
        assert!(expected.contains(&pieces), "{name}: {pieces} pieces of {} bytes", text.len());
    }
}
