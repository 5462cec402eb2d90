use super::*;
use kiln_shard::memory;
use proptest::prelude::*;

fn model() -> ModelConfig {
    ModelConfig { block: Some("mine".to_owned()), ..ModelConfig::preset("10m").unwrap() }
}

fn manifest() -> Manifest {
    let file = |bytes, covered| FileEntry { bytes, covered, checksum: Checksum::empty() };
    let chunk = |offset, length, file: &str| Chunk {
        offset,
        length,
        file: file.to_owned(),
        checksum: Checksum::of(file.as_bytes()),
    };
    let tensor = |name: &str, saved, shape: &[usize], chunks| TensorEntry {
        name: name.to_owned(),
        saved,
        group: 0,
        dtype: "F32".to_owned(),
        shape: shape.to_owned(),
        chunks,
    };
    let both = || vec![chunk(0, 4, "one"), chunk(4, 2, "two")];
    Manifest {
        format_version: FORMAT_VERSION,
        format: Format::Sharded,
        ranks: 2,
        architecture: Architecture::from_model(&model()),
        optimizer: SavedOptimizer::adamw(),
        state: CheckpointState {
            step: 3,
            next_sample: 24,
            tokens: 100,
            seed: 7,
            ..CheckpointState::new(model(), 8)
        },
        config: Some(serde_json::json!({ "train": { "steps": 4 } })),
        base: None,
        checksums: Checksum::NAME.to_owned(),
        groups: vec![GroupEntry { name: "embed".to_owned(), trainable: true }],
        files: BTreeMap::from([
            ("config.toml".to_owned(), file(10, 10)),
            ("one".to_owned(), file(72 + 3 * 16, 72)),
            ("two".to_owned(), file(64 + 3 * 8, 64)),
        ]),
        tensors: vec![
            tensor("a", Saved::Weight, &[2, 3], both()),
            tensor("a", Saved::Slot("exp_avg".into()), &[2, 3], both()),
            tensor("a", Saved::Slot("exp_avg_sq".into()), &[2, 3], both()),
            tensor("empty", Saved::Weight, &[0, 3], Vec::new()),
        ],
    }
}

fn problem(change: impl FnOnce(&mut Manifest)) -> String {
    let mut manifest = manifest();
    change(&mut manifest);
    Manifest::from_bytes(&manifest.to_bytes().unwrap()).unwrap_err()
}

fn sgd_with_momentum() -> SavedOptimizer {
    SavedOptimizer { name: "sgd".to_owned(), state: vec!["exp_avg".to_owned()], owned: Vec::new() }
}

#[test]
fn manifest_is_read_as_written_and_is_json() {
    let bytes = manifest().to_bytes().unwrap();
    assert_eq!(Manifest::from_bytes(&bytes).unwrap(), manifest());
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(json["state"]["next_sample"], 24);
    assert_eq!(json["tensors"][1]["saved"], "exp_avg");
    assert_eq!(json["architecture"]["parts"][0]["name"], "mine");
    assert_eq!(json["optimizer"]["name"], "adamw");
}

#[test]
fn no_bit_can_change() {
    let bytes = manifest().to_bytes().unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(Manifest::from_bytes(&changed).is_err(), "bit {bit} of byte {at}");
        }
    }
    for length in 0..bytes.len() {
        assert!(Manifest::from_bytes(&bytes[..length]).is_err(), "cut to {length}");
    }
}

#[test]
fn inconsistent_manifests_are_refused() {
    let chunk = |m: &mut Manifest, offset, length| {
        (m.tensors[0].chunks[1].offset, m.tensors[0].chunks[1].length) = (offset, length);
    };
    for (reason, found) in [
        ("no chunk starts at element 4", problem(|m| chunk(m, 5, 1))),
        ("no chunk starts at element 4", problem(|m| chunk(m, 3, 3))),
        ("no chunk starts at element 4", problem(|m| chunk(m, 4, 0))),
        ("hold 7 elements of 6", problem(|m| chunk(m, 4, 3))),
        ("too long", problem(|m| chunk(m, 4, u64::MAX))),
        ("hold 4 elements of 6", problem(|m| m.tensors[0].chunks.truncate(1))),
        ("too large", problem(|m| m.tensors[0].shape = vec![usize::MAX, usize::MAX])),
        ("dtype is F16", problem(|m| m.tensors[0].dtype = "F16".to_owned())),
        ("not among the files", problem(|m| m.tensors[0].chunks[0].file = "x".to_owned())),
        ("occurs twice", problem(|m| m.tensors[1].saved = Saved::Weight)),
        ("no group 1", problem(|m| m.tensors[0].group = 1)),
        ("has 121 bytes", problem(|m| m.files.get_mut("one").unwrap().bytes = 121)),
        ("has 88 bytes", problem(|m| m.files.get_mut("two").unwrap().covered = 60)),
        ("too large", problem(|m| m.files.get_mut("one").unwrap().bytes = u64::MAX)),
        (
            "not a name",
            problem(|m| {
                let file = m.files["one"].clone();
                m.files.insert("../one".to_owned(), file);
            }),
        ),
        ("format version 6", problem(|m| m.format_version = 6)),
        ("format version 4", problem(|m| m.format_version = 4)),
        (
            "`a.exp_avg_sq`: the optimizer `sgd` has no such state",
            problem(|m| m.optimizer = sgd_with_momentum()),
        ),
        ("empty name", problem(|m| m.architecture.parts[0].name.clear())),
        ("empty name", problem(|m| m.optimizer.name.clear())),
        ("its checksums are", problem(|m| m.checksums = "sum".to_owned())),
        ("divisible", problem(|m| m.state.model.heads = 7)),
    ] {
        assert!(found.contains(reason), "{reason}: {found}");
    }
}

/// Reading any manifest with a valid checksum returns an error or a manifest, without a panic or a large allocation.
#[test]
fn any_manifest_is_read_without_a_panic() {
    let bytes = manifest().to_bytes().unwrap();
    let start = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let rest = &bytes[start..];
    let rank = memory::MAX_RANKS - 3;
    memory::bind_to_rank(rank);
    memory::reset_peak(rank);
    let mutation = prop_oneof![
        (0..rest.len(), prop::collection::vec(any::<u8>(), 1..8)),
        (0..rest.len(), "[0-9]{1,20}").prop_map(|(at, n)| (at, n.into_bytes())),
        (0..rest.len(), "[\\[\\]{},:\"a-z]{1,4}").prop_map(|(at, n)| (at, n.into_bytes())),
    ];
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) };
    // Mutations of numbers have the largest effect.
    let numbers: Vec<_> = (0..rest.len()).filter(|at| rest[*at].is_ascii_digit()).collect();
    proptest!(config, |(mutations in prop::collection::vec(mutation, 0..3),
                        numbers_at in prop::collection::vec(
                            (prop::sample::select(numbers.clone()), any::<u64>()), 0..3))| {
        let mut changed = rest.to_vec();
        let numbers = numbers_at.into_iter().map(|(at, n)| (at, n.to_string().into_bytes()));
        for (at, new) in mutations.into_iter().chain(numbers) {
            let at = at.min(changed.len());
            let end = (at + 1).min(changed.len());
            changed.splice(at..end, new);
        }
        if let Ok(manifest) = Manifest::from_bytes(&[seal(&changed).as_bytes(), &changed].concat()) {
            let _ = (manifest.layout(3), manifest.bytes(), manifest.num_parameters());
        }
    });
    let peak = memory::peak_bytes(rank);
    assert!(peak < 4 << 20, "{peak} bytes at one time");
}
