use std::time::Duration;

use super::*;
use crate::dtype::DType;
use crate::flight::Record;
use crate::flight::{Activity, GroupFlight, Pending, Stall};
use crate::label::{Label, Phase};
use crate::payload::Payload;

fn gather(scope: &str) -> Call {
    let buffer = |len| crate::Buffer::zeros(DType::F32, len);
    let payload = Payload::AllGather { input: buffer(1).into(), output: buffer(4) };
    payload.call(Label::new(scope, Phase::Forward), 4)
}

/// A rank in the activity `doing`. `groups`: name, ranks, number of issued operations, and the last call if pending.
fn rank(rank: usize, doing: &str, groups: &[(&str, &[usize], u64, Option<Call>)]) -> Witness {
    let group = |(name, ranks, issued, waits): &(&str, &[usize], u64, Option<Call>)| {
        let pending = waits.iter().map(|call| Pending {
            sequence: issued - 1,
            call: call.clone(),
            seconds: 61.0 - rank as f64,
        });
        GroupFlight {
            name: (*name).into(),
            ranks: ranks.to_vec(),
            issued: *issued,
            pending: pending.collect(),
        }
    };
    Witness::Answered(Box::new(Flight {
        rank,
        world_size: 4,
        backend: "tcp".into(),
        node: "node0".into(),
        process: 1,
        activity: Activity { name: doing.into(), seconds: 61.2 },
        groups: groups.iter().map(group).collect(),
        verdict: None,
        records: Vec::new(),
        clock: 0.0,
        stall: None,
    }))
}

/// A rank that entered operation 1085 `age` seconds ago. It is still there, or has finished and waits in `next`.
fn entered(index: usize, age: f64, next: Option<Call>) -> Witness {
    let issued = if next.is_some() { 1087 } else { 1086 };
    let call = next.clone().unwrap_or_else(|| gather("block.7"));
    let witness = rank(index, "forward", &[("world", WORLD, issued, Some(call))]);
    let Witness::Answered(mut flight) = witness else { unreachable!() };
    flight.groups[0].pending[0].seconds = if next.is_some() { 0.1 } else { age };
    flight.clock = 100.0;
    flight.records = vec![record(1085, Duration::from_secs_f64(100.0 - age), None)];
    Witness::Answered(flight)
}

fn record(sequence: u64, ready: Duration, finished: Option<Duration>) -> Record {
    Record {
        sequence,
        group: "world".into(),
        operation: crate::Operation::AllGather,
        label: Label::new("block.7", Phase::Forward),
        dtype: DType::F32,
        count: 4,
        bytes_sent: 3,
        enqueued: Some(ready),
        started: finished.map(|_| ready),
        finished,
    }
}

#[track_caller]
fn check_wait(witnesses: &[Witness], finding: Finding, culprits: &[usize], text: &str) {
    let verdict = Verdict::for_wait(witnesses, "world", WORLD, 1085);
    assert_eq!(verdict.text, text);
    assert_eq!((verdict.finding, verdict.culprits.as_slice()), (finding, culprits));
}

const WORLD: &[usize] = &[0, 1, 2, 3];

#[track_caller]
fn check(witnesses: &[Witness], finding: Finding, culprits: &[usize], text: &str) {
    let verdict = Verdict::of(witnesses);
    assert_eq!(verdict.text, text);
    assert_eq!((verdict.finding, verdict.culprits.as_slice()), (finding, culprits));
}

fn waiting(index: usize) -> Witness {
    rank(index, "forward", &[("world", WORLD, 1086, Some(gather("block.7")))])
}

#[test]
fn a_missing_rank_is_named_with_its_activity() {
    let late = rank(2, "data loading", &[("world", WORLD, 1085, None)]);
    check(
        &[waiting(0), waiting(1), late, waiting(3)],
        Finding::Missing,
        &[2],
        "rank 2 never entered #1085 all_gather(block.7); it has been in data loading for 61 s; \
         ranks 0, 1, 3 wait",
    );
}

#[test]
fn the_chain_of_waits_is_followed_to_its_end() {
    // Rank 0 waits for rank 1 in the world, rank 1 for rank 3 in its shard group; rank 3 is in the optimizer.
    let shard: &[usize] = &[1, 3];
    let shard_of = |issued, call| ("shard", shard, issued, call);
    let world = |issued, call| ("world", WORLD, issued, call);
    check(
        &[
            rank(0, "loss", &[world(9, Some(gather("loss")))]),
            rank(1, "forward", &[world(8, None), shard_of(5, Some(gather("block.1")))]),
            rank(2, "loss", &[world(9, Some(gather("loss")))]),
            rank(3, "optimizer", &[world(8, None), shard_of(4, None)]),
        ],
        Finding::Missing,
        &[3],
        "rank 3 never entered #4 all_gather(block.1) of group \"shard\"; it has been in optimizer \
         for 61 s; rank 1 waits",
    );
}

#[test]
fn the_minority_of_differing_calls_is_blamed() {
    let other = rank(1, "forward", &[("world", WORLD, 1086, Some(gather("block.8")))]);
    check(
        &[waiting(0), other, waiting(2), waiting(3)],
        Finding::Mismatch,
        &[1],
        "#1085 differs between ranks: ranks 0, 2, 3 called all_gather of 4 f32 for \
         \"block.7\" (forward); rank 1 called all_gather of 4 f32 for \"block.8\" (forward)",
    );
}

#[test]
fn dead_and_silent_ranks_are_blamed_first() {
    let gone = || Witness::Gone { reason: "died".into() };
    let silent = || Witness::Silent { seconds: 12.4 };
    check(
        &[waiting(0), gone(), silent(), gone()],
        Finding::Died,
        &[1, 3],
        "ranks 1, 3 died; rank 0 waits in #1085 all_gather(block.7)",
    );
    check(
        &[waiting(0), silent(), silent(), waiting(3)],
        Finding::Silent,
        &[1, 2],
        "ranks 1, 2 have not answered for 12 s: their processes are stopped or their machines \
         cannot be reached; ranks 0, 3 wait in #1085 all_gather(block.7)",
    );
    check(
        &[waiting(0), waiting(1), silent(), waiting(3)],
        Finding::Silent,
        &[2],
        "rank 2 has not answered for 12 s: its process is stopped or its machine cannot be \
         reached; ranks 0, 1, 3 wait in #1085 all_gather(block.7)",
    );
}

#[test]
fn slow_transfers_and_healthy_runs_blame_no_rank() {
    check(
        &[waiting(0), waiting(1), waiting(2), waiting(3)],
        Finding::Transfer,
        &[],
        "all ranks entered #1085 all_gather(block.7), but the transfer did not finish in \
         time: look at the network, or allow more time with comm.timeout_s",
    );
    let fine = |index| rank(index, "forward", &[("world", WORLD, 3, None)]);
    check(&[fine(0), fine(1), fine(2), fine(3)], Finding::Nothing, &[], "no rank waits for another");
}

/// The late rank arrives after another rank has timed out, but before that one asks who was late.
#[test]
fn a_late_rank_is_blamed_not_the_network() {
    let text = "rank 2 entered #1085 all_gather(block.7) 61 s late; ranks 0, 1, 3 had waited for it: look at \
                what it did before, or allow more time with comm.timeout_s";
    let entered_all = [entered(0, 61.0, None), entered(1, 60.0, None), entered(2, 0.2, None), waiting(3)];
    check_wait(&entered_all, Finding::Late, &[2], text);
    assert_eq!(Verdict::of(&entered_all).finding, Finding::Transfer);
    // The operation has finished after all. The others wait in the next one for rank 0, which has given up.
    let gone_on = |index, age| entered(index, age, Some(gather("block.8")));
    let given_up = {
        let Witness::Answered(mut flight) = entered(0, 61.0, None) else { unreachable!() };
        flight.groups[0].pending.clear();
        Witness::Answered(flight)
    };
    let finished = [given_up, gone_on(1, 60.0), gone_on(2, 0.2), gone_on(3, 59.5)];
    check_wait(&finished, Finding::Late, &[2], text);
    let without = Verdict::of(&finished);
    assert_eq!((without.finding, without.culprits), (Finding::Missing, vec![0]));
    check_wait(
        &[entered(0, 61.0, None), entered(1, 3.0, None), entered(2, 0.2, None), waiting(3)],
        Finding::Late,
        &[1, 2],
        "ranks 1, 2 entered #1085 all_gather(block.7) up to 61 s late; ranks 0, 3 had waited for them: look \
         at what they did before, or allow more time with comm.timeout_s",
    );
}

/// Rank 2 entered when its process was continued, and then answered, two seconds after rank 0.
#[test]
fn lateness_counts_beyond_the_deadline() {
    let earlier = |index| match entered(index, 10.0, None) {
        Witness::Answered(flight) => Witness::Answered(Box::new(flight.later(2.0))),
        _ => unreachable!(),
    };
    check_wait(
        &[earlier(0), earlier(1), entered(2, 0.1, None), earlier(3)],
        Finding::Late,
        &[2],
        "rank 2 entered #1085 all_gather(block.7) 12 s late; ranks 0, 1, 3 had waited for it: look at what it \
         did before, or allow more time with comm.timeout_s",
    );
}

/// The processes were stopped with their launcher, and continued a minute later.
#[test]
fn stopped_processes_are_blamed_not_the_network() {
    let stopped = |witness: Witness, seconds: f64, ago: f64| {
        let Witness::Answered(mut flight) = witness else { unreachable!() };
        flight.stall = Some(Stall { seconds, ago });
        Witness::Answered(flight)
    };
    let all = |index| stopped(entered(index, 61.0, None), 60.0, 0.2);
    let text = "did not run for about 60 s, in which #1085 all_gather(block.7) was to be done: they were stopped, as \
                by Ctrl-Z, SIGSTOP or a debugger, or frozen with the machine; the network is not to blame";
    check_wait(
        &[all(0), all(1), all(2), all(3)],
        Finding::Stopped,
        WORLD,
        &format!("the processes of ranks 0, 1, 2, 3 {text}"),
    );
    let missing = rank(2, "data loading", &[("world", WORLD, 1085, None)]);
    check_wait(
        &[all(0), all(1), stopped(missing, 60.0, 0.2), all(3)],
        Finding::Stopped,
        WORLD,
        &format!("the processes of ranks 0, 1, 2, 3 {text}"),
    );
    let in_time = |index| entered(index, 12.0, None);
    let one = stopped(entered(2, 0.1, None), 11.0, 0.1);
    check_wait(
        &[in_time(0), in_time(1), one, in_time(3)],
        Finding::Stopped,
        &[2],
        "the process of rank 2 did not run for about 11 s, in which #1085 all_gather(block.7) was to be done: it was \
         stopped, as by Ctrl-Z, SIGSTOP or a debugger, or frozen with the machine; the network is not to blame",
    );
    for (seconds, ago) in [(5.0, 0.2), (60.0, 30.0)] {
        let witness = |index| stopped(entered(index, 12.0, None), seconds, ago);
        let verdict = Verdict::for_wait(&[0, 1, 2, 3].map(witness), "world", WORLD, 1085);
        assert_eq!(verdict.finding, Finding::Transfer, "{verdict}");
    }
}

#[test]
fn a_wait_is_judged_by_its_own_operation() {
    check_wait(
        &[
            entered(0, 61.0, None),
            entered(1, 55.0, Some(gather("block.8"))),
            entered(2, 50.0, None),
            entered(3, 61.0, Some(gather("block.8"))),
        ],
        Finding::Transfer,
        &[],
        "all ranks entered #1085 all_gather(block.7), but the transfer did not finish in time: look at the \
         network, or allow more time with comm.timeout_s",
    );
    let missing = rank(3, "data loading", &[("world", WORLD, 1085, None)]);
    check_wait(
        &[entered(0, 61.0, None), entered(1, 60.0, None), entered(2, 0.2, None), missing],
        Finding::Missing,
        &[3],
        "rank 3 never entered #1085 all_gather(block.7); it has been in data loading for 61 s; ranks 0, 1, 2 \
         wait",
    );
}

#[test]
fn missing_files_mean_dead_ranks() {
    let flights: Vec<Flight> = [waiting(0), waiting(1), waiting(3)]
        .into_iter()
        .filter_map(|witness| match witness {
            Witness::Answered(flight) => Some(*flight),
            _ => None,
        })
        .collect();
    let text = serde_json::to_string(&flights).unwrap();
    let back: Vec<Flight> = serde_json::from_str(&text).unwrap();
    let verdict = Verdict::from_flights(&back);
    assert_eq!((verdict.finding, verdict.culprits.as_slice()), (Finding::Died, &[2][..]));
    let mut told = back.clone();
    told[1].verdict = Some(Verdict { text: "as told".into(), ..verdict });
    assert_eq!(Verdict::from_flights(&told).text, "as told");
}

#[test]
fn a_wait_is_told_before_it_times_out() {
    let backward = |index| rank(index, "backward", &[("world", WORLD, 1085, None)]);
    let witnesses = [waiting(0), waiting(1), backward(2), waiting(3)];
    let wait = Wait::longest(&witnesses);
    assert_eq!((wait.seconds, wait.verdict.culprits.as_slice()), (61.0, &[2][..]));
    let text = "rank 2 has not entered #1085 all_gather(block.7); it has been in backward for 61 s; ranks 0, \
                1, 3 wait";
    assert_eq!(wait.verdict.text, text);
    assert_eq!(waits_for(&witnesses, 0), [2]);
    assert_eq!(waits_for(&witnesses, 2), [0; 0]);

    let halted = [waiting(0), Witness::Halted, waiting(2), Witness::Halted];
    let text = "ranks 1, 3 are stopped, as by Ctrl-Z, SIGSTOP or a debugger; ranks 0, 2 wait in #1085 \
                all_gather(block.7)";
    assert_eq!(Wait::longest(&halted).verdict.text, text);
    assert_eq!(waits_for(&halted, 2), [1, 3]);

    let all = [0, 1, 2, 3].map(waiting);
    let text = "all ranks are in #1085 all_gather(block.7), but the transfer has not finished";
    assert_eq!(Wait::longest(&all).verdict.text, text);
    assert_eq!(Wait::longest(&[0, 1, 2, 3].map(backward)).seconds, 0.0);
}

/// A rank in 20 operations that end every 100 ms. It was ready `milliseconds` before each end.
fn ready_before(index: usize, milliseconds: impl Fn(u64) -> u64) -> Witness {
    let Witness::Answered(mut flight) = waiting(index) else { unreachable!() };
    flight.records = (0..20)
        .map(|sequence| {
            let end = Duration::from_millis(100 * (sequence + 1));
            record(sequence, end - Duration::from_millis(milliseconds(sequence)), Some(end))
        })
        .collect();
    Witness::Answered(flight)
}

#[test]
fn a_rank_that_others_keep_waiting_for_lags() {
    let quick = |index| ready_before(index, move |_| 60 + index as u64);
    let witnesses = [quick(0), ready_before(1, |_| 10), quick(2), quick(3)];
    let lag = Lag::find(&witnesses).unwrap();
    assert_eq!((lag.rank, lag.late, lag.operations), (1, 20, 20));
    assert!((lag.seconds - 1.0).abs() < 1e-9 && (0.45..0.55).contains(&lag.share), "{lag:?}");

    let once = ready_before(1, |sequence| if sequence == 7 { 1 } else { 60 });
    assert_eq!(Lag::find(&[quick(0), once, quick(2), quick(3)]), None);
    let in_turn = |index: u64| {
        ready_before(index as usize, move |sequence| if sequence % 4 == index { 10 } else { 60 })
    };
    assert_eq!(Lag::find(&[0, 1, 2, 3].map(in_turn)), None);
    assert_eq!(Lag::find(&[0, 1, 2, 3].map(waiting)), None);
    assert_eq!(Lag::find(&[quick(0), ready_before(1, |_| 10), quick(2), Witness::Halted]), None);
}
