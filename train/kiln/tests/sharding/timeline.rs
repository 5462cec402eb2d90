//! The timeline of a step: every moment belongs to a span, and every wait names its collective.

use std::collections::BTreeSet;

use kiln_collectives::{Operation, StepTimeline};
use kiln_shard::{Recompute, Strategy};

use crate::support::{Rank, Run};

/// Longest time in seconds between two spans: waits below two microseconds have no span.
const GAP: f64 = 1e-5;

fn second_step(run: &Run) -> Vec<(StepTimeline, Vec<String>)> {
    run.on_ranks(|world| {
        let (recorder, view) = (world.recorder().clone(), world.view());
        let rank = Rank::start(run, world)?;
        rank.step(1)?;
        recorder.begin_step(2);
        recorder.set_activity("forward");
        rank.step(2)?;
        recorder.begin_step(3);
        let timeline = view.timeline(None).expect("the last step that has ended");
        let groups = rank.engine().layout().groups.iter().map(|group| group.name.clone()).collect();
        Ok((timeline, groups))
    })
}

#[test]
fn every_moment_of_a_step_is_in_a_span_and_waits_name_their_collective() {
    for strategy in [Strategy::FullShard, Strategy::NoShard, Strategy::HybridShard] {
        let mut run = Run::new(strategy, 4).recompute(Recompute::Block);
        run.shard_size = strategy.is_hybrid().then_some(2);
        let mut ranks_that_waited = 0;
        for (rank, (timeline, groups)) in second_step(&run).into_iter().enumerate() {
            let StepTimeline { start, end, ref spans, ref records, .. } = timeline;
            assert_eq!((timeline.rank, timeline.step), (rank, 2));
            let (first, last) = (&spans[0], &spans[spans.len() - 1]);
            assert!(first.start == start && (last.end - end).abs() < GAP, "{strategy}: {timeline:?}");
            for pair in spans.windows(2) {
                let gap = pair[1].start - pair[0].end;
                assert!((-1e-9..GAP).contains(&gap) && pair[1].start < pair[1].end, "{strategy}: {pair:?}");
            }
            let modules: BTreeSet<_> = spans.iter().filter_map(|span| span.module.as_deref()).collect();
            assert_eq!(modules, groups.iter().map(String::as_str).collect(), "{strategy}");
            let waits: Vec<_> = spans.iter().filter_map(|span| span.waits_for.as_ref()).collect();
            ranks_that_waited += usize::from(!waits.is_empty());
            for (group, sequence) in waits {
                let of = |record: &&kiln_collectives::Record| {
                    *record.group == **group && record.sequence == *sequence && record.finished.is_some()
                };
                assert!(records.iter().any(|record| of(&record)), "{strategy}: {group} {sequence}");
            }
            let gathers = records.iter().filter(|record| record.operation == Operation::AllGather).count();
            assert_eq!(gathers > 0, strategy != Strategy::NoShard, "{strategy}");
        }
        // A rank that arrives last at every collective of a step does not wait.
        assert!(ranks_that_waited > 0, "{strategy}: four ranks wait for each other at the end of a step");
    }
}
