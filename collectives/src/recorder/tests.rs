use super::*;
use crate::label::Label;

fn issue(recorder: &Recorder, group: GroupId, sequence: u64) -> RecordId {
    let call = Call::barrier(Label::new("step", Phase::Other));
    recorder.enqueued(group, sequence, &call, 0)
}

fn with_world(capacity: usize) -> (Recorder, GroupId) {
    let recorder = Recorder::new(capacity);
    let group = recorder.join(&Arc::from("world"), &[0, 1]);
    (recorder, group)
}

#[test]
fn ring_drops_the_oldest_but_totals_stay() {
    let (recorder, group) = with_world(2);
    let ids: Vec<RecordId> = (0..5).map(|sequence| issue(&recorder, group, sequence)).collect();
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
    let (recorder, group) = with_world(0);
    let id = issue(&recorder, group, 0);
    recorder.finished(id);
    assert_eq!(recorder.records(), []);
    assert_eq!(recorder.count(Operation::Barrier, None), 1);
}

#[test]
fn groups_show_what_is_pending() {
    let (recorder, group) = with_world(8);
    recorder.set_activity("data loading");
    let first = issue(&recorder, group, 0);
    let mut now = String::new();
    recorder.write_now(&mut now).unwrap();
    assert_eq!(now, ", in data loading after barrier(step)");
    let mut call = String::new();
    recorder.write_last_call(&mut call).unwrap();
    assert_eq!((call.as_str(), recorder.activity_now()), ("barrier(step)", Some("data loading")));
    issue(&recorder, group, 1);
    recorder.finished(first);
    let groups = recorder.groups();
    assert_eq!((groups[0].issued, groups[0].ranks.as_slice()), (2, &[0, 1][..]));
    let pending: Vec<u64> = groups[0].pending.iter().map(|p| p.sequence).collect();
    assert_eq!(pending, [1]);
    assert_eq!(recorder.activity().name, "data loading");
}

#[test]
fn records_survive_json() {
    let (recorder, group) = with_world(8);
    let id = issue(&recorder, group, 0);
    recorder.started(id);
    let record = recorder.records().remove(0);
    let text = serde_json::to_string(&record).unwrap();
    let back: Record = serde_json::from_str(&text).unwrap();
    assert_eq!((back.sequence, back.label, back.finished), (0, record.label, None));
    let bad = text.replace("\"finished\":null", "\"finished\":-1.0");
    assert!(serde_json::from_str::<Record>(&bad).is_err());
}
