//! The output of a run on a terminal, and in a log.

use std::process::Command;

use crate::PROGRAM;
use crate::support::{Ended, Workspace};
use crate::terminal::Terminal;

/// The characters of a gauge.
const GAUGE: [char; 2] = ['\u{2588}', '\u{2591}'];

/// Returns the command `kiln` in the folder of `workspace`.
fn kiln(workspace: &Workspace, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.current_dir(workspace.path("")).args(arguments);
    command
}

/// Returns the lines that a terminal shows after receiving `text`, if it is as wide as the longest line.
fn screen(text: &str) -> Vec<String> {
    let (mut lines, mut row, mut column) = (vec![Vec::new()], 0, 0);
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            '\r' => column = 0,
            '\n' => {
                row += 1;
                lines.resize(lines.len().max(row + 1), Vec::new());
            }
            '\u{1b}' => {
                let code: String = rest.by_ref().skip(1).take_while(|c| !"AK".contains(*c)).collect();
                match code.as_str() {
                    "2" => lines[row].clear(),
                    up => row -= up.parse::<usize>().unwrap_or_else(|_| panic!("{up:?} in {text:?}")),
                }
            }
            c => {
                let line: &mut Vec<char> = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
    }
    lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect()
}

fn piped(workspace: &Workspace, more: &[&str]) -> Ended {
    workspace.kiln(&[&["train", "run.toml", "--out", "run"], more].concat())
}

#[test]
fn a_person_at_a_terminal_sees_a_bar_that_goes_away() {
    let workspace = Workspace::new();
    let slow = ["train", "run.toml", "--out", "run", "--fault", "slow=1@data:3:0"];
    let mut terminal = Terminal::start(&mut kiln(&workspace, &slow));
    terminal.expect("a rank holds: weights ");
    terminal.expect("2/4 | loss ");
    let bar = terminal.expect("eta ");
    for part in [" tok/s | mfu ", "% | wait "] {
        assert!(bar.contains(part), "{bar:?}");
    }
    let (status, all) = terminal.end();
    assert!(status.success(), "{all}");
    let left = screen(&all);
    assert!(left.iter().any(|line| line.starts_with("done: 4 steps, validation loss ")), "{left:#?}");
    assert!(left.iter().any(|line| line.starts_with("step     4/4 | validation loss ")), "{left:#?}");
    assert!(!left.iter().any(|line| line.contains(GAUGE) || line.contains("| loss ")), "{left:#?}");
    assert!(left.len() <= 2 * 24, "the start and the end have a screen each: {left:#?}");
}

#[test]
fn a_person_stops_a_run_and_its_bar_goes_away() {
    let workspace = Workspace::new();
    let slow = ["train", "run.toml", "--out", "run", "--fault", "slow=8@data:3:0"];
    let mut terminal = Terminal::start(&mut kiln(&workspace, &slow));
    terminal.expect("2/4 | loss ");
    terminal.enter("\u{3}");
    terminal.expect("interrupted: saving step");
    let (status, all) = terminal.end();
    assert_eq!(status.code(), Some(75), "{all}");
    let left = screen(&all);
    assert!(!left.iter().any(|line| line.contains(GAUGE)), "{left:#?}");
    let stopped = "stopped on request: 3 of 4 steps, checkpoint run/checkpoints/fsdp_cpt3; ";
    assert!(left.iter().any(|line| line.starts_with(stopped)), "{left:#?}");
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_and_a_pipe_get_lines() {
    let workspace = Workspace::new();
    let run = ["train", "run.toml", "--out", "dumb"];
    let mut dumb = Command::new("env");
    dumb.current_dir(workspace.path("")).args(["TERM=dumb", PROGRAM]).args(run);
    let terminal = Terminal::start(&mut dumb);
    // It still has the terminal open.
    drop(dumb);
    let (status, seen) = terminal.end();
    assert!(status.success(), "{seen}");
    let ended = piped(&workspace, &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    for text in [&seen, &ended.stdout] {
        assert!(!text.contains(['\u{1b}', GAUGE[0], GAUGE[1]]), "{text}");
        let steps: Vec<_> = text.lines().filter(|line| line.contains("| loss ")).collect();
        assert_eq!(steps.len(), 4, "{text}");
        let column = |line: &str| line.find("iB  eta ");
        assert!(steps.iter().all(|line| column(line) == column(steps[0])), "{steps:#?}");
        for part in ["  wait ", "iB  eta "] {
            assert!(steps.iter().all(|line| line.contains(part)), "{part}: {steps:#?}");
        }
    }
    for (what, count) in [("first step done ", 1), ("time  ", 1), ("tokens  ", 1), ("next  ", 1)] {
        let lines = ended.stdout.lines().filter(|line| line.starts_with(what));
        assert_eq!(lines.count(), count, "{what}: {}", ended.stdout);
    }
}

#[test]
fn one_rank_waits_for_nobody_and_a_run_without_anything_to_do_says_so() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.ranks", "1"), ("train.steps", "1")]);
    let one = piped(&workspace, &[]).stdout;
    assert!(one.contains("step     1/1 | loss "), "{one}");
    assert!(!one.contains("wait"), "{one}");
    assert!(one.contains(" in 1 step, "), "{one}");
    let again = piped(&workspace, &["--resume", "latest"]).stdout;
    assert!(again.contains("done: 1 step, validation loss "), "{again}");
    assert!(!again.contains("tokens  ") && !again.contains("first step done"), "{again}");
}

#[test]
fn the_lowest_validation_loss_is_that_of_all_starts() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("eval.every", "1"), ("checkpoint.every", "1")]);
    let first = piped(&workspace, &[]).stdout;
    assert!(first.contains(", the lowest of the run\n"), "{first}");
    let further = ["--resume", "latest", "--set", "train.steps=8", "--set", "optim.lr=3.0"];
    let second = piped(&workspace, &further).stdout;
    let losses = workspace.metrics("run").into_iter().filter_map(|line| {
        Some((line["step"].as_u64().expect("a step"), line.get("val_loss")?.as_f64().expect("a loss")))
    });
    let (step, loss) = losses.min_by(|a, b| a.1.total_cmp(&b.1)).expect("evaluations");
    assert!(step <= 4, "the second start has made it worse: {second}");
    assert!(second.contains(&format!(" | the lowest was {loss:.4}, at step {step}\n")), "{second}");
    assert!(second.contains(&format!(", lowest {loss:.4}, at step {step}")), "{second}");
    let better = format!("the checkpoint of step {step} was better: run/checkpoints/fsdp_cpt{step}");
    assert!(second.contains(&better), "{second}");
}
