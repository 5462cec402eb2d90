//! Learning rates over the steps of a run.

use kiln_shard::LearningRates;

use crate::config::{LrSchedule, OptimSection, Schedule};

/// The learning rate of step `step` of `steps`, both counted from 1: that of `[optim]`.
pub fn learning_rate(optim: &OptimSection, step: u64, steps: u64) -> f64 {
    rate(optim.lr, optim.lr_schedule(), step, steps)
}

/// [`learning_rate`], and the same with each schedule that a group of parameters has of its own, in the order of
/// [`OptimSection::lr_schedules`].
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
            let progress = fraction(step - warmup_steps, steps - warmup_steps);
            towards_floor(0.5 * (1.0 + (std::f64::consts::PI * progress).cos()))
        }
        Schedule::Wsd => {
            let decay = decay_steps.unwrap_or(steps / 10);
            let stable_until = steps.saturating_sub(decay);
            if step <= stable_until { lr } else { towards_floor(1.0 - fraction(step - stable_until, decay)) }
        }
    }
}

fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { (part as f64 / whole as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimGroup;

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
    fn a_run_of_nothing_but_warm_up_has_no_division_by_zero() {
        for schedule in [Schedule::Constant, Schedule::Cosine, Schedule::Wsd] {
            let lr = learning_rate(&optim(schedule), 10, 10);
            assert_eq!(lr, 1.0);
        }
    }

    /// A group's schedule is that of `[optim]` with its own keys, and gets a rate of its own only if it differs.
    #[test]
    fn groups_have_the_rates_of_their_schedules() {
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
