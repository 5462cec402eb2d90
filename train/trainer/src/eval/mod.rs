//! Evaluation of a model: the validation loop that training shares (`evaluate.rs`), the validation loss of a
//! saved model (`loss.rs`), the loss on answers to prompts (`answers.rs`), and logits (`logits.rs`).

mod answers;
mod evaluate;
mod logits;
mod loss;

pub use crate::error::EvalError;
pub use answers::answer_losses_while;
pub use answers::{AnswerLoss, Pair, TokenPair, answer_losses, mean_answer_loss, read_pairs};
pub use evaluate::evaluate;
pub(crate) use evaluate::{evaluate_while, passes_of};
pub use logits::{Logits, check_tokens, logits};
pub use loss::{Validation, ValidationLoss, ValidationOptions};
