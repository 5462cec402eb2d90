//! The command `kiln chat`: a conversation with a model in the terminal.

use std::io::{self, BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;
use clap::Args;
use kiln_checkpoint::source::ModelSource;
use kiln_config::device::{self, DeviceFlag, DeviceRequest};
use kiln_config::{CommSection, Precision};
use kiln_data::{ChatTemplate, DataError, Message, Tokenizer, encode_chat_prompt};
use kiln_model::decoder::Modules;
use kiln_model::{Decoder, Layers};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, ShardError, Strategy, memory};
use kiln_sys::output::{self, eprint_line};

use kiln_train::error::{Result, TrainError};
use kiln_train::generate::{Batch, Continuation, End, Sampling};
use kiln_train::kernels;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::sampling::SamplingFlags;

/// Flags of `kiln chat`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "At the prompt: /clear forgets the conversation, /exit or Ctrl-D ends it. Ctrl-C ends an answer."
)]
pub(crate) struct ChatArgs {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Instructions in front of the conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Chat template in Jinja, as in Hugging Face's chat_template.jinja [default: the model's].
    #[arg(long, value_name = "FILE.jinja")]
    chat_template: Option<PathBuf>,
    /// Maximum number of tokens of an answer.
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 1024)]
    max_tokens: usize,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    device: DeviceFlag,
}

impl ChatArgs {
    /// Answers the lines of standard input on one rank until it ends.
    pub(crate) fn run(self, layers: &Layers) -> Result<()> {
        memory::use_huge_pages();
        self.sampling.check()?;
        let source = ModelSource::open_with(&self.checkpoint, layers)?;
        let sampling = self.sampling.sampling(&source, self.max_tokens)?;
        let tokenizer = source.load_tokenizer()?;
        let place = self.chat_template.as_deref().unwrap_or_else(|| source.tokenizer_folder());
        let template = ChatTemplate::load(place)?.ok_or_else(|| without_template(place))?;
        let threads = device::threads_per_rank(&Default::default(), 1);
        let (backend, strategy) = (self.device.backend(), Strategy::NoShard);
        let parameters = Decoder::count_parameters(layers, source.model())?;
        let request = DeviceRequest::for_weights(backend, parameters, 1, strategy, None);
        let selected = DeviceFlag::select(&request, None)?;
        kernels::settle_in(Precision::F32, source.model(), &selected, None, &CommSection::default())?;
        let device = selected.device();
        let stop = kiln_sys::interruption().unwrap_or_default();
        run_ranks(1, threads, |world| {
            let policy = Policy { strategy, ..Policy::default() };
            let model = source.decoder(layers, EngineBuilder::new(world, policy, None)?, &device)?;
            let mut chat = Chat {
                tokenizer: &tokenizer,
                template: &template,
                sampling: &sampling,
                messages: Vec::new(),
                system: self.system.iter().map(|text| Message::new("system", text)).collect(),
                turns: 0,
                batch: None,
                stop: stop.clone(),
            };
            let mut input = Input::new();
            while let Some(line) = input.next_line() {
                match line.trim() {
                    "" => {}
                    "/exit" => break,
                    "/clear" => chat.messages.clear(),
                    _ => {
                        let after_pass = || model.engine().finish_evaluation();
                        chat.answer(line, &model.pass(&device), &device, after_pass)?;
                    }
                }
            }
            Ok::<_, TrainError>(())
        })?;
        Ok(())
    }
}

fn without_template(folder: &Path) -> TrainError {
    TrainError::usage(format!(
        "{} has no chat template, so its model was not trained on conversations, or the template was lost: name one with \
         --chat-template FILE.jinja, or continue text with `kiln generate`",
        folder.display()
    ))
}

/// A conversation.
struct Chat<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    sampling: &'a Sampling,
    system: Vec<Message>,
    /// Questions and answers, alternating.
    messages: Vec<Message>,
    /// Number of answers so far.
    turns: u64,
    /// The last answer, with the cache of its conversation.
    batch: Option<Batch<'a>>,
    /// Becomes true when the user interrupts the answer.
    stop: Arc<AtomicBool>,
}

impl Chat<'_> {
    /// Prints the answer to `question` while the model generates it, and remembers both.
    fn answer<P: Modules>(
        &mut self,
        question: String,
        modules: &P,
        device: &Device,
        mut after_pass: impl FnMut() -> Result<(), ShardError>,
    ) -> Result<()> {
        self.messages.push(Message::new("user", question));
        let (ids, room) = match self.prompt() {
            Ok(Some(prompt)) => prompt,
            Ok(None) => return Ok(()),
            // The template refuses this message, but may accept another.
            Err(TrainError::Data(error @ DataError::ChatTemplate { .. })) => {
                self.messages.pop();
                note(&error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let key = self.sampling.key.fork_index(self.turns);
        let sampling =
            Sampling { max_tokens: self.sampling.max_tokens.min(room), key, ..self.sampling.clone() };
        self.turns += 1;
        let text = Continuation::from_ids(self.tokenizer, ids, &sampling)?;
        let batch = match &mut self.batch {
            Some(batch) => {
                batch.follow(text);
                batch
            }
            none => none.insert(Batch::new(vec![text])),
        };
        // From here on, Ctrl-C ends the answer.
        self.stop.store(false, Ordering::Relaxed);
        let mut shown = 0;
        loop {
            let continues = batch.advance(modules, device, &mut after_pass)?;
            let interrupted = self.stop.load(Ordering::Relaxed);
            let text = &batch.texts()[0];
            let settled = if interrupted { text.added() } else { text.settled() };
            show(&settled[shown..]);
            shown = settled.len();
            if !continues || interrupted {
                break;
            }
        }
        let interrupted = self.stop.swap(true, Ordering::Relaxed);
        show("\n");
        let text = &batch.texts()[0];
        if interrupted {
            note("the answer was interrupted");
        } else if text.end() == Some(End::Length) {
            let tokens = text.tokens().len();
            note(&format!("the answer ends after {tokens} tokens: --max-tokens, or the end of the context"));
        }
        self.messages.push(Message::new("assistant", text.added()));
        Ok(())
    }

    /// Returns the token ids of the conversation, and the number of tokens that an answer may have. Drops the oldest
    /// turns that leave too little room. Returns `None`, and forgets the question, if the question alone is too long.
    fn prompt(&mut self) -> Result<Option<(Vec<u32>, usize)>> {
        let context = self.sampling.context_length;
        let least = self.sampling.max_tokens.min(context / 4).max(1);
        let mut dropped = 0;
        let prompt = loop {
            let messages = &self.messages[2 * dropped..];
            let conversation = [&self.system[..], messages].concat();
            let ids = encode_chat_prompt(self.tokenizer, self.template, &conversation)?;
            let room = context.saturating_sub(ids.len());
            if room >= least {
                break (ids, room);
            }
            if messages.len() < 2 {
                self.messages.pop();
                let tokens = ids.len();
                note(&format!(
                    "the message is too long: {tokens} of {context} tokens leave less than {least} for an answer"
                ));
                return Ok(None);
            }
            dropped += 1;
        };
        self.messages.drain(..2 * dropped);
        if dropped > 0 {
            let turns = if dropped == 1 { "turn was".to_owned() } else { format!("{dropped} turns were") };
            note(&format!("the context of {context} tokens is full: the oldest {turns} dropped"));
        }
        Ok(Some(prompt))
    }
}

/// The questions: lines that the user types, or lines of a pipe or file.
enum Input {
    Terminal(Box<DefaultEditor>),
    Stream,
}

impl Input {
    fn new() -> Self {
        let editor = if stdin().is_terminal() { DefaultEditor::new().ok() } else { None };
        editor.map_or(Input::Stream, |editor| Input::Terminal(Box::new(editor)))
    }

    /// Returns the next line; `None` after Ctrl-D, Ctrl-C or the end of the input.
    fn next_line(&mut self) -> Option<String> {
        match self {
            Input::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    let _ = editor.add_history_entry(&line);
                    Some(line)
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => None,
                Err(error) => {
                    eprint_line(&format!("cannot read from the terminal: {error}"));
                    None
                }
            },
            Input::Stream => {
                let mut line = Vec::new();
                let read = stdin().lock().read_until(b'\n', &mut line);
                let read =
                    read.inspect_err(|error| eprint_line(&format!("cannot read standard input: {error}")));
                let is_end = read.unwrap_or(0) == 0;
                let line = String::from_utf8_lossy(&line);
                (!is_end).then(|| line.trim_end_matches(['\n', '\r']).to_owned())
            }
        }
    }
}

/// Writes a part of an answer at once. On a terminal, escapes control characters. If the reader has closed the output,
/// that is not an error.
fn show(text: &str) {
    let written = match stdout().is_terminal() {
        true => write!(stdout(), "{}", output::printable(&text.replace('\r', ""))),
        false => write!(stdout(), "{text}"),
    };
    let _: io::Result<()> = written.and_then(|()| stdout().flush());
}

/// Tells the user about the conversation on standard error, dimmed on a terminal.
fn note(text: &str) {
    let has_colours = stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    if has_colours {
        let _ = writeln!(stderr(), "\u{1b}[2m[{text}]\u{1b}[0m");
    } else {
        eprint_line(&format!("[{text}]"));
    }
}
