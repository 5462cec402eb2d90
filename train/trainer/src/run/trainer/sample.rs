//! Samples: text that the model generates during and after training.

use std::path::Path;

use kiln_observe::run::Sample;
use kiln_sys::Lines;

use super::state::{Text, Trainer};
use crate::error::{Result, TrainError};
use crate::generate::{Batch, Continuation, Sampling};
use crate::process::output::{columns, one_line};
use crate::run::folder::samples_of_run;
use kiln_data::Tokenizer;

impl Trainer<'_> {
    /// Generates the configured samples, without changing the rest of the run. Collective.
    /// Rank 0 shows them and, if this start has trained, appends them to `samples.jsonl`. Empty after a stop request.
    ///
    /// # Errors
    ///
    /// If the ranks lose contact.
    pub fn sample(&mut self) -> Result<Vec<Sample>> {
        self.settle_step()?;
        if self.progress.is_stopping {
            return Ok(Vec::new());
        }
        let texts = self.generate(true)?;
        for Text { whole, sample: Sample { step, .. } } in &texts {
            let head = format!("step {step:>5} | sample: ");
            let text = one_line(whole, columns().saturating_sub(head.len()));
            self.print_line(&(head + &text));
        }
        Ok(texts.into_iter().map(|text| text.sample).collect())
    }

    /// Generates samples of the last step, which depend only on weights, seed and prompt number. Collective.
    /// If `may_stop`, the ranks check for a requested stop between tokens.
    pub(super) fn generate(&mut self, may_stop: bool) -> Result<Vec<Text>> {
        let step = self.state.step;
        if let Some((_, texts)) = self.progress.sampled.as_ref().filter(|(known, _)| *known == step) {
            return Ok(texts.clone());
        }
        let Trainer { plan, rank, model, device, stops, reporter, .. } = self;
        let pace = &mut stops.pace;
        let (engine, section) = (model.engine(), &plan.config.sample);
        let mut texts = Vec::new();
        if section.all_prompts().next().is_none() {
            return Ok(texts);
        }
        engine.set_activity("sampling");
        reporter.iter().for_each(|reporter| reporter.activity("sampling"));
        let path = plan.config.data.path.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(plan.tokenizer.to_vec(), &path)?
            .reading_special_tokens(true)
            .ending_with(Some(plan.message.data.end_of_text));
        let pass = model.pass(device);
        let held = || engine.world().holds().total();
        pace.begin(held());
        for (index, prompt) in section.all_prompts().enumerate() {
            let key = plan.key().fork("sample");
            let sampling = Sampling {
                max_tokens: section.max_tokens,
                temperature: section.temperature,
                key: if index == 0 { key } else { key.fork_index(index as u64) },
                context_length: plan.inherited.context_length,
                end_ids: plan.inherited.end_ids.clone(),
                ..Sampling::default()
            };
            let mut batch = Batch::new(vec![Continuation::new(&tokenizer, prompt, &sampling)?]);
            loop {
                // Rank 0 chooses, because the last bits of the logits differ between kinds of machines.
                let agree = |choices: Vec<f64>| {
                    let own = if *rank == 0 { choices } else { vec![0.0; choices.len()] };
                    engine.sum_over_ranks("sample", &own)
                };
                match batch.advance_together(&pass, device, || engine.finish_evaluation(), agree) {
                    Ok(true) => {}
                    Ok(false) => break,
                    // All ranks see the same error, and the steps report its cause.
                    Err(error @ TrainError::NotANumber { .. }) => {
                        if *rank == 0 {
                            tracing::warn!("no sample: {error}");
                        }
                        return Ok(Vec::new());
                    }
                    Err(error) => return Err(error),
                }
                if may_stop && pace.end(held()) && pace.ask(engine, &plan.stop)?.0 {
                    self.progress.is_stopping = true;
                    return Ok(Vec::new());
                }
            }
            let text = &batch.texts()[0];
            let sample = Sample { step, prompt: prompt.to_owned(), text: text.added().to_owned() };
            texts.push(Text { whole: text.text()?, sample });
        }
        // A run with nothing left to do wrote its texts earlier.
        if *rank == 0 && self.progress.has_trained {
            write(&samples_of_run(&plan.out), &texts);
            for (index, text) in texts.iter().enumerate() {
                let tag = format!("samples/{index}");
                self.reporter.iter_mut().for_each(|reporter| reporter.text(step, &tag, &text.whole));
            }
        }
        self.stops.pace.ask_soon();
        self.progress.sampled = Some((step, texts.clone()));
        Ok(texts)
    }
}

/// Appends `texts` to the samples of a run. A failed write does not end the run.
pub(super) fn write(path: &Path, texts: &[Text]) {
    let written = Lines::open(path).and_then(|mut lines| {
        for text in texts {
            lines.append(serde_json::to_string(&text.sample)?);
        }
        Ok(())
    });
    if let Err(error) = written {
        tracing::warn!("cannot write {}: {error}; the run continues without its lines", path.display());
    }
}
