//! Tests of exports.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{ExportError, csv, tensorboard};

const METRICS: &str = r#"{"step":1,"time":1700000000.5,"loss":2.5,"tokens":9007199254740993}
{"step":2,"time":1700000001.5,"skipped":1,"parameter":"a,\"b\""}
{"step":3,"time":1700000002.0,"loss":null,"layers.0.rms":0.1}
{"step":3,"time":1700000003,"val_loss":2.25}
{"step":4,"lo"#;

fn run(root: &tempfile::TempDir, name: &str, metrics: &str) -> PathBuf {
    let folder = root.path().join(name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("run.json"), format!("{{\"kiln_run\":1,\"id\":\"id-of-{name}\"}}")).unwrap();
    fs::write(folder.join("config.toml"), "[train]\nsteps = 4\n[optim]\nlr = 0.5\n").unwrap();
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    folder
}

#[test]
fn csv_has_a_row_per_step_and_a_column_per_key() {
    let root = tempfile::tempdir().unwrap();
    let one = run(&root, "one", METRICS);
    let rows = "1,1700000000.5,2.5,9007199254740993,,,,\n\
                2,1700000001.5,,,1,\"a,\"\"b\"\"\",,\n\
                3,1700000003,,,,,0.1,2.25\n";
    let columns = "step,time,loss,tokens,skipped,parameter,layers.0.rms,val_loss\n";
    assert_eq!(csv(std::slice::from_ref(&one)).unwrap(), format!("{columns}{rows}"));
    let two = run(&root, "two", "{\"step\":1,\"other\":1}\n");
    let both = csv(&[one, two]).unwrap();
    let lines: Vec<_> = both.lines().collect();
    assert_eq!(lines[0], format!("run,{},other", columns.trim_end()));
    assert_eq!((lines[1], lines[4]), ("one,1,1700000000.5,2.5,9007199254740993,,,,,", "two,1,,,,,,,,1"));
}

#[test]
fn run_without_metrics_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let empty = run(&root, "empty", "{\"st");
    assert!(matches!(csv(&[empty]), Err(ExportError::Empty(..))));
    assert!(matches!(csv(&[root.path().join("none")]), Err(ExportError::Run(_))));
}

#[test]
fn each_run_gets_its_own_folder() {
    let root = tempfile::tempdir().unwrap();
    let runs = [run(&root, "one", METRICS), run(&root, "two", METRICS)];
    let out = root.path().join("boards");
    assert_eq!(tensorboard(&runs, &out).unwrap(), [out.join("one"), out.join("two")]);
    assert!(matches!(tensorboard(&runs, &out), Err(ExportError::Taken(_))));
}

#[test]
fn runs_of_the_same_name_are_named_by_path() {
    let root = tempfile::tempdir().unwrap();
    let runs = ["a/run", "b/run", "c"].map(|name| run(&root, name, "{\"step\":1,\"loss\":2}\n"));
    let table = csv(&runs).unwrap();
    let names: Vec<_> = table.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    let paths = runs.each_ref().map(|run| run.display().to_string());
    assert_eq!(names, [&paths[0], &paths[1], "c"]);
    let out = root.path().join("boards");
    let folder = |path: &str| out.join(path.trim_start_matches('/').replace('/', "-"));
    assert_eq!(tensorboard(&runs, &out).unwrap(), [folder(&paths[0]), folder(&paths[1]), out.join("c")]);
}

#[test]
fn line_without_time_gets_the_next_one() {
    let root = tempfile::tempdir().unwrap();
    let metrics = "{\"step\":1}\n{\"step\":2,\"time\":5}\n{\"step\":3}\n";
    let folders = [run(&root, "one", metrics)];
    let run = super::runs(&folders).next().unwrap().unwrap();
    assert_eq!(run.times[..2], [5.0, 5.0]);
    assert!(run.times[2] > 5.0, "when the file was written");
}

/// Environment variable that passes the folder to the child process.
const SMALL_DISK: &str = "KILN_TEST_SMALL_DISK";

/// Limits the file size of a child process to simulate a full disk.
#[test]
fn export_to_a_full_disk_leaves_no_folder() {
    if let Some(root) = std::env::var_os(SMALL_DISK) {
        let root = Path::new(&root);
        let (one, out) = ([root.join("one")], root.join("out"));
        assert!(matches!(tensorboard(&one, &out), Err(ExportError::Io { .. })));
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let metrics: String = (0..1000).map(|step| format!("{{\"step\":{step},\"loss\":2.5}}\n")).collect();
    run(&root, "one", &metrics);
    let this = "export::tests::export_to_a_full_disk_leaves_no_folder";
    let limited = "trap '' XFSZ && ulimit -f 8 && exec \"$0\" --exact \"$1\"";
    let test = std::env::current_exe().unwrap();
    let mut limited_test = Command::new("sh");
    limited_test.arg("-c").arg(limited).arg(test).arg(this).env(SMALL_DISK, root.path());
    let output = limited_test.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
}
