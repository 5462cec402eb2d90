use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use kiln_collectives::{DType, Label, Operation, Phase, Record, Span, StepTimeline};
use prost::Message;

use super::proto::{self, EventType};
use super::*;

/// Returns two ranks on two machines whose clocks differ. Rank 1 takes longer for the forward pass of `layers.1`, and
/// rank 0 waits for it.
fn recorded(ahead: f64) -> Vec<RecordedRank> {
    [0, 1]
        .map(|rank| RecordedRank {
            groups: BTreeMap::from([("world".to_owned(), vec![0, 1])]),
            steps: (0..3).map(|step| recorded_step(rank, step, ahead)).collect(),
            gpu: recorded_gpu(5001.0 + ahead * rank as f64),
        })
        .to_vec()
}

/// Returns kernels on two streams; two consecutive ones overlap slightly.
fn recorded_gpu(begun: f64) -> Vec<GpuActivity> {
    let activity = |name: &str, stream, bytes, start: f64, end: f64| GpuActivity {
        name: name.to_owned(),
        stream,
        bytes,
        start: begun + start / 1e6,
        end: begun + end / 1e6,
    };
    vec![
        activity("matmul_kernel_with_a_name_that_says_all_that_it_was_compiled_for", 7, None, 100.0, 300.0),
        activity("ncclDevKernel_AllGather_RING_LL", 13, None, 150.0, 400.0),
        activity("copy host to device", 7, Some(4096), 299.5, 350.0),
    ]
}

fn recorded_step(rank: usize, index: u64, ahead: f64) -> RecordedStep {
    let begun = 1.0 + index as f64 * 1e-3;
    let at = |us: f64| begun + us / 1e6;
    let slow = if rank == 1 { 100.0 } else { 0.0 };
    let span = |activity: &str, module: Option<&str>, waits_for: Option<u64>, start: f64, end: f64| Span {
        activity: activity.to_owned(),
        module: module.map(str::to_owned),
        waits_for: waits_for.map(|sequence| ("world".to_owned(), 10 * index + sequence)),
        start: at(start),
        end: at(end),
        bytes: 1000 + end as u64,
    };
    let record = |operation, scope: &str, phase, sequence: u64, times: [f64; 3]| Record {
        sequence: 10 * index + sequence,
        group: "world".into(),
        operation,
        label: Label::new(scope, phase),
        dtype: DType::F32,
        count: 100,
        bytes_sent: 200,
        enqueued: Some(Duration::from_secs_f64(at(times[0]))),
        started: Some(Duration::from_secs_f64(at(times[1]))),
        finished: Some(Duration::from_secs_f64(at(times[2]))),
    };
    let timeline = StepTimeline {
        rank,
        node: ["here", "there"][rank].to_owned(),
        step: 10 + index,
        start: at(0.0),
        end: at(900.0),
        created: 5000.0 + ahead * rank as f64,
        spans: vec![
            span("data loading", None, None, 0.0, 50.0),
            span("forward", None, None, 50.0, 60.0),
            span("forward", Some("layers.0"), None, 60.0, 100.0),
            span("forward", Some("layers.0"), Some(0), 100.0, 160.0),
            span("forward", Some("layers.0"), None, 160.0, 200.0),
            span("forward", Some("layers.1"), None, 200.0, 300.0 + slow),
            span("backward", None, Some(1), 300.0 + slow, 450.0),
            span("backward", Some("layers.1"), None, 450.0, 900.0),
        ],
        records: vec![
            record(Operation::AllGather, "layers.0", Phase::Forward, 0, [60.0, 70.0, 158.0]),
            record(Operation::AllReduce, "loss", Phase::Loss, 1, [300.0 + slow, 310.0 + slow, 449.0]),
        ],
    };
    RecordedStep { timeline, sums: BTreeMap::from([("busy_ns.forward".to_owned(), 7)]) }
}

#[test]
fn reading_returns_the_written_trace() {
    let trace = Trace::from_ranks(&recorded(-40.0));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pftrace");
    std::fs::write(&path, trace.encode()).unwrap();
    let mut expected = trace.clone();
    for rank in &mut expected.ranks {
        rank.gpu[2].start = rank.gpu[0].end;
    }
    assert_eq!(Trace::open(&path).unwrap(), expected);
}

#[test]
fn clocks_of_machines_are_aligned() {
    let (near, far) = (Trace::from_ranks(&recorded(0.0)), Trace::from_ranks(&recorded(12_345.678)));
    assert_eq!(near.ranks[0], far.ranks[0]);
    let starts = |trace: &Trace| trace.ranks.iter().map(|rank| rank.steps[2].start).collect::<Vec<_>>();
    let apart = starts(&far)[1].abs_diff(starts(&far)[0]);
    assert!(apart < 10_000, "{apart} ns");
    let error = far.ranks[1].clock_error.unwrap();
    // The all-reduce has the narrowest interval: rank 0 arrived 100 us before rank 1.
    assert!(apart <= error && error < 140_000, "{apart} {error}");
}

#[test]
fn slices_nest_and_arrows_connect() {
    let trace = Trace::from_ranks(&recorded(0.0));
    let file = proto::Trace::decode(&*trace.encode()).unwrap();
    let mut tracks: HashMap<u64, proto::TrackDescriptor> = HashMap::new();
    let mut open: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut last: HashMap<u64, u64> = HashMap::new();
    let [mut leaving, mut arriving] = [BTreeMap::new(), BTreeMap::new()];
    for packet in file.packet {
        if let Some(descriptor) = packet.track_descriptor {
            let parent = descriptor.parent_uuid;
            assert!(parent.is_none_or(|parent| tracks.contains_key(&parent)));
            assert!(tracks.insert(descriptor.uuid.unwrap(), descriptor).is_none());
        }
        let Some(event) = packet.track_event else { continue };
        let (track, time) = (event.track_uuid.unwrap(), packet.timestamp.unwrap());
        assert!(tracks.contains_key(&track));
        assert!(last.insert(track, time).is_none_or(|before| before <= time));
        let kind = EventType::try_from(event.r#type.unwrap()).unwrap();
        let open = open.entry(track).or_default();
        match kind {
            EventType::SliceBegin => open.push(time),
            EventType::SliceEnd => assert!(open.pop().unwrap() <= time),
            _ => assert_eq!(kind, EventType::Counter),
        }
        for flow in event.flow_ids {
            assert!(leaving.insert(flow, time).is_none());
        }
        for flow in event.terminating_flow_ids {
            assert!(arriving.insert(flow, time).is_none());
        }
    }
    assert!(open.values().all(Vec::is_empty));
    assert!(leaving.len() == 12 && leaving.keys().eq(arriving.keys()));
    assert!(leaving.iter().all(|(flow, time)| *time <= arriving[flow]), "{leaving:?} {arriving:?}");
    let names: Vec<_> = tracks.values().filter_map(|track| track.name.as_deref()).collect();
    for name in [
        "compute",
        "waits",
        "data",
        "checkpoint",
        "memory",
        "communication world (ranks 0-1)",
        "GPU stream 7",
        "GPU stream 13",
    ] {
        assert_eq!(names.iter().filter(|known| **known == name).count(), 2, "{name} in {names:?}");
    }
    let processes = tracks.values().filter_map(|track| track.process.as_ref()?.process_name.clone());
    let mut processes: Vec<_> = processes.collect();
    processes.sort();
    assert_eq!(processes, ["rank 0 (here)", "rank 1 (there)"]);
}

#[test]
fn overlapping_collectives_get_own_tracks() {
    let mut trace = Trace::from_ranks(&recorded(0.0)[..1]);
    let step = &mut trace.ranks[0].steps[0];
    step.collectives[1].started = step.collectives[0].started + 1;
    let file = proto::Trace::decode(&*trace.encode()).unwrap();
    let tracks = file.packet.iter().filter_map(|packet| packet.track_descriptor.as_ref()?.name.as_deref());
    assert_eq!(tracks.filter(|name| name.starts_with("communication")).count(), 2);
}

#[test]
fn summary_names_the_slowest_rank() {
    let summary = Summary::of(&Trace::from_ranks(&recorded(3.0)));
    let step = &summary.steps[1];
    assert_eq!((summary.steps.len(), step.step), (3, 11));
    let slowest = step.slowest.as_ref().unwrap();
    assert_eq!((slowest.rank, slowest.machine.as_str()), (1, "there"));
    assert_eq!(slowest.reasons[0].what, "forward of layers.1");
    let us = |seconds: f64| (seconds * 1e6).round() as i64;
    assert_eq!((us(slowest.reasons[0].seconds), us(slowest.reasons[0].others_s)), (200, 100));
    let [first, second] = &step.ranks[..] else { panic!("two ranks") };
    assert_eq!((us(first.exposed_s), us(second.exposed_s)), (210, 110));
    assert_eq!((us(first.data_s), us(first.computing_s)), (50, 640));
    assert!((first.overlap.unwrap() - (1.0 - 210.0 / 227.0)).abs() < 1e-3, "{first:?}");
    assert_eq!(step.exposed[0].place, "backward");
    assert_eq!((us(step.exposed[0].mean_s), us(step.exposed[0].most_s)), (100, 150));
    let gather = step.operations.iter().find(|sum| sum.operation == "all_gather").unwrap();
    assert_eq!((gather.calls, gather.bytes_sent), (2, 400));
    assert!((gather.gb_per_s.unwrap() - 400.0 / 176e3).abs() < 2e-4, "{gather:?}");
}

#[test]
fn critical_path_crosses_the_last_rank() {
    let summary = Summary::of(&Trace::from_ranks(&recorded(0.0)));
    let path = &summary.steps[0].critical_path;
    let total: f64 = path.iter().map(|part| part.seconds).sum();
    // Rank 0's clock is slightly off, so short parts may be missing.
    assert!((total - summary.steps[0].seconds).abs() < 1e-5, "{total} {path:?}");
    let part = |what: &str| path.iter().find(|part| part.what == what).unwrap();
    assert_eq!(part("forward of layers.1").rank, 1);
    assert!(part("all_reduce loss").is_communication);
    assert!((part("all_reduce loss").seconds - 50e-6).abs() < 5e-6, "{path:?}");
}

#[test]
fn summary_fits_80_columns() {
    let mut ranks = recorded(0.0);
    for step in &mut ranks[1].steps {
        step.timeline.spans[5].module =
            Some("layers.1.a_module_with_a_name_that_nobody_can_pronounce".repeat(2));
        step.timeline.node = "a-machine-with-a-name.that.goes.on.and.on.and.on.and.on.example".to_owned();
    }
    let text = Summary::of(&Trace::from_ranks(&ranks)).to_string();
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(text.contains("slowest rank: 1 on a-machine"), "{text}");
    // The gather continues after the copy has ended, for 50 of 300 us.
    assert!(text.contains("0         0.300 ms      100.0 %       16.7 %"), "{text}");
    assert!(
        text.contains("ncclDevKernel_AllGather_RING_LL                     2      0.500 ms  50.0 %"),
        "{text}"
    );
}

/// Other programs may write such files.
#[test]
fn slices_ending_before_they_begin_are_empty() {
    let mut file = proto::Trace::decode(&*Trace::from_ranks(&recorded(0.0)).encode()).unwrap();
    for packet in &mut file.packet {
        let is_end = packet.track_event.as_ref().is_some_and(|event| event.r#type() == EventType::SliceEnd);
        if is_end {
            packet.timestamp = Some(0);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pftrace");
    std::fs::write(&path, file.encode_to_vec()).unwrap();
    let summary = Summary::of(&Trace::open(&path).unwrap());
    assert_eq!(summary.steps.len(), 3);
    assert!(summary.steps.iter().flat_map(|step| &step.ranks).all(|rank| rank.step_s == 0.0), "{summary}");
}

#[test]
fn other_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.pftrace");
    let rejected = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        Trace::open(&path).unwrap_err().to_string()
    };
    assert!(rejected(b"{\"traceEvents\": []}").contains("is not a Perfetto trace"));
    assert!(rejected(b"").contains("contains no step of a Kiln run"));
    let whole = Trace::from_ranks(&recorded(0.0)).encode();
    assert!(rejected(&whole[..whole.len() - 3]).contains("is not a Perfetto trace"));
    let missing = Trace::open(&folder.path().join("none")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read"), "{missing}");
}
