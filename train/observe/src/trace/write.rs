//! Writing a trace as a file for Perfetto.
//!
//! A rank is a process with these tracks: `compute` with nested slices for steps, phases and modules; `waits`
//! with the waits of the rank's thread; `data` and `checkpoint` with the phases of these names; one track for
//! each communication group with its collectives, one for each stream of its GPU with its activities, and
//! `memory` with the bytes that the rank held. The slice of a module ends where its thread waits, and another
//! one continues it, so that `compute` shows only computation.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use prost::Message;

use super::calls::Calls;
use super::error::TraceError;
use super::intern::Names;
use super::model::{CollectiveTrace, RankTrace, SpanTrace, StepTrace, ThreadTrack, Trace};
use super::names::{self, category, note};
use super::proto::{
    self, ChildTracksOrdering, CounterDescriptor, CounterUnit, DebugAnnotation, EventType, ProcessDescriptor,
    TracePacket, TrackDescriptor, TrackEvent, Value,
};
use crate::fresh::write_new;

impl Trace {
    /// Writes the trace to a new file: `path`, or a path next to it with a number in its name. Returns the
    /// path used.
    ///
    /// # Errors
    ///
    /// If a file operation fails.
    pub fn save(&self, path: &Path) -> Result<PathBuf, TraceError> {
        let mut content = Vec::new();
        let written = self.write(&mut content).and_then(|()| write_new(path, &content));
        written.map_err(|source| TraceError::Io { doing: "write", path: path.to_owned(), source })
    }

    /// Writes the trace in Perfetto's format.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let calls = Calls::of(self);
        let mut flows = 0;
        for rank in &self.ranks {
            let mut packets = Packets::new(rank.rank);
            packets.describe(rank);
            let arrows = Arrows::of(rank, &mut flows);
            for (step, arrows) in rank.steps.iter().zip(&arrows) {
                packets.write_thread(rank, step, &calls, arrows);
                packets.write_collectives(rank, step, arrows);
                packets.write_memory(step);
            }
            packets.write_gpu(rank);
            for packet in packets.packets {
                // Concatenated files form one file.
                out.write_all(&proto::Trace { packet: vec![packet] }.encode_to_vec())?;
            }
        }
        Ok(())
    }
}

/// Arrows from collectives to the waits for them, in one step.
#[derive(Default)]
struct Arrows {
    /// The arrows that leave each collective, by its index in the step.
    of_collective: HashMap<usize, Vec<u64>>,
    /// The arrow that arrives at each span, by its index in the step, and whether it arrives at the span's
    /// beginning.
    of_wait: HashMap<usize, (u64, bool)>,
}

impl Arrows {
    /// Returns the arrows of a rank, by step. `flows` is the number of the last arrow before them.
    fn of(rank: &RankTrace, flows: &mut u64) -> Vec<Self> {
        let mut all: Vec<Arrows> = rank.steps.iter().map(|_| Arrows::default()).collect();
        let mut places = HashMap::new();
        for (at, step) in rank.steps.iter().enumerate() {
            for (place, collective) in step.collectives.iter().enumerate() {
                places.insert((collective.group.as_str(), collective.sequence), (at, place, collective));
            }
        }
        for (at, step) in rank.steps.iter().enumerate() {
            for (index, span) in step.spans.iter().enumerate() {
                let key = span.waits_for.as_ref().map(|(group, sequence)| (group.as_str(), *sequence));
                let Some((from, place, collective)) = key.and_then(|key| places.get(&key)) else { continue };
                *flows += 1;
                all[*from].of_collective.entry(*place).or_default().push(*flows);
                // An arrow must not arrive before it has left: a wait may begin before its collective has
                // reached the head of the queue. It does not end before.
                let at_start = span.start >= collective.started;
                all[at].of_wait.insert(index, (*flows, at_start));
            }
        }
        all
    }
}

/// Annotations of a slice.
type Notes<'a> = Vec<(&'a str, Note<'a>)>;

enum Note<'a> {
    Count(u64),
    Number(f64),
    Text(&'a str),
}

/// Rounded to nanoseconds.
fn micros(nanoseconds: u64) -> Note<'static> {
    Note::Number(nanoseconds as f64 / 1e3)
}

/// The packets of one rank.
struct Packets {
    id: u32,
    names: Names,
    packets: Vec<TracePacket>,
    /// For each group, the end of the last slice on each of its tracks.
    lanes: Vec<(String, Vec<u64>)>,
}

/// Tracks of a rank after those of its thread.
const MEMORY: u64 = 8;
const GROUPS: u64 = 16;
/// Number of track ids per group.
const LANES: u64 = 1 << 12;
/// First track id of streams, after all groups.
const STREAMS: u64 = 1 << 23;

impl Packets {
    fn new(rank: usize) -> Self {
        // Zero is reserved.
        let id = u32::try_from(rank).unwrap_or(u32::MAX).saturating_add(1);
        Packets { id, names: Names::default(), packets: Vec::new(), lanes: Vec::new() }
    }

    /// Returns a track id, composed of the rank's process and a place in it.
    fn track(&self, place: u64) -> u64 {
        u64::from(self.id) << 24 | place
    }

    fn thread_track(&self, track: ThreadTrack) -> u64 {
        self.track(1 + track as u64)
    }

    fn push(&mut self, packet: TracePacket) {
        let mut flags = proto::NEEDS_INCREMENTAL_STATE;
        if self.packets.is_empty() {
            flags |= proto::INCREMENTAL_STATE_CLEARED;
        }
        let interned_data = self.names.take_new();
        self.packets.push(TracePacket {
            trusted_packet_sequence_id: Some(self.id),
            sequence_flags: Some(flags),
            interned_data,
            ..packet
        });
    }

    fn describe_track(&mut self, descriptor: TrackDescriptor) {
        self.push(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
    }

    /// Describes the rank's tracks, except those of groups.
    fn describe(&mut self, rank: &RankTrace) {
        let pid = i32::try_from(self.id).unwrap_or(i32::MAX);
        self.describe_track(TrackDescriptor {
            uuid: Some(self.track(0)),
            process: Some(ProcessDescriptor {
                pid: Some(pid),
                legacy_sort_index: Some(pid),
                process_name: Some(names::process(rank.rank, &rank.node)),
            }),
            child_ordering: Some(ChildTracksOrdering::Explicit.into()),
            sibling_order_rank: Some(pid),
            description: Some(match rank.clock_error {
                None => "Its clock could not be aligned with that of rank 0.".to_owned(),
                Some(0) => "Its clock is that of rank 0.".to_owned(),
                Some(error) => {
                    format!("Its clock is aligned with that of rank 0 within {} us.", error.div_ceil(1000))
                }
            }),
            ..TrackDescriptor::default()
        });
        for track in ThreadTrack::ALL {
            self.describe_child(self.thread_track(track), track.name(), 1 + track as i32, None);
        }
        let bytes = CounterDescriptor { unit: Some(CounterUnit::SizeBytes.into()) };
        self.describe_child(self.track(MEMORY), "memory", 1000, Some(bytes));
    }

    fn describe_child(&mut self, uuid: u64, name: &str, place: i32, counter: Option<CounterDescriptor>) {
        self.describe_track(TrackDescriptor {
            uuid: Some(uuid),
            parent_uuid: Some(self.track(0)),
            name: Some(name.to_owned()),
            sibling_order_rank: Some(place),
            counter,
            ..TrackDescriptor::default()
        });
    }

    /// Writes a beginning, an end or a value at `time`.
    fn event(&mut self, time: u64, event: TrackEvent) {
        self.push(TracePacket { timestamp: Some(time), track_event: Some(event), ..TracePacket::default() });
    }

    fn begin(
        &mut self,
        track: u64,
        time: u64,
        [name, category]: [&str; 2],
        notes: Notes<'_>,
        flows: [Vec<u64>; 2],
    ) {
        let note = |(name, value): (&str, Note<'_>)| DebugAnnotation {
            name_iid: Some(self.names.annotation(name)),
            value: Some(match value {
                Note::Count(value) => Value::Uint(value),
                Note::Number(value) => Value::Double(value),
                Note::Text(text) => Value::Text(self.names.text(text)),
            }),
        };
        let debug_annotations = notes.into_iter().map(note).collect();
        let [flow_ids, terminating_flow_ids] = flows;
        let event = TrackEvent {
            r#type: Some(EventType::SliceBegin.into()),
            track_uuid: Some(track),
            name_iid: Some(self.names.event(name)),
            category_iids: vec![self.names.category(category)],
            debug_annotations,
            flow_ids,
            terminating_flow_ids,
            ..TrackEvent::default()
        };
        self.event(time, event);
    }

    fn end(&mut self, track: u64, time: u64, terminating_flow_ids: Vec<u64>) {
        let event = TrackEvent {
            r#type: Some(EventType::SliceEnd.into()),
            track_uuid: Some(track),
            terminating_flow_ids,
            ..TrackEvent::default()
        };
        self.event(time, event);
    }

    /// Writes a step of the rank's thread: phases, modules and waits.
    fn write_thread(&mut self, rank: &RankTrace, step: &StepTrace, calls: &Calls<'_>, arrows: &Arrows) {
        let compute = self.thread_track(ThreadTrack::Compute);
        let mut notes = vec![(note::STEP, Note::Count(step.step)), (note::NODE, Note::Text(&rank.node))];
        if let Some(error) = rank.clock_error {
            notes.push((note::CLOCK_ERROR, micros(error)));
        }
        let sums: Vec<_> =
            step.recorder.iter().map(|(name, sum)| (format!("{}{name}", note::RECORDER), *sum)).collect();
        notes.extend(sums.iter().map(|(name, sum)| (name.as_str(), Note::Count(*sum))));
        let name = format!("step {}", step.step);
        self.begin(compute, step.start, [&name, category::STEP], notes, Default::default());
        let mut index = 0;
        for phase in step.spans.chunk_by(|a, b| a.activity == b.activity) {
            let [first, .., last] = [phase.first(), phase.last()].map(|span| span.unwrap_or(&phase[0]));
            let track = self.thread_track(ThreadTrack::of_activity(&first.activity));
            let names = [first.activity.as_str(), category::PHASE];
            self.begin(track, first.start, names, Vec::new(), Default::default());
            for span in phase {
                match (&span.waits_for, &span.unit) {
                    (Some((group, sequence)), _) => {
                        let arrow = arrows.of_wait.get(&index).copied();
                        self.write_wait(rank, span, (group, *sequence), calls, arrow);
                    }
                    (None, Some(unit)) => {
                        self.begin(track, span.start, [unit, category::UNIT], Vec::new(), Default::default());
                        self.end(track, span.end, Vec::new());
                    }
                    (None, None) => {}
                }
                index += 1;
            }
            self.end(track, last.end, Vec::new());
        }
        self.end(compute, step.end, Vec::new());
    }

    fn write_wait(
        &mut self,
        rank: &RankTrace,
        span: &SpanTrace,
        (group, sequence): (&str, u64),
        calls: &Calls<'_>,
        arrow: Option<(u64, bool)>,
    ) {
        let all = calls.get(rank, group, sequence);
        let last = calls.last(rank, group, sequence);
        let name = match all.first() {
            Some((_, collective)) => format!("wait for {} {}", collective.operation, collective.scope),
            None => format!("wait for {group} {sequence}"),
        };
        let mut notes = vec![
            (note::ACTIVITY, Note::Text(&span.activity)),
            (note::GROUP, Note::Text(group)),
            (note::SEQUENCE, Note::Count(sequence)),
        ];
        notes.extend(span.unit.iter().map(|unit| (note::UNIT, Note::Text(unit))));
        if let Some((last, collective)) = last.filter(|(last, _)| *last != rank.rank && all.len() > 1) {
            notes.push((note::CAME_LAST, Note::Count(last as u64)));
            notes.push((note::LATE, micros(collective.enqueued.saturating_sub(span.start))));
        }
        let track = self.thread_track(ThreadTrack::Waits);
        let [mut begins, mut ends] = [Vec::new(), Vec::new()];
        if let Some((flow, at_start)) = arrow {
            if at_start { &mut begins } else { &mut ends }.push(flow);
        }
        self.begin(track, span.start, [&name, category::WAIT], notes, [Vec::new(), begins]);
        self.end(track, span.end, ends);
    }

    fn write_collectives(&mut self, rank: &RankTrace, step: &StepTrace, arrows: &Arrows) {
        for (place, collective) in step.collectives.iter().enumerate() {
            let flows = arrows.of_collective.get(&place).cloned().unwrap_or_default();
            let track = self.lane(rank, collective);
            let ranks = names::ranks(rank.groups.get(&collective.group).map_or(&[], Vec::as_slice));
            let mut notes = vec![
                (note::OPERATION, Note::Text(&collective.operation)),
                (note::SCOPE, Note::Text(&collective.scope)),
                (note::PHASE, Note::Text(&collective.phase)),
                (note::GROUP, Note::Text(&collective.group)),
                (note::RANKS, Note::Text(&ranks)),
                (note::SEQUENCE, Note::Count(collective.sequence)),
                (note::DTYPE, Note::Text(&collective.dtype)),
                (note::BYTES, Note::Count(collective.bytes)),
                (note::BYTES_SENT, Note::Count(collective.bytes_sent)),
                (note::BANDWIDTH, Note::Number(collective.bandwidth())),
                (note::QUEUED, micros(collective.started - collective.enqueued.min(collective.started))),
            ];
            if !collective.is_finished {
                notes.push((note::UNFINISHED, Note::Count(1)));
            }
            let name = format!("{} {}", collective.operation, collective.scope);
            let names = [name.as_str(), category::COLLECTIVE];
            self.begin(track, collective.started, names, notes, [flows, Vec::new()]);
            self.end(track, collective.finished, Vec::new());
        }
    }

    /// Returns the track for a collective. Collectives of a group share one track; where they overlap, as on
    /// GPUs, the group has several tracks of the same name, which Perfetto shows as one.
    fn lane(&mut self, rank: &RankTrace, collective: &CollectiveTrace) -> u64 {
        let group = collective.group.as_str();
        let place = self.lanes.iter().position(|(known, _)| known == group).unwrap_or_else(|| {
            self.lanes.push((group.to_owned(), Vec::new()));
            self.lanes.len() - 1
        });
        let lanes = &mut self.lanes[place].1;
        let free = lanes.iter().position(|end| *end <= collective.started);
        let lane = free.unwrap_or_else(|| {
            lanes.push(0);
            lanes.len() - 1
        });
        lanes[lane] = collective.finished;
        let uuid = self.track(GROUPS + place as u64 * LANES + lane as u64);
        if free.is_none() {
            let ranks = rank.groups.get(group).map(|ranks| format!(" (ranks {})", names::ranks(ranks)));
            let name = format!("communication {group}{}", ranks.unwrap_or_default());
            self.describe_child(uuid, &name, 100 + place as i32, None);
        }
        uuid
    }

    /// Writes the activities of the GPU, with a track for each stream.
    fn write_gpu(&mut self, rank: &RankTrace) {
        let mut streams: BTreeMap<u32, u64> = BTreeMap::new();
        for activity in &rank.gpu {
            let track = self.track(STREAMS + u64::from(activity.stream));
            let until = streams.entry(activity.stream).or_insert_with(|| {
                let place = i32::try_from(activity.stream).unwrap_or(i32::MAX - 1200);
                self.describe_child(track, &format!("GPU stream {}", activity.stream), 1100 + place, None);
                0
            });
            // A stream runs one activity after the other, but clock readings are slightly inconsistent.
            let start = activity.start.max(*until);
            *until = activity.end.max(start);
            let mut notes = vec![(note::STREAM, Note::Count(u64::from(activity.stream)))];
            notes.extend(activity.bytes.map(|bytes| (note::BYTES, Note::Count(bytes))));
            self.begin(track, start, [&activity.name, category::GPU], notes, Default::default());
            self.end(track, *until, Vec::new());
        }
    }

    fn write_memory(&mut self, step: &StepTrace) {
        for span in &step.spans {
            let Some(bytes) = span.bytes else { continue };
            let event = TrackEvent {
                r#type: Some(EventType::Counter.into()),
                track_uuid: Some(self.track(MEMORY)),
                counter_value: i64::try_from(bytes).ok(),
                ..TrackEvent::default()
            };
            self.event(span.end, event);
        }
    }
}
