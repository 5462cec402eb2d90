use super::*;

fn holder(owner: &str, module: Option<&str>) -> Holder {
    Holder { owner: owner.to_owned(), module: module.map(str::to_owned) }
}

const MIB: i64 = 1 << 20;

fn recorded() -> Recorded {
    let change = |after, holder, mib: i64| Change { after, holder, bytes: mib * MIB };
    let doing =
        |after, activity: &str, module: Option<&str>| (after, activity.to_owned(), module.map(str::to_owned));
    Recorded {
        rank: 1,
        step: 3,
        seconds: 1.0,
        holders: vec![
            holder("weights", None),
            holder("activations", Some("layers.0")),
            holder("activations", Some("layers.<1>")),
            holder("gradients", None),
        ],
        held: vec![4 * MIB as u64],
        changes: vec![
            change(0.2, 1, 3),
            change(0.3, 2, 5),
            change(0.60001, 3, 4),
            change(0.60002, 3, -3),
            change(0.7, 2, -5),
            change(0.8, 1, -3),
        ],
        held_at_end: 5 * MIB as u64,
        missing: 0,
        doings: vec![
            doing(0.0, "data loading", None),
            doing(0.1, "forward", None),
            doing(0.2, "forward", Some("layers.0")),
            doing(0.5, "backward", Some("layers.<1>")),
            doing(0.9, "optimizer", None),
        ],
    }
}

#[test]
fn text_explains_the_peak() {
    let profile = Profile::of(recorded());
    assert_eq!(
        profile.to_string(),
        "peak 16.0 MiB in backward of layers.<1>: activations 8.0 MiB (layers.<1> 5.0, layers.0 3.0), \
         weights 4.0 MiB, gradients 4.0 MiB"
    );
    assert_eq!((profile.unexplained, profile.changes), (0, 6));
    let bands: Vec<_> = profile.bands.iter().map(|band| (band.activity.as_str(), band.end)).collect();
    assert_eq!(bands, [("data loading", 0.1), ("forward", 0.5), ("backward", 0.9), ("optimizer", 1.0)]);
    let totals: Vec<_> = profile.samples.iter().map(|sample| sample.total() as i64 / MIB).collect();
    assert_eq!(totals, [4, 7, 12, 16, 8, 5, 5]);
}

#[test]
fn gaps_are_reported() {
    let recorded = Recorded { held_at_end: 0, missing: 2, ..recorded() };
    let text = Profile::of(recorded).to_string();
    assert!(text.contains("; 2 allocations could not be recorded"), "{text}");
    assert!(text.ends_with("; -5242880 bytes at the end of the step are unexplained"), "{text}");
}

#[test]
fn drawing_has_an_area_per_holder() {
    let svg = Profile::of(recorded()).svg();
    for part in ["activations: layers.0 3.0 MiB", "layers.&lt;1&gt;", ">backward<", ">peak 16.0 MiB<"] {
        assert!(svg.contains(part), "{part} in {svg}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("layers.<1>"));
    let empty = Recorded { holders: vec![], held: vec![], changes: vec![], doings: vec![], ..recorded() };
    assert!(!Profile::of(empty).svg().contains("NaN"));
}

#[test]
fn saving_never_replaces_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("memory");
    let profile = Profile::of(recorded());
    save(std::slice::from_ref(&profile), &folder).unwrap();
    let text = save(&[profile], &folder).unwrap();
    assert_eq!(text, folder.join("step-3-2.txt"));
    let text = std::fs::read_to_string(text).unwrap();
    assert!(text.starts_with("rank 1, step 3: peak 16.0 MiB"), "{text}");
    assert!(text.contains("drawn in step-3-rank-1-2.svg"), "{text}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 4);
}
