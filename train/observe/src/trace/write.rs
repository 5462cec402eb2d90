//! Writes a trace as a file for Perfetto.
//!
//! A rank is a process with the tracks `compute`, `waits`, `data`, `checkpoint` and `memory`, and one track per
//! communication group and per GPU stream. Slices of modules end where the thread waits, so `compute` shows only
//! computation. Annotations are in microseconds, like Perfetto's UI.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use kiln_sys::words::in_ranges;
use prost::Message;

use super::TraceError;
use super::model::{Calls, CollectiveTrace, RankTrace, SpanTrace, StepTrace, THREAD_TRACKS, Trace, track_of};
use super::proto::{
    self, CounterDescriptor, DebugAnnotation, EventType, Interned, InternedData, InternedName,
    ProcessDescriptor, TracePacket, TrackDescriptor, TrackEvent, Value,
};
use crate::fresh::write_new;

impl Trace {
    /// Writes the trace to `path`, or to a numbered path next to it if `path` exists. Returns the path used.
    ///
    /// # Errors
    ///
    /// If a file operation fails.
    pub fn save(&self, path: &Path) -> Result<PathBuf, TraceError> {
        let io = |source| TraceError::Io { doing: "write", path: path.to_owned(), source };
        write_new(path, &self.encode()).map_err(io)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let calls = Calls::new(self);
        // Concatenated protobuf messages form one message.
        let of_rank = |rank| proto::Trace { packet: RankWriter::write(rank, &calls) }.encode_to_vec();
        self.ranks.iter().flat_map(of_rank).collect()
    }
}

pub(super) fn ranks(ranks: &[usize]) -> String {
    in_ranges(ranks).replace(' ', "")
}

type Notes<'a> = Vec<(&'a str, Note<'a>)>;

enum Note<'a> {
    Count(u64),
    Number(f64),
    Text(&'a str),
}

fn micros(nanoseconds: u64) -> Note<'static> {
    Note::Number(nanoseconds as f64 / 1e3)
}

struct Arrows {
    start: u64,
    flows: Vec<u64>,
    arrived: usize,
}

struct RankWriter<'a> {
    rank: &'a RankTrace,
    calls: &'a Calls<'a>,
    id: u32,
    packets: Vec<TracePacket>,
    names: [HashMap<String, u64>; 4],
    new_names: InternedData,
    arrows: HashMap<(&'a str, u64), Arrows>,
    /// For each group, the end of the last slice on each of its tracks.
    lanes: Vec<(&'a str, Vec<u64>)>,
}

const MEMORY: u64 = 8;
const GROUPS: u64 = 16;
const LANES: u64 = 1 << 12;
const STREAMS: u64 = 1 << 23;

impl<'a> RankWriter<'a> {
    fn write(rank: &'a RankTrace, calls: &'a Calls<'a>) -> Vec<TracePacket> {
        let id = u32::try_from(rank.rank).unwrap_or(u32::MAX).saturating_add(1);
        let mut writer = RankWriter {
            rank,
            calls,
            id,
            packets: Vec::new(),
            names: Default::default(),
            new_names: InternedData::default(),
            arrows: HashMap::new(),
            lanes: Vec::new(),
        };
        for collective in rank.steps.iter().flat_map(|step| &step.collectives) {
            let arrows = Arrows { start: collective.started, flows: Vec::new(), arrived: 0 };
            writer.arrows.insert((&collective.group, collective.sequence), arrows);
        }
        let waits = rank.steps.iter().flat_map(|step| &step.spans).filter_map(|span| span.waits_for.as_ref());
        for (flow, (group, sequence)) in (u64::from(id) << 32..).zip(waits) {
            if let Some(arrows) = writer.arrows.get_mut(&(group.as_str(), *sequence)) {
                arrows.flows.push(flow);
            }
        }
        writer.describe_rank();
        for step in &rank.steps {
            writer.write_thread(step);
            step.collectives.iter().for_each(|collective| writer.write_collective(collective));
            writer.write_memory(step);
        }
        writer.write_gpu();
        writer.packets
    }

    fn track(&self, place: u64) -> u64 {
        u64::from(self.id) << 24 | place
    }

    fn thread_track(&self, name: &str) -> u64 {
        self.track(THREAD_TRACKS.iter().zip(1..).find(|(track, _)| **track == name).map_or(0, |(_, id)| id))
    }

    fn intern(&mut self, kind: Interned, name: &str) -> u64 {
        let known = &mut self.names[kind as usize];
        if let Some(iid) = known.get(name) {
            return *iid;
        }
        let iid = known.len() as u64 + 1;
        known.insert(name.to_owned(), iid);
        let list = match kind {
            Interned::Category => &mut self.new_names.event_categories,
            Interned::Event => &mut self.new_names.event_names,
            Interned::Annotation => &mut self.new_names.debug_annotation_names,
            Interned::Text => &mut self.new_names.debug_annotation_string_values,
        };
        list.push(InternedName { iid: Some(iid), name: Some(name.to_owned()) });
        iid
    }

    fn push(&mut self, packet: TracePacket) {
        let mut flags = proto::NEEDS_INCREMENTAL_STATE;
        if self.packets.is_empty() {
            flags |= proto::INCREMENTAL_STATE_CLEARED;
        }
        let new_names = std::mem::take(&mut self.new_names);
        self.packets.push(TracePacket {
            trusted_packet_sequence_id: Some(self.id),
            sequence_flags: Some(flags),
            interned_data: (new_names != InternedData::default()).then_some(new_names),
            ..packet
        });
    }

    fn describe_rank(&mut self) {
        let pid = i32::try_from(self.id).unwrap_or(i32::MAX);
        let descriptor = TrackDescriptor {
            uuid: Some(self.track(0)),
            process: Some(ProcessDescriptor {
                pid: Some(pid),
                legacy_sort_index: Some(pid),
                process_name: Some(format!("rank {} ({})", self.rank.rank, self.rank.node)),
            }),
            child_ordering: Some(proto::ORDERED_EXPLICITLY),
            sibling_order_rank: Some(pid),
            description: Some(match self.rank.clock_error {
                None => "Its clock could not be aligned with that of rank 0.".to_owned(),
                Some(0) => "Its clock is that of rank 0.".to_owned(),
                Some(error) => {
                    format!("Its clock is aligned with that of rank 0 within {} us.", error.div_ceil(1000))
                }
            }),
            ..TrackDescriptor::default()
        };
        self.push(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
        for (name, place) in THREAD_TRACKS.into_iter().zip(1..) {
            self.describe_track(self.thread_track(name), name, place, None);
        }
        let bytes = CounterDescriptor { unit: Some(proto::SIZE_BYTES) };
        self.describe_track(self.track(MEMORY), "memory", 1000, Some(bytes));
    }

    fn describe_track(&mut self, uuid: u64, name: &str, place: i32, counter: Option<CounterDescriptor>) {
        let descriptor = TrackDescriptor {
            uuid: Some(uuid),
            parent_uuid: Some(self.track(0)),
            name: Some(name.to_owned()),
            sibling_order_rank: Some(place),
            counter,
            ..TrackDescriptor::default()
        };
        self.push(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() });
    }

    fn event(&mut self, kind: EventType, track: u64, time: u64, event: TrackEvent) {
        let event = TrackEvent { r#type: Some(kind.into()), track_uuid: Some(track), ..event };
        self.push(TracePacket { timestamp: Some(time), track_event: Some(event), ..TracePacket::default() });
    }

    fn slice(&mut self, name: &str, category: &str, notes: Notes<'_>) -> TrackEvent {
        let note = |(name, value): (&str, Note<'_>)| DebugAnnotation {
            name_iid: Some(self.intern(Interned::Annotation, name)),
            value: Some(match value {
                Note::Count(value) => Value::Uint(value),
                Note::Number(value) => Value::Double(value),
                Note::Text(text) => Value::Text(self.intern(Interned::Text, text)),
            }),
        };
        TrackEvent {
            debug_annotations: notes.into_iter().map(note).collect(),
            name_iid: Some(self.intern(Interned::Event, name)),
            category_iids: vec![self.intern(Interned::Category, category)],
            ..TrackEvent::default()
        }
    }

    fn begin(&mut self, track: u64, time: u64, slice: TrackEvent) {
        self.event(EventType::SliceBegin, track, time, slice);
    }

    fn end(&mut self, track: u64, time: u64) {
        self.event(EventType::SliceEnd, track, time, TrackEvent::default());
    }

    fn write_thread(&mut self, step: &'a StepTrace) {
        let compute = self.thread_track("compute");
        let sums: Vec<_> =
            step.recorder.iter().map(|(name, sum)| (format!("recorder.{name}"), *sum)).collect();
        let mut notes = vec![("step", Note::Count(step.step)), ("machine", Note::Text(&self.rank.node))];
        notes.extend(self.rank.clock_error.map(|error| ("clock_error_us", micros(error))));
        notes.extend(sums.iter().map(|(name, sum)| (name.as_str(), Note::Count(*sum))));
        let slice = self.slice(&format!("step {}", step.step), "step", notes);
        self.begin(compute, step.start, slice);
        for phase in step.spans.chunk_by(|a, b| a.activity == b.activity) {
            let [first, .., last] = [phase.first(), phase.last()].map(|span| span.unwrap_or(&phase[0]));
            let track = self.thread_track(track_of(&first.activity));
            let slice = self.slice(&first.activity, "phase", Vec::new());
            self.begin(track, first.start, slice);
            for span in phase {
                if let Some((group, sequence)) = &span.waits_for {
                    self.write_wait(span, group, *sequence);
                } else if let Some(module) = &span.module {
                    let slice = self.slice(module, "module", Vec::new());
                    self.begin(track, span.start, slice);
                    self.end(track, span.end);
                }
            }
            self.end(track, last.end);
        }
        self.end(compute, step.end);
    }

    fn write_wait(&mut self, span: &SpanTrace, group: &'a str, sequence: u64) {
        let all = self.calls.get(self.rank, group, sequence);
        let last = self.calls.last(self.rank, group, sequence);
        let name = match all.first() {
            Some((_, collective)) => format!("wait for {} {}", collective.operation, collective.scope),
            None => format!("wait for {group} {sequence}"),
        };
        let mut notes = vec![
            ("activity", Note::Text(&span.activity)),
            ("group", Note::Text(group)),
            ("sequence", Note::Count(sequence)),
        ];
        notes.extend(span.module.iter().map(|module| ("module", Note::Text(module))));
        if let Some((last, collective)) = last.filter(|(last, _)| *last != self.rank.rank && all.len() > 1) {
            notes.push(("came_last", Note::Count(last as u64)));
            notes.push(("late_us", micros(collective.enqueued.saturating_sub(span.start))));
        }
        let mut begin = self.slice(&name, "wait", notes);
        let mut end = TrackEvent::default();
        if let Some(arrows) = self.arrows.get_mut(&(group, sequence)) {
            // An arrow must not arrive before it has left, and a wait may start before its collective does.
            let event = if span.start >= arrows.start { &mut begin } else { &mut end };
            event.terminating_flow_ids.extend(arrows.flows.get(arrows.arrived));
            arrows.arrived += 1;
        }
        let track = self.thread_track("waits");
        self.begin(track, span.start, begin);
        self.event(EventType::SliceEnd, track, span.end, end);
    }

    fn write_collective(&mut self, collective: &'a CollectiveTrace) {
        let track = self.lane(collective);
        let members = ranks(self.rank.groups.get(&collective.group).map_or(&[], Vec::as_slice));
        let nanoseconds = collective.finished.saturating_sub(collective.started).max(1);
        let mut notes = vec![
            ("operation", Note::Text(&collective.operation)),
            ("scope", Note::Text(&collective.scope)),
            ("phase", Note::Text(&collective.phase)),
            ("group", Note::Text(&collective.group)),
            ("ranks", Note::Text(&members)),
            ("sequence", Note::Count(collective.sequence)),
            ("dtype", Note::Text(&collective.dtype)),
            ("bytes", Note::Count(collective.bytes)),
            ("bytes_sent", Note::Count(collective.bytes_sent)),
            ("bandwidth_gb_s", Note::Number(collective.bytes_sent as f64 / nanoseconds as f64)),
            ("queued_us", micros(collective.started.saturating_sub(collective.enqueued))),
        ];
        if !collective.is_finished {
            notes.push(("unfinished", Note::Count(1)));
        }
        let name = format!("{} {}", collective.operation, collective.scope);
        let mut slice = self.slice(&name, "collective", notes);
        let arrows = self.arrows.get(&(collective.group.as_str(), collective.sequence));
        slice.flow_ids = arrows.map_or_else(Vec::new, |arrows| arrows.flows.clone());
        self.begin(track, collective.started, slice);
        self.end(track, collective.finished);
    }

    /// Returns the track of a collective. A group with overlapping collectives has several tracks of the same name,
    /// which Perfetto shows as one.
    fn lane(&mut self, collective: &'a CollectiveTrace) -> u64 {
        let group = collective.group.as_str();
        let place = self.lanes.iter().position(|(known, _)| *known == group).unwrap_or_else(|| {
            self.lanes.push((group, Vec::new()));
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
            let members = self.rank.groups.get(group).map(|members| format!(" (ranks {})", ranks(members)));
            let name = format!("communication {group}{}", members.unwrap_or_default());
            self.describe_track(uuid, &name, 100 + place as i32, None);
        }
        uuid
    }

    fn write_gpu(&mut self) {
        let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
        for activity in &self.rank.gpu {
            let stream = activity.stream;
            let track = self.track(STREAMS + u64::from(stream));
            let previous = ends.get(&stream).copied();
            if previous.is_none() {
                let place = i32::try_from(stream).unwrap_or(i32::MAX - 1200);
                self.describe_track(track, &format!("GPU stream {stream}"), 1100 + place, None);
            }
            // A stream runs one activity after the other, but its times are slightly inconsistent.
            let start = activity.start.max(previous.unwrap_or(0));
            let end = activity.end.max(start);
            ends.insert(stream, end);
            let mut notes = vec![("stream", Note::Count(u64::from(stream)))];
            notes.extend(activity.bytes.map(|bytes| ("bytes", Note::Count(bytes))));
            let slice = self.slice(&activity.name, "gpu", notes);
            self.begin(track, start, slice);
            self.end(track, end);
        }
    }

    fn write_memory(&mut self, step: &StepTrace) {
        for span in &step.spans {
            let Some(bytes) = span.bytes else { continue };
            let value = TrackEvent { counter_value: i64::try_from(bytes).ok(), ..TrackEvent::default() };
            self.event(EventType::Counter, self.track(MEMORY), span.end, value);
        }
    }
}
