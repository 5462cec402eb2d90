//! A rank's use of its time. A [`Span`] is the time between two reports of an activity
//! ([`Recorder::set_activity`](crate::Recorder::set_activity)), module
//! ([`Recorder::enter_module`](crate::Recorder::enter_module)) or wait ([`Recorder::waited`](crate::Recorder::waited)).
//! Sums cover the whole run; only the last spans are kept. With tensors on a GPU, spans are host times of queueing.

use crate::flight::Record;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// The activity of a rank that is held for inspection.
pub const HELD: &str = "held";

const CAPACITY: usize = 4096;

const CAPACITY_OF_ALL: usize = 1 << 20;

const STEPS: usize = 256;

/// Shorter waits count only in the sums.
const SHORT: Duration = Duration::from_micros(2);

/// A period of one activity of a rank's thread. Times are in seconds since its recorder was created.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Activity, such as `data loading`, `forward`, `backward`, `optimizer`, `checkpoint`.
    pub activity: String,
    /// The current module, such as `layers.3`; `None` outside of modules.
    pub module: Option<String>,
    /// The awaited collective, as group and number; `None` if the thread was not waiting.
    pub waits_for: Option<(String, u64)>,
    /// Start time.
    pub start: f64,
    /// End time.
    pub end: f64,
    /// Bytes that the rank held at the end; 0 if bytes are not counted.
    pub bytes: u64,
}

/// One optimizer step of one rank, up to the start of the next step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTimeline {
    /// Rank in the world.
    pub rank: usize,
    /// Machine that the rank runs on.
    pub node: String,
    /// The optimizer step.
    pub step: u64,
    /// Start time, in seconds as in [`Span`].
    pub start: f64,
    /// End time.
    pub end: f64,
    /// Creation time of the recorder on the machine's monotonic clock, in seconds. Aligns the ranks of one machine.
    pub created: f64,
    /// The spans of the rank's thread, in order. Very long steps may lack the first ones.
    pub spans: Vec<Span>,
    /// The collectives that the rank issued during the step, in order.
    pub records: Vec<Record>,
}

/// A rank's time in one activity since its recorder was created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActivityTime {
    /// The activity.
    pub activity: &'static str,
    /// Time without waits.
    pub busy: Duration,
    /// Time spent waiting for other ranks.
    pub waited: Duration,
}

#[derive(Debug)]
struct Kept {
    activity: &'static str,
    module: Option<Arc<str>>,
    waits_for: Option<(Arc<str>, u64)>,
    start: Duration,
    end: Duration,
    bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Timeline {
    activity: &'static str,
    module: Option<Arc<str>>,
    since: Duration,
    times: Vec<ActivityTime>,
    spans: VecDeque<Kept>,
    steps: VecDeque<(u64, Duration)>,
    keeps_all: bool,
    held_bytes: Option<fn() -> u64>,
}

impl Default for Timeline {
    fn default() -> Timeline {
        Timeline {
            activity: "start",
            module: None,
            since: Duration::ZERO,
            times: Vec::new(),
            // Allocated now: memory allocated while a rank works would be counted as tensors.
            spans: VecDeque::with_capacity(CAPACITY + 1),
            steps: VecDeque::with_capacity(STEPS),
            keeps_all: false,
            held_bytes: None,
        }
    }
}

impl Timeline {
    pub(crate) fn count_bytes(&mut self, held_bytes: fn() -> u64) {
        self.held_bytes = Some(held_bytes);
    }

    pub(crate) fn keep_all(&mut self, all: bool) {
        self.keeps_all = all;
    }

    pub(crate) fn set_activity(&mut self, activity: &'static str, now: Duration) {
        self.close(now, None);
        (self.activity, self.module) = (activity, None);
    }

    pub(crate) fn enter_module(&mut self, module: &Arc<str>, now: Duration) {
        self.close(now, None);
        self.module = Some(Arc::clone(module));
    }

    pub(crate) fn waited(&mut self, group: &Arc<str>, sequence: u64, start: Duration, now: Duration) {
        // A wait lies within the current span; the clocks of other threads must not extend it.
        let start = start.clamp(self.since, now);
        if now - start < SHORT {
            let time = self.time();
            time.waited += now - start;
            // Waiting time must not also count as busy time.
            self.since += now - start;
            return;
        }
        self.close(start, None);
        self.close(now, Some((Arc::clone(group), sequence)));
    }

    pub(crate) fn held(&mut self, start: Duration, now: Duration) {
        self.close(start.clamp(self.since, now), None);
        let activity = std::mem::replace(&mut self.activity, HELD);
        self.close(now, None);
        self.activity = activity;
    }

    pub(crate) fn begin_step(&mut self, step: u64, now: Duration) {
        self.close(now, None);
        self.module = None;
        if self.steps.len() == STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back((step, now));
    }

    pub(crate) fn times(&self, now: Duration) -> Vec<ActivityTime> {
        let mut times = self.times.clone();
        let busy = now.saturating_sub(self.since);
        match times.iter_mut().find(|time| time.activity == self.activity) {
            Some(time) => time.busy += busy,
            None => times.push(ActivityTime { activity: self.activity, busy, waited: Duration::ZERO }),
        }
        times
    }

    pub(crate) fn last_step(&self) -> Option<u64> {
        self.steps.len().checked_sub(2).map(|index| self.steps[index].0)
    }

    /// Returns the start of `step` and of the next step, or `now`.
    pub(crate) fn bounds(&self, step: u64, now: Duration) -> Option<(Duration, Duration)> {
        let at = self.steps.iter().rposition(|(known, _)| *known == step)?;
        Some((self.steps[at].1, self.steps.get(at + 1).map_or(now, |(_, start)| *start)))
    }

    pub(crate) fn spans(&self, start: Duration, end: Duration) -> Vec<Span> {
        let within = |kept: &&Kept| kept.start >= start && kept.start < end;
        self.spans.iter().filter(within).map(Kept::span).collect()
    }

    fn time(&mut self) -> &mut ActivityTime {
        let at = self.times.iter().position(|time| time.activity == self.activity);
        let at = at.unwrap_or_else(|| {
            self.times.push(ActivityTime { activity: self.activity, ..ActivityTime::default() });
            self.times.len() - 1
        });
        &mut self.times[at]
    }

    fn close(&mut self, now: Duration, waits_for: Option<(Arc<str>, u64)>) {
        let start = std::mem::replace(&mut self.since, now);
        let taken = now.saturating_sub(start);
        let time = self.time();
        *(if waits_for.is_some() { &mut time.waited } else { &mut time.busy }) += taken;
        if taken.is_zero() {
            return;
        }
        let capacity = if self.keeps_all { CAPACITY_OF_ALL } else { CAPACITY };
        while self.spans.len() >= capacity {
            self.spans.pop_front();
        }
        let bytes = self.held_bytes.map_or(0, |held_bytes| held_bytes());
        let (activity, module) = (self.activity, self.module.clone());
        self.spans.push_back(Kept { activity, module, waits_for, start, end: now, bytes });
    }
}

impl Kept {
    fn span(&self) -> Span {
        let waits_for = self.waits_for.as_ref();
        Span {
            activity: self.activity.to_owned(),
            module: self.module.as_ref().map(|module| module.to_string()),
            waits_for: waits_for.map(|(group, sequence)| (group.to_string(), *sequence)),
            start: self.start.as_secs_f64(),
            end: self.end.as_secs_f64(),
            bytes: self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn spans_and_sums_cover_all_of_the_time() {
        let (mut timeline, group) = (Timeline::default(), Arc::from("world"));
        timeline.set_activity("data loading", us(10));
        timeline.begin_step(1, us(20));
        timeline.set_activity("forward", us(30));
        timeline.enter_module(&Arc::from("layers.0"), us(40));
        timeline.waited(&group, 7, us(50), us(80));
        timeline.waited(&group, 8, us(89), us(90));
        timeline.set_activity("backward", us(100));
        timeline.begin_step(2, us(130));
        let spans: Vec<_> = timeline
            .spans(us(20), us(130))
            .into_iter()
            .map(|span| (span.activity, span.module, span.waits_for, (span.end * 1e6).round() as u64))
            .collect();
        let layer = Some("layers.0".to_owned());
        assert_eq!(
            spans,
            [
                ("data loading".to_owned(), None, None, 30),
                ("forward".to_owned(), None, None, 40),
                ("forward".to_owned(), layer.clone(), None, 50),
                ("forward".to_owned(), layer.clone(), Some(("world".to_owned(), 7)), 80),
                ("forward".to_owned(), layer, None, 100),
                ("backward".to_owned(), None, None, 130),
            ]
        );
        let time = |activity, busy, waited| ActivityTime { activity, busy: us(busy), waited: us(waited) };
        let times = timeline.times(us(150));
        let expected = [
            time("start", 10, 0),
            time("data loading", 20, 0),
            time("forward", 39, 31),
            time("backward", 50, 0),
        ];
        assert_eq!(times, expected);
        assert_eq!(times.iter().map(|time| time.busy + time.waited).sum::<Duration>(), us(150));
        assert_eq!((timeline.last_step(), timeline.bounds(1, us(150))), (Some(1), Some((us(20), us(130)))));
        assert_eq!(timeline.bounds(2, us(150)), Some((us(130), us(150))));
        assert_eq!(timeline.bounds(3, us(150)), None);
    }

    #[test]
    fn old_spans_are_dropped_unless_all_are_kept() {
        let mut timeline = Timeline::default();
        let run = |timeline: &mut Timeline, from: u64| {
            (from..from + 5000).for_each(|at| timeline.set_activity("forward", us(at)));
        };
        run(&mut timeline, 1);
        assert_eq!(timeline.spans(us(0), us(u64::MAX >> 20)).len(), CAPACITY);
        timeline.keep_all(true);
        run(&mut timeline, 5001);
        assert_eq!(timeline.spans(us(0), us(u64::MAX >> 20)).len(), CAPACITY + 5000);
    }
}
