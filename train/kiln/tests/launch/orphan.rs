//! No rank outlives its launcher. The ranks are the real program, because it asks the system to be killed with its
//! parent, which a script could not.

use std::fs;

use kiln_testkit::{run_to_end, status_of, wait_until};

use crate::support::{Job, children_of, finish, parent_of, send};

/// Trains for longer than any test waits.
const CONFIG: &str = r#"
[model]
d_model = 16
layers = 1
heads = 2
kv_heads = 2
d_ff = 32
[data]
path = "data"
text = ["builtin:arithmetic"]
vocab_size = 300
seq_len = 8
[train]
steps = 1000000000
global_batch = 4
micro_batch = 1
ranks = 2
[optim]
lr = 1e-3
[device]
threads = 2
peak_tflops = 1.0
"#;

#[test]
fn ranks_end_with_a_launcher_that_is_killed() {
    let job = Job::new("");
    fs::write(job.path("config.toml"), CONFIG).expect("a file");
    let command = ["launch", "--nproc-per-node", "2", "--", "train", "config.toml", "--out", "run"];
    let launcher = job.kiln(&command, &[]).spawn().expect("the launcher starts");
    let mut ranks = Vec::new();
    wait_until("two ranks", || {
        ranks = children_of(launcher.id());
        ranks.len() == 2
    });
    send("KILL", &launcher);
    assert_eq!(finish(launcher).code, None);
    for rank in ranks {
        wait_until("the end of a rank", || parent_of(rank).is_none());
    }
}

/// The launcher may end before a rank asks to be killed with it.
#[test]
fn a_rank_without_its_launcher_does_not_start() {
    let job = Job::new("");
    let mut gone = job.kiln(&["doctor"], &[]).spawn().expect("a process");
    let pid = gone.id().to_string();
    status_of(&mut gone);
    let ended = run_to_end(&mut job.kiln(&["doctor"], &[("KILN_LAUNCHER_PID", &pid)]));
    let ended = crate::support::ended(ended);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stderr, format!("error: the launcher (pid {pid}) is gone\n"));
}
