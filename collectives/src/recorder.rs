//! A record of a rank's communication: the last operations in detail, and totals of all operations.
//!
//! The records serve as a flight recorder: after a failure, the first record without a `finished` time is the
//! operation in which the rank was stuck.

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

/// Number of records that a recorder keeps by default.
pub const DEFAULT_CAPACITY: usize = 4096;

/// Number of records that are kept after [`Recorder::keep_all`].
const CAPACITY_OF_ALL: usize = 1 << 20;

/// Number of times that [`Recorder::write_now`] tries to lock the log. Other threads hold the lock for well
/// below a microsecond.
const LOCK_ATTEMPTS: usize = 10_000;

/// Number of calls and bytes of all operations of one kind with one label in one group.
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
    /// Number of calls issued.
    pub calls: u64,
    /// Ring bytes of those calls.
    pub bytes_sent: u64,
}

/// The flight recorder of one rank, for all its groups. Recording an event takes one short lock.
///
/// An operation is counted when it is issued, so counts do not depend on timing.
#[derive(Debug)]
pub struct Recorder {
    created: Instant,
    /// Time of creation on the clock that all processes of the machine share.
    created_monotonic: f64,
    capacity: usize,
    log: Mutex<Log>,
    timeline: Mutex<Timeline>,
}

type TotalKey = (Operation, Arc<str>, Phase, Arc<str>);

#[derive(Debug, Default)]
struct Log {
    /// The newest records, oldest first.
    records: VecDeque<Record>,
    /// Index of the next record, counted over all records ever made.
    next: u64,
    /// Number of calls and of bytes sent.
    totals: BTreeMap<TotalKey, (u64, u64)>,
    /// Groups that this rank has joined.
    groups: Vec<GroupLog>,
    /// The rank's activity other than communication, and when the activity began.
    activity: Option<(&'static str, Duration)>,
    /// True if no record is dropped.
    keeps_all: bool,
}

impl Log {
    /// Returns a record, unless it was dropped.
    fn record_mut(&mut self, id: RecordId) -> Option<&mut Record> {
        let first = self.next - self.records.len() as u64;
        let index = usize::try_from(id.index.checked_sub(first)?).ok()?;
        self.records.get_mut(index)
    }
}

/// The operations of one group.
#[derive(Debug)]
struct GroupLog {
    name: Arc<str>,
    world_ranks: Vec<usize>,
    /// Number of operations issued.
    issued: u64,
    /// Operations issued and not finished, with the time of issue.
    pending: BTreeMap<u64, (Call, Duration)>,
}

/// Index of a group in its recorder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupId(usize);

/// Identifies a record for later updates. Stays valid after the record has been dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordId {
    index: u64,
    group: GroupId,
    sequence: u64,
}

impl Recorder {
    /// Creates a recorder that keeps the last `capacity` records. Totals are always kept.
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

    /// Returns at most the last `count` records, oldest first.
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

    /// Resets the totals to zero, for example at the start of a step. Keeps the records.
    pub fn reset_totals(&self) {
        lock(&self.log).totals.clear();
    }

    /// Returns the bytes sent since creation or the last reset, over all groups.
    pub fn bytes_sent(&self) -> u64 {
        lock(&self.log).totals.values().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of calls of `operation` since creation or the last reset, in `phase` or in all
    /// phases.
    pub fn count(&self, operation: Operation, phase: Option<Phase>) -> u64 {
        lock(&self.log)
            .totals
            .iter()
            .filter(|((o, _, p, _), _)| *o == operation && phase.is_none_or(|phase| phase == *p))
            .map(|(_, (calls, _))| calls)
            .sum()
    }

    /// Sets the rank's current activity other than communication, such as `"data loading"`. Verdicts name
    /// this activity when other ranks wait for this rank.
    pub fn set_activity(&self, name: &'static str) {
        let now = self.created.elapsed();
        lock(&self.log).activity = Some((name, now));
        lock(&self.timeline).set_activity(name, now);
    }

    /// Records that the rank enters the module `module`, which it leaves when the activity changes.
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

    /// From now on, adds to each span the bytes that `held_bytes` returns. Only the rank's own thread may
    /// call this.
    pub fn count_bytes(&self, held_bytes: fn() -> u64) {
        lock(&self.timeline).count_bytes(held_bytes);
    }

    /// Keeps all spans and records from now on, or, with `false`, only the last ones.
    pub fn keep_all(&self, all: bool) {
        lock(&self.timeline).keep_all(all);
        lock(&self.log).keeps_all = all;
    }

    /// Returns the rank's times by activity since the recorder was created.
    pub fn times(&self) -> Vec<ActivityTime> {
        lock(&self.timeline).times(self.created.elapsed())
    }

    /// Returns how long the rank has waited for other ranks since the recorder was created.
    pub fn total_waited(&self) -> Duration {
        self.times().iter().map(|time| time.waited).sum()
    }

    /// Returns the rank's timeline of optimizer step `step`, or by default of the last completed step. `None`
    /// if the step is unknown or its timeline is no longer kept.
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

    /// Returns the seconds since the recorder was created; records use the same clock.
    pub(crate) fn clock(&self) -> f64 {
        self.created.elapsed().as_secs_f64()
    }

    /// Writes the rank's activity and its last operation, such as `, in backward after all_gather(layers.0)`.
    /// Safe in signal handlers: blocks on no lock and allocates nothing. Writes nothing if another thread is
    /// changing the log.
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

    /// Writes the rank's last operation, such as `all_gather(layers.0)`, like [`Recorder::write_now`].
    pub fn write_last_call(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        let log = self.log_now();
        match log.as_ref().and_then(|log| log.records.back()) {
            Some(last) => write!(out, "{}({})", last.operation, last.label.scope),
            None => Ok(()),
        }
    }

    /// Returns the name of the rank's activity, unless another thread is changing the log. Safe in signal
    /// handlers.
    pub fn activity_now(&self) -> Option<&'static str> {
        self.log_now()?.activity.map(|(name, _)| name)
    }

    /// Locks the log; gives up if another thread does not release it almost immediately.
    fn log_now(&self) -> Option<MutexGuard<'_, Log>> {
        let attempt = || {
            std::hint::spin_loop();
            self.log.try_lock().ok()
        };
        (0..LOCK_ATTEMPTS).find_map(|_| attempt())
    }

    /// Returns the state of all groups this rank has joined.
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

    /// Adds a group that this rank has joined; `world_ranks` has the world rank of each member.
    pub(crate) fn join(&self, name: &Arc<str>, world_ranks: &[usize]) -> GroupId {
        let mut log = lock(&self.log);
        let (name, world_ranks) = (Arc::clone(name), world_ranks.to_vec());
        log.groups.push(GroupLog { name, world_ranks, issued: 0, pending: BTreeMap::new() });
        GroupId(log.groups.len() - 1)
    }

    /// Records that `rank` of `group` issued `call`.
    pub(crate) fn enqueued(&self, group: GroupId, sequence: u64, call: &Call, rank: usize) -> RecordId {
        let now = self.created.elapsed();
        let mut log = lock(&self.log);
        // Ids come from `join` of the same recorder, and groups are never removed.
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

    /// Records that the operation reached the head of its queue.
    pub(crate) fn started(&self, id: RecordId) {
        self.update(id, |record, now| record.started = Some(now));
    }

    /// Records that the operation completed.
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

    /// Logs the size, times and bandwidth of a finished operation.
    #[cold]
    fn trace(&self, id: RecordId) {
        // The lock is released first: formatting a log line asks the recorder for the rank's activity.
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

/// Returns seconds on the machine's monotonic clock, or 0 if there is none.
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
