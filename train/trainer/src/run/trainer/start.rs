//! The header that rank 0 prints before it initialises the weights, which takes a minute for a large model.

use kiln_shard::{Mesh, ShardError};

use crate::error::Result;
use crate::metrics::print_line;
use crate::run::plan::{Plan, PlanMessage};
use crate::version::version;
use kiln_checkpoint::shape_line;
use kiln_config::{Config, OptimSection, Schedule};
use kiln_data::BatchSource;
use kiln_sys::words::number_of;

pub(super) fn introduce(plan: &Plan, parameters: usize, ranks: usize, data: &BatchSource) -> Result<()> {
    let Plan { config, model, message: PlanMessage { data: info, threads, .. }, .. } = plan;
    let (train, policy) = (&config.train, config.policy());
    let mesh = Mesh::new(policy.strategy, ranks, config.shard.shard_size);
    let mesh = mesh.map_err(ShardError::from)?;
    print_line(&plan.device.describe());
    print_line(&shape_line(model, format_args!("{:.2}M", parameters as f64 / 1e6)));
    let passes = train.global_batch / ranks / config.micro_batch();
    let accumulate = match passes {
        1 => String::new(),
        _ => format!(", accumulate {}", policy.accumulate),
    };
    print_line(&format!(
        "ranks: {ranks} x {}, mesh {mesh}, {}, recompute {}{accumulate}",
        number_of(*threads, "thread"),
        config.shard.strategy,
        config.shard.recompute()
    ));
    print_line(&format!(
        "dtypes: master f32, compute {}, reduce {}, accumulate f32",
        policy.compute_dtype, policy.reduce_dtype
    ));
    let micro_batches = match passes {
        1 => "1 micro-batch".to_owned(),
        count => format!("{count} micro-batches"),
    };
    print_line(&format!(
        "batch: {} x {} per step = {} x {} x {}; {}{}",
        number_of(train.global_batch, "sequence"),
        number_of(config.data.seq_len, "token"),
        number_of(ranks, "rank"),
        micro_batches,
        config.micro_batch(),
        number_of(train.steps, "step"),
        data.num_samples().map_or_else(String::new, |samples| {
            let taken = (train.steps * train.global_batch as u64) as f64;
            format!(" = {:.2} epochs of {}", taken / samples as f64, number_of(samples, "sample"))
        }),
    ));
    print_line(&format!("optimizer: {}", optimizer(&config.optim)));
    print_line(&format!("run folder: {}; {}", plan.out.display(), rhythm(config)));
    if let Some(unigram) = &info.unigram_entropy {
        print_line(&format!(
            "unigram entropy of the validation text: {:.4} nats per token",
            unigram.validation
        ));
    }
    Ok(())
}

pub(super) fn started_as(plan: &Plan, ranks: usize) -> String {
    let from = plan.resume.as_ref().map_or_else(String::new, |checkpoint| {
        format!("from step {}, {}; ", checkpoint.state().step, checkpoint.folder().display())
    });
    let (strategy, device) = (plan.config.shard.strategy, plan.device.describe());
    format!("{from}kiln {}, {}, {strategy}, {device}", version(), number_of(ranks, "rank"))
}

fn optimizer(section: &OptimSection) -> String {
    let OptimSection { kind, lr, schedule, warmup_steps, min_lr_ratio, weight_decay, grad_clip, .. } =
        section;
    let warmup = number_of(*warmup_steps, "step");
    let schedule = match schedule {
        Schedule::Constant => "constant".to_owned(),
        Schedule::Cosine => format!("cosine to {:.2e}", lr * min_lr_ratio),
        Schedule::Wsd => format!("wsd to {:.2e}", lr * min_lr_ratio),
    };
    let clip = if *grad_clip > 0.0 { format!("clip {grad_clip}") } else { "no clipping".to_owned() };
    format!("{kind}, lr {lr:.2e} after {warmup} of warm-up, {schedule}, weight decay {weight_decay}, {clip}")
}

fn rhythm(config: &Config) -> String {
    let every = |steps: u64| match steps {
        0 => "at the end".to_owned(),
        steps => format!("every {}", number_of(steps, "step")),
    };
    let Config { log, eval, checkpoint, .. } = config;
    format!("logs {}, evaluates {}, saves {}", every(log.every), every(eval.every), every(checkpoint.every))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_told_in_words() {
        let mut config = Config::default();
        let constant = OptimSection { schedule: Schedule::Constant, grad_clip: 0.0, ..config.optim.clone() };
        let told = "adamw, lr 1.00e-3 after 10 steps of warm-up, cosine to 1.00e-4, weight decay 0.1, clip 1";
        assert_eq!(optimizer(&config.optim), told);
        let told = "adamw, lr 1.00e-3 after 10 steps of warm-up, constant, weight decay 0.1, no clipping";
        assert_eq!(optimizer(&constant), told);
        (config.eval.every, config.log.every) = (100, 1);
        assert_eq!(rhythm(&config), "logs every 1 step, evaluates every 100 steps, saves at the end");
    }
}
