//! `kiln eval`: evaluates a model.
//!
//! [`EvalArgs::run`] reads the arguments, starts the ranks, as threads or as this process, and lets each of
//! them do its part of the work; rank 0 prints the result. Validation data are in `loss.rs`, answers to prompts
//! in `answers.rs`, logits in `logits.rs`. Everything is computed in f32.

mod answers;
mod command;
mod error;
mod logits;
mod loss;
mod report;

pub use answers::answer_losses_while;
pub use answers::{AnswerLoss, Pair, TokenPair, answer_losses, mean_answer_loss, read_pairs};
pub use command::EvalArgs;
pub use error::EvalError;
pub use logits::{Logits, check_tokens, logits};
pub use loss::{Validation, ValidationLoss, ValidationOptions};
pub use report::{Outcome, Report};
