use std::io::{IsTerminal, Write, stdout};
use std::num::NonZero;
use std::path::PathBuf;

use clap::Args;
use kiln_model::{Decoder, Layers};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, Strategy, memory};
use serde::Serialize;

use kiln_sys::output;
use kiln_train::error::{Result, TrainError};
use kiln_train::generate::{Batch, Continuation, Counts, End, check_prompt, sample_of, texts};
use kiln_train::kernels;
use kiln_train::lines::read_prompts;

use super::sampling::SamplingFlags;
use kiln_checkpoint::source::ModelSource;
use kiln_config::device::{self, DeviceFlag, DeviceRequest};
use kiln_config::{CommSection, Precision};

/// Flags of `kiln generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Text to continue.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, required_unless_present = "prompts")]
    prompt: Option<String>,
    /// Continue every prompt of this file: one per line or, in a .jsonl file, one object with "prompt" per line.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,
    /// Number of texts for each prompt.
    #[arg(long, value_name = "N", default_value_t = NonZero::<usize>::MIN)]
    samples: NonZero<usize>,
    /// Maximum number of texts that are generated at once. More are faster, and need more memory.
    #[arg(long, value_name = "N", default_value_t = ROWS)]
    rows: NonZero<usize>,
    /// Treat special tokens in prompts as plain text.
    #[arg(long)]
    plain_text: bool,
    /// Maximum number of tokens to generate for each text.
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 200)]
    max_tokens: usize,
    #[command(flatten)]
    sampling: SamplingFlags,
    /// Print a JSON object for each text: prompt_index, sample, prompt, text, tokens, finish_reason.
    #[arg(long)]
    json: bool,
    /// Add the log-probability of each token under the model, "logprobs", to the JSON. Implies --json.
    #[arg(long)]
    logprobs: bool,
    #[command(flatten)]
    device: DeviceFlag,
}

/// Default number of texts that are generated at once.
const ROWS: NonZero<usize> = NonZero::new(16).unwrap();

impl GenerateArgs {
    /// Continues the prompts on one rank. On a terminal, prints a single text token by token, else each text at its
    /// end.
    pub(crate) fn run(self, layers: &Layers) -> Result<()> {
        memory::use_huge_pages();
        self.sampling.check()?;
        let source = ModelSource::open_with(&self.checkpoint, layers)?;
        let sampling = self.sampling.sampling(&source, self.max_tokens)?;
        let tokenizer = source.load_tokenizer()?.reading_special_tokens(!self.plain_text);
        let prompts: Vec<(String, String)> = match (&self.prompts, &self.prompt) {
            (Some(path), _) => {
                let place = |line| format!("{}, line {line}", path.display());
                read_prompts(path)?.into_iter().map(|(line, prompt)| (place(line), prompt)).collect()
            }
            (None, prompt) => vec![("--prompt".to_owned(), prompt.clone().unwrap_or_default())],
        };
        let mut starts = Vec::new();
        for (index, (place, prompt)) in prompts.iter().enumerate() {
            check_prompt(place, prompt, &tokenizer, sampling.context_length)?;
            let start = Continuation::new(&tokenizer, prompt, &sampling)?;
            starts.push(start.with_key(sampling.key.fork_index(index as u64)));
        }
        let threads = device::threads_per_rank(&Default::default(), 1);
        let (backend, strategy) = (self.device.backend(), Strategy::NoShard);
        let parameters = Decoder::count_parameters(layers, source.model())?;
        let request = DeviceRequest::for_weights(backend, parameters, 1, strategy, None);
        let selected = DeviceFlag::select(&request, None)?;
        kernels::settle_in(Precision::F32, source.model(), &selected, None, &CommSection::default())?;
        let device = selected.device();
        let is_json = self.json || self.logprobs;
        let is_one = starts.len() == 1 && self.samples.get() == 1;
        run_ranks(1, threads, |world| {
            let policy = Policy { strategy, ..Policy::default() };
            let model = source.decoder(layers, EngineBuilder::new(world, policy, None)?, &device)?;
            let pass = model.pass(&device);
            let after_pass = || model.engine().finish_evaluation();
            if is_one && !is_json && stdout().is_terminal() {
                let mut batch = Batch::new(vec![sample_of(&starts[0], 0)]);
                show(&batch.texts()[0].prompt()?);
                let mut shown = 0;
                loop {
                    let continues = batch.advance(&pass, &device, after_pass)?;
                    let settled = batch.texts()[0].settled();
                    show(&settled[shown..]);
                    shown = settled.len();
                    if !continues {
                        break;
                    }
                }
                let _ = writeln!(output::Console::Stdout);
                return Ok(());
            }
            let counts = Counts { samples: self.samples.get(), rows: self.rows.get() };
            texts(&pass, &device, &starts, counts, after_pass, Ok, |index, sample, text| {
                if is_json {
                    let line = Line {
                        prompt_index: index,
                        sample,
                        prompt: &prompts[index].1,
                        text: text.added(),
                        tokens: text.tokens(),
                        finish_reason: text.end(),
                        logprobs: self.logprobs.then(|| text.log_probabilities()),
                    };
                    let line = serde_json::to_string(&line).unwrap_or_default();
                    let _ = writeln!(output::Console::Stdout, "{line}");
                    return Ok(());
                }
                if !is_one {
                    output::print_line(&format!("== prompt {}, sample {} ==", index + 1, sample + 1));
                }
                let whole = text.text()?;
                // Output that is not a terminal gets the text unchanged.
                let whole = if stdout().is_terminal() { on_terminal(&whole) } else { whole };
                let _ = writeln!(output::Console::Stdout, "{whole}");
                Ok(())
            })?;
            Ok::<_, TrainError>(())
        })?;
        Ok(())
    }
}

/// A text as JSON.
#[derive(Serialize)]
struct Line<'a> {
    /// Number of the prompt, from 0.
    prompt_index: usize,
    /// Number of the text among those of its prompt, from 0.
    sample: usize,
    prompt: &'a str,
    /// The text after the prompt.
    text: &'a str,
    /// Ids of the tokens after the prompt, without an end token. With a stop string, they include its tokens.
    tokens: &'a [u32],
    finish_reason: Option<End>,
    /// Natural logarithms of the model's probabilities of `tokens`, before any setting changes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [f64]>,
}

/// Writes text to a terminal at once. If the reader has closed the output, that is not an error.
fn show(text: &str) {
    let _ = write!(stdout(), "{}", on_terminal(text)).and_then(|()| stdout().flush());
}

/// Escapes text for a terminal: a model's author could otherwise make it send control sequences.
fn on_terminal(text: &str) -> String {
    output::printable(&text.replace('\r', "")).into_owned()
}
