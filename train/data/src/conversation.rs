//! Conversations as training samples: token ids, and the tokens that the model learns to write.

use std::ops::Range;

use super::chat::{ChatTemplate, Message, Rendered};
use super::{DataError, Result, Tokenizer};

/// The role whose turns the model learns to write.
const ASSISTANT: &str = "assistant";

/// The tokens of a conversation, or of its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConversationTokens {
    /// Token ids, including all special tokens.
    pub ids: Vec<u32>,
    /// For each token, whether the assistant writes it. Otherwise its loss is masked.
    pub counts: Vec<bool>,
}

/// Turns conversations into tokens.
///
/// The text is encoded once as a whole, with special tokens as tokens and without adding any, as transformers does.
/// Counted are the tokens of the assistant's turns, up to the end of the turn. These are the `{% generation %}` blocks
/// of a template that has them. Otherwise, a turn is the text that it adds to the conversation before it with a
/// generation prompt, as in TRL.
#[derive(Clone, Debug)]
pub struct ConversationEncoder {
    template: ChatTemplate,
    tokenizer: Tokenizer,
}

impl ConversationEncoder {
    /// Creates an encoder for the template and the tokenizer of one model.
    pub fn new(template: ChatTemplate, tokenizer: Tokenizer) -> Self {
        Self { template, tokenizer: tokenizer.reading_special_tokens(true).without_post_processor() }
    }

    /// Returns the tokens of a conversation.
    ///
    /// Some templates write an earlier turn differently once the conversation continues, such as without its thoughts.
    /// Such a conversation becomes one sequence for each of the assistant's turns, which ends with that turn and counts
    /// only this turn: the model learns each answer in the context in which it will write it.
    ///
    /// # Errors
    ///
    /// If the conversation has no turn of the assistant, the template or tokenizer fails, or the text with a turn does
    /// not start with the text before it.
    pub fn encode(&self, messages: &[Message]) -> Result<Vec<ConversationTokens>> {
        let answers: Vec<_> =
            (0..messages.len()).filter(|index| messages[*index].role == ASSISTANT).collect();
        if answers.is_empty() {
            return Err(self.refused("the conversation has no turn of the role \"assistant\""));
        }
        if self.template.has_generation() {
            let rendered = self.template.render_marked(messages, &[(messages.len(), false)])?.remove(0);
            return Ok(vec![self.tokens(&rendered.text, &rendered.generation)?]);
        }
        let around = |index: &usize| [(*index, true), (index + 1, false)];
        let mut prefixes: Vec<_> = answers.iter().flat_map(around).collect();
        prefixes.push((messages.len(), false));
        let texts: Vec<_> = self.template.render_marked(messages, &prefixes)?;
        let texts: Vec<_> = texts.into_iter().map(|Rendered { text, .. }| text).collect();
        // The list ends with the whole conversation.
        let (whole, turns) = (&texts[texts.len() - 1], texts[..texts.len() - 1].chunks(2));
        let mut ranges = Vec::with_capacity(answers.len());
        for (turn, index) in turns.clone().zip(&answers) {
            let [before, after] = [&turn[0], &turn[1]];
            if !after.starts_with(before.as_str()) {
                return Err(self.refused(&format!(
                    "it writes the messages before message {} differently with and without that answer, so the \
                     answer's tokens are unknown; use a template with {{% generation %}} blocks",
                    index + 1
                )));
            }
            ranges.push(before.len()..after.len());
        }
        if turns.clone().all(|turn| whole.starts_with(turn[1].as_str())) {
            return Ok(vec![self.tokens(whole, &ranges)?]);
        }
        turns.zip(ranges).map(|(turn, range)| self.tokens(&turn[1], &[range])).collect()
    }

    /// Encodes `text`. Counted are the tokens with a byte inside one of `ranges`.
    fn tokens(&self, text: &str, ranges: &[Range<usize>]) -> Result<ConversationTokens> {
        let (ids, offsets) = self.tokenizer.encode_with_offsets(text)?;
        let is_inside = |token: &Range<usize>| {
            ranges.iter().any(|range| match token.is_empty() {
                // A token without text, such as a dummy prefix, belongs to the text after it.
                true => range.contains(&token.start),
                false => token.start < range.end && range.start < token.end,
            })
        };
        let counts = offsets.iter().map(is_inside).collect();
        Ok(ConversationTokens { ids, counts })
    }

    fn refused(&self, problem: &str) -> DataError {
        DataError::ChatTemplate { path: self.template.path().to_path_buf(), problem: problem.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::builtin::Builtin;
    use super::*;
    use std::path::Path;
    use tokenizers::AddedToken;

    const LLAMA: &str = "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + \
        m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}\
        {% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
    const CHATML: &str = "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n\
        {%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";
    const MISTRAL: &str = "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}\
        {% elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}{% else %}\
        {{- raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}";
    const GEMMA: &str = "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}\
        {{ '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}\
        {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";
    /// As Qwen 3: thoughts stay in the last turn only.
    const QWEN: &str = "{%- for m in messages %}{%- if m.role == 'assistant' and not loop.last %}\
        {{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}{%- else %}\
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
    const GENERATION: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
        {% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}\
        {{ '\\n' }}{% endfor %}";

    fn encoder(template: &str) -> ConversationEncoder {
        let texts = (0..40).map(|index| Ok(Builtin::Arithmetic.document(index)));
        let mut inner = Tokenizer::train(texts, 300).unwrap().inner().clone();
        let special =
            ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>"];
        let special = special.into_iter().chain(["<|im_end|>", "<start_of_turn>", "<end_of_turn>"]);
        let special: Vec<_> = special.map(|token| AddedToken::from(token, true)).collect();
        inner.add_special_tokens(special).unwrap();
        let tokenizer =
            Tokenizer::from_file(inner.to_string(false).unwrap().into_bytes(), Path::new("t")).unwrap();
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(n, t)| (n.to_owned(), t.to_owned()));
        let template = ChatTemplate::new(template.to_owned(), tokens.into(), "t.jinja".into()).unwrap();
        ConversationEncoder::new(template, tokenizer)
    }

    fn chat() -> Vec<Message> {
        let turns =
            [("user", "Add 1."), ("assistant", "Is it 2? 🙂"), ("user", "Is it 2? 🙂"), ("assistant", "Yés")];
        turns.map(|(role, content)| Message::new(role, content)).to_vec()
    }

    /// Returns each sequence as text, with brackets around what counts.
    fn bracketed(template: &str, messages: &[Message]) -> Vec<String> {
        let encoder = encoder(template);
        let bracket = |tokens: ConversationTokens| {
            let pairs: Vec<_> = tokens.ids.into_iter().zip(tokens.counts).collect();
            let runs = pairs.chunk_by(|a, b| a.1 == b.1).map(|run| {
                let ids: Vec<_> = run.iter().map(|(id, _)| *id).collect();
                let text = encoder.tokenizer.decode(&ids).unwrap();
                if run[0].1 { format!("[{text}]") } else { text }
            });
            runs.collect()
        };
        encoder.encode(messages).unwrap().into_iter().map(bracket).collect()
    }

    #[test]
    fn the_turns_of_the_assistant_count() {
        let user = "Is it 2? 🙂";
        for (template, expected) in [
            (
                LLAMA,
                format!(
                    "<s><|start_header_id|>user<|end_header_id|>\n\nAdd 1.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\
                 \n\n[{user}<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|><|start_header_id|>\
                 assistant<|end_header_id|>\n\n[Yés<|eot_id|>]"
                ),
            ),
            (
                CHATML,
                format!(
                    "<|im_start|>user\nAdd 1.<|im_end|>\n<|im_start|>assistant\n[{user}<|im_end|>\n]<|im_start|>user\n{user}\
                 <|im_end|>\n<|im_start|>assistant\n[Yés<|im_end|>\n]"
                ),
            ),
            (MISTRAL, format!("<s>[INST] Add 1. [/INST][ {user}</s>][INST] {user} [/INST][ Yés</s>]")),
            (
                GEMMA,
                format!(
                    "<s><start_of_turn>user\nAdd 1.<end_of_turn>\n<start_of_turn>model\n[{user}<end_of_turn>\n]<start_of_turn>user\n\
                 {user}<end_of_turn>\n<start_of_turn>model\n[Yés<end_of_turn>\n]"
                ),
            ),
            (
                GENERATION,
                format!(
                    "<|im_start|>user\nAdd 1.<|im_end|>\n<|im_start|>assistant\n[{user}<|im_end|>]\n<|im_start|>user\n{user}\
                 <|im_end|>\n<|im_start|>assistant\n[Yés<|im_end|>]\n"
                ),
            ),
            (
                QWEN,
                format!(
                    "<|im_start|>user\nAdd 1.<|im_end|>\n<|im_start|>assistant\n[{user}<|im_end|>\n]<|im_start|>user\n{user}\
                 <|im_end|>\n<|im_start|>assistant\n[Yés<|im_end|>\n]"
                ),
            ),
        ] {
            assert_eq!(bracketed(template, &chat()), [expected]);
        }
    }

    #[test]
    fn answers_that_change_later_are_learned_one_by_one() {
        let mut messages = chat();
        messages[1].content = "<think>1+1</think>\n\n2".to_owned();
        let [first, second] = <[String; 2]>::try_from(bracketed(QWEN, &messages)).unwrap();
        assert_eq!(
            first,
            "<|im_start|>user\nAdd 1.<|im_end|>\n<|im_start|>assistant\n[<think>1+1</think>\n\n2<|im_end|>\n]"
        );
        assert!(second.contains("<|im_start|>assistant\n2<|im_end|>\n"), "{second}");
        assert!(second.ends_with("<|im_start|>assistant\n[Yés<|im_end|>\n]"), "{second}");
    }

    #[test]
    fn unusable_conversations_are_refused() {
        let message = |template: &str, messages: &[Message]| {
            encoder(template).encode(messages).unwrap_err().to_string()
        };
        assert!(message(CHATML, &chat()[..1]).contains("no turn of the role \"assistant\""));
        assert!(
            message(MISTRAL, &[Message::new("system", "x"), chat()[1].clone()])
                .contains("Only user and assistant")
        );
        let counting = message("{{ messages|length }}", &chat());
        assert!(counting.contains("before message 2 differently"), "{counting}");
    }
}
