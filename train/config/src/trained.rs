//! The choice of trained parameters: `train.freeze` and `train.train_only`.

use globset::{Glob, GlobSet};

use super::{ConfigError, TrainSection};

/// The parameters that are not trained, by their full names.
#[derive(Clone, Debug)]
pub struct Frozen {
    named: GlobSet,
    /// True if all other parameters are frozen instead.
    is_inverted: bool,
}

impl Frozen {
    /// Returns all parameters except adapters.
    pub(super) fn except_adapters() -> Self {
        let adapters = glob(ADAPTERS).and_then(|glob| GlobSet::builder().add(glob).build());
        Frozen { named: adapters.unwrap_or_default(), is_inverted: true }
    }

    /// Returns whether the parameter `name` is frozen.
    pub fn contains(&self, name: &str) -> bool {
        self.named.is_match(name) != self.is_inverted
    }
}

/// Names of the parameters of adapters.
const ADAPTERS: &str = "*.lora.?";

/// Number of names that an error suggests.
const SUGGESTIONS: usize = 3;

impl TrainSection {
    /// Returns whether a key chooses parameters.
    pub fn freezes(&self) -> bool {
        !self.patterns().1.is_empty()
    }

    /// Returns the frozen parameters. A pattern that [`Config::validate`](crate::Config::validate) refuses matches
    /// none.
    pub fn frozen(&self) -> Frozen {
        let globs = self.patterns().1.iter().filter_map(|pattern| glob(pattern).ok());
        let mut set = GlobSet::builder();
        globs.for_each(|glob| _ = set.add(glob));
        Frozen { named: set.build().unwrap_or_default(), is_inverted: !self.train_only.is_empty() }
    }

    /// Fails if a pattern matches none of the parameters `names`, or if nothing is left to train.
    pub fn check_trained(&self, names: &[String]) -> Result<(), ConfigError> {
        let (key, patterns) = self.patterns();
        let mut problems = Vec::new();
        for pattern in patterns {
            if !matches_any(pattern, names) {
                let matches = if has_wildcard(pattern) { "matches" } else { "starts with" };
                problems.push(format!(
                    "{key}: no parameter {matches} \"{pattern}\"; similar names are {}",
                    similar(pattern, names).join(", ")
                ));
            }
        }
        let frozen = self.frozen();
        if key == FREEZE && names.iter().all(|name| frozen.contains(name)) {
            problems.push(format!(
                "{FREEZE} leaves nothing to train: name fewer parameters, such as \"layers.0.\""
            ));
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { problems }) }
    }

    /// Removes the patterns that match none of the parameters `names`.
    pub fn forget_absent(&mut self, names: &[String]) {
        for patterns in [&mut self.freeze, &mut self.train_only] {
            patterns.retain(|pattern| matches_any(pattern, names));
        }
    }

    /// Checks what can be checked without the model.
    pub(super) fn check_patterns(&self, problems: &mut Vec<String>) {
        if !self.freeze.is_empty() && !self.train_only.is_empty() {
            problems.push(format!("{FREEZE} and {TRAIN_ONLY} are both set: remove one of them"));
        }
        for (key, patterns) in [(FREEZE, &self.freeze), (TRAIN_ONLY, &self.train_only)] {
            for pattern in patterns {
                problems.extend(
                    glob(pattern).err().map(|error| format!("{key}: \"{pattern}\": {}", error.kind())),
                );
            }
        }
    }

    /// Returns the key that chooses parameters, and its patterns.
    fn patterns(&self) -> (&'static str, &[String]) {
        match self.train_only.is_empty() {
            true => (FREEZE, &self.freeze),
            false => (TRAIN_ONLY, &self.train_only),
        }
    }
}

const FREEZE: &str = "train.freeze";
const TRAIN_ONLY: &str = "train.train_only";

/// A pattern without wildcards is a prefix.
fn glob(pattern: &str) -> Result<Glob, globset::Error> {
    match has_wildcard(pattern) {
        true => Glob::new(pattern),
        false => Glob::new(&format!("{}*", globset::escape(pattern))),
    }
}

fn has_wildcard(pattern: &str) -> bool {
    pattern.contains(['*', '?'])
}

fn matches_any(pattern: &str, names: &[String]) -> bool {
    let matcher = glob(pattern).map(|glob| glob.compile_matcher());
    matcher.is_ok_and(|matcher| names.iter().any(|name| matcher.is_match(name)))
}

fn similar<'a>(pattern: &str, names: &'a [String]) -> Vec<&'a str> {
    let mut names: Vec<_> =
        names.iter().map(|name| (strsim::jaro_winkler(pattern, name), name.as_str())).collect();
    names.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    names.into_iter().take(SUGGESTIONS).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 4] = [
        "embed_tokens.weight",
        "layers.0.attention.q_proj.weight",
        "layers.0.attention.lora_a.weight",
        "layers.1.ffn.lora_b.weight",
    ];

    fn section(text: &str) -> TrainSection {
        toml::from_str(text).expect("a section")
    }

    fn trained(text: &str) -> Vec<&'static str> {
        let frozen = section(text).frozen();
        NAMES.into_iter().filter(|name| !frozen.contains(name)).collect()
    }

    fn checked(text: &str) -> Result<(), String> {
        let names = NAMES.map(str::to_owned);
        section(text).check_trained(&names).map_err(|error| error.to_string())
    }

    #[test]
    fn patterns_choose_parameters() {
        for (text, expected) in [
            ("", &NAMES[..]),
            ("freeze = ['layers.0.']", &[NAMES[0], NAMES[3]]),
            ("freeze = ['embed', 'layers.?.attention.*']", &NAMES[3..]),
            ("freeze = ['layers.*.weight']", &NAMES[..1]),
            ("freeze = ['*.q_proj']", &NAMES),
            ("freeze = ['']", &[]),
            ("train_only = ['*.lora_*']", &NAMES[2..]),
            ("train_only = ['layers.1.', 'embed_tokens.weight']", &[NAMES[0], NAMES[3]]),
        ] {
            assert_eq!(trained(text), expected, "{text}");
        }
    }

    #[test]
    fn patterns_without_parameters_are_refused() {
        assert_eq!(checked("train_only = ['*.lora_?.weight']"), Ok(()));
        let message = checked("train_only = ['*.lora_*', 'layers.1.ffn.lora_c.*']").expect_err("no lora_c");
        assert!(
            message.contains("train.train_only: no parameter matches \"layers.1.ffn.lora_c.*\""),
            "{message}"
        );
        assert!(message.contains("similar names are layers.1.ffn.lora_b.weight, "), "{message}");
        let message = checked("freeze = ['*']").expect_err("nothing is trained");
        assert!(message.contains("train.freeze leaves nothing to train"), "{message}");
    }

    #[test]
    fn names_are_forgotten() {
        let mut section = section("train_only = ['layers.2.', '*.lora_a.*']");
        section.forget_absent(&NAMES.map(str::to_owned));
        assert_eq!(section.train_only, ["*.lora_a.*"]);
    }

    #[test]
    fn invalid_patterns_are_refused() {
        let mut problems = Vec::new();
        section("freeze = ['*.[a']\ntrain_only = ['*']").check_patterns(&mut problems);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems[0].contains("both set") && problems[1].contains("train.freeze: \"*.[a\""),
            "{problems:?}"
        );
    }
}
