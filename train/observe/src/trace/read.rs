//! Reads trace files written by Kiln, and skips tracks and slices of other programs.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use prost::Message;

use super::TraceError;
use super::model::{CollectiveTrace, GpuTrace, RankTrace, SpanTrace, StepTrace, Trace};
use super::proto::{self, EventType, Interned, TracePacket, TrackDescriptor, TrackEvent, Value};

const MOST_BYTES: u64 = 1 << 31;

const MOST_RANKS: usize = 1 << 20;

impl Trace {
    /// Reads the trace file at `path`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is in another format, or contains no step of a Kiln run.
    pub fn open(path: &Path) -> Result<Trace, TraceError> {
        let io = |source| TraceError::Io { doing: "read", path: path.to_owned(), source };
        let bytes = kiln_sys::files::read(path, MOST_BYTES).map_err(io)?;
        let format =
            |error: prost::DecodeError| TraceError::Format { path: path.to_owned(), why: error.to_string() };
        let file = proto::Trace::decode(&*bytes).map_err(format)?;
        let trace = Reader::default().read(file.packet);
        match trace.ranks.is_empty() {
            true => Err(TraceError::Foreign(path.to_owned())),
            false => Ok(trace),
        }
    }
}

/// Parses a process name, as in `rank 3 (node7)`.
fn rank_of(process: &str) -> Option<(usize, &str)> {
    let (rank, node) = process.strip_prefix("rank ")?.split_once(" (")?;
    Some((rank.parse().ok()?, node.strip_suffix(')')?))
}

fn parse_ranks(text: &str) -> Option<Vec<usize>> {
    let mut ranks = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last.checked_sub(first)? >= MOST_RANKS - ranks.len() {
            return None;
        }
        ranks.extend(first..=last);
    }
    Some(ranks)
}

struct Slice {
    track: u64,
    name: String,
    category: String,
    notes: BTreeMap<String, Note>,
    start: u64,
    end: u64,
}

enum Note {
    Count(u64),
    Number(f64),
    Text(String),
}

impl Slice {
    fn text(&self, name: &str) -> Option<&str> {
        match self.notes.get(name)? {
            Note::Text(text) => Some(text),
            _ => None,
        }
    }

    fn count(&self, name: &str) -> Option<u64> {
        match self.notes.get(name)? {
            Note::Count(count) => Some(*count),
            _ => None,
        }
    }

    fn nanoseconds(&self, name: &str) -> Option<u64> {
        match self.notes.get(name)? {
            Note::Number(micros) => Some((micros * 1e3).round() as u64),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Names([HashMap<u64, String>; 4]);

impl Names {
    fn get(&self, kind: Interned, iid: Option<u64>) -> String {
        iid.and_then(|iid| self.0[kind as usize].get(&iid)).cloned().unwrap_or_default()
    }
}

#[derive(Default)]
struct Reader {
    names: HashMap<u32, Names>,
    tracks: HashMap<u64, TrackDescriptor>,
    open: HashMap<u64, Vec<Slice>>,
    slices: Vec<Slice>,
    /// Track, time and value.
    counters: Vec<(u64, u64, u64)>,
}

impl Reader {
    fn read(mut self, packets: Vec<TracePacket>) -> Trace {
        packets.into_iter().for_each(|packet| self.take(packet));
        let mut ranks: BTreeMap<usize, RankTracks> = BTreeMap::new();
        for slice in std::mem::take(&mut self.slices) {
            if let Some((rank, node)) = self.rank_of(slice.track) {
                let tracks = ranks.entry(rank).or_default();
                tracks.node = node.to_owned();
                tracks.slices.push(slice);
            }
        }
        for (track, time, value) in &self.counters {
            if let Some((rank, _)) = self.rank_of(*track) {
                ranks.entry(rank).or_default().memory.insert(*time, *value);
            }
        }
        let ranks = ranks.into_iter().map(|(rank, tracks)| rank_trace(rank, tracks));
        Trace { ranks: ranks.filter(|rank| !rank.steps.is_empty()).collect() }
    }

    fn rank_of(&self, track: u64) -> Option<(usize, &str)> {
        let mut descriptor = self.tracks.get(&track)?;
        if let Some(parent) = descriptor.parent_uuid {
            descriptor = self.tracks.get(&parent)?;
        }
        rank_of(descriptor.process.as_ref()?.process_name.as_ref()?)
    }

    fn take(&mut self, packet: TracePacket) {
        let names = self.names.entry(packet.trusted_packet_sequence_id.unwrap_or(0)).or_default();
        if packet.sequence_flags.unwrap_or(0) & proto::INCREMENTAL_STATE_CLEARED != 0 {
            *names = Names::default();
        }
        if let Some(new) = packet.interned_data {
            let lists = [
                new.event_categories,
                new.event_names,
                new.debug_annotation_names,
                new.debug_annotation_string_values,
            ];
            for (known, list) in names.0.iter_mut().zip(lists) {
                known.extend(list.into_iter().filter_map(|name| Some((name.iid?, name.name?))));
            }
        }
        if let Some(descriptor) = packet.track_descriptor {
            self.tracks.insert(descriptor.uuid.unwrap_or(0), descriptor);
        }
        let (Some(time), Some(event)) = (packet.timestamp, packet.track_event) else { return };
        let track = event.track_uuid.unwrap_or(0);
        match event.r#type() {
            EventType::SliceBegin => {
                self.open.entry(track).or_default().push(slice(names, track, time, &event));
            }
            EventType::SliceEnd => {
                if let Some(slice) = self.open.get_mut(&track).and_then(Vec::pop) {
                    // Files of other programs may have an end before its beginning.
                    self.slices.push(Slice { end: time.max(slice.start), ..slice });
                }
            }
            EventType::Counter => {
                let value = event.counter_value.and_then(|value| u64::try_from(value).ok());
                self.counters.extend(value.map(|value| (track, time, value)));
            }
            EventType::Unspecified | EventType::Instant => {}
        }
    }
}

fn slice(names: &Names, track: u64, time: u64, event: &TrackEvent) -> Slice {
    let notes = event.debug_annotations.iter().filter_map(|note| {
        let value = match note.value? {
            Value::Uint(count) => Note::Count(count),
            Value::Double(number) => Note::Number(number),
            Value::Text(iid) => Note::Text(names.get(Interned::Text, Some(iid))),
        };
        Some((names.get(Interned::Annotation, note.name_iid), value))
    });
    Slice {
        track,
        name: names.get(Interned::Event, event.name_iid),
        category: names.get(Interned::Category, event.category_iids.first().copied()),
        notes: notes.collect(),
        start: time,
        end: time,
    }
}

#[derive(Default)]
struct RankTracks {
    node: String,
    slices: Vec<Slice>,
    memory: BTreeMap<u64, u64>,
}

fn rank_trace(rank: usize, RankTracks { node, slices, memory }: RankTracks) -> RankTrace {
    let mut by_category: HashMap<String, Vec<Slice>> = HashMap::new();
    for slice in slices {
        by_category.entry(slice.category.clone()).or_default().push(slice);
    }
    let mut sorted = |category: &str| {
        let mut slices = by_category.remove(category).unwrap_or_default();
        slices.sort_by_key(|slice| (slice.start, slice.end));
        slices
    };
    let (phases, modules, waits) = (sorted("phase"), sorted("module"), sorted("wait"));
    let mut clock_error = None;
    let mut steps = Vec::new();
    for slice in sorted("step") {
        clock_error = slice.nanoseconds("clock_error_us");
        let sums = slice.notes.iter().filter_map(|(name, value)| match value {
            Note::Count(sum) => Some((name.strip_prefix("recorder.")?.to_owned(), *sum)),
            _ => None,
        });
        let phases = within(&phases, slice.start, slice.end);
        let mut spans: Vec<_> =
            phases.iter().flat_map(|phase| spans_of(phase, &modules, &waits, &memory)).collect();
        // Phases overlap only in files of other programs.
        spans.sort_by_key(|span| span.start);
        steps.push(StepTrace {
            step: slice.count("step").unwrap_or(0),
            start: slice.start,
            end: slice.end,
            spans,
            collectives: Vec::new(),
            recorder: sums.collect(),
        });
    }
    let mut groups = BTreeMap::new();
    for slice in sorted("collective") {
        let Some(collective) = collective(&slice) else { continue };
        let ranks = slice.text("ranks").filter(|ranks| !ranks.is_empty()).and_then(parse_ranks);
        if let Some(ranks) = ranks {
            groups.entry(collective.group.clone()).or_insert(ranks);
        }
        let after = steps.partition_point(|step| step.start <= collective.enqueued);
        if let Some(step) = after.checked_sub(1).and_then(|at| steps.get_mut(at)) {
            step.collectives.push(collective);
        }
    }
    for step in &mut steps {
        step.collectives.sort_by_key(|collective| (collective.started, collective.sequence));
    }
    let stream = |slice: &Slice| slice.count("stream").and_then(|stream| u32::try_from(stream).ok());
    let gpu = sorted("gpu").into_iter().map(|slice| GpuTrace {
        stream: stream(&slice).unwrap_or(0),
        bytes: slice.count("bytes"),
        name: slice.name,
        start: slice.start,
        end: slice.end,
    });
    RankTrace { rank, node, clock_error, groups, steps, gpu: gpu.collect() }
}

fn within(slices: &[Slice], start: u64, end: u64) -> &[Slice] {
    let at = |time| slices.partition_point(|slice| slice.start < time);
    &slices[at(start)..at(end).max(at(start))]
}

/// Returns the spans of a phase: modules, waits, and the time between them.
fn spans_of(
    phase: &Slice,
    modules: &[Slice],
    waits: &[Slice],
    memory: &BTreeMap<u64, u64>,
) -> Vec<SpanTrace> {
    let span = |start, end| SpanTrace {
        activity: phase.name.clone(),
        module: None,
        waits_for: None,
        start,
        end,
        bytes: memory.get(&end).copied(),
    };
    let modules = within(modules, phase.start, phase.end)
        .iter()
        .map(|slice| SpanTrace { module: Some(slice.name.clone()), ..span(slice.start, slice.end) });
    let waits = within(waits, phase.start, phase.end).iter().map(|slice| SpanTrace {
        module: slice.text("module").map(str::to_owned),
        waits_for: slice.text("group").map(str::to_owned).zip(slice.count("sequence")),
        ..span(slice.start, slice.end)
    });
    let mut known: Vec<_> = modules.chain(waits).collect();
    known.sort_by_key(|span| (span.start, span.end));
    let mut spans = Vec::new();
    let mut now = phase.start;
    for next in known {
        if next.start > now {
            spans.push(span(now, next.start));
        }
        now = now.max(next.end);
        spans.push(next);
    }
    if phase.end > now {
        spans.push(span(now, phase.end));
    }
    spans
}

fn collective(slice: &Slice) -> Option<CollectiveTrace> {
    let text = |name| slice.text(name).map(str::to_owned);
    Some(CollectiveTrace {
        operation: text("operation")?,
        scope: text("scope")?,
        phase: text("phase")?,
        group: text("group")?,
        sequence: slice.count("sequence")?,
        dtype: text("dtype")?,
        bytes: slice.count("bytes")?,
        bytes_sent: slice.count("bytes_sent")?,
        enqueued: slice.start.saturating_sub(slice.nanoseconds("queued_us").unwrap_or(0)),
        started: slice.start,
        finished: slice.end,
        is_finished: slice.count("unfinished").is_none(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::write::ranks;
    use super::*;

    #[test]
    fn names_are_parsed() {
        assert_eq!(rank_of("rank 3 (a (b))"), Some((3, "a (b)")));
        assert_eq!(rank_of("chrome"), None);
        for (list, text) in [(vec![], ""), (vec![0], "0"), (vec![0, 1, 2, 5, 7, 8], "0-2,5,7-8")] {
            assert_eq!(ranks(&list), text);
            assert_eq!(parse_ranks(text), Some(list));
        }
        assert_eq!(parse_ranks("0-99999999999"), None);
        assert_eq!(parse_ranks("3-1"), None);
        assert_eq!(parse_ranks("x"), None);
    }
}
