//! The summary at the end of a run: its progress, its time by activity, its resources, and what to do next.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use kiln_collectives::ActivityTime;

use crate::metrics::BestLoss;
use crate::process::quoted;
use kiln_sys::words::{duration, flops_per_s, number_of, size};

const ACTIVITIES: [(&str, &str); 7] = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer", "optimizer"),
    ("data loading", "data"),
    ("evaluation", "evaluation"),
    ("checkpoint", "checkpoint"),
    ("sampling", "sampling"),
];

/// Share of waiting, and length of a run, above which the summary suggests a remedy.
const MUCH: f64 = 0.2;
const SOME_LENGTH: Duration = Duration::from_secs(60);

const LITTLE: f64 = 0.005;

pub(super) struct Conclusion {
    pub(super) out: PathBuf,
    pub(super) elapsed: Duration,
    pub(super) start: Duration,
    pub(super) times: Vec<ActivityTime>,
    pub(super) ranks: usize,
    pub(super) steps: u64,
    pub(super) skipped: u64,
    pub(super) tokens: u64,
    pub(super) in_steps: f64,
    /// FLOP/s of the model over these steps, and their share of the peak if that is known.
    pub(super) flops: f64,
    pub(super) mfu: Option<f64>,
    pub(super) val_loss: Option<f64>,
    pub(super) unigram: Option<f64>,
    pub(super) best: Option<BestLoss>,
    /// The checkpoint of the step with the lowest validation loss, if it exists and is not the last one.
    pub(super) best_checkpoint: Option<PathBuf>,
    /// The most bytes that a rank held; the planned bytes, with the layers that the plan does not describe.
    pub(super) peak_bytes: Option<u64>,
    pub(super) planned: Option<(u64, BTreeSet<&'static str>)>,
    /// Command-line name of the program that has the model's parts; `None` if it has no commands.
    pub(super) program: Option<String>,
    /// True if the Hugging Face layout has all parts of the model.
    pub(super) is_exportable: bool,
}

impl Conclusion {
    pub(super) fn lines(&self) -> Vec<String> {
        let lines = [
            ("validation loss", self.validation()),
            ("time", Some(self.time())),
            ("tokens", self.trained()),
            ("memory of a rank", self.memory()),
        ];
        lines.into_iter().filter_map(|(what, text)| Some(format!("{what:<17} {}", text?))).collect()
    }

    fn validation(&self) -> Option<String> {
        let mut text = match (self.val_loss, self.best) {
            (None, None) => return None,
            (Some(loss), None) => format!("{loss:.4}"),
            (None, Some(best)) => format!("lowest {:.4}, at step {}", best.val_loss, best.step),
            (Some(loss), Some(best)) if best.val_loss < loss => {
                format!("{loss:.4}, lowest {:.4}, at step {}", best.val_loss, best.step)
            }
            (Some(loss), Some(_)) => format!("{loss:.4}, the lowest of the run"),
        };
        if let Some(unigram) = self.unigram {
            let _ = write!(text, "; unigram entropy {unigram:.4}");
        }
        Some(text)
    }

    fn time(&self) -> String {
        let all = self.elapsed.as_secs_f64();
        let share = |time: Duration| time.as_secs_f64() / all.max(f64::MIN_POSITIVE);
        let busy = |activity: &str| {
            let of = self.times.iter().filter(|time| time.activity == activity);
            share(of.map(|time| time.busy).sum())
        };
        let mut shares: Vec<_> = ACTIVITIES.iter().map(|(activity, name)| (*name, busy(activity))).collect();
        shares.extend((self.ranks > 1).then(|| ("waiting", self.waiting())));
        shares.insert(0, ("start", share(self.start)));
        let known: f64 = shares.iter().map(|(_, share)| share).sum();
        shares.push(("other", (1.0 - known).max(0.0)));
        let told = shares.iter().filter(|(_, share)| *share >= LITTLE);
        let told: Vec<_> = told.map(|(name, share)| format!("{name} {:.0}%", share * 100.0)).collect();
        format!("{}: {}", duration(self.elapsed), told.join(", "))
    }

    fn waiting(&self) -> f64 {
        // Until the first step, ranks wait for the rank that prepares the run.
        let is_work =
            |time: &&ActivityTime| ACTIVITIES.iter().any(|(activity, _)| time.activity == *activity);
        let waited: Duration = self.times.iter().filter(is_work).map(|time| time.waited).sum();
        waited.as_secs_f64() / self.elapsed.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    fn trained(&self) -> Option<String> {
        if self.steps == 0 {
            return None;
        }
        let rate = self.tokens as f64 / self.in_steps.max(f64::MIN_POSITIVE);
        let mut text = format!(
            "{} in {}, {rate:.0} tok/s, {}",
            self.tokens,
            number_of(self.steps, "step"),
            match self.mfu {
                Some(mfu) => format!("mfu {:.1}%", mfu * 100.0),
                None => flops_per_s(self.flops),
            }
        );
        if self.skipped > 0 {
            let _ = write!(text, "; {} without an update", number_of(self.skipped, "step"));
        }
        Some(text)
    }

    fn memory(&self) -> Option<String> {
        let peak = self.peak_bytes.filter(|bytes| *bytes > 0)?;
        let mut text = format!("{} at its peak", size(peak));
        if let Some((planned, undescribed)) = &self.planned {
            let _ = write!(text, ", {} were planned", size(*planned));
            if !undescribed.is_empty() {
                let names: Vec<_> = undescribed.iter().copied().collect();
                let _ = write!(text, "; not described: {}", names.join(", "));
            }
        }
        Some(text)
    }

    pub(super) fn next(&self) -> Vec<String> {
        let out = quoted(&self.out);
        let mut next = Vec::new();
        if let (Some(best), Some(checkpoint)) = (self.best, &self.best_checkpoint) {
            next.push(format!("the checkpoint of step {} was better: {}", best.step, checkpoint.display()));
        }
        if self.ranks > 1 && self.waiting() > MUCH && self.elapsed > SOME_LENGTH {
            next.push("ranks waited for each other: kiln bench strategies compares ways to shard".to_owned());
        }
        if let Some(program) = &self.program {
            next.push(format!("{program} generate {out} --prompt \"...\""));
            next.push(format!("{program} eval {out}"));
            if self.is_exportable {
                next.push(format!("{program} export {out} --out DIR"));
            }
        }
        let what = |index| if index == 0 { "next" } else { "" };
        next.into_iter().enumerate().map(|(index, line)| format!("{:<17} {line}", what(index))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spent(activity: &'static str, busy: u64, waited: u64) -> ActivityTime {
        let [busy, waited] = [busy, waited].map(Duration::from_millis);
        ActivityTime { activity, busy, waited }
    }

    fn whole() -> Conclusion {
        Conclusion {
            out: PathBuf::from("runs/quickstart"),
            elapsed: Duration::from_millis(148_500),
            start: Duration::from_millis(2_200),
            times: vec![
                spent("start", 900, 100),
                spent("data loading", 1_300, 0),
                spent("forward", 40_000, 3_000),
                spent("backward", 78_000, 6_000),
                spent("optimizer", 9_000, 1_000),
                spent("evaluation", 4_000, 200),
                spent("checkpoint", 900, 500),
            ],
            ranks: 2,
            steps: 400,
            skipped: 0,
            tokens: 819_200,
            in_steps: 138.3,
            flops: 12.34e9,
            mfu: Some(0.311),
            val_loss: Some(3.4203),
            unigram: Some(6.2539),
            best: Some(BestLoss { step: 400, val_loss: 3.4203 }),
            best_checkpoint: None,
            peak_bytes: Some(129_394_278),
            planned: Some((126_100_000, BTreeSet::new())),
            program: Some("kiln".to_owned()),
            is_exportable: true,
        }
    }

    fn told(conclusion: &Conclusion) -> String {
        [conclusion.lines(), conclusion.next()].concat().join("\n")
    }

    #[test]
    fn a_run_ends_with_what_there_is_to_say() {
        let overfitted = Conclusion {
            best: Some(BestLoss { step: 300, val_loss: 3.39 }),
            best_checkpoint: Some(PathBuf::from("runs/quickstart/checkpoints/fsdp_cpt300")),
            skipped: 3,
            planned: Some((126_100_000, BTreeSet::from(["Mixer"]))),
            times: vec![spent("forward", 40_000, 60_000)],
            ..whole()
        };
        let stopped = Conclusion {
            val_loss: None,
            best: None,
            unigram: None,
            steps: 1,
            mfu: None,
            elapsed: Duration::from_secs(7_380),
            planned: None,
            ..whole()
        };
        let nothing = Conclusion {
            steps: 0,
            best: None,
            peak_bytes: None,
            elapsed: Duration::ZERO,
            start: Duration::ZERO,
            times: Vec::new(),
            ..whole()
        };
        let texts = [&whole(), &overfitted, &stopped, &nothing].map(told);
        assert!(texts.iter().all(|text| text.lines().count() <= 10));
        insta::assert_snapshot!(texts.join("\n\n"));
    }
}
