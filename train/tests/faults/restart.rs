//! What a job that is started again makes of its run folder.

use std::fs;

use crate::support::{Run, config, undisturbed};

/// It would begin anew, as if there had never been anything.
#[test]
fn a_job_whose_folder_was_taken_away_is_not_begun_anew() {
    config();
    for and_then in
        ["", "mkdir -p OUT", "mkdir -p OUT; cp MOVED/config.toml MOVED/metrics.jsonl OUT"]
    {
        let run = Run::new();
        let (out, moved) = (run.out(), run.folder().join("moved"));
        let script = format!("mv OUT MOVED; {and_then}");
        let script = script.replace("OUT", &out.display().to_string());
        let script = run.script(&script.replace("MOVED", &moved.display().to_string()));
        // Rank 0 finds that out when it saves step 4.
        let drill = format!("run={script}@data:3:0");
        // So that the checkpoint of step 2 is complete by then.
        let train = ["--fault", &drill, "--set", "checkpoint.async=false"];
        let ended = run.launch(2, &["--max-restarts", "5"], &train);
        assert_eq!(ended.code, Some(2), "{and_then}: {ended:?}");
        let says = "is not the folder that this job was writing to before it was started again";
        assert!(ended.stderr.contains(says), "{and_then}: {ended:?}");
        assert!(!ended.stderr.contains("restart 2 of 5"), "{and_then}: {ended:?}");
        assert!(!out.join("checkpoints").exists(), "{and_then}");
        // Nothing of it is lost.
        let _ = fs::remove_dir_all(&out);
        fs::rename(&moved, &out).expect("the folder");
        let resume = ["--resume", "latest", "--set", "checkpoint.async=false"];
        let ended = run.launch(2, &[], &resume);
        assert_eq!(ended.code, Some(0), "{and_then}: {ended:?}");
        assert_eq!(run.losses(), undisturbed(2), "{and_then}");
    }
}
