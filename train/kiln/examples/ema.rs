//! An exponential moving average of the weights: a slot of the optimizer, so it is sharded, saved and resumed like its
//! moments. The loop also evaluates the averaged weights, and saves, every `eval.every` steps.
//!
//!     cargo run --release --example ema -- train configs/quickstart.toml --set optim.kind=ema --set eval.every=20

use kiln::prelude::*;

kiln::allocator!();

const DECAY: f32 = 0.99;

/// AdamW, followed by the average.
#[derive(Debug)]
struct Averaged(AdamW);

impl Rule for Averaged {
    fn name(&self) -> &str {
        "ema"
    }

    fn slots(&self) -> &[&'static str] {
        &["exp_avg", "exp_avg_sq", "ema"]
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        self.0.settings(shape)
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let ShardRun { weights, gradient, mut slots, settings } = run;
        let Some(averages) = slots.pop() else { return };
        self.0.update(step, ShardRun { weights: &mut *weights, gradient, slots, settings });
        // The average begins as the weights after the first step.
        let share = (1.0 - DECAY).max(1.0 / step.step as f32);
        averages
            .iter_mut()
            .zip(weights)
            .for_each(|(average, weight)| *average += share * (*weight - *average));
    }
}

fn train(mut trainer: Trainer<'_>) -> LoopResult {
    while trainer.train_step()? {
        if trainer.step().is_multiple_of(trainer.config().eval.every.max(1)) {
            let loss = trainer.evaluate()?;
            trainer.engine().swap_weights("ema")?;
            let of_average = trainer.evaluate()?;
            trainer.engine().swap_weights("ema")?;
            trainer.save()?;
            trainer.print_line(&format!("validation loss {loss:?}, of the average {of_average:?}"));
        }
    }
    Ok(trainer.finish()?)
}

fn main() -> std::process::ExitCode {
    let registry = Registry::default().optimizer("ema", |init| Ok(Averaged(init.section.adamw())));
    kiln::cli::main(registry.training_loop(train))
}
