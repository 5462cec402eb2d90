//! Exit codes, and messages about failures.

use crate::support::Job;

/// Rank r exits with the r-th code of `$CODES`.
const CODES: &str = r#"exit "$(echo "$CODES" | cut -d, -f$((RANK + 1)))""#;

#[test]
fn exit_codes() {
    for (codes, expected, lives) in [
        ("0,0,0", 0, 1),
        ("2,2,2", 2, 1),
        ("2,0,2", 2, 1),
        ("75,75,75", 75, 1),
        ("75,0,75", 75, 1),
        ("1,1,1", 1, 2),
        ("0,0,3", 1, 2),
        ("75,1,75", 1, 2),
        ("2,1,2", 1, 2),
    ] {
        let job = Job::new(CODES);
        let flags = ["--nproc-per-node", "3", "--max-restarts", "1"];
        let ended = job.launch(&flags, &[("CODES", codes)]);
        assert_eq!(ended.code, Some(expected), "{codes}: {ended:?}");
        assert_eq!(job.logs("run/logs").len(), lives * 3 * 2, "{codes}");
    }
}

#[test]
fn the_earliest_failure_comes_first() {
    let job = Job::new(
        r#"case $RANK in
1) echo out of cheese >&2; put pid1 $$; exit 3 ;;
0) wait_end pid1; echo rank 1 is gone >&2; exit 1 ;;
esac"#,
    );
    let ended = job.launch(&["--nproc-per-node", "3"], &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let pid = job.text("pid1");
    let lines: Vec<_> = ended.stderr.lines().filter(|line| line.starts_with("kiln launch: ")).collect();
    let first = format!("kiln launch: rank 1 (pid {}) failed first: exit code 3 after ", pid.trim());
    assert!(lines[0].starts_with(&first) && lines[0].ends_with(" s"), "{lines:#?}");
    assert_eq!(
        lines[1..3],
        [
            "kiln launch:   its last lines on stderr (all lines are in \
             run/logs/rank_1.restart_0.stderr.log):",
            "kiln launch:   | out of cheese",
        ]
    );
    assert!(lines[3].starts_with("kiln launch: rank 0 (pid "), "{lines:#?}");
    assert!(lines[3].contains("failed after it: exit code 1"), "{lines:#?}");
    assert_eq!(lines[5], "kiln launch:   | rank 1 is gone");
    assert_eq!(lines.len(), 6, "{lines:#?}");
}

#[test]
fn a_rank_that_is_killed_takes_the_others_along() {
    let job = Job::new("[ $RANK = 1 ] && kill -9 $$\nwhile :; do sleep 0.05; done");
    let ended = job.launch(&["--nproc-per-node", "2"], &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("failed first: killed by SIGKILL (9) after"), "{ended:?}");
    assert!(
        ended.stderr.contains("out of memory: see `dmesg` and `kiln explain out-of-memory`"),
        "{ended:?}"
    );
    assert!(ended.stderr.contains("it wrote nothing to stderr"), "{ended:?}");
    assert!(ended.stderr.contains("stopped by the launcher: killed by SIGTERM (15)"), "{ended:?}");
}

#[test]
fn only_the_last_lines_are_shown() {
    let job = Job::new("[ $RANK = 1 ] && { seq 1 5000 >&2; exit 1; }; exit 0");
    let ended = job.launch(&["--nproc-per-node", "2"], &[]);
    let shown = ended.stderr.lines().filter(|line| line.starts_with("kiln launch:   | "));
    assert_eq!(shown.count(), 20, "{ended:?}");
    assert!(ended.stderr.contains("| 5000\n"), "{ended:?}");
}

#[test]
fn what_a_rank_leaves_behind_ends_with_it() {
    let job = Job::new("sh -c 'echo $$ > left; exec sleep 1000' & wait_for left");
    assert_eq!(job.launch(&[], &[]).code, Some(0));
    let left = job.text("left").trim().parse().expect("a process id");
    kiln_testkit::wait_until("the end of it", || crate::support::parent_of(left).is_none());
}

#[test]
fn a_program_that_does_not_start_is_named() {
    let job = Job::new("");
    let ended = ended(&job, &["launch", "--program", "./nothing", "--", "train", "c.toml"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("error: cannot start ./nothing: "), "{ended:?}");
}

fn ended(job: &Job, arguments: &[&str]) -> crate::support::Ended {
    crate::support::ended(kiln_testkit::run_to_end(&mut job.kiln(arguments, &[])))
}
