mod stream;

use std::io::{IsTerminal, Write, stdout};
use std::path::PathBuf;

use clap::Args;
use kiln_model::{Decoder, Key, Layers};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, Strategy, memory};

use kiln_sys::output;
use kiln_train::error::{Result, TrainError};
use kiln_train::generate::{Continuation, Sampling, check_prompt};
use kiln_train::kernels;

use kiln_checkpoint::source::ModelSource;
use kiln_config::device::{self, DeviceFlag, DeviceRequest};
use kiln_config::{CommSection, ConfigError, Precision};
use stream::TextStream;

/// Flags of `kiln generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Text to continue.
    #[arg(long, allow_hyphen_values = true)]
    prompt: String,
    /// Treat special tokens in the prompt as plain text.
    #[arg(long)]
    plain_text: bool,
    /// Maximum number of tokens to generate.
    #[arg(long, allow_negative_numbers = true, default_value_t = 200)]
    max_tokens: usize,
    /// Sampling temperature: 0 always picks the most likely token, higher values are more random.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from the K most likely tokens; 0 means all.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0)]
    top_k: usize,
    /// Sample from the most likely tokens whose probabilities add up to P; 1 means all.
    #[arg(long, allow_negative_numbers = true, default_value_t = 1.0)]
    top_p: f64,
    /// Seed of the sampling.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    device: DeviceFlag,
}

impl GenerateArgs {
    /// Continues the prompt on one rank. Prints token by token on a terminal, else the whole text at the end.
    pub(crate) fn run(self, layers: &Layers) -> Result<()> {
        memory::use_huge_pages();
        let mut sampling = Sampling {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            key: Key::new(self.seed),
            context_length: 0,
            end_ids: Vec::new(),
        };
        check_flags(&sampling)?;
        let source = ModelSource::open_with(&self.checkpoint, layers)?;
        sampling.context_length = source.context_length();
        sampling.end_ids = source.end_ids()?;
        let tokenizer = source.load_tokenizer()?.reading_special_tokens(!self.plain_text);
        check_prompt("--prompt", &self.prompt, &tokenizer, sampling.context_length)?;
        let threads = device::threads_per_rank(&Default::default(), 1);
        let (backend, strategy) = (self.device.backend(), Strategy::NoShard);
        let parameters = Decoder::count_parameters(layers, source.model())?;
        let request = DeviceRequest::for_weights(backend, parameters, 1, strategy, None);
        let selected = DeviceFlag::select(&request, None)?;
        kernels::settle_in(Precision::F32, source.model(), &selected, None, &CommSection::default())?;
        let device = selected.device();
        let live = stdout().is_terminal();
        run_ranks(1, threads, |world| {
            let policy = Policy { strategy, ..Policy::default() };
            let model = source.decoder(layers, EngineBuilder::new(world, policy, None)?, &device)?;
            let mut continuation = Continuation::new(&tokenizer, &self.prompt, &sampling)?;
            let mut stream = TextStream::default();
            let decode = |ids: &[u32]| tokenizer.decode(ids);
            let pass = model.pass(&device);
            while continuation.advance(&pass, &device, || model.engine().finish_evaluation())? {
                if live {
                    let new = stream.next(continuation.ids(), decode)?;
                    // If the reader has closed the output, that is not an error.
                    let _ = write!(stdout(), "{}", on_terminal(&new)).and_then(|()| stdout().flush());
                }
            }
            // Output that is not a terminal gets the text unchanged.
            let rest = match live {
                true => on_terminal(&stream.rest(continuation.ids(), decode)?),
                false => continuation.text()?,
            };
            let _ = writeln!(output::Console::Stdout, "{rest}");
            Ok::<_, TrainError>(())
        })?;
        Ok(())
    }
}

/// Escapes text for a terminal: a model's author could otherwise make it send control sequences.
fn on_terminal(text: &str) -> String {
    output::printable(&text.replace('\r', "")).into_owned()
}

fn check_flags(sampling: &Sampling) -> Result<(), ConfigError> {
    let Sampling { temperature, top_p, .. } = *sampling;
    let problem = if !(temperature >= 0.0 && temperature.is_finite()) {
        format!("--temperature = {temperature}: must be zero or more, and finite")
    } else if !(top_p > 0.0 && top_p <= 1.0) {
        format!("--top-p = {top_p}: must be above 0 and at most 1")
    } else {
        return Ok(());
    };
    Err(ConfigError::Invalid { problems: vec![problem] })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_p: f64) -> Sampling {
        let (max_tokens, top_k, key) = (1, 0, Key::new(1));
        Sampling { max_tokens, temperature, top_k, top_p, key, context_length: 8, end_ids: Vec::new() }
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        let said = |temperature, top_p| {
            check_flags(&sampling(temperature, top_p)).expect_err("out of range").to_string()
        };
        for top_p in [0.0, -0.5, 1.5, f64::NAN] {
            let expected = format!("--top-p = {top_p}: must be above 0 and at most 1");
            assert_eq!(said(1.0, top_p), expected);
        }
        for temperature in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(said(temperature, 1.0).starts_with("--temperature = "));
        }
        check_flags(&sampling(0.0, 1.0)).expect("in range");
        check_flags(&sampling(5.0, 1e-9)).expect("in range");
    }
}
