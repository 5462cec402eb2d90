use serde::Serialize;

use super::difference::{Difference, Judge, Verdict};
use super::keys::{Effect, KeyDifference};
use kiln_sys::words::number_of;

const SHOWN: usize = 8;

#[derive(Debug, Serialize)]
pub struct Report {
    pub names: [String; 2],
    pub verdict: Verdict,
    /// The first place with a difference larger than rounding.
    pub parted: Option<Difference>,
    /// The first place with different bits, if not the same place as `parted`.
    pub first: Option<Difference>,
    pub likely_cause: Option<String>,
    /// The largest difference, relative to the tensor or to those of its kind in its module.
    pub largest: f64,
    /// Number of places with the same bits, of all `places` compared.
    pub equal: usize,
    pub places: usize,
    pub compared: Vec<String>,
    pub keys: Vec<KeyDifference>,
    /// Set if there is a difference without a size, such as a key, or a tensor that only one of them has.
    #[serde(skip)]
    pub is_of_another_kind: bool,
}

impl Report {
    pub fn new(names: [String; 2]) -> Self {
        Report {
            names,
            verdict: Verdict::Equal,
            parted: None,
            first: None,
            likely_cause: None,
            largest: 0.0,
            equal: 0,
            places: 0,
            compared: Vec::new(),
            keys: Vec::new(),
            is_of_another_kind: false,
        }
    }

    /// Adds the result of a comparison. More precise comparisons come first.
    pub fn add(&mut self, judge: Judge, what: String) {
        self.verdict = self.verdict.max(judge.verdict());
        self.largest = self.largest.max(judge.worst);
        self.equal += judge.equal;
        self.places += judge.seen;
        self.compared.push(what);
        if self.parted.is_none() {
            self.parted = judge.parted;
        }
        if self.first.is_none() {
            self.first = judge.first;
        }
    }

    /// Returns the exit code. Differences up to `tolerance` do not count.
    pub fn exit_code(&self, tolerance: Option<f64>) -> u8 {
        let is_within =
            !self.is_of_another_kind && tolerance.is_some_and(|tolerance| self.largest <= tolerance);
        u8::from(self.verdict != Verdict::Equal && !is_within)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    pub fn to_text(&self) -> String {
        let [a, b] = &self.names;
        let mut lines = Vec::new();
        match (self.verdict, &self.parted, &self.first) {
            _ if self.places == 0 => lines.push(match self.keys.len() {
                0 => format!("{a} and {b} are equal"),
                keys => format!("{a} and {b} differ in {}", number_of(keys as u64, "key")),
            }),
            (Verdict::Equal, ..) => lines.push(format!("{a} and {b} are bit for bit equal")),
            (_, Some(parted), first) => {
                lines.push(format!("{a} and {b} diverge at"));
                lines.push(format!("  {parted}"));
                if let Some(first) = first.as_ref().filter(|first| first.at != parted.at) {
                    lines.push(format!("  smaller differences, such as rounding, start at {first}"));
                }
            }
            (Verdict::Different, None, first) => {
                lines.push(format!("{a} and {b} have different tensors"));
                lines.extend(first.as_ref().map(|first| format!("  bits first differ at {first}")));
            }
            (_, None, first) => {
                let largest = self.largest;
                lines.push(format!("{a} and {b} differ by rounding: by at most {largest:.1e}"));
                lines.extend(first.as_ref().map(|first| format!("  bits first differ at {first}")));
            }
        }
        lines.extend(self.likely_cause.as_ref().map(|cause| format!("likely cause: {cause}")));
        self.push_keys(&mut lines);
        if self.places > 0 {
            lines.push(format!("compared: {}", self.compared.join("; ")));
            let places = number_of(self.places as u64, "place");
            lines.push(match self.verdict {
                Verdict::Equal => format!("bit for bit equal: all of {places}"),
                _ => format!("bit for bit equal: {} of {places} compared", self.equal),
            });
        }
        lines.join("\n")
    }

    fn push_keys(&self, lines: &mut Vec<String>) {
        let is_of = |number: bool, rounding: bool| {
            move |key: &&KeyDifference| match key.effect {
                Effect::Numbers(_) => number,
                Effect::Rounding => rounding,
                Effect::Neither => !number && !rounding,
            }
        };
        for (title, keys) in [
            ("keys that change results", self.keys.iter().filter(is_of(true, false)).collect::<Vec<_>>()),
            ("keys that change only rounding", self.keys.iter().filter(is_of(false, true)).collect()),
            ("keys that change nothing", self.keys.iter().filter(is_of(false, false)).collect()),
        ] {
            if keys.is_empty() {
                continue;
            }
            lines.push(format!("{title}:"));
            lines.extend(keys.iter().take(SHOWN).map(|key| format!("  {}", key.describe())));
            if keys.len() > SHOWN {
                lines.push(format!("  and {} more", keys.len() - SHOWN));
            }
        }
    }
}
