//! Evaluation of a model: validation loss, loss on answers to prompts, and logits.

mod answers;
mod evaluate;
mod logits;
mod loss;
mod task;

pub use crate::error::EvalError;
pub use answers::answer_losses_while;
pub use answers::{AnswerLoss, Pair, TokenPair, answer_losses, mean_answer_loss, read_pairs};
pub use evaluate::evaluate;
pub(crate) use evaluate::{Evaluated, evaluate_while, objective_while, passes_of};
pub use logits::{Logits, check_tokens, logits};
pub use loss::{Validation, ValidationLoss, ValidationOptions};
pub use task::{Answered, Question, answers, read_task};
