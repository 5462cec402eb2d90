//! Records a rank's communication: the last operations in detail, and totals of all. After a failure, the first record
//! without a `finished` time is the operation in which the rank was stuck.

use crate::call::Call;
use crate::flight::{Activity, GroupFlight, Pending, Record};
use crate::label::{Phase, text};
use crate::operation::Operation;
use crate::sync::lock;
use crate::timeline::{ActivityTime, StepTimeline, Timeline};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Default number of records that a recorder keeps.
pub const DEFAULT_CAPACITY: usize = 4096;

const CAPACITY_OF_ALL: usize = 1 << 20;

/// Attempts of [`Recorder::write_now`] to lock the log, which other threads hold for less than a microsecond.
const LOCK_ATTEMPTS: usize = 10_000;

/// Calls and bytes of all operations of one kind, label and group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Kind of operation.
    pub operation: Operation,
    /// Scope of the label.
    #[serde(rename = "module", with = "text")]
    pub scope: Arc<str>,
    /// Phase of the label.
    pub phase: Phase,
    /// Name of the group.
    #[serde(with = "text")]
    pub group: Arc<str>,
    /// Number of issued calls.
    pub calls: u64,
    /// Ring bytes of these calls.
    pub bytes_sent: u64,
}

/// The flight recorder of one rank, for all its groups. Counts an operation when it is issued.
#[derive(Debug)]
pub struct Recorder {
    created: Instant,
    /// Time of creation on the machine's monotonic clock.
    created_monotonic: f64,
    capacity: usize,
    log: Mutex<Log>,
    timeline: Mutex<Timeline>,
}

type TotalKey = (Operation, Arc<str>, Phase, Arc<str>);

#[derive(Debug, Default)]
struct Log {
    records: VecDeque<Record>,
    /// Index of the next record, counted over all records ever made.
    next: u64,
    totals: BTreeMap<TotalKey, (u64, u64)>,
    groups: Vec<GroupLog>,
    activity: Option<(&'static str, Duration)>,
    keeps_all: bool,
}

impl Log {
    fn record_mut(&mut self, id: RecordId) -> Option<&mut Record> {
        let first = self.next - self.records.len() as u64;
        let index = usize::try_from(id.index.checked_sub(first)?).ok()?;
        self.records.get_mut(index)
    }
}

#[derive(Debug)]
struct GroupLog {
    name: Arc<str>,
    world_ranks: Vec<usize>,
    issued: u64,
    pending: BTreeMap<u64, (Call, Duration)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupId(usize);

/// Stays valid after the record has been dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordId {
    index: u64,
    group: GroupId,
    sequence: u64,
}

impl Recorder {
    /// Creates a recorder that keeps the last `capacity` records, and all totals.
    pub fn new(capacity: usize) -> Recorder {
        Recorder {
            created: Instant::now(),
            created_monotonic: monotonic(),
            capacity,
            log: Mutex::new(Log {
                // Allocated now: memory allocated while a rank works would be counted as tensors.
                records: VecDeque::with_capacity(capacity.min(DEFAULT_CAPACITY) + 1),
                ..Log::default()
            }),
            timeline: Mutex::default(),
        }
    }

    /// Returns the last records, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.last_records(usize::MAX)
    }

    pub(crate) fn last_records(&self, count: usize) -> Vec<Record> {
        let log = lock(&self.log);
        log.records.iter().skip(log.records.len().saturating_sub(count)).cloned().collect()
    }

    /// Returns the totals since creation or the last reset, sorted by operation, scope, phase and group.
    pub fn totals(&self) -> Vec<Total> {
        lock(&self.log)
            .totals
            .iter()
            .map(|((operation, scope, phase, group), (calls, bytes_sent))| Total {
                operation: *operation,
                scope: Arc::clone(scope),
                phase: *phase,
                group: Arc::clone(group),
                calls: *calls,
                bytes_sent: *bytes_sent,
            })
            .collect()
    }

    /// Resets the totals, for example at the start of a step. Keeps the records.
    pub fn reset_totals(&self) {
        lock(&self.log).totals.clear();
    }

    /// Returns the bytes sent by all groups since creation or the last reset.
    pub fn bytes_sent(&self) -> u64 {
        lock(&self.log).totals.values().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of calls of `operation` since creation or the last reset, in `phase` or in all phases.
    pub fn count(&self, operation: Operation, phase: Option<Phase>) -> u64 {
        lock(&self.log)
            .totals
            .iter()
            .filter(|((o, _, p, _), _)| *o == operation && phase.is_none_or(|phase| phase == *p))
            .map(|(_, (calls, _))| calls)
            .sum()
    }

    /// Sets the activity other than communication, such as `"data loading"`. Verdicts name it when other ranks wait.
    pub fn set_activity(&self, name: &'static str) {
        let now = self.created.elapsed();
        lock(&self.log).activity = Some((name, now));
        lock(&self.timeline).set_activity(name, now);
    }

    /// Records that the rank enters `module`, which it leaves when the activity changes.
    pub fn enter_module(&self, module: &Arc<str>) {
        lock(&self.timeline).enter_module(module, self.created.elapsed());
    }

    /// Records that the rank's thread has waited for operation `sequence` of `group` since `start`.
    pub fn waited(&self, group: &Arc<str>, sequence: u64, start: Instant) {
        let start = start.saturating_duration_since(self.created);
        lock(&self.timeline).waited(group, sequence, start, self.created.elapsed());
    }

    /// Records that the rank was held for inspection since `start`.
    pub fn was_held(&self, start: Instant) {
        let start = start.saturating_duration_since(self.created);
        lock(&self.timeline).held(start, self.created.elapsed());
    }

    /// Records that an optimizer step begins.
    pub fn begin_step(&self, step: u64) {
        lock(&self.timeline).begin_step(step, self.created.elapsed());
    }

    /// Makes each later span include the bytes that `held_bytes` returns. Only the rank's own thread may call it.
    pub fn count_bytes(&self, held_bytes: fn() -> u64) {
        lock(&self.timeline).count_bytes(held_bytes);
    }

    /// Keeps all later spans and records, or, with `false`, only the last ones.
    pub fn keep_all(&self, all: bool) {
        lock(&self.timeline).keep_all(all);
        lock(&self.log).keeps_all = all;
    }

    /// Returns the rank's times by activity since the recorder was created.
    pub fn times(&self) -> Vec<ActivityTime> {
        lock(&self.timeline).times(self.created.elapsed())
    }

    /// Returns the rank's time in waits since the recorder was created.
    pub fn total_waited(&self) -> Duration {
        self.times().iter().map(|time| time.waited).sum()
    }

    /// Returns the timeline of optimizer step `step`, by default the last completed step; `None` if not recorded.
    pub(crate) fn timeline(&self, rank: usize, node: &str, step: Option<u64>) -> Option<StepTimeline> {
        let now = self.created.elapsed();
        let (step, start, end, spans) = {
            let timeline = lock(&self.timeline);
            let step = step.or_else(|| timeline.last_step())?;
            let (start, end) = timeline.bounds(step, now)?;
            (step, start, end, timeline.spans(start, end))
        };
        let within = |record: &&Record| record.enqueued.is_some_and(|at| at >= start && at < end);
        let records = lock(&self.log).records.iter().filter(within).cloned().collect();
        let (start, end) = (start.as_secs_f64(), end.as_secs_f64());
        let created = self.created_monotonic;
        Some(StepTimeline { rank, node: node.to_owned(), step, start, end, created, spans, records })
    }

    /// Returns the activity set by the last [`Recorder::set_activity`].
    pub fn activity(&self) -> Activity {
        let now = self.created.elapsed();
        let (name, since) = lock(&self.log).activity.unwrap_or(("start", Duration::ZERO));
        Activity { name: name.to_owned(), seconds: now.saturating_sub(since).as_secs_f64() }
    }

    pub(crate) fn clock(&self) -> f64 {
        self.created.elapsed().as_secs_f64()
    }

    /// Writes the activity and the last operation, such as `, in backward after all_gather(layers.0)`.
    /// Async-signal-safe: writes nothing if another thread is changing the log.
    pub fn write_now(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let Some(log) = self.log_now() else { return Ok(()) };
        if let Some((activity, _)) = log.activity {
            write!(out, ", in {activity}")?;
        }
        match log.records.back() {
            Some(last) => write!(out, " after {}({})", last.operation, last.label.scope),
            None => Ok(()),
        }
    }

    /// Writes the last operation, such as `all_gather(layers.0)`. Async-signal-safe like [`Recorder::write_now`].
    pub fn write_last_call(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let log = self.log_now();
        match log.as_ref().and_then(|log| log.records.back()) {
            Some(last) => write!(out, "{}({})", last.operation, last.label.scope),
            None => Ok(()),
        }
    }

    /// Returns the activity's name, unless another thread is changing the log. Async-signal-safe.
    pub fn activity_now(&self) -> Option<&'static str> {
        self.log_now()?.activity.map(|(name, _)| name)
    }

    /// `None` if another thread does not release the log almost immediately.
    fn log_now(&self) -> Option<MutexGuard<'_, Log>> {
        let attempt = || {
            std::hint::spin_loop();
            self.log.try_lock().ok()
        };
        (0..LOCK_ATTEMPTS).find_map(|_| attempt())
    }

    pub(crate) fn groups(&self) -> Vec<GroupFlight> {
        let now = self.created.elapsed();
        let log = lock(&self.log);
        let pending = |(sequence, (call, since)): (&u64, &(Call, Duration))| Pending {
            sequence: *sequence,
            call: call.clone(),
            seconds: now.saturating_sub(*since).as_secs_f64(),
        };
        let flight = |group: &GroupLog| GroupFlight {
            name: group.name.to_string(),
            ranks: group.world_ranks.clone(),
            issued: group.issued,
            pending: group.pending.iter().map(pending).collect(),
        };
        log.groups.iter().map(flight).collect()
    }

    pub(crate) fn join(&self, name: &Arc<str>, world_ranks: &[usize]) -> GroupId {
        let mut log = lock(&self.log);
        let (name, world_ranks) = (Arc::clone(name), world_ranks.to_vec());
        log.groups.push(GroupLog { name, world_ranks, issued: 0, pending: BTreeMap::new() });
        GroupId(log.groups.len() - 1)
    }

    pub(crate) fn enqueued(&self, group: GroupId, sequence: u64, call: &Call, rank: usize) -> RecordId {
        let now = self.created.elapsed();
        let mut log = lock(&self.log);
        let known = &mut log.groups[group.0];
        known.issued = sequence + 1;
        known.pending.insert(sequence, (call.clone(), now));
        let (name, world_size) = (Arc::clone(&known.name), known.world_ranks.len());
        let bytes_sent = match call.problem {
            Some(_) => 0,
            None => call.operation.ring_bytes(call.bytes(), rank, world_size, call.root.unwrap_or(0)),
        };
        let key = (call.operation, Arc::clone(&call.label.scope), call.label.phase, Arc::clone(&name));
        let (calls, bytes) = log.totals.entry(key).or_default();
        *calls += 1;
        *bytes += bytes_sent;
        let id = RecordId { index: log.next, group, sequence };
        log.next += 1;
        log.records.push_back(Record {
            sequence,
            group: name,
            operation: call.operation,
            label: call.label.clone(),
            dtype: call.dtype,
            count: call.count,
            bytes_sent,
            enqueued: Some(now),
            started: None,
            finished: None,
        });
        let capacity = if log.keeps_all { CAPACITY_OF_ALL } else { self.capacity };
        while log.records.len() > capacity {
            log.records.pop_front();
        }
        id
    }

    pub(crate) fn started(&self, id: RecordId) {
        self.update(id, |record, now| record.started = Some(now));
    }

    pub(crate) fn finished(&self, id: RecordId) {
        self.update(id, |record, now| record.finished = Some(now));
        if tracing::enabled!(tracing::Level::TRACE) {
            self.trace(id);
        }
        if let Some(group) = lock(&self.log).groups.get_mut(id.group.0) {
            group.pending.remove(&id.sequence);
        }
    }

    fn update(&self, id: RecordId, change: impl FnOnce(&mut Record, Duration)) {
        let now = self.created.elapsed();
        if let Some(record) = lock(&self.log).record_mut(id) {
            change(record, now);
        }
    }

    #[cold]
    fn trace(&self, id: RecordId) {
        // Releases the lock first: formatting a log line asks the recorder for the rank's activity.
        let Some(record) = lock(&self.log).record_mut(id).map(|record| record.clone()) else { return };
        let Record { sequence, group, operation, label, dtype, count, bytes_sent, .. } = &record;
        let [queued, ran] = record.times().map(|time| time.as_secs_f64());
        let bandwidth = if ran > 0.0 { *bytes_sent as f64 / ran / 1e9 } else { 0.0 };
        tracing::trace!(
            "{operation} {sequence} of {group} for {} ({}): bytes={} dtype={dtype} queued_us={:.0} ran_us={:.0} \
             bus_gb_s={bandwidth:.3}",
            label.scope,
            label.phase,
            count * dtype.size(),
            queued * 1e6,
            ran * 1e6,
        );
    }
}

fn monotonic() -> f64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0.0, |now| Duration::from(now).as_secs_f64())
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder::new(DEFAULT_CAPACITY)
    }
}

#[cfg(test)]
mod tests;
