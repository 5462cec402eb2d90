//! `kiln tune`: the configurations it tries, the file it writes, and the parts it leaves unchanged.

use serde_json::Value as Json;

use crate::support::Workspace;

const QUICK: [&str; 4] = ["--steps", "1", "--rounds", "1"];

/// A run of two ranks, as a user would write it.
const TUNED: &str = r#"# Mine.
[model]
d_model = 16
layers = 2
heads = 4
kv_heads = 2
d_ff = 32

[data]
path = "data"
seq_len = 8
vocab_size = 257

[train]
steps = 2
global_batch = 16    # shared by the ranks
micro_batch = 1    # to be found
ranks = 2

[device]
backend = "cpu"
threads = 1
peak_tflops = 1.0
"#;

fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.write("mine.toml", TUNED);
    workspace
}

fn tune(workspace: &Workspace, more: &[&str]) -> String {
    workspace.succeed(&[&["tune", "mine.toml"], &QUICK[..], more].concat())
}

fn report(workspace: &Workspace, more: &[&str]) -> Json {
    serde_json::from_str(&tune(workspace, &[&["--json"], more].concat())).expect("JSON")
}

/// Returns the settings that distinguish rows.
fn way(row: &Json) -> (String, String, u64) {
    let text = |key: &str| row[key].as_str().expect("a text").to_owned();
    (text("strategy"), text("recompute"), row["micro_batch"].as_u64().expect("a number"))
}

#[test]
fn the_fastest_way_is_written_into_a_configuration_like_the_one_given() {
    let workspace = workspace();
    let said = tune(&workspace, &[]);
    let (table, conclusion) = said.split_once("written to mine.tuned.toml").expect("where it is");
    let rows: Vec<_> = table.lines().filter(|line| line.contains("_SHARD") || line.contains("_OP")).collect();
    assert_eq!(rows.len(), 6, "{said}");
    assert!(rows[0].contains("as configured") && rows[0].contains("1.00x"), "{said}");
    let chosen: Vec<_> = rows.iter().filter(|row| row.starts_with('*')).collect();
    assert_eq!(chosen.len(), 1, "{said}");
    let text = workspace.text("mine.tuned.toml");
    assert!(text.starts_with("# Written by `kiln tune mine.toml`"), "{text}");
    for row in &rows {
        assert!(text.contains(row), "{text}");
    }
    // Only the reported changes distinguish the file from the original.
    assert!(text.contains("\n\n# Mine.\n[model]\nd_model = 16\n"), "{text}");
    assert!(text.contains("global_batch = 16    # shared by the ranks\nmicro_batch = "), "{text}");
    assert!(text.contains("    # to be found\n"), "{text}");
    let written: toml::Table = toml::from_str(&text).expect("TOML");
    let mut expected: toml::Table = toml::from_str(TUNED).expect("TOML");
    for change in conclusion.lines().filter_map(|line| line.trim().strip_prefix("--set ")) {
        let (name, value) = change.split_once('=').expect("a setting");
        let (section, key) = name.split_once('.').expect("a key");
        let value = value.parse::<i64>().map_or_else(|_| value.into(), toml::Value::Integer);
        let section = expected.entry(section).or_insert_with(|| toml::Table::new().into());
        section.as_table_mut().expect("a section").insert(key.to_owned(), value);
    }
    assert_eq!(written, expected);
    let word = chosen[0].split_whitespace().nth(1).expect("a strategy");
    let strategy =
        written.get("shard").and_then(|shard| shard.get("strategy")).and_then(|name| name.as_str());
    assert_eq!(strategy.unwrap_or("FULL_SHARD"), word);
    workspace.succeed(&["config", "mine.tuned.toml"]);
    workspace.succeed(&["train", "mine.tuned.toml", "--out", "run"]);
    assert_eq!(workspace.steps("run").len(), 2);
}

#[test]
fn what_is_there_already_is_overwritten_only_by_force() {
    let workspace = workspace();
    tune(&workspace, &["--candidates", "1", "--set", "train.steps=3"]);
    let first = workspace.text("mine.tuned.toml");
    assert!(first.contains("\nsteps = 3\n"), "{first}");
    // The only candidate is the configuration itself.
    assert!(first.contains("\nmicro_batch = 1    # to be found\n") && !first.contains("[shard]"), "{first}");
    let again = workspace.kiln(&[&["tune", "mine.toml"], &QUICK[..]].concat());
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(again.stderr.contains("mine.tuned.toml already exists"), "{again:?}");
    assert!(again.stderr.contains("more: kiln explain output-exists"), "{again:?}");
    assert_eq!((again.stdout.as_str(), workspace.text("mine.tuned.toml")), ("", first));
    tune(&workspace, &["--candidates", "1", "--force"]);
    assert!(workspace.text("mine.tuned.toml").contains("\nsteps = 2\n"));
    // A tuned file can be tuned again, and still has one table.
    let more = ["--candidates", "1", "--out", "twice.toml"];
    workspace.succeed(&[&["tune", "mine.tuned.toml"], &QUICK[..], &more].concat());
    assert_eq!(workspace.text("twice.toml").matches("kiln tune").count(), 1);
    let nowhere = workspace.kiln(&["tune", "mine.toml", "--out", "nowhere/tuned.toml"]);
    assert_eq!(nowhere.code, Some(2), "{nowhere:?}");
    assert!(nowhere.stderr.contains("there is no folder nowhere"), "{nowhere:?}");
}

/// The best candidates of the plan come first: nothing is recomputed, and micro-batches are the largest.
#[test]
fn rows_are_what_was_planned_and_measured() {
    let workspace = workspace();
    let found = report(&workspace, &["--candidates", "99", "--ranks", "4"]);
    let rows = found["rows"].as_array().expect("rows");
    let expected =
        |strategy: &str, recompute: &str, micro| (strategy.to_owned(), recompute.to_owned(), micro);
    let ways: Vec<_> = rows.iter().map(way).collect();
    assert_eq!(ways[0], expected("FULL_SHARD", "none", 1));
    assert_eq!(
        ways[1..4],
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"].map(|strategy| expected(strategy, "none", 4))
    );
    // 3 strategies, 3 kinds of recomputation, micro-batches of 4, 2 and 1.
    assert_eq!(ways.len(), 27);
    for row in rows {
        for key in ["planned_peak_bytes", "peak_bytes", "tokens_per_s", "relative_speed"] {
            assert!(row[key].as_f64().expect("a number") > 0.0, "{key}: {row}");
        }
    }
    let chosen: Vec<_> = rows.iter().filter(|row| row["chosen"] == true).collect();
    let speed = |row: &Json| row["relative_speed"].as_f64().expect("a number");
    assert_eq!(chosen.len(), 1);
    assert!(rows.iter().all(|row| speed(row) <= speed(chosen[0])), "{found}");
    let written: toml::Table = toml::from_str(&workspace.text("mine.tuned.toml")).expect("TOML");
    assert_eq!(written["train"]["ranks"].as_integer(), Some(4));
    assert_eq!(written["train"]["micro_batch"].as_integer(), chosen[0]["micro_batch"].as_i64());
}

#[test]
fn processes_try_the_same_ways_and_rank_0_writes() {
    let workspace = workspace();
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--", "tune", "mine.toml"];
    let said = workspace.succeed(&[&launch[..], &QUICK, &["--json"]].concat());
    let found: Json = serde_json::from_str(&said).expect("JSON");
    assert_eq!((&found["ranks"], found["rows"].as_array().expect("rows").len()), (&2.into(), 6));
    assert!(workspace.text("mine.tuned.toml").contains("# Mine.\n"));
    let again = workspace.kiln(&[&launch[..], &QUICK].concat());
    assert_eq!(again.code, Some(2), "{again:?}");
    assert!(again.stderr.contains("already exists"), "{again:?}");
    // Logs go where those of a launch without a run folder go.
    let anywhere = ["launch", "--nproc-per-node", "2", "--", "tune", "mine.toml", "--out", "other.toml"];
    workspace.succeed(&[&anywhere[..], &QUICK, &["--candidates", "1"]].concat());
    assert!(workspace.path("other.toml").is_file());
}

#[test]
fn what_does_not_fit_is_not_tried() {
    let workspace = workspace();
    let arguments = |memory: &str| -> Vec<String> {
        let wide = ["--set", "model.d_model=512", "--set", "model.d_ff=1024", "--ranks", "4"];
        let memory = format!("device.memory={memory}");
        let unsharded = ["--set", "shard.accumulate=unsharded"];
        let more =
            ["--candidates", "99", "--margin", "0", "--force", "--set", &memory, unsharded[0], unsharded[1]];
        wide.iter().chain(&more).map(|word| (*word).to_owned()).collect()
    };
    let ways = |memory: &str| -> Vec<_> {
        let arguments = arguments(memory);
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        report(&workspace, &arguments)["rows"].as_array().expect("rows").iter().map(way).collect()
    };
    let own = ("FULL_SHARD".to_owned(), "none".to_owned(), 1);
    let all = ways("4GiB");
    assert!(all.iter().any(|way| way.0 == "NO_SHARD") && all.contains(&own), "{all:?}");
    let sharded = ways("300MiB");
    assert!(sharded.iter().all(|way| way.0 != "NO_SHARD") && sharded.contains(&own), "{sharded:?}");
    // Several micro-batches keep whole gradients between them, so the configuration itself needs too much
    // memory.
    let whole = ways("225MiB");
    assert!(!whole.is_empty() && whole.iter().all(|way| way.2 == 4), "{whole:?}");
    let written = workspace.text("mine.tuned.toml");
    assert!(written.contains("\nmicro_batch = 4    # to be found\n"), "{written}");
    let none = arguments("60MiB");
    let none: Vec<_> = none.iter().map(String::as_str).collect();
    let ended = workspace.kiln(&[&["tune", "mine.toml"], &QUICK[..], &none].concat());
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("of memory, and device.memory is 60.0 MiB"), "{ended:?}");
}

/// `kiln tune` removes keys that its chosen strategy would refuse.
#[test]
fn groups_of_ranks_go_with_their_strategy() {
    let workspace = workspace();
    let hybrid = "\n[shard]\nstrategy = \"HYBRID_SHARD\"\nshard_size = 2\n";
    workspace.write("mine.toml", format!("{TUNED}{hybrid}"));
    let found = report(&workspace, &["--candidates", "99", "--ranks", "4"]);
    let rows = found["rows"].as_array().expect("rows");
    let strategies: std::collections::BTreeSet<_> = rows.iter().map(|row| way(row).0).collect();
    assert_eq!(strategies.len(), 5, "{found}");
    let chosen = rows.iter().find(|row| row["chosen"] == true).expect("a row");
    let is_hybrid = way(chosen).0.starts_with("HYBRID");
    let text = workspace.text("mine.tuned.toml");
    assert_eq!(text.contains("\nshard_size = 2"), is_hybrid, "{text}");
    assert_eq!(found["removed"].as_array().expect("keys").is_empty(), is_hybrid, "{found}");
    workspace.succeed(&["config", "mine.tuned.toml"]);
}

/// The configuration describes the model only by its initial weights, some of which are frozen.
#[test]
fn a_model_of_weights_is_tuned() {
    let workspace = workspace();
    workspace.succeed(&["train", "mine.toml", "--out", "first", "--set", "train.steps=1"]);
    let (_, rest) = TUNED.split_once("[data]").expect("a section");
    let text = format!("[init]\nfrom = \"first\"\n\n[data]{rest}");
    let all = report(&workspace, &["--candidates", "1"]);
    workspace.write("mine.toml", &text);
    let found = report(&workspace, &["--candidates", "1", "--force"]);
    assert_eq!(found["parameters"], all["parameters"]);
    let frozen = report(&workspace, &["--candidates", "1", "--force", "--set", "train.freeze=[\"layers.\"]"]);
    let peak = |report: &Json| report["rows"][0]["peak_bytes"].as_u64().expect("a number");
    assert!(peak(&frozen) < peak(&found), "{frozen}");
}
