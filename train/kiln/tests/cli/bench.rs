//! `kiln bench strategies` and `kiln bench network`.

use std::collections::BTreeSet;

use crate::support::Workspace;

const STRATEGIES: [&str; 5] =
    ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"];

fn bench(workspace: &Workspace, more: &[&str]) -> String {
    workspace.config("bench.toml", &[("model.vocab_size", "300")]);
    let arguments = ["bench", "strategies", "bench.toml", "--ranks", "2"];
    workspace.succeed(&[&arguments[..], &["--steps", "1", "--rounds", "1"], more].concat())
}

#[test]
fn json_has_a_row_per_strategy() {
    let workspace = Workspace::new();
    // The strategy of the file is one of the five compared.
    let table: serde_json::Value = serde_json::from_str(&bench(&workspace, &["--json"])).unwrap();
    let keys = |value: &serde_json::Value| -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    let set = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<BTreeSet<_>>();
    let expected = ["model", "parameters", "ranks", "global_batch", "seq_len", "rows"];
    assert_eq!(keys(&table), set(&expected));
    assert_eq!((&table["ranks"], &table["global_batch"]), (&2.into(), &8.into()));
    let model: kiln_model::ModelConfig = serde_json::from_value(table["model"].clone()).unwrap();
    let parameters =
        kiln_model::Decoder::count_parameters(&Default::default(), &model).expect("built-in layers");
    assert_eq!(table["parameters"], parameters);
    let rows = table["rows"].as_array().unwrap();
    let expected = [
        "strategy",
        "mesh",
        "tokens_per_s",
        "tokens_per_s_range",
        "relative_speed",
        "peak_bytes",
        "sent_bytes",
        "gathers",
        "reductions",
        "wait_share",
    ];
    for (row, strategy) in rows.iter().zip(STRATEGIES) {
        assert_eq!(keys(row), set(&expected));
        assert_eq!(row["strategy"], strategy);
        for key in ["tokens_per_s", "relative_speed", "peak_bytes", "sent_bytes", "reductions"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{strategy} {key}: {row}");
        }
    }
    assert_eq!(rows.len(), 5);
    assert_eq!(rows[0]["relative_speed"], 1.0);
    assert_eq!(rows[2]["gathers"], 0);
}

#[test]
fn the_table_has_a_line_per_strategy() {
    let table = bench(&Workspace::new(), &[]);
    let lines: Vec<_> = table.lines().skip(2).collect();
    assert_eq!(lines.len(), 7, "{table}");
    for (line, strategy) in lines.iter().zip(STRATEGIES) {
        assert_eq!(line.split_whitespace().next(), Some(strategy));
    }
    assert!(lines[5].starts_with("relative: tok/s divided by that of FULL_SHARD in the same round"));
    assert!(lines[6].starts_with("Hybrids have one group per machine, which is all ranks here"));
}

/// The measured strategy behaves as in a run of the same configuration.
#[test]
fn hybrids_have_the_groups_that_training_gives_them() {
    let workspace = Workspace::new();
    let strategy = ("shard.strategy", "'HYBRID_SHARD'");
    let meshes = |changes: &[(&str, &str)]| {
        let vocabulary = ("model.vocab_size", "300");
        workspace.config("bench.toml", &[&[strategy, vocabulary], changes].concat());
        let arguments = ["bench", "strategies", "bench.toml", "--steps", "1"];
        let more = ["--rounds", "1", "--ranks", "4", "--json"];
        let said = workspace.succeed(&[&arguments[..], &more].concat());
        let table: serde_json::Value = serde_json::from_str(&said).unwrap();
        let rows = table["rows"].as_array().unwrap().clone();
        rows.iter().map(|row| row["mesh"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let [all, none, halves] = ["replicate 1 x shard 4", "replicate 4 x shard 1", "replicate 2 x shard 2"];
    assert_eq!(meshes(&[]), [all, all, none, all, all]);
    assert_eq!(meshes(&[("shard.shard_size", "2")]), [all, all, none, halves, halves]);
    // Trains on processes started by a launcher.
    let trained = |changes: &[(&str, &str)]| {
        workspace.config("run.toml", &[&[strategy], changes].concat());
        let out = changes.len().to_string();
        let launch = ["launch", "--nproc-per-node", "4", "--log-dir", "logs", "--"];
        workspace.succeed(&[&launch[..], &["train", "run.toml", "--out", &out]].concat())
    };
    assert!(trained(&[]).contains(&format!("mesh {all}, HYBRID_SHARD")));
    assert!(trained(&[("shard.shard_size", "2")]).contains(&format!("mesh {halves}, HYBRID_SHARD")));
}

/// The strategies behave the same on processes and on threads, and only rank 0 prints.
#[test]
fn strategies_are_compared_on_processes_as_well() {
    let workspace = Workspace::new();
    let threads: serde_json::Value = serde_json::from_str(&bench(&workspace, &["--json"])).unwrap();
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let strategies = ["bench", "strategies", "bench.toml", "--steps", "1", "--rounds", "1"];
    let said = workspace.succeed(&[&launch[..], &strategies, &["--json"]].concat());
    let processes: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(processes["ranks"], 2);
    let rows = |table: &serde_json::Value| table["rows"].as_array().unwrap().clone();
    for (process, thread) in rows(&processes).iter().zip(rows(&threads)) {
        for key in ["strategy", "mesh", "sent_bytes", "gathers", "reductions"] {
            assert_eq!(process[key], thread[key], "{key}");
        }
        assert!(process["tokens_per_s"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(rows(&processes).len(), STRATEGIES.len());
    let other = workspace.kiln(&[&launch[..], &strategies, &["--ranks", "3"]].concat());
    assert_eq!(other.code, Some(2), "{other:?}");
    assert!(other.stderr.contains("the launcher has started 2 processes"), "{other:?}");
    let alone = workspace.kiln(&strategies);
    assert_eq!(alone.code, Some(2), "{alone:?}");
    assert!(alone.stderr.contains("--ranks N for threads"), "{alone:?}");
}

/// Returns the entries of a file of links, by collective.
fn links(workspace: &Workspace, file: &str) -> Vec<(String, u64, u64, String)> {
    let json = workspace.json(file);
    assert_eq!(json["version"], 1);
    let links = json["links"].as_array().expect("links");
    let text = |link: &serde_json::Value, key: &str| link[key].as_str().expect("a text").to_owned();
    let number = |link: &serde_json::Value, key: &str| link[key].as_u64().expect("a number");
    let read = |link: &serde_json::Value| {
        assert!(link["latency_s"].as_f64().is_some_and(|seconds| seconds >= 0.0), "{link}");
        assert!(link["bytes_per_s"].as_f64().is_some_and(|bytes| bytes > 0.0), "{link}");
        (text(link, "backend"), number(link, "ranks"), number(link, "nodes"), text(link, "operation"))
    };
    links.iter().map(read).collect()
}

/// New measurements are added to a file of links; its other entries are kept.
#[test]
fn networks_are_measured_into_one_file() {
    let workspace = Workspace::new();
    let operations = ["all_gather", "reduce_scatter", "all_reduce"];
    let of = |backend: &str, ranks: u64| {
        operations.map(|operation| (backend.to_owned(), ranks, 1, operation.to_owned())).to_vec()
    };
    let network = ["bench", "network", "--out", "links.json"];
    let said = workspace.succeed(&[&network[..], &["--ranks", "2"]].concat());
    assert_eq!(links(&workspace, "links.json"), of("local", 2));
    for operation in operations {
        assert!(said.contains(&format!("{operation} over local, 2 ranks on 1 node: ")), "{said}");
    }
    // Ten sizes of each collective. The bytes that a rank sends are those that the recorder counts.
    assert_eq!(said.lines().count(), 3 * 12 + 2, "{said}");
    let rows = |size: &str| {
        let row = |line: &str| line.trim_start().starts_with(size).then(|| line.trim_start().to_owned());
        said.lines().filter_map(row).map(|line| line[8..].trim_start()[..8].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(rows("64.0 KiB"), ["32.0 KiB", "32.0 KiB", "64.0 KiB"], "{said}");
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    workspace.succeed(&[&launch[..], &network].concat());
    let both = [of("local", 2), of("tcp", 2)].concat();
    assert_eq!(links(&workspace, "links.json"), both);
    workspace.succeed(&[&network[..], &["--ranks", "2"]].concat());
    assert_eq!(links(&workspace, "links.json"), both);
    // Nothing is measured if the file cannot be extended.
    workspace.write("links.json", "{}");
    for (more, says) in [
        (&["--ranks", "2"][..], "links.json is not a file of network links: missing field `version`"),
        (&["--ranks", "1"], "a single rank sends nothing"),
        (&[], "--ranks N for threads"),
    ] {
        let ended = workspace.kiln(&[&network[..], more].concat());
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
    }
    assert_eq!(workspace.text("links.json"), "{}");
}
