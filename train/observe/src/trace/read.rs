//! Reading back a trace file that Kiln has written.
//!
//! Tracks and slices of other programs are skipped.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use prost::Message;

use super::error::TraceError;
use super::model::{CollectiveTrace, GpuTrace, RankTrace, SpanTrace, StepTrace, Trace};
use super::names::{self, category, note};
use super::proto::{self, EventType, InternedName, TracePacket, TrackDescriptor, TrackEvent, Value};

/// Maximum size of a file in bytes.
const MOST_BYTES: u64 = 1 << 31;

impl Trace {
    /// Reads the trace in the file `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is in another format, or has no step of a run of Kiln.
    pub fn open(path: &Path) -> Result<Trace, TraceError> {
        let io = |source| TraceError::Io { doing: "read", path: path.to_owned(), source };
        let bytes = kiln_sys::files::read(path, MOST_BYTES).map_err(io)?;
        let format =
            |error: prost::DecodeError| TraceError::Format { path: path.to_owned(), why: error.to_string() };
        let file = proto::Trace::decode(&*bytes).map_err(format)?;
        let trace = Reader::default().read(file.packet);
        match trace.ranks.is_empty() {
            true => Err(TraceError::Foreign { path: path.to_owned() }),
            false => Ok(trace),
        }
    }
}

/// A slice as stored in the file.
struct Slice {
    track: u64,
    name: String,
    category: String,
    notes: BTreeMap<String, Noted>,
    start: u64,
    end: u64,
}

enum Noted {
    Count(u64),
    Number(f64),
    Text(String),
}

impl Slice {
    fn text(&self, name: &str) -> Option<&str> {
        match self.notes.get(name)? {
            Noted::Text(text) => Some(text),
            _ => None,
        }
    }

    fn count(&self, name: &str) -> Option<u64> {
        match self.notes.get(name)? {
            Noted::Count(count) => Some(*count),
            _ => None,
        }
    }

    /// Returns nanoseconds from a value stored in microseconds.
    fn nanoseconds(&self, name: &str) -> Option<u64> {
        match self.notes.get(name)? {
            Noted::Number(micros) => Some((micros * 1e3).round() as u64),
            _ => None,
        }
    }
}

/// Interned names by writer and number.
#[derive(Default)]
struct Interned {
    events: HashMap<u64, String>,
    categories: HashMap<u64, String>,
    annotations: HashMap<u64, String>,
    texts: HashMap<u64, String>,
}

fn add(names: &mut HashMap<u64, String>, new: Vec<InternedName>) {
    names.extend(new.into_iter().filter_map(|name| Some((name.iid?, name.name?))));
}

#[derive(Default)]
struct Reader {
    names: HashMap<u32, Interned>,
    tracks: HashMap<u64, TrackDescriptor>,
    /// Slices that have begun on a track and not ended.
    open: HashMap<u64, Vec<Slice>>,
    slices: Vec<Slice>,
    /// Times and values of counters, by track.
    counters: HashMap<u64, Vec<(u64, u64)>>,
}

impl Reader {
    fn read(mut self, packets: Vec<TracePacket>) -> Trace {
        packets.into_iter().for_each(|packet| self.take(packet));
        // By the process that a track belongs to.
        let mut of_rank: BTreeMap<usize, OfRank> = BTreeMap::new();
        for slice in std::mem::take(&mut self.slices) {
            if let Some((rank, node)) = self.rank_of(slice.track) {
                let of_rank = of_rank.entry(rank).or_default();
                of_rank.node = node;
                of_rank.slices.push(slice);
            }
        }
        for (track, values) in std::mem::take(&mut self.counters) {
            if let Some((rank, _)) = self.rank_of(track) {
                of_rank.entry(rank).or_default().memory.extend(values);
            }
        }
        let ranks = of_rank.into_iter().map(|(rank, of)| rank_trace(rank, of));
        Trace { ranks: ranks.filter(|rank| !rank.steps.is_empty()).collect() }
    }

    fn rank_of(&self, track: u64) -> Option<(usize, String)> {
        let mut descriptor = self.tracks.get(&track)?;
        if let Some(parent) = descriptor.parent_uuid {
            descriptor = self.tracks.get(&parent)?;
        }
        let (rank, node) = names::rank_of(descriptor.process.as_ref()?.process_name.as_ref()?)?;
        Some((rank, node.to_owned()))
    }

    fn take(&mut self, packet: TracePacket) {
        let names = self.names.entry(packet.trusted_packet_sequence_id.unwrap_or(0)).or_default();
        if packet.sequence_flags.unwrap_or(0) & proto::INCREMENTAL_STATE_CLEARED != 0 {
            *names = Interned::default();
        }
        if let Some(new) = packet.interned_data {
            add(&mut names.events, new.event_names);
            add(&mut names.categories, new.event_categories);
            add(&mut names.annotations, new.debug_annotation_names);
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            let texts = new.debug_annotation_string_values.into_iter();
            names.texts.extend(texts.filter_map(|new| Some((new.iid?, text(new.str?)))));
        }
        if let Some(descriptor) = packet.track_descriptor {
            self.tracks.insert(descriptor.uuid.unwrap_or(0), descriptor);
        }
        if let (Some(time), Some(event)) = (packet.timestamp, packet.track_event) {
            let track = event.track_uuid.unwrap_or(0);
            match EventType::try_from(event.r#type.unwrap_or(0)) {
                Ok(EventType::SliceBegin) => {
                    let slice = begun(names, track, time, &event);
                    self.open.entry(track).or_default().push(slice);
                }
                Ok(EventType::SliceEnd) => {
                    if let Some(slice) = self.open.get_mut(&track).and_then(Vec::pop) {
                        // A file of another program may have an end before the beginning.
                        self.slices.push(Slice { end: time.max(slice.start), ..slice });
                    }
                }
                Ok(EventType::Counter) => {
                    let value = event.counter_value.and_then(|value| u64::try_from(value).ok());
                    self.counters.entry(track).or_default().extend(value.map(|value| (time, value)));
                }
                _ => {}
            }
        }
    }
}

fn begun(names: &Interned, track: u64, time: u64, event: &TrackEvent) -> Slice {
    let name = |names: &HashMap<u64, String>, iid: Option<u64>| {
        iid.and_then(|iid| names.get(&iid)).cloned().unwrap_or_default()
    };
    let notes = event.debug_annotations.iter().filter_map(|note| {
        let value = match note.value? {
            Value::Uint(count) => Noted::Count(count),
            Value::Double(number) => Noted::Number(number),
            Value::Text(iid) => Noted::Text(name(&names.texts, Some(iid))),
        };
        Some((name(&names.annotations, note.name_iid), value))
    });
    Slice {
        track,
        name: name(&names.events, event.name_iid),
        category: name(&names.categories, event.category_iids.first().copied()),
        notes: notes.collect(),
        start: time,
        end: time,
    }
}

/// The contents of the tracks of one rank.
#[derive(Default)]
struct OfRank {
    node: String,
    slices: Vec<Slice>,
    /// Bytes that it held, by time.
    memory: BTreeMap<u64, u64>,
}

fn rank_trace(rank: usize, OfRank { node, slices, memory }: OfRank) -> RankTrace {
    let mut trace = RankTrace {
        rank,
        node,
        clock_error: None,
        groups: BTreeMap::new(),
        steps: Vec::new(),
        gpu: Vec::new(),
    };
    let mut by_category: HashMap<String, Vec<Slice>> = HashMap::new();
    for slice in slices {
        by_category.entry(slice.category.clone()).or_default().push(slice);
    }
    let mut of = |category: &str| {
        let mut slices = by_category.remove(category).unwrap_or_default();
        slices.sort_by_key(|slice| (slice.start, slice.end));
        slices
    };
    for slice in of(category::STEP) {
        trace.clock_error = slice.nanoseconds(note::CLOCK_ERROR);
        let sums = slice.notes.iter().filter_map(|(name, value)| match value {
            Noted::Count(sum) => Some((name.strip_prefix(note::RECORDER)?.to_owned(), *sum)),
            _ => None,
        });
        trace.steps.push(StepTrace {
            step: slice.count(note::STEP).unwrap_or(0),
            start: slice.start,
            end: slice.end,
            recorder: sums.collect(),
            ..StepTrace::default()
        });
    }
    let [phases, units, waits] =
        [category::PHASE, category::UNIT, category::WAIT].map(|category| Times::new(of(category)));
    for step in &mut trace.steps {
        for phase in phases.within(step.start, step.end) {
            step.spans.extend(spans_of(phase, &units, &waits, &memory));
        }
        // Phases overlap only in files of other programs.
        step.spans.sort_by_key(|span| span.start);
    }
    for slice in of(category::COLLECTIVE) {
        let Some(collective) = collective(&slice) else { continue };
        let ranks = slice.text(note::RANKS).filter(|ranks| !ranks.is_empty()).and_then(names::parse_ranks);
        if let Some(ranks) = ranks {
            trace.groups.entry(collective.group.clone()).or_insert(ranks);
        }
        // Belongs to the step in which it was issued; it may extend into the next one.
        let after = trace.steps.partition_point(|step| step.start <= collective.enqueued);
        if let Some(step) = after.checked_sub(1).and_then(|at| trace.steps.get_mut(at)) {
            step.collectives.push(collective);
        }
    }
    trace.gpu = of(category::GPU).iter().map(gpu).collect();
    for step in &mut trace.steps {
        step.collectives.sort_by_key(|collective| (collective.started, collective.sequence));
    }
    trace
}

/// Slices ordered by start.
struct Times(Vec<Slice>);

impl Times {
    fn new(slices: Vec<Slice>) -> Self {
        Times(slices)
    }

    /// Returns the slices that begin in `start..end`.
    fn within(&self, start: u64, end: u64) -> &[Slice] {
        let at = |time| self.0.partition_point(|slice| slice.start < time);
        &self.0[at(start)..at(end).max(at(start))]
    }
}

/// Returns the spans of a phase: modules, waits, and the time between them.
fn spans_of(phase: &Slice, units: &Times, waits: &Times, memory: &BTreeMap<u64, u64>) -> Vec<SpanTrace> {
    let inner = |times: &'_ Times| -> Vec<SpanTrace> {
        times.within(phase.start, phase.end).iter().map(|slice| span(phase, slice)).collect()
    };
    let mut known = inner(units);
    known.extend(inner(waits));
    known.sort_by_key(|span| (span.start, span.end));
    let mut spans = Vec::new();
    let mut now = phase.start;
    let mut between = |spans: &mut Vec<SpanTrace>, until: u64| {
        if until > now {
            let activity = phase.name.clone();
            spans.push(SpanTrace {
                activity,
                unit: None,
                waits_for: None,
                start: now,
                end: until,
                bytes: None,
            });
        }
        now = now.max(until);
    };
    for span in known {
        between(&mut spans, span.start);
        between(&mut Vec::new(), span.end);
        spans.push(span);
    }
    between(&mut spans, phase.end);
    spans.iter_mut().for_each(|span| span.bytes = memory.get(&span.end).copied());
    spans
}

fn span(phase: &Slice, slice: &Slice) -> SpanTrace {
    let is_wait = slice.category == category::WAIT;
    let waits_for = slice.text(note::GROUP).zip(slice.count(note::SEQUENCE)).filter(|_| is_wait);
    SpanTrace {
        activity: phase.name.clone(),
        unit: match is_wait {
            true => slice.text(note::UNIT).map(str::to_owned),
            false => Some(slice.name.clone()),
        },
        waits_for: waits_for.map(|(group, sequence)| (group.to_owned(), sequence)),
        start: slice.start,
        end: slice.end,
        bytes: None,
    }
}

fn gpu(slice: &Slice) -> GpuTrace {
    let stream = slice.count(note::STREAM).and_then(|stream| u32::try_from(stream).ok());
    GpuTrace {
        name: slice.name.clone(),
        stream: stream.unwrap_or(0),
        bytes: slice.count(note::BYTES),
        start: slice.start,
        end: slice.end,
    }
}

fn collective(slice: &Slice) -> Option<CollectiveTrace> {
    let text = |name| slice.text(name).map(str::to_owned);
    Some(CollectiveTrace {
        operation: text(note::OPERATION)?,
        scope: text(note::SCOPE)?,
        phase: text(note::PHASE)?,
        group: text(note::GROUP)?,
        sequence: slice.count(note::SEQUENCE)?,
        dtype: text(note::DTYPE)?,
        bytes: slice.count(note::BYTES)?,
        bytes_sent: slice.count(note::BYTES_SENT)?,
        enqueued: slice.start.saturating_sub(slice.nanoseconds(note::QUEUED).unwrap_or(0)),
        started: slice.start,
        finished: slice.end,
        is_finished: slice.count(note::UNFINISHED).is_none(),
    })
}
