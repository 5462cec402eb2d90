//! What a rank has communicated: the last operations in detail, and totals of all of them.
//!
//! The records serve as a flight recorder: after a failure, the first record without a
//! `finished` time is the operation the rank was stuck in.

use crate::call::Call;
use crate::dtype::DType;
use crate::label::{Label, Phase, serialize_str};
use crate::operation::Operation;
use crate::sync::lock;
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Number of records kept unless asked otherwise.
pub const DEFAULT_CAPACITY: usize = 4096;

/// One operation as one rank saw it. Times count from the creation of the recorder and
/// serialize as seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Number of the operation in its group, from 0; the same on every rank.
    pub sequence: u64,
    /// Name of the group.
    #[serde(serialize_with = "serialize_str")]
    pub group: Arc<str>,
    /// Kind of operation.
    pub operation: Operation,
    /// What it was for.
    pub label: Label,
    /// Element type.
    pub dtype: DType,
    /// Elements of the full tensor: output of all-gather, input of reduce-scatter, the buffer
    /// otherwise.
    pub count: usize,
    /// Bytes this rank would send on a ring; see [`Operation::ring_bytes`]. 0 for a call with
    /// invalid arguments.
    pub bytes_sent: u64,
    /// When the caller issued it.
    #[serde(serialize_with = "serialize_seconds")]
    pub enqueued: Option<Duration>,
    /// When it reached the head of its group's queue.
    #[serde(serialize_with = "serialize_seconds")]
    pub started: Option<Duration>,
    /// When it completed. Stays empty if it failed.
    #[serde(serialize_with = "serialize_seconds")]
    pub finished: Option<Duration>,
}

/// Sum over all operations of one kind, purpose and group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Total {
    /// Kind of operation.
    pub operation: Operation,
    /// Unit of the label.
    #[serde(serialize_with = "serialize_str")]
    pub unit: Arc<str>,
    /// Phase of the label.
    pub phase: Phase,
    /// Name of the group.
    #[serde(serialize_with = "serialize_str")]
    pub group: Arc<str>,
    /// Number of calls issued.
    pub calls: u64,
    /// Ring bytes of those calls.
    pub bytes_sent: u64,
}

/// Records of one rank, over all its groups. Cheap: one short lock per event.
///
/// An operation counts from the moment it is issued, so counts do not depend on timing.
#[derive(Debug)]
pub struct Recorder {
    created: Instant,
    capacity: usize,
    log: Mutex<Log>,
}

type TotalKey = (Operation, Arc<str>, Phase, Arc<str>);

#[derive(Debug, Default)]
struct Log {
    /// The newest records, oldest first.
    records: VecDeque<Record>,
    /// Id of the next record; ids count all records ever made.
    next: u64,
    /// Calls and bytes.
    totals: BTreeMap<TotalKey, (u64, u64)>,
}

/// Names one record for later updates, also after it has been dropped from the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordId(u64);

impl Recorder {
    /// Makes a recorder that keeps the last `capacity` records. Totals are always kept.
    pub fn new(capacity: usize) -> Recorder {
        Recorder { created: Instant::now(), capacity, log: Mutex::default() }
    }

    /// The last records, oldest first.
    pub fn records(&self) -> Vec<Record> {
        lock(&self.log).records.iter().cloned().collect()
    }

    /// Totals since creation or the last reset, sorted by operation, unit, phase and group.
    pub fn totals(&self) -> Vec<Total> {
        lock(&self.log)
            .totals
            .iter()
            .map(|((operation, unit, phase, group), (calls, bytes_sent))| Total {
                operation: *operation,
                unit: Arc::clone(unit),
                phase: *phase,
                group: Arc::clone(group),
                calls: *calls,
                bytes_sent: *bytes_sent,
            })
            .collect()
    }

    /// Starts the totals from zero, for example at the start of a step. Keeps the records.
    pub fn reset_totals(&self) {
        lock(&self.log).totals.clear();
    }

    /// Bytes sent since creation or the last reset, over all groups.
    pub fn bytes_sent(&self) -> u64 {
        lock(&self.log).totals.values().map(|(_, bytes)| bytes).sum()
    }

    /// Number of calls of `operation` since creation or the last reset, in `phase` or in all.
    pub fn count(&self, operation: Operation, phase: Option<Phase>) -> u64 {
        lock(&self.log)
            .totals
            .iter()
            .filter(|((o, _, p, _), _)| *o == operation && phase.is_none_or(|phase| phase == *p))
            .map(|(_, (calls, _))| calls)
            .sum()
    }

    /// Notes that `call` was issued by `rank` of a group of `world_size`.
    pub(crate) fn enqueued(
        &self,
        group: &Arc<str>,
        sequence: u64,
        call: &Call,
        rank: usize,
        world_size: usize,
    ) -> RecordId {
        let bytes_sent = match call.problem {
            Some(_) => 0,
            None => {
                call.operation.ring_bytes(call.bytes(), rank, world_size, call.root.unwrap_or(0))
            }
        };
        let record = Record {
            sequence,
            group: Arc::clone(group),
            operation: call.operation,
            label: call.label.clone(),
            dtype: call.dtype,
            count: call.count,
            bytes_sent,
            enqueued: Some(self.created.elapsed()),
            started: None,
            finished: None,
        };
        let mut log = lock(&self.log);
        let key = (
            record.operation,
            Arc::clone(&record.label.unit),
            record.label.phase,
            Arc::clone(group),
        );
        let (calls, bytes) = log.totals.entry(key).or_default();
        *calls += 1;
        *bytes += bytes_sent;
        let id = RecordId(log.next);
        log.next += 1;
        log.records.push_back(record);
        if log.records.len() > self.capacity {
            log.records.pop_front();
        }
        id
    }

    /// Notes that the operation reached the head of its queue.
    pub(crate) fn started(&self, id: RecordId) {
        self.update(id, |record, now| record.started = Some(now));
    }

    /// Notes that the operation completed.
    pub(crate) fn finished(&self, id: RecordId) {
        self.update(id, |record, now| record.finished = Some(now));
    }

    fn update(&self, id: RecordId, change: impl FnOnce(&mut Record, Duration)) {
        let now = self.created.elapsed();
        let mut log = lock(&self.log);
        let first = log.next - log.records.len() as u64;
        let index = id.0.checked_sub(first).and_then(|i| usize::try_from(i).ok());
        if let Some(record) = index.and_then(|index| log.records.get_mut(index)) {
            change(record, now);
        }
    }
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder::new(DEFAULT_CAPACITY)
    }
}

fn serialize_seconds<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn issue(recorder: &Recorder, sequence: u64) -> RecordId {
        let call = Call::barrier(Label::new("step", Phase::Other));
        recorder.enqueued(&Arc::from("world"), sequence, &call, 0, 2)
    }

    #[test]
    fn ring_drops_the_oldest_but_totals_stay() {
        let recorder = Recorder::new(2);
        let ids: Vec<RecordId> = (0..5).map(|sequence| issue(&recorder, sequence)).collect();
        // Updates of dropped records are ignored, those of kept ones are not.
        for id in ids {
            recorder.started(id);
            recorder.finished(id);
        }
        let records = recorder.records();
        let sequences: Vec<u64> = records.iter().map(|record| record.sequence).collect();
        assert_eq!(sequences, [3, 4]);
        for record in records {
            assert!(record.enqueued <= record.started && record.started <= record.finished);
            assert!(record.enqueued.is_some());
        }
        assert_eq!(recorder.count(Operation::Barrier, Some(Phase::Other)), 5);
        assert_eq!(recorder.count(Operation::Barrier, Some(Phase::Loss)), 0);
        recorder.reset_totals();
        assert_eq!(recorder.totals(), []);
        assert_eq!(recorder.records().len(), 2);
    }

    #[test]
    fn capacity_may_be_zero() {
        let recorder = Recorder::new(0);
        let id = issue(&recorder, 0);
        recorder.finished(id);
        assert_eq!(recorder.records(), []);
        assert_eq!(recorder.count(Operation::Barrier, None), 1);
    }
}
