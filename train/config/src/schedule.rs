//! Learning rates over the steps of a run.

use kiln_shard::LearningRates;

use crate::{Config, LrSchedule, MUON, OptimSection, Schedule};

/// Returns the learning rate of `[optim]` in step `step` of `steps`, both counted from 1.
pub fn learning_rate(optim: &OptimSection, step: u64, steps: u64) -> f64 {
    rate(optim.lr, optim.lr_schedule(), step, steps)
}

/// Returns the [`learning_rate`], and one for each other schedule, in the order of `OptimSection::lr_schedules`.
pub fn learning_rates(optim: &OptimSection, step: u64, steps: u64) -> LearningRates {
    let others = optim.lr_schedules().split_off(1);
    let others = others.into_iter().map(|schedule| rate(optim.lr, schedule, step, steps));
    LearningRates::new(learning_rate(optim, step, steps), others.collect())
}

fn rate(lr: f64, schedule: LrSchedule, step: u64, steps: u64) -> f64 {
    let LrSchedule { schedule, warmup_steps, decay_steps, min_lr_ratio } = schedule;
    if step <= warmup_steps {
        return lr * step as f64 / warmup_steps as f64;
    }
    let floor = lr * min_lr_ratio;
    let towards_floor = |share: f64| floor + (lr - floor) * share;
    match schedule {
        Schedule::Constant => lr,
        Schedule::Cosine => {
            let progress = fraction(step - warmup_steps, steps.saturating_sub(warmup_steps));
            towards_floor(0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
        }
        Schedule::Wsd => {
            let decay = decay_steps.unwrap_or(steps / 10);
            let stable_until = steps.saturating_sub(decay);
            if step <= stable_until { lr } else { towards_floor(1.0 - fraction(step - stable_until, decay)) }
        }
    }
}

/// Relative change of a learning rate above which a resume reports it.
const JUMP: f64 = 0.01;

/// Returns a warning if the learning rate jumps when a run resumes after `step` with `after` instead of `before`.
pub fn jump(step: u64, before: &Config, after: &Config) -> Option<String> {
    if step == 0 || step >= after.train.steps {
        return None;
    }
    let rates = |config: &Config, step| -> Vec<f64> {
        let Config { optim, train, .. } = config;
        optim.lr_schedules().into_iter().map(|own| rate(optim.lr, own, step, train.steps)).collect()
    };
    let (last, expected, next) = (rates(before, step), rates(before, step + 1), rates(after, step + 1));
    let is_jump = |(expected, next): (&f64, &f64)| (next - expected).abs() > JUMP * next.max(*expected);
    let index = expected.iter().zip(&next).position(is_jump)?;
    let whose = if index == 0 { "" } else { " of a group in optim.groups" };
    let (last, next) = (last[index], next[index]);
    let (was, is) = (&before.optim, &after.optim);
    let causes = [
        ("train.steps", before.train.steps.to_string(), after.train.steps.to_string()),
        ("optim.lr", was.lr.to_string(), is.lr.to_string()),
        ("optim.schedule", format!("{:?}", was.schedule), format!("{:?}", is.schedule)),
        ("optim.warmup_steps", was.warmup_steps.to_string(), is.warmup_steps.to_string()),
        ("optim.decay_steps", format!("{:?}", was.decay_steps), format!("{:?}", is.decay_steps)),
        ("optim.min_lr_ratio", was.min_lr_ratio.to_string(), is.min_lr_ratio.to_string()),
    ];
    let causes = causes.into_iter().filter(|(_, was, is)| was != is).map(|(key, ..)| key).collect::<Vec<_>>();
    let causes = if causes.is_empty() { vec!["optim.groups"] } else { causes };
    let remedy = match index {
        0 => {
            let others = is.kind == MUON || is.groups.iter().any(|group| group.lr.is_some());
            let others = match others {
                true => {
                    format!("; multiply the rates of optim.muon and optim.groups by {:.4}", last / was.lr)
                }
                false => String::new(),
            };
            format!(
                "To continue at {last:.3e}, set optim.schedule = \"constant\", optim.warmup_steps = 0 and \
                 optim.lr = {last:.3e}{others}"
            )
        }
        _ => "To avoid it, restore these keys".to_owned(),
    };
    Some(format!(
        "the learning rate{whose} jumps from {last:.3e} in step {step} to {next:.3e} in step {}, because {} \
         changed. {remedy}",
        step + 1,
        causes.join(" and "),
    ))
}

fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { (part as f64 / whole as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OptimGroup;

    fn optim(schedule: Schedule) -> OptimSection {
        OptimSection {
            lr: 1.0,
            schedule,
            warmup_steps: 10,
            decay_steps: Some(20),
            min_lr_ratio: 0.1,
            ..OptimSection::default()
        }
    }

    fn table(schedule: Schedule, steps: [u64; 7]) -> [f64; 7] {
        steps.map(|step| (learning_rate(&optim(schedule), step, 110) * 1e6).round() / 1e6)
    }

    #[test]
    fn warm_up_is_linear_and_reaches_the_peak() {
        for schedule in [Schedule::Constant, Schedule::Cosine, Schedule::Wsd] {
            assert_eq!(learning_rate(&optim(schedule), 1, 110), 0.1);
            assert_eq!(learning_rate(&optim(schedule), 10, 110), 1.0);
        }
    }

    #[test]
    fn schedules_follow_their_tables() {
        let steps = [11, 35, 60, 90, 91, 100, 110];
        assert_eq!(table(Schedule::Constant, steps), [1.0; 7]);
        assert_eq!(
            table(Schedule::Cosine, steps),
            [0.999778, 0.868198, 0.55, 0.185942, 0.177814, 0.122025, 0.1]
        );
        assert_eq!(table(Schedule::Wsd, steps), [1.0, 1.0, 1.0, 1.0, 0.955, 0.55, 0.1]);
    }

    #[test]
    fn warm_up_may_fill_the_run() {
        for schedule in [Schedule::Constant, Schedule::Cosine, Schedule::Wsd] {
            let lr = learning_rate(&optim(schedule), 10, 10);
            assert_eq!(lr, 1.0);
        }
    }

    #[test]
    fn resume_reports_jumps() {
        let config = |schedule, steps| {
            let mut config = Config { optim: optim(schedule), ..Config::default() };
            config.train.steps = steps;
            config
        };
        let (cosine, wsd) = (config(Schedule::Cosine, 110), config(Schedule::Wsd, 110));
        let message = jump(110, &cosine, &config(Schedule::Cosine, 210)).expect("a jump");
        assert!(
            message.contains("from 1.000e-1 in step 110 to 5.429e-1 in step 111, because train.steps"),
            "{message}"
        );
        assert!(message.contains("optim.lr = 1.000e-1") && !message.contains("multiply"), "{message}");
        assert_eq!(jump(60, &cosine, &cosine), None);
        assert_eq!(jump(110, &config(Schedule::Constant, 110), &config(Schedule::Constant, 210)), None);
        assert_eq!(jump(60, &wsd, &config(Schedule::Wsd, 210)), None);
        assert_eq!(jump(110, &cosine, &config(Schedule::Cosine, 100)), None);
        assert_eq!(jump(0, &cosine, &wsd), None);
        for (step, after) in
            [(110, config(Schedule::Wsd, 210)), (60, config(Schedule::Wsd, 70)), (60, cosine.clone())]
        {
            assert!(jump(step, &wsd, &after).is_some(), "{step}");
        }
        let mut after = cosine.clone();
        after.optim.lr = 0.5;
        after.optim.kind = MUON.to_owned();
        let message = jump(60, &cosine, &after).expect("a jump");
        assert!(message.contains("because optim.lr changed") && message.contains("by 0.5500"), "{message}");
        let mut after = cosine.clone();
        after.optim.groups = vec![OptimGroup { schedule: Some(Schedule::Constant), ..OptimGroup::default() }];
        let mut before = cosine;
        before.optim.groups = vec![OptimGroup { schedule: Some(Schedule::Wsd), ..OptimGroup::default() }];
        assert_eq!(jump(60, &before, &after), None);
        let message = jump(95, &before, &after).expect("a jump");
        assert!(
            message.contains("of a group in optim.groups") && message.contains("restore these keys"),
            "{message}"
        );
    }

    #[test]
    fn groups_follow_their_schedules() {
        let group = |schedule, warmup_steps| OptimGroup { schedule, warmup_steps, ..OptimGroup::default() };
        let groups = vec![
            group(Some(Schedule::Constant), Some(0)),
            group(None, None),
            group(Some(Schedule::Wsd), None),
            group(Some(Schedule::Cosine), Some(10)),
            group(None, Some(0)),
            group(Some(Schedule::Wsd), None),
        ];
        let optim = OptimSection { groups, ..optim(Schedule::Cosine) };
        for step in [1, 5, 11, 60, 95, 110] {
            let with = |schedule, warmup_steps| {
                learning_rate(&OptimSection { schedule, warmup_steps, ..optim.clone() }, step, 110)
            };
            let others =
                vec![with(Schedule::Constant, 0), with(Schedule::Wsd, 10), with(Schedule::Cosine, 0)];
            let expected = LearningRates::new(with(Schedule::Cosine, 10), others);
            assert_eq!(learning_rates(&optim, step, 110), expected);
        }
    }
}
