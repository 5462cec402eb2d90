//! Event files, read as TensorBoard reads them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use prost::Message;

use super::event::Histogram;
use super::proto::{Event, HParamsPluginData, Kind, START, SummaryValue, Value, What};
use super::writer::read;
use super::{EventWriter, TensorBoard, TensorBoardOptions};

type Curves = BTreeMap<String, Vec<(i64, f32)>>;

fn events(folder: &Path) -> Vec<Event> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut events = Vec::new();
    for file in files {
        let bytes = fs::read(file).unwrap();
        let (records, rest) = read(&bytes);
        assert_eq!(rest, b"");
        let of_file: Vec<_> = records.into_iter().map(|record| Event::decode(record).unwrap()).collect();
        assert_eq!(of_file[0].what, Some(What::FileVersion("brain.Event:2".to_owned())));
        events.extend(of_file);
    }
    events
}

fn values(events: &[Event]) -> Vec<(i64, SummaryValue)> {
    let mut values = Vec::new();
    for event in events {
        match &event.what {
            Some(What::SessionLog(log)) if log.status == START => {
                values.retain(|(step, _)| *step < event.step);
            }
            Some(What::Summary(summary)) => {
                values.extend(summary.value.iter().map(|value| (event.step, value.clone())));
            }
            _ => {}
        }
    }
    values
}

fn curves(folder: &Path) -> Curves {
    let mut curves = Curves::new();
    for (step, value) in values(&events(folder)) {
        if let Some(Value::Simple(number)) = value.value {
            curves.entry(value.tag).or_default().push((step, number));
        }
    }
    curves
}

fn options(run: &Path, done: u64) -> TensorBoardOptions {
    let config =
        "[train]\nsteps = 5\n[optim]\nlr = 0.5\nrule = \"adamw\"\nlist = [1, 2]\n[data]\nshuffle = true\n";
    TensorBoardOptions {
        folder: run.join("tensorboard"),
        metrics: run.join("metrics.jsonl"),
        config: config.to_owned(),
        done,
    }
}

fn show(options: TensorBoardOptions, lines: &[&str]) {
    let mut board = TensorBoard::start(options).unwrap();
    lines.iter().for_each(|line| board.line(line));
}

#[test]
fn resume_continues_the_curves() {
    let run = tempfile::tempdir().unwrap();
    let line = |step: u64, loss: f64| format!("{{\"step\":{step},\"time\":100.5,\"loss\":{loss}}}");
    let lines = |lines: &[(u64, f64)]| -> String {
        lines.iter().map(|(step, loss)| line(*step, *loss) + "\n").collect()
    };
    let first = [line(1, 3.0), line(2, 2.5), line(3, 2.0)];
    show(options(run.path(), 0), &first.each_ref().map(String::as_str));
    fs::write(run.path().join("metrics.jsonl"), lines(&[(1, 3.0), (2, 2.5)])).unwrap();
    show(options(run.path(), 2), &[&line(3, 2.25), "{\"step\":3,\"val_loss\":2.125}", "{\"st"]);
    let folder = run.path().join("tensorboard");
    let expected = Curves::from([
        ("loss_metrics/global_avg_loss".to_owned(), vec![(1, 3.0), (2, 2.5), (3, 2.25)]),
        ("validation_metrics/loss".to_owned(), vec![(3, 2.125)]),
    ]);
    assert_eq!(curves(&folder), expected);
    let of_loss = events(&folder).into_iter().filter(|event| event.wall_time == 100.5).count();
    assert_eq!(of_loss, 3, "the time of a line is that of its event, and a void event is cut off");

    // Void even for readers that ignore START.
    let of_step =
        |step| move |event: &&Event| event.step == step && matches!(event.what, Some(What::Summary(_)));
    assert_eq!(events(&folder).iter().filter(of_step(3)).count(), 2);

    show(options(run.path(), 3), &[]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    fs::write(run.path().join("metrics.jsonl"), "").unwrap();
    show(options(run.path(), 0), &[&line(1, 4.0)]);
    assert_eq!(curves(&folder).into_values().collect::<Vec<_>>(), [[(1, 4.0)]]);
}

#[test]
fn earlier_steps_are_in_new_event_files() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":3.0}\n{\"step\":2,\"loss\":null}\n")
        .unwrap();
    show(options(run.path(), 2), &["{\"step\":3,\"loss\":2.0}"]);
    let curves = curves(&run.path().join("tensorboard"));
    let loss = &curves["loss_metrics/global_avg_loss"];
    assert_eq!((loss.len(), loss[0], loss[2]), (3, (1, 3.0), (3, 2.0)));
    assert!(loss[1].1.is_nan());
}

#[test]
fn settings_texts_and_histograms_are_shown() {
    let run = tempfile::tempdir().unwrap();
    let histogram = Histogram {
        min: -1.0,
        max: 2.0,
        sum: 4.0,
        sum_squares: 6.0,
        limits: vec![-2.0, -1.0, 0.0, 1.0, 2.0],
        counts: vec![0.0, 0.0, 2.0, 3.0, 0.0],
    };
    let mut board = TensorBoard::start(options(run.path(), 0)).unwrap();
    board.text(4, "samples/0", "# one\n\ntwo");
    board.histogram(5, "weights/head", histogram);
    drop(board);
    let values = values(&events(&run.path().join("tensorboard")));
    let [(0, settings), (4, text), (5, histogram)] = &values[..] else { panic!("{values:?}") };

    let plugin = |value: &SummaryValue| value.metadata.clone().and_then(|data| data.plugin_data).unwrap();
    let data = HParamsPluginData::decode(&plugin(settings).content[..]).unwrap();
    let settings = data.session_start_info.unwrap().hparams;
    let kinds: Vec<_> =
        settings.iter().map(|(key, value)| (key.as_str(), value.kind.clone().unwrap())).collect();
    let expected = [
        ("data.shuffle", Kind::Bool(true)),
        ("optim.list", Kind::String("[1, 2]".to_owned())),
        ("optim.lr", Kind::Number(0.5)),
        ("optim.rule", Kind::String("adamw".to_owned())),
        ("train.steps", Kind::Number(5.0)),
    ];
    assert_eq!(kinds, expected);

    assert_eq!(plugin(text).plugin_name, "text");
    let Some(Value::Tensor(tensor)) = &text.value else { panic!("{text:?}") };
    assert_eq!(tensor.string_val, [b"    # one\n    \n    two"]);

    let Some(Value::Histogram(found)) = &histogram.value else { panic!("{histogram:?}") };
    assert_eq!((found.num, found.sum, found.min), (5.0, 4.0, -1.0));
    assert_eq!((&found.bucket_limit[..], &found.bucket[..]), (&[-1.0, 0.0, 1.0][..], &[0.0, 2.0, 3.0][..]));
}

#[test]
fn incomplete_record_is_cut_off() {
    let run = tempfile::tempdir().unwrap();
    let folder = run.path().join("tensorboard");
    show(options(run.path(), 0), &["{\"step\":1,\"loss\":3.0}", "{\"step\":2,\"loss\":2.0}"]);
    let file = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
    fs::write(run.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":3.0}\n").unwrap();
    show(options(run.path(), 1), &["{\"step\":2,\"loss\":1.0}"]);
    assert_eq!(curves(&folder).into_values().collect::<Vec<_>>(), [[(1, 3.0), (2, 1.0)]]);
}

#[test]
fn unwritable_folder_is_no_failure() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("tensorboard"), "a file").unwrap();
    show(options(run.path(), 0), &["{\"step\":1,\"loss\":3.0}", "{\"step\":2,\"loss\":3.0}"]);
    assert!(EventWriter::create(&run.path().join("tensorboard"), 0).is_err());
}
