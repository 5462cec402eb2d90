//! The screen for runs of all kinds, and the effect of keys on it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_collectives::{Activity, Operation, Phase};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use tempfile::TempDir;

use super::draw::draw;
use super::feed::{Snapshot, Update};
use super::gauges::Gauges;
use super::keys::{Action, on_key};
use super::logs::LogLine;
use super::state::{View, Watch};
use super::theme::Theme;
use crate::run::{Event, Run, Sample};
use crate::status::{Call, Look, ProcessLook, RankLook, State};

const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (200, 60);

struct Screen {
    root: TempDir,
    watch: Watch,
}

impl Screen {
    fn new() -> Self {
        let theme = Theme { has_colours: true, has_unicode: true };
        Screen { root: tempfile::tempdir().unwrap(), watch: Watch::new(theme, Instant::now()) }
    }

    /// Adds a run with `steps` of 200 steps logged. Returns its index.
    fn add(&mut self, name: &str, lr: &str, steps: u64, look: Look) -> usize {
        let folder = self.root.path().join(name);
        fs::create_dir(&folder).unwrap();
        write_run(&folder, lr, steps);
        let mut snapshot = Snapshot::new(folder.clone());
        snapshot.set_run(&Run::open(&folder).unwrap());
        snapshot.set_look(Ok(look), self.watch.now);
        let number = self.watch.runs.len();
        self.watch.apply(Update::Run(number, Box::new(snapshot)));
        number
    }

    fn press(&mut self, keys: &str) {
        for key in keys.chars() {
            let code = match key {
                '↑' => KeyCode::Up,
                '↓' => KeyCode::Down,
                '←' => KeyCode::Left,
                '→' => KeyCode::Right,
                '\t' => KeyCode::Tab,
                '\n' => KeyCode::Enter,
                '\u{8}' => KeyCode::Backspace,
                '⇞' => KeyCode::PageUp,
                '⇟' => KeyCode::PageDown,
                '⇱' => KeyCode::Home,
                '⇲' => KeyCode::End,
                key => KeyCode::Char(key),
            };
            on_key(&mut self.watch, KeyEvent::new(code, KeyModifiers::NONE));
        }
    }

    fn text(&mut self, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(&mut self.watch, frame.area(), frame.buffer_mut())).unwrap();
        let shown = terminal.backend().to_string();
        let rows = shown.lines().map(|row| row.trim_matches('"').trim_end());
        rows.collect::<Vec<_>>().join("\n")
    }
}

fn write_run(folder: &Path, lr: &str, steps: u64) {
    let config =
        format!("[train]\nsteps = 200\nseed = 0\n[optim]\nlr = {lr}\n[shard]\nstrategy = \"FULL_SHARD\"\n");
    fs::write(folder.join("config.toml"), config).unwrap();
    let rate: f64 = lr.parse().unwrap();
    let line = |step: u64| {
        let at = step as f64;
        let loss = 2.5 + 3.0 * (-at * rate * 10.0).exp() + 0.1 * (at * 1.7).sin();
        let line = format!(
            "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":{},\"lr\":{},\"tokens_per_s\":{},\"mfu\":0.312,\
             \"peak_bytes\":8682600,\"step_s\":0.25,\"time\":{}}}\n",
            1.0 + 0.3 * (at * 0.9).cos(),
            rate * (at / 20.0).min(1.0),
            45_000.0 + 2_000.0 * (at * 0.6).sin(),
            1_795_591_592.0 + at * 0.3,
        );
        let eval = format!("{{\"step\":{step},\"val_loss\":{}}}\n", loss + 0.25);
        if step.is_multiple_of(25) { line + &eval } else { line }
    };
    fs::write(folder.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    let event = |step, kind: &str, text: &str| {
        let (kind, text, time) = (kind.to_owned(), text.to_owned(), 1_795_591_592.0 + step as f64 * 0.3);
        serde_json::to_string(&Event { time, step, kind, text }).unwrap() + "\n"
    };
    let events = [event(0, "start", "4 ranks"), event(50, "checkpoint", "saved in 0.2 s")].concat();
    fs::write(folder.join("events.jsonl"), events).unwrap();
    let sample = |step, text: &str| {
        let sample = Sample { step, prompt: "Once upon a time".into(), text: text.into() };
        serde_json::to_string(&sample).unwrap() + "\n"
    };
    let samples = [sample(50, " the the the"), sample(100, " there was a \u{1b}[31mfox\nwho ran.")].concat();
    fs::write(folder.join("samples.jsonl"), samples).unwrap();
}

fn call(operation: Operation, module: &str, seconds: f64) -> Call {
    Call {
        group: "world".into(),
        sequence: 812,
        operation,
        module: module.into(),
        phase: Phase::Backward,
        seconds,
    }
}

fn rank(rank: usize) -> RankLook {
    RankLook {
        rank,
        step: Some(120),
        activity: Some(Activity { name: "backward".into(), seconds: 0.02 }),
        last: Some(call(Operation::ReduceScatter, "layers.11", 0.004)),
        bytes: Some(1_288_490_189 + rank as u64 * 10_000_000),
        peak_bytes: Some(1_503_238_553),
        ..RankLook::default()
    }
}

fn waiting(at: usize, seconds: f64, waits_for: &[usize]) -> RankLook {
    let pending = Some(call(Operation::AllGather, "layers.3", seconds));
    RankLook { pending, waits_for: waits_for.to_vec(), ..rank(at) }
}

fn look(state: State, text: &str, ranks: Vec<RankLook>) -> Look {
    let numbers = (0..ranks.len()).collect();
    let process = ProcessLook { host: "node-7".into(), process: 4711, ranks: numbers, threads: None };
    Look {
        run: "runs/a".into(),
        state,
        text: text.into(),
        culprits: Vec::new(),
        step: Some(120),
        steps: Some(200),
        saved: Some(50),
        loss: None,
        tokens_per_s: None,
        deadline_s: Some(600.0),
        processes: if ranks.is_empty() { Vec::new() } else { vec![process] },
        ranks,
    }
}

fn healthy(ranks: usize) -> Look {
    let ranks = (0..ranks).map(|at| if at % 3 == 1 { waiting(at, 0.003, &[0]) } else { rank(at) }).collect();
    look(State::Healthy, "no rank has been waiting longer than usual", ranks)
}

fn hung() -> Look {
    let mut ranks: Vec<_> = [0, 1, 3].map(|at| waiting(at, 14.2, &[2])).into();
    let silent = Some("is stopped".into());
    ranks.insert(2, RankLook { rank: 2, silent, ..RankLook::default() });
    let text = "rank 2 is stopped; ranks 0-1, 3 wait in #812 all_gather(layers.3) for it; comm.timeout_s ends the \
                run in 586 s";
    Look { culprits: vec![2], ..look(State::Trouble, text, ranks) }
}

fn with_output(screen: &mut Screen, run: usize) {
    let line = |step: usize, rank: usize| {
        LogLine {
        rank,
        is_error: rank > 0,
        text: match rank {
            0 => format!("step {step:>5}/200 | loss 3.2101 | grad norm 1.214 | lr 3.00e-3 | 0.25 s | 45,683 tok/s"),
            _ => format!("warning \u{7}{step}: a line that is so long that it has to be broken somewhere, or cut if it may not be")
        }
        .into(),
    }
    };
    let gauges = |rank: usize| (rank, Gauges { cpu: Some(1.98), gpu: None, celsius: None });
    screen.watch.runs[run].log = Arc::new((1..=40).flat_map(|step| [line(step, 0), line(step, 3)]).collect());
    screen.watch.runs[run].gauges = Arc::new((0..4).map(gauges).collect());
}

macro_rules! shows {
    ($name:literal, $screen:expr) => {
        insta::assert_snapshot!(concat!($name, "_80x24"), $screen.text(SMALL));
        insta::assert_snapshot!(concat!($name, "_200x60"), $screen.text(LARGE));
    };
}

#[test]
fn healthy_run() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 120, healthy(4));
    with_output(&mut screen, 0);
    shows!("healthy", screen);
    for (key, name) in
        [("2", "curves"), ("3", "ranks"), ("4", "log"), ("5", "samples"), ("6", "runs"), ("?", "help")]
    {
        screen.press(key);
        insta::assert_snapshot!(format!("{name}_80x24"), screen.text(SMALL));
    }
}

#[test]
fn run_of_64_ranks() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 120, healthy(64));
    shows!("64_ranks", screen);
    screen.press("3⇲");
    shows!("64_ranks_end", screen);
}

#[test]
fn hung_run() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 120, hung());
    shows!("hung", screen);
    screen.press("3↓↓");
    insta::assert_snapshot!("hung_ranks_80x24", screen.text(SMALL));
    screen.watch.now += Duration::from_secs(65);
    assert!(screen.text(LARGE).contains("ends the run in 586 s (as of 1 min 05 s ago)"));
}

#[test]
fn ended_runs() {
    let mut screen = Screen::new();
    let text = "all 200 steps are done, checkpoint fsdp_cpt200";
    screen.add("a", "3e-3", 200, Look { step: Some(200), ..look(State::Finished, text, Vec::new()) });
    shows!("finished", screen);
    let mut screen = Screen::new();
    let text = "its process was killed in step 120; it goes on from step 50 with kiln train --resume latest";
    screen.add("a", "3e-3", 119, look(State::Dead, text, Vec::new()));
    shows!("killed", screen);
}

#[test]
fn three_runs_are_compared() {
    let mut screen = Screen::new();
    screen.add("small-lr", "1e-3", 120, healthy(4));
    screen.add("middle-lr", "3e-3", 90, healthy(4));
    let done = look(State::Finished, "all steps are done", Vec::new());
    screen.add("large-lr", "1e-2", 200, done);
    shows!("compared", screen);
    screen.press("6");
    shows!("compared_runs", screen);
    screen.press("↓ 2");
    let text = screen.text(SMALL);
    assert!(
        text.contains("1 small-lr") && !text.contains("2 middle-lr 2.") && text.contains("3 large-lr"),
        "{text}"
    );
    screen.press("c");
    assert!(screen.text(SMALL).contains("─ loss 2.7823"), "{}", screen.text(SMALL));
    screen.press("cL");
    screen.watch.theme = Theme { has_colours: false, has_unicode: false };
    shows!("compared_plain", screen);
    assert!(screen.text(LARGE).is_ascii());
}

#[test]
fn no_run() {
    let mut screen = Screen::new();
    let note = "runs/none is not the folder of a run: it is not there; name the one that --out has named, or a folder \
                with such folders";
    screen.watch.apply(Update::Problems(vec![note.to_owned()]));
    shows!("no_run", screen);
    // Keys must not panic without runs.
    screen.press("\t123456np↑↓←→⇞⇟⇱⇲+-0sSlLck\n wr?q");
    for size in [SMALL, LARGE, (39, 24), (80, 9), (1, 1), (40, 10)] {
        screen.text(size);
    }
}

#[test]
fn missing_files_are_listed() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 20, healthy(2));
    let folder = screen.watch.runs[0].folder.clone();
    let mut metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    metrics.push_str("{\"step\":21,\"loss\":null,\"who\":\"knows\"}\nwhat\n{\"new\":1}\n{\"step\":22,\"lo");
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    fs::write(folder.join("config.toml"), "[train").unwrap();
    screen.watch.runs[0].set_run(&Run::open(&folder).unwrap());
    screen.watch.runs[0].set_look(Err("it is another user's".into()), Instant::now());
    let text = screen.text(LARGE);
    for part in
        ["skipped 2 lines that this build cannot read", "config.toml: ", "× 1 not a number", "another user's"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn every_view_fits_every_size() {
    let mut screen = Screen::new();
    for (name, look) in [("a", healthy(3)), ("b", hung()), ("c", look(State::Failed, "bad", Vec::new()))] {
        screen.add(name, "3e-3", 40, look);
    }
    let young = screen.root.path().join("young");
    screen.watch.apply(Update::Run(3, Box::new(Snapshot::new(young))));
    screen.watch.apply(Update::Problems(vec!["a note".into()]));
    for keys in ["1", "2", "2k", "\n3", "4", "5", "6", "?"] {
        for _ in 0..screen.watch.runs.len() {
            screen.press(keys);
            for size in [(40, 10), (41, 60), (200, 10), (79, 23), (120, 37), (300, 90)] {
                screen.text(size);
            }
            screen.press(if keys.ends_with('k') { "\n" } else { "n" });
        }
    }
}

#[test]
fn keys_change_the_view() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 120, healthy(64));
    screen.add("b", "3e-3", 120, hung());
    with_output(&mut screen, 0);
    screen.press("\t");
    assert_eq!(screen.watch.view, View::Curves);
    screen.press("↓↓");
    assert_eq!(screen.watch.curves.key, "lr");
    screen.press("kNorm");
    assert!(screen.text(SMALL).contains("metrics with Norm"));
    screen.press("\n+←ssl");
    let text = screen.text(LARGE);
    assert!(
        text.contains("grad_norm") && text.contains("smoothed 0.8, steps 47-106 of 1-120, log"),
        "{text}"
    );
    screen.press("S0l2");
    assert!(screen.text(LARGE).contains("smoothed 0.5 "));

    screen.press("3→→→→→→→");
    screen.text(SMALL);
    assert!(screen.text(SMALL).contains("mem▼"), "{}", screen.text(SMALL));
    screen.press("r");
    assert!(screen.text(SMALL).contains("mem▲"));
    screen.press("⇲");
    assert!(screen.text(SMALL).contains("rows 53-64"), "{}", screen.text(SMALL));
    screen.press("⇱↓⇟⇞");
    assert_eq!(screen.watch.rows.ranks.selected(), Some(1));

    screen.press("4");
    screen.text(SMALL);
    screen.press("⇱");
    assert!(screen.text(SMALL).contains("step     1/200"));
    screen.press("↓⇟⇞↑⇲→");
    assert!(screen.text(SMALL).contains("output of rank 0"));
    screen.press("←←");
    assert!(screen.text(SMALL).contains("checkpoint: saved in 0.2 s"));
    screen.press("←w");
    let text = screen.text(SMALL);
    assert!(
        text.contains("output of rank 3") && text.contains(r"warning \u000740") && text.contains('…'),
        "{text}"
    );

    screen.press("5");
    let text = screen.text(SMALL);
    assert!(text.contains("samples of step 100") && text.contains(r"\u001b[31mfox"), "{text}");
    screen.press("↑");
    assert!(screen.text(SMALL).contains("samples of step 50"));

    screen.press("np n");
    assert_eq!(screen.watch.front, 1);
    screen.press("1→");
    assert_eq!(screen.watch.view, View::Curves);
    let control = |key| KeyEvent::new(KeyCode::Char(key), KeyModifiers::CONTROL);
    for (key, action) in [('c', Action::Quit), ('z', Action::Suspend), ('l', Action::DrawAll)] {
        assert_eq!(on_key(&mut screen.watch, control(key)), Some(action));
    }
    let quit = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE);
    screen.press("?");
    assert!(screen.watch.shows_help && screen.text(SMALL).contains("show this help"));
    assert_eq!(on_key(&mut screen.watch, quit), Some(Action::Quit));
}

#[test]
fn ranks_are_sorted_by_any_column() {
    let mut screen = Screen::new();
    let mut look =
        look(State::Healthy, "fine", vec![rank(0), waiting(1, 0.0042, &[0]), waiting(2, 7200.0, &[0, 1, 3])]);
    look.ranks.push(RankLook { rank: 10, step: Some(0), bytes: Some(7), ..RankLook::default() });
    look.ranks[0].step = None;
    screen.add("a", "3e-3", 120, look);
    let gauges = |(rank, cpu)| (rank, Gauges { cpu: Some(cpu), ..Gauges::default() });
    screen.watch.runs[0].gauges = Arc::new([(1, 1.98), (2, 0.5)].map(gauges).into());
    screen.press("3");
    let text = screen.text((120, 30));
    for part in ["start", "4ms", "120min", "0-1, 3", "7B", "198%"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for (column, order) in [
        ("rank", [0, 1, 2, 10]),
        ("step", [0, 10, 1, 2]),
        ("doing", [10, 0, 1, 2]),
        ("module", [10, 0, 1, 2]),
        ("collective", [0, 10, 1, 2]),
        ("for", [2, 0, 1, 10]),
        ("awaits", [2, 1, 0, 10]),
        ("mem", [2, 1, 0, 10]),
        ("peak", [0, 1, 2, 10]),
        ("cpu", [1, 2, 0, 10]),
    ] {
        let text = screen.text((120, 30));
        let rows = text.lines().skip_while(|line| !line.contains(&format!("{column}▼"))).skip(1).take(4);
        let ranks: Vec<usize> = rows.map(|row| row[..6].trim().parse().unwrap()).collect();
        assert_eq!(ranks, order, "{column}: {text}");
        screen.press("→");
    }
}

#[test]
fn no_column_of_ranks_is_cut() {
    let mut screen = Screen::new();
    let mut look = healthy(4);
    look.ranks.iter_mut().for_each(|rank| rank.step = Some(1_234_567));
    screen.add("a", "3e-3", 120, look);
    let gauges = |rank: usize| (rank, Gauges { cpu: Some(1.0), gpu: Some(1.0), celsius: Some(71.0) });
    screen.watch.runs[0].gauges = Arc::new((0..4).map(gauges).collect());
    for (view, width) in
        ["1", "3"].into_iter().flat_map(|view| [40, 80, 100, 120, 160].map(|width| (view, width)))
    {
        screen.press(view);
        let text = screen.text((width, 40));
        let lines: Vec<Vec<char>> = text.lines().map(|line| line.chars().collect()).collect();
        let column =
            |line: &Vec<char>| line.windows(5).position(|part| part.iter().eq(&['r', 'a', 'n', 'k', '▼']));
        let (row, column) =
            lines.iter().enumerate().find_map(|(row, line)| Some((row, column(line)?))).unwrap();
        let words = |line: &[char]| {
            let line: String = line[column..].iter().collect();
            line.split_whitespace().map(str::to_owned).collect::<Vec<String>>()
        };
        let (head, first) = (words(&lines[row]), words(&lines[row + 1]));
        let titles = "rank▼ step doing module collective for awaits mem peak cpu gpu °C".split(' ');
        let values = "0 1234567 backward layers.11 - 20ms - 1.2G 1.4G 100% 100% 71".split(' ');
        let (titles, values): (Vec<_>, Vec<_>) =
            titles.zip(values).filter(|(title, _)| head.iter().any(|known| known == title)).unzip();
        assert!(head == titles && first == values, "{text}");
    }
}

#[test]
fn no_column_of_runs_is_cut() {
    let mut screen = Screen::new();
    for run in 1..=15 {
        screen.add(&format!("run-{run}"), &format!("{run}e-3"), 20, healthy(2));
    }
    screen.watch.runs[0].progress.step = Some(1_234_567);
    screen.watch.runs[0].progress.steps = Some(12_345_678);
    screen.press("6");
    for (width, count) in [(80, 7), (100, 9), (120, 11), (200, 15)] {
        let text = screen.text((width, 30));
        assert!(text.contains(" 1234567/12345678 "), "{text}");
        assert_eq!(text.contains(&format!("{count} of 15 runs;")), count < 15, "{text}");
        let head = text.lines().find(|line| line.starts_with("          1 run-1 ")).unwrap();
        let head: Vec<&str> = head.split_whitespace().collect();
        assert_eq!(
            (head.len(), head[head.len() - 1]),
            (2 * count, format!("run-{count}").as_str()),
            "{text}"
        );
    }
    for (view, width) in
        ["1", "2", "3", "4", "5", "6"].into_iter().flat_map(|view| [80, 100, 120].map(|width| (view, width)))
    {
        screen.press(view);
        let text = screen.text((width, 30));
        let hints = text.lines().last().unwrap();
        assert!(!hints.contains('…') && hints.starts_with(" ? help  q quit  Tab view  n/p run"), "{hints}");
    }
}

#[test]
fn huge_values_are_drawn() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 2, healthy(2));
    let folder = screen.watch.runs[0].folder.clone();
    for value in ["1.7e308", "1e-300"] {
        let lines = [1, 2].map(|step| format!("{{\"step\":{step},\"loss\":{value}}}\n"));
        fs::write(folder.join("metrics.jsonl"), lines.concat()).unwrap();
        screen.watch.runs[0].set_run(&Run::open(&folder).unwrap());
        for keys in ["2", "l", "L", "l", "L"] {
            screen.press(keys);
            let text = screen.text(SMALL);
            let labels = text.lines().filter(|line| line.contains('│') && !line.starts_with(' ')).count();
            assert!(labels > 1, "{text}");
        }
    }
}

#[test]
fn no_colour_without_colours() {
    let mut screen = Screen::new();
    screen.add("a", "3e-3", 120, hung());
    screen.watch.theme.has_colours = false;
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| draw(&mut screen.watch, frame.area(), frame.buffer_mut())).unwrap();
    let cells = &terminal.backend().buffer().content;
    assert!(cells.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
}
