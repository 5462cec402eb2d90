//! The content of a detailed log, and its destination.

use std::collections::BTreeSet;

use kiln_testkit::run_to_end;

use crate::support::{Ended, Run, config};

/// Returns the `key=value` words of a line between the time and the level.
fn place(line: &str) -> Vec<(&str, &str)> {
    line.split(' ').skip(1).take(5).filter_map(|word| word.split_once('=')).collect()
}

#[test]
fn every_line_says_where_its_rank_is_and_collectives_say_how_fast_they_were() {
    config();
    let run = Run::new();
    let mut launcher = run.launcher(2, &[], &["--set", "train.steps=2"]);
    let ended = Ended::from(run_to_end(launcher.env("KILN_LOG", "debug,comm=trace")));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    // The terminal shows no detail, and the files contain everything.
    assert!(!ended.stderr.contains("DEBUG") && !ended.stderr.contains("TRACE"), "{ended:?}");
    for (rank, log) in run.logs(2, 0).iter().enumerate() {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(" host=")).collect();
        for line in &lines {
            let keys: Vec<_> = place(line).into_iter().map(|(key, _)| key).collect();
            assert_eq!(keys, ["host", "rank", "step", "phase", "module"], "{line}");
            let of_rank = format!("rank={rank}");
            assert!(line.contains(" rank=- ") || line.split(' ').any(|word| word == of_rank), "{line}");
        }
        let of_step: Vec<_> = lines.iter().filter(|line| line.contains(" step=2 ")).collect();
        let find = |text: &str| of_step.iter().find(|line| line.contains(text));
        assert!(find("a step begins").is_some_and(|line| line.contains(" lr=")), "{log}");
        let end = find("a step has ended").expect("an end");
        for key in [" loss=", " grad_norm=", " lr=", " tokens="] {
            assert!(end.contains(key), "{key}: {end}");
        }
        let mut shapes =
            lines.iter().filter(|line| line.contains(" step=1 ") && line.contains(": a tensor "));
        let output = " place=\"layers.1.ffn\" name=\"output\" shape=[";
        for is_gradient in [" is_gradient=false", " is_gradient=true"] {
            assert!(shapes.clone().any(|l| l.contains(output) && l.ends_with(is_gradient)), "{log}");
        }
        assert!(shapes.all(|line| line.contains(" shape=[")), "{log}");
        assert!(find(": a tensor ").is_none(), "{log}");
        let modules: BTreeSet<_> = of_step.iter().flat_map(|line| place(line)).collect();
        for module in ["embed", "layers.0", "layers.1", "head"] {
            assert!(modules.contains(&("module", module)), "{module}: {modules:?}");
        }
        let call = find(" TRACE kiln_collectives").expect("a collective");
        for key in [" bytes=", " queued_us=", " ran_us=", " bus_gb_s="] {
            assert!(call.contains(key), "{key}: {call}");
        }
    }
}

#[test]
fn what_nobody_asks_for_is_not_logged() {
    config();
    let run = Run::new();
    let ended = run.launch(2, &[], &["--set", "train.steps=2"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    for log in run.logs(2, 0) {
        assert!(!log.contains(" host=") && !log.contains("a step begins"), "{log}");
    }
}
