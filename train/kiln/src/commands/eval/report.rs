use std::fmt;
use std::path::PathBuf;

use kiln_shard::Strategy;
use serde::Serialize;

use kiln_sys::output::one_line;
use kiln_sys::words::number_of;
use kiln_train::error::{Result, TrainError};
use kiln_train::eval::{AnswerLoss, Answered, ValidationLoss, mean_answer_loss};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Report {
    pub(crate) outcome: Outcome,
    pub(crate) ranks: usize,
    pub(crate) strategy: Strategy,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// Loss on validation data.
    Validation(ValidationLoss),
    /// Loss of one answer.
    Answer(AnswerLoss),
    /// Losses of the answers of a file, in order.
    Answers(Vec<AnswerLoss>),
    /// Logits, written to a file. `shape`: positions and vocabulary.
    Logits { path: PathBuf, shape: [usize; 2] },
    /// Answers to the questions of a task, in order.
    Task(Vec<Answered>),
}

impl Outcome {
    pub(super) fn check(&self) -> Result<()> {
        let (what, losses) = match self {
            Outcome::Validation(ValidationLoss { loss, .. }) => ("the validation loss", vec![*loss]),
            Outcome::Answer(answer) => ("the loss of the answer", vec![answer.sum]),
            Outcome::Answers(answers) => {
                ("the loss of an answer", answers.iter().map(|answer| answer.sum).collect())
            }
            // Logits are written even if they are not finite.
            Outcome::Logits { .. } | Outcome::Task(_) => return Ok(()),
        };
        match losses.into_iter().find(|loss| !loss.is_finite()) {
            Some(value) => Err(TrainError::NotANumber { what, value }),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Total {
    /// Mean loss per token, over all answers.
    loss: f64,
    tokens: usize,
    /// Mean over the answers of each answer's summed loss.
    mean_sum: f64,
}

impl Total {
    fn of(losses: &[AnswerLoss]) -> Self {
        let sum: f64 = losses.iter().map(|loss| loss.sum).sum();
        let tokens = losses.iter().map(|loss| loss.tokens).sum();
        Total { loss: mean_answer_loss(losses), tokens, mean_sum: sum / losses.len() as f64 }
    }
}

/// Number of wrong answers that are shown.
const WRONG: usize = 5;

/// Columns of an answer that is shown.
const COLUMNS: usize = 60;

/// Share of correct answers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Accuracy {
    correct: usize,
    /// Correct answers by questions.
    share: f64,
    /// Standard error of the share, estimated from the sample as in lm-evaluation-harness; `None` for one question.
    error: Option<f64>,
}

impl Accuracy {
    fn of(answers: &[Answered]) -> Self {
        let (count, correct) = (answers.len(), answers.iter().filter(|answer| answer.is_correct()).count());
        let share = correct as f64 / count as f64;
        let error = (count > 1).then(|| (share * (1.0 - share) / (count as f64 - 1.0)).sqrt());
        Accuracy { correct, share, error }
    }
}

impl Report {
    /// Returns JSON, one object per line. Losses are in nats; a non-finite number is `null`.
    ///
    /// - Validation data: `val_loss`, `perplexity`, `tokens`, `seq_len`.
    /// - One answer: `loss` per token, `sum`, `perplexity`, `tokens`.
    /// - A file of pairs: a line per pair with `pair` (its number, from 1), `loss`, `sum` and `tokens`; then
    ///   `pairs`, `loss` and `perplexity` over all `tokens`, and `mean_sum`, the mean over the pairs of their
    ///   sums.
    /// - Logits: `logits` (the file), `shape`.
    /// - A task: a line per question with `line` (its number in the file), `expected`, `answer`, `correct` and
    ///   `finish_reason`; then `questions`, `correct`, `accuracy` and its `standard_error`, `null` for one question.
    ///
    /// The last line also has `ranks` and `strategy`.
    pub(crate) fn to_json(&self) -> String {
        let Report { outcome, ranks, strategy } = self;
        let mut lines: Vec<String> = Vec::new();
        let last = match outcome {
            Outcome::Validation(ValidationLoss { loss, tokens, seq_len }) => serde_json::json!({
                "val_loss": loss,
                "perplexity": loss.exp(),
                "tokens": tokens,
                "seq_len": seq_len,
            }),
            Outcome::Answer(answer) => serde_json::json!({
                "loss": answer.loss(),
                "sum": answer.sum,
                "perplexity": answer.loss().exp(),
                "tokens": answer.tokens,
            }),
            Outcome::Answers(losses) => {
                lines.extend(losses.iter().enumerate().map(|(index, answer)| {
                    let AnswerLoss { sum, tokens } = *answer;
                    line(&serde_json::json!({
                        "pair": index + 1,
                        "loss": answer.loss(),
                        "sum": sum,
                        "tokens": tokens,
                    }))
                }));
                let Total { loss, tokens, mean_sum } = Total::of(losses);
                serde_json::json!({
                    "pairs": losses.len(),
                    "loss": loss,
                    "perplexity": loss.exp(),
                    "tokens": tokens,
                    "mean_sum": mean_sum,
                })
            }
            Outcome::Logits { path, shape } => {
                serde_json::json!({ "logits": path.to_string_lossy(), "shape": shape })
            }
            Outcome::Task(answers) => {
                lines.extend(answers.iter().map(|answer| {
                    line(&serde_json::json!({
                        "line": answer.line,
                        "expected": answer.expected,
                        "answer": answer.found,
                        "correct": answer.is_correct(),
                        "finish_reason": answer.end,
                    }))
                }));
                let Accuracy { correct, share, error } = Accuracy::of(answers);
                serde_json::json!({
                    "questions": answers.len(),
                    "correct": correct,
                    "accuracy": share,
                    "standard_error": error,
                })
            }
        };
        lines.push(line(&WithRanks { result: last, ranks: *ranks, strategy: *strategy }));
        lines.join("\n")
    }
}

#[derive(Serialize)]
struct WithRanks {
    #[serde(flatten)]
    result: serde_json::Value,
    ranks: usize,
    strategy: Strategy,
}

fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Validation(ValidationLoss { loss, tokens, seq_len }) => write!(
                f,
                "validation loss {loss:.4} nats per token, perplexity {:.2}, {tokens} tokens in sequences of {seq_len}",
                loss.exp()
            )?,
            Outcome::Answer(answer) => write!(
                f,
                "answer loss {:.4} nats per token, perplexity {:.2}, sum {:.4} over {}",
                answer.loss(),
                answer.loss().exp(),
                answer.sum,
                number_of(answer.tokens, "token")
            )?,
            Outcome::Answers(losses) => {
                let Total { loss, tokens, mean_sum } = Total::of(losses);
                write!(
                    f,
                    "answer loss {loss:.4} nats per token, perplexity {:.2}, {} of {}; mean sum \
                     per answer {mean_sum:.4}",
                    loss.exp(),
                    number_of(tokens, "token"),
                    number_of(losses.len(), "answer")
                )?;
            }
            Outcome::Logits { path, shape: [rows, columns] } => {
                write!(f, "logits {rows} x {columns} -> {}", path.display())?;
            }
            Outcome::Task(answers) => {
                for answer in answers.iter().filter(|answer| !answer.is_correct()).take(WRONG) {
                    let [expected, found] =
                        [&answer.expected, &answer.found].map(|text| one_line(text, COLUMNS));
                    writeln!(f, "line {}: expected \"{expected}\", got \"{found}\"", answer.line)?;
                }
                let Accuracy { correct, share, error } = Accuracy::of(answers);
                let wrong = answers.len() - correct;
                if wrong > WRONG {
                    writeln!(f, "… and {} more wrong answers; --json has all", wrong - WRONG)?;
                }
                write!(f, "accuracy {share:.4}")?;
                if let Some(error) = error {
                    write!(f, " ± {error:.4} (standard error)")?;
                }
                write!(f, ", {correct} of {} correct", number_of(answers.len(), "answer"))?;
            }
        }
        write!(f, " ({}, {})", self.strategy, number_of(self.ranks, "rank"))
    }
}
