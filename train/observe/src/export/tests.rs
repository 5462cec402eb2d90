//! Exports, read again.

use std::fs;
use std::path::PathBuf;

use prost::Message;

use super::wandb_proto::{Record, What};
use super::{ExportError, csv, leveldb, tensorboard, wandb_offline};

const METRICS: &str = r#"{"step":1,"time":1700000000.5,"loss":2.5,"tokens":9007199254740993}
{"step":2,"time":1700000001.5,"skipped":1,"parameter":"a,\"b\""}
{"step":3,"time":1700000002.0,"loss":null,"layers.0.rms":0.1}
{"step":3,"time":1700000003,"val_loss":2.25}
{"step":4,"lo"#;

fn run(root: &tempfile::TempDir, name: &str, metrics: &str) -> PathBuf {
    let folder = root.path().join(name);
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("run.json"), format!("{{\"kiln_run\":1,\"id\":\"id-of-{name}\"}}")).unwrap();
    fs::write(folder.join("config.toml"), "[train]\nsteps = 4\n[optim]\nlr = 0.5\n").unwrap();
    fs::write(folder.join("metrics.jsonl"), metrics).unwrap();
    folder
}

#[test]
fn a_table_has_a_row_for_each_step_and_a_column_for_each_key() {
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
fn a_run_without_metrics_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let empty = run(&root, "empty", "{\"st");
    assert!(matches!(csv(&[empty]), Err(ExportError::Empty(..))));
    assert!(matches!(csv(&[root.path().join("none")]), Err(ExportError::Run(_))));
}

#[test]
fn weights_and_biases_gets_configuration_history_and_summary() {
    let root = tempfile::tempdir().unwrap();
    let (one, out) = (run(&root, "one", METRICS), root.path().join("wandb"));
    let folders = wandb_offline(std::slice::from_ref(&one), &out).unwrap();
    assert_eq!(folders, [out.join("offline-run-20231114_221320-idofone")]);
    let bytes = fs::read(folders[0].join("run-idofone.wandb")).unwrap();
    let records: Vec<_> =
        leveldb::read(&bytes).iter().map(|record| Record::decode(&record[..]).unwrap()).collect();
    assert_eq!(records.iter().map(|record| record.num).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
    let whats: Vec<_> = records.into_iter().map(|record| record.what.unwrap()).collect();
    let [
        What::Header(_),
        What::Run(run),
        What::History(first),
        _,
        What::History(third),
        What::Summary(last),
        What::Exit(exit),
    ] = &whats[..]
    else {
        panic!("{whats:?}")
    };
    let items = |items: &[super::wandb_proto::Item]| -> Vec<(String, String)> {
        items.iter().map(|item| (item.nested_key.join("/"), item.value_json.clone())).collect()
    };
    let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    assert_eq!(
        items(&run.config.clone().unwrap().update),
        pairs(&[("optim", "{\"lr\":0.5}"), ("train", "{\"steps\":4}")])
    );
    let expected = [
        ("loss", "2.5"),
        ("tokens", "9007199254740993"),
        ("_step", "1"),
        ("_timestamp", "1700000000.5"),
        ("_runtime", "0"),
    ];
    assert_eq!(items(&first.item), pairs(&expected));
    let expected = [
        ("loss", "NaN"),
        ("layers.0.rms", "0.1"),
        ("val_loss", "2.25"),
        ("_step", "3"),
        ("_timestamp", "1700000002"),
        ("_runtime", "1.5"),
    ];
    assert_eq!(items(&third.item), pairs(&expected));
    assert_eq!((third.step.as_ref().unwrap().num, exit.runtime, last.update.len()), (3, 1, 9));
    assert!(matches!(wandb_offline(&[one], &out), Err(ExportError::Taken(_))));
}

#[test]
fn event_files_of_runs_are_in_folders_of_their_names() {
    let root = tempfile::tempdir().unwrap();
    let runs = [run(&root, "one", METRICS), run(&root, "two", METRICS)];
    let out = root.path().join("boards");
    assert_eq!(tensorboard(&runs, &out).unwrap(), [out.join("one"), out.join("two")]);
    assert!(matches!(tensorboard(&runs, &out), Err(ExportError::Taken(_))));
}
