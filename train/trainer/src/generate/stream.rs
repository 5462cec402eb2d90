//! Turns a growing list of token ids into text, piece by piece.

/// The character that tokenizers return for an incomplete character.
const INCOMPLETE: char = '\u{FFFD}';

/// Maximum number of ids that are held back because later ids may complete a character. A character has up to four
/// bytes, and a tokenizer may have a token for each byte.
const PENDING: usize = 16;

/// Records how much of a text has been shown. Decodes each piece with the previous one, on which its text may depend,
/// and never the whole text, so that the work per token stays constant.
#[derive(Clone, Debug)]
pub(super) struct TextStream {
    /// Position of the first id of the last shown piece.
    context: usize,
    /// Number of ids that were shown.
    shown: usize,
}

impl TextStream {
    /// Starts after `shown` ids, whose text is known already.
    pub(super) fn after(shown: usize) -> Self {
        TextStream { context: 0, shown }
    }

    /// Returns the text of `ids` after the shown part, without a last character that later ids may complete. `ids`
    /// starts with the ids of the last call; `decode` returns the text of some ids.
    pub(super) fn next<E>(
        &mut self,
        ids: &[u32],
        decode: impl FnMut(&[u32]) -> Result<String, E>,
    ) -> Result<String, E> {
        let is_late = ids.len() - self.shown > PENDING;
        let piece = self.piece(ids, is_late, decode)?;
        if !is_late && (piece.is_empty() || piece.ends_with(INCOMPLETE)) {
            return Ok(String::new());
        }
        (self.context, self.shown) = (self.shown, ids.len());
        Ok(piece)
    }

    /// Returns the text of `ids` that was not shown yet, when no more ids follow.
    pub(super) fn rest<E>(
        &self,
        ids: &[u32],
        decode: impl FnMut(&[u32]) -> Result<String, E>,
    ) -> Result<String, E> {
        self.piece(ids, true, decode)
    }

    /// Returns the text of the unshown ids; an empty string if they change earlier text, unless it `has_to_be` shown.
    fn piece<E>(
        &self,
        ids: &[u32],
        has_to_be: bool,
        mut decode: impl FnMut(&[u32]) -> Result<String, E>,
    ) -> Result<String, E> {
        if self.shown == 0 {
            return decode(ids);
        }
        let (before, text) = (decode(&ids[self.context..self.shown])?, decode(&ids[self.context..])?);
        match text.strip_prefix(&*before) {
            Some(piece) => Ok(piece.to_owned()),
            None if has_to_be => decode(&ids[self.shown..]),
            None => Ok(String::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use kiln_data::Tokenizer;

    /// Returns a tokenizer with a token for every byte, and no merges.
    fn byte_level() -> Tokenizer {
        Tokenizer::train(["ab".to_owned()].into_iter().map(Ok), 257).expect("a tokenizer")
    }

    fn from_json(content: &Value) -> Tokenizer {
        Tokenizer::from_file(content.to_string().into_bytes(), Path::new("tokenizer.json"))
            .expect("a tokenizer")
    }

    /// Returns a tokenizer like that of Llama 2: a space before the text, and bytes for characters without a token.
    fn byte_fallback() -> Tokenizer {
        let bytes = (0..=255u32).map(|byte| format!("<0x{byte:02X}>"));
        let tokens = ["<unk>", "</s>"].map(str::to_owned).into_iter().chain(bytes);
        let tokens =
            tokens.chain(["\u{2581}", "a", "b", ".", "\u{2581}a", "\u{2581}\u{2581}"].map(str::to_owned));
        let vocab: serde_json::Map<_, _> = tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
        from_json(&json!({
            "version": "1.0",
            "added_tokens": [{
                "id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true
            }],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}
            ]},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            ]},
            "model": {
                "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                "merges": [["\u{2581}", "a"], ["\u{2581}", "\u{2581}"]]
            }
        }))
    }

    /// Returns a tokenizer like BERT's: spaces between words are not tokens.
    fn word_piece() -> Tokenizer {
        let tokens = ["[UNK]", "a", "b", "##a", "##b", ".", "</s>"];
        let vocab: serde_json::Map<_, _> =
            tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
        from_json(&json!({
            "version": "1.0",
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "model": {
                "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": vocab
            }
        }))
    }

    /// Returns the text of `ids`, of which at least `given` are known and the rest follow id by id, and the number of
    /// ids decoded for the rest.
    fn shown(tokenizer: &Tokenizer, ids: &[u32], mut given: usize) -> (String, usize) {
        // Prompts have no incomplete characters.
        let known = |given: usize| tokenizer.decode(&ids[..given]).expect("text");
        while given < ids.len() && known(given).ends_with(INCOMPLETE) {
            given += 1;
        }
        let (mut stream, mut text, mut decoded) = (TextStream::after(given), known(given), 0);
        let mut decode = |ids: &[u32]| {
            decoded += ids.len();
            tokenizer.decode(ids)
        };
        for end in given + 1..=ids.len() {
            text += &stream.next(&ids[..end], &mut decode).expect("text");
        }
        text += &stream.rest(ids, &mut decode).expect("text");
        (text, decoded)
    }

    #[test]
    fn the_pieces_are_the_text() {
        let texts = [
            "a ab  a. b",
            " a",
            "   ",
            "ab\u{E4}\u{20AC}\u{1F600}\u{1F600} a\u{4E2D}\u{56FD}b",
            "a.a . a",
            "",
        ];
        for (kind, tokenizer) in
            [("byte level", byte_level()), ("byte fallback", byte_fallback()), ("word piece", word_piece())]
        {
            for text in texts {
                let ids = tokenizer.encode(text).expect("ids");
                let whole = tokenizer.decode(&ids).expect("text");
                for given in [0, 1, ids.len() / 2].map(|given| given.min(ids.len())) {
                    assert_eq!(shown(&tokenizer, &ids, given).0, whole, "{kind}, {given} of {ids:?}");
                }
            }
        }
    }

    #[test]
    fn a_token_decodes_a_few_ids() {
        for tokenizer in [byte_level(), byte_fallback()] {
            let ids = tokenizer.encode(&"ab a\u{20AC}. ".repeat(500)).expect("ids");
            let broken: Vec<u32> = tokenizer.encode("\u{20AC}").expect("ids").into_iter().take(2).collect();
            let broken = broken.repeat(2_000);
            for ids in [ids, broken] {
                let (_, decoded) = shown(&tokenizer, &ids, 0);
                assert!(decoded < 60 * ids.len(), "{decoded} ids decoded for a text of {}", ids.len());
            }
        }
    }
}
