//! Tasks: questions to a model, whose generated answers are compared with the expected ones.

use std::path::Path;

use burn::tensor::Device;
use kiln_checkpoint::sharded::ShardedDecoder;
use kiln_checkpoint::source::ModelSource;
use kiln_data::{ChatTemplate, DataError, Message, Tokenizer, encode_chat_prompt};
use serde::Deserialize;

use crate::error::{EvalError, Result, TrainError};
use crate::generate::{Continuation, Counts, End, Sampling, texts};
use crate::lines;

/// Each line of a task, as errors call it.
const EXPECTED: &str = "an object with the string \"answer\", and with \"prompt\" or \"messages\"";

/// A question of a task as token ids, and its answer.
#[derive(Clone, Debug)]
pub struct Question {
    /// Number of its line in the file, from 1.
    pub line: usize,
    /// Expected answer.
    pub answer: String,
    ids: Vec<u32>,
}

/// A model's answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Number of the question's line in the file, from 1.
    pub line: usize,
    /// Expected answer.
    pub expected: String,
    /// The model's answer.
    pub found: String,
    /// The reason why the answer ended.
    pub end: Option<End>,
}

impl Answered {
    /// Returns whether the answer is the expected one, apart from white space around it.
    pub fn is_correct(&self) -> bool {
        self.found.trim() == self.expected.trim()
    }
}

/// Reads the questions of a task for the model `source`: JSON lines with "answer", and with "prompt" or, for models
/// with a chat template, "messages".
///
/// # Errors
///
/// If the file cannot be read, a line is invalid, the model has no chat template for messages, or a question leaves no
/// room for an answer in the model's context.
pub fn read_task(path: &Path, source: &ModelSource, tokenizer: &Tokenizer) -> Result<Vec<Question>> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct Line {
        prompt: Option<String>,
        messages: Option<Vec<Message>>,
        answer: String,
    }
    let invalid = |line, problem: &str| EvalError::Line {
        path: path.to_owned(),
        line,
        problem: problem.to_owned(),
        expected: EXPECTED,
    };
    let (mut template, mut questions) = (None, Vec::new());
    for (line, Line { prompt, messages, answer }) in lines::read_json::<Line>(path, EXPECTED)? {
        let ids = match (prompt, messages) {
            (Some(prompt), None) => tokenizer.encode_prompt(&prompt)?.1,
            (None, Some(messages)) => {
                let template = match &template {
                    Some(template) => template,
                    None => template.insert(load_template(source, path, line)?),
                };
                match encode_chat_prompt(tokenizer, template, &messages) {
                    Err(error @ DataError::ChatTemplate { .. }) => {
                        return Err(invalid(line, &error.to_string()).into());
                    }
                    encoded => encoded?,
                }
            }
            (Some(_), Some(_)) => return Err(invalid(line, "it has both prompt and messages").into()),
            (None, None) => return Err(invalid(line, "it has neither prompt nor messages").into()),
        };
        let (tokens, context) = (ids.len(), source.context_length());
        if tokens >= context {
            // The answer needs at least one position.
            let what = format!("{}, line {line}", path.display());
            return Err(EvalError::TooLong { what, tokens: tokens + 1, context }.into());
        }
        questions.push(Question { line, answer, ids });
    }
    Ok(questions)
}

fn load_template(source: &ModelSource, path: &Path, line: usize) -> Result<ChatTemplate> {
    let folder = source.tokenizer_folder();
    ChatTemplate::load(folder)?.ok_or_else(|| {
        TrainError::usage(format!(
            "{}, line {line}: {} has no chat template for messages: use prompts, or add a chat_template.jinja",
            path.display(),
            folder.display()
        ))
    })
}

/// Generates an answer to each question, in batches of at most `rows`, the same on every rank. The most probable tokens
/// are chosen unless `sampling` has a temperature. Collective.
pub fn answers(
    model: &ShardedDecoder,
    device: &Device,
    tokenizer: &Tokenizer,
    questions: &[Question],
    sampling: &Sampling,
    rows: usize,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Answered>> {
    let engine = model.engine();
    let is_first = engine.world().rank() == 0;
    // Rank 0 chooses, because the last bits of the logits differ between kinds of machines.
    let agree = |choices: Vec<f64>| {
        let own = if is_first { choices } else { vec![0.0; choices.len()] };
        engine.sum_over_ranks("answers", &own)
    };
    let start = |question: &Question| {
        let room = sampling.context_length.saturating_sub(question.ids.len());
        let sampling = Sampling { max_tokens: sampling.max_tokens.min(room), ..sampling.clone() };
        Continuation::from_ids(tokenizer, question.ids.clone(), &sampling)
    };
    let starts: Vec<_> = questions.iter().map(start).collect::<Result<_, _>>()?;
    let mut answered = Vec::new();
    let after_pass = || engine.finish_evaluation();
    texts(
        &model.pass(device),
        device,
        &starts,
        Counts { samples: 1, rows },
        after_pass,
        agree,
        |index, _, text| {
            let Question { line, answer, .. } = &questions[index];
            let (expected, found) = (answer.clone(), text.added().to_owned());
            answered.push(Answered { line: *line, expected, found, end: text.end() });
            progress(answered.len());
            Ok(())
        },
    )?;
    Ok(answered)
}
