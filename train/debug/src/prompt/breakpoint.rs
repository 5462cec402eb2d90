use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use kiln_train::run::{Pass, Reach};
use serde::{Deserialize, Serialize};

/// A breakpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Breakpoint {
    /// The event that stops the run.
    pub on: Trigger,
    /// The optimizer step; every step if `None`.
    pub step: Option<u64>,
    /// The rank to stop; all ranks if `None`.
    pub rank: Option<usize>,
    /// The behaviour of the other ranks while this breakpoint holds a rank.
    pub others: Others,
}

/// Behaviour of the other ranks when one stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Others {
    /// The other ranks are held at the same point, so that sharded tensors can be gathered.
    #[default]
    Hold,
    /// The other ranks continue until they need data from the held rank.
    Run,
}

/// The event that stops a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Trigger {
    /// A part of a step begins.
    Part(Part),
    /// A pass reaches a place.
    Tensor {
        /// The pass.
        pass: Pass,
        /// The place, such as `layers.3`, or a tensor in it, such as `layers.3.output`. `*` matches any text.
        pattern: String,
    },
    /// A tensor of a pass, or the loss, is not finite.
    Nan,
    /// A number of a step is above or below a value.
    Number {
        /// The number to compare.
        number: Number,
        /// Set to stop above the value instead of below it.
        above: bool,
        /// The value to compare with.
        than: f64,
    },
}

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Part {
    /// The first micro-batch is loaded, and its forward pass is next.
    Data,
    /// The gradient has been reduced; the update is next.
    Optimizer,
    /// The step is over.
    Step,
}

/// A number of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Number {
    /// The training loss. It is known when the step is over.
    #[value(name = "loss")]
    Loss,
    /// The norm of the gradient. It is known before the update.
    #[value(name = "grad_norm")]
    GradNorm,
}

/// The error for an invalid breakpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{problem}; write forward:layers.3@12, backward:layers.3.ffn, optimizer@5, step, nan, or \"grad_norm > 10\", \
     followed by \"rank 2\" or \"rank 2 run\" for one rank"
)]
pub struct BreakpointError {
    problem: String,
}

pub(super) fn written(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

impl Breakpoint {
    /// Returns `true` if this breakpoint stops a pass that reaches tensor `name` of `place`. A pattern that names only
    /// a place matches where the pass enters it: its input in forward, the gradient of its output in backward.
    pub fn is_at(&self, pass: Pass, place: &str, name: &str) -> bool {
        let Trigger::Tensor { pass: wanted, pattern } = &self.on else { return false };
        let entry = if pass == Pass::Backward { "output" } else { "input" };
        // The embedding's input is token ids, which no pass shows.
        let is_entry = name == entry || (place == "embed" && name == "output");
        let tensor = format!("{place}.{name}");
        *wanted == pass && (matches(pattern, &tensor) || (is_entry && matches(pattern, place)))
    }

    /// Returns `true` if this breakpoint can stop `step`.
    pub fn is_in(&self, step: u64) -> bool {
        self.step.is_none_or(|at| at == step)
    }
}

/// Describes why `breakpoint` can never be hit in a run of this `reach`; `None` if it can be.
pub(super) fn objection(reach: &Reach, breakpoint: &Breakpoint) -> Option<String> {
    let (first, last) = (reach.steps.start(), reach.steps.end());
    if breakpoint.step.is_some_and(|step| !reach.steps.contains(&step)) {
        return Some(format!("the run has steps {first} to {last}"));
    }
    let Trigger::Tensor { pass, pattern } = &breakpoint.on else { return None };
    if *pass == Pass::Recompute && !reach.recomputes {
        return Some("no block is recomputed: see shard.recompute".to_owned());
    }
    let blocks = (0..reach.layers).flat_map(|index| {
        ["", ".attention", ".ffn"].map(|inside| (format!("layers.{index}{inside}"), &["input", "output"][..]))
    });
    let ends = [("embed", &["output"][..]), ("head", &["input", "output"][..])];
    let mut places = ends.into_iter().map(|(place, names)| (place.to_owned(), names)).chain(blocks);
    let is_known = places.any(|(place, names)| {
        let is_own = || reach.has_own_places && (pattern.contains('*') || is_inside(pattern, &place));
        names.iter().any(|name| breakpoint.is_at(*pass, &place, name)) || is_own()
    });
    let last = reach.layers.saturating_sub(1);
    (!is_known).then(|| {
            format!(
                "the model has no such place; its places are embed, head, and layers.0 to layers.{last}, each with \
                 .attention and .ffn"
            )
        })
}

fn is_inside(pattern: &str, place: &str) -> bool {
    pattern.strip_prefix(place).is_some_and(|inside| inside.starts_with('.'))
}

/// Returns `true` if `text` matches `pattern`, in which `*` matches any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

impl FromStr for Breakpoint {
    type Err = BreakpointError;

    fn from_str(text: &str) -> Result<Self, BreakpointError> {
        let wrong = |problem: String| BreakpointError { problem };
        let (text, whose) = match text.find(" rank ") {
            None => (text, ""),
            Some(at) => (&text[..at], &text[at..]),
        };
        let text = text.trim();
        let (rank, others) = match whose.split_whitespace().collect::<Vec<_>>()[..] {
            [] => (None, Others::Hold),
            [_, rank] | [_, rank, "hold"] => (Some(rank), Others::Hold),
            [_, rank, "run"] => (Some(rank), Others::Run),
            _ => return Err(wrong(format!("\"{}\" is not rank N or rank N run", whose.trim()))),
        };
        let rank = rank.map(str::parse).transpose();
        let rank = rank.map_err(|_| wrong(format!("missing rank number in \"{}\"", whose.trim())))?;
        let (on, step) = match text.split_once('@') {
            None => (text, None),
            Some((on, step)) => {
                let step = step.trim();
                let number = step.parse().map_err(|_| wrong(format!("\"{step}\" is not a step")))?;
                (on.trim(), Some(number))
            }
        };
        let named = |on: &str| Part::from_str(on, false).ok().map(Trigger::Part);
        let on = match on.split_once([':', '<', '>']) {
            None if on == "nan" => Trigger::Nan,
            None => named(on).ok_or_else(|| wrong(format!("\"{on}\" is not a breakpoint")))?,
            Some((pass, pattern)) if on.contains(':') => {
                let pass = Pass::from_str(pass, false)
                    .map_err(|_| wrong(format!("\"{pass}\" is not forward, recompute or backward")))?;
                if pattern.is_empty() {
                    return Err(wrong("missing place after the colon".to_owned()));
                }
                Trigger::Tensor { pass, pattern: pattern.to_owned() }
            }
            Some((number, than)) => {
                let number = number.trim();
                let number = Number::from_str(number, false)
                    .map_err(|_| wrong(format!("\"{number}\" is not loss or grad_norm")))?;
                let than = than.trim();
                let than = than.parse().map_err(|_| wrong(format!("\"{than}\" is not a number")))?;
                Trigger::Number { number, above: on.contains('>'), than }
            }
        };
        Ok(Breakpoint { on, step, rank, others })
    }
}

impl fmt::Display for Breakpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.on {
            Trigger::Part(part) => f.write_str(&written(part))?,
            Trigger::Tensor { pass, pattern } => write!(f, "{}:{pattern}", written(pass))?,
            Trigger::Nan => f.write_str("nan")?,
            Trigger::Number { number, above, than } => {
                write!(f, "{} {} {than}", written(number), if *above { '>' } else { '<' })?;
            }
        }
        self.step.map_or(Ok(()), |step| write!(f, "@{step}"))?;
        match self.rank {
            None => Ok(()),
            Some(rank) => write!(f, " rank {rank}{}", if self.others == Others::Run { " run" } else { "" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Breakpoint {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn breakpoints_round_trip() {
        for text in [
            "forward:layers.3@12",
            "backward:layers.*.ffn",
            "recompute:layers.0",
            "data",
            "optimizer@5",
            "nan",
            "grad_norm > 10",
            "loss < 0.5@7",
            "step rank 1",
            "backward:layers.1@3 rank 2 run",
        ] {
            assert_eq!(parsed(text).to_string(), text);
        }
        for (text, problem) in [
            ("", "is not a breakpoint"),
            ("layers.3", "is not a breakpoint"),
            ("sideways:layers.3", "not forward, recompute or backward"),
            ("forward:", "missing place"),
            ("forward:layers.3@x", "not a step"),
            ("norm > 3", "not loss or grad_norm"),
            ("loss > much", "not a number"),
            ("step rank x", "missing rank number in \"rank x\""),
            ("step rank 1 walk", "is not rank N"),
        ] {
            let error = text.parse::<Breakpoint>().expect_err(text).to_string();
            assert!(error.contains(problem) && error.contains("write forward:layers.3@12"), "{error}");
        }
    }

    #[test]
    fn unreachable_breakpoints_are_detected() {
        let stock = Reach { steps: 3..=8, layers: 2, has_own_places: false, recomputes: false };
        let objection =
            |reach: &Reach, text: &str| super::objection(reach, &parsed(text)).unwrap_or_default();
        for text in [
            "forward:layers.1",
            "forward:layers.*.ffn@3",
            "backward:layers.0.attention.input@8",
            "forward:embed",
            "backward:head.input",
            "forward:*",
            "nan@5",
            "step",
        ] {
            assert_eq!(objection(&stock, text), "", "{text}");
        }
        for (text, why) in [
            ("step@9", "has steps 3 to 8"),
            ("nan@2", "has steps 3 to 8"),
            ("forward:layers.2", "layers.0 to layers.1"),
            ("forward:layers.1.fnn", "no such place"),
            ("backward:embed.input", "no such place"),
            ("recompute:layers.1", "see shard.recompute"),
        ] {
            assert!(objection(&stock, text).contains(why), "{text}: {}", objection(&stock, text));
        }
        let own = Reach { has_own_places: true, recomputes: true, ..stock };
        for text in
            ["forward:layers.1.attention.after attention", "recompute:layers.1", "forward:layers.*.mine"]
        {
            assert_eq!(objection(&own, text), "", "{text}");
        }
        assert!(objection(&own, "forward:layers.2.mine").contains("no such place"));
    }

    #[test]
    fn a_place_is_where_a_pass_enters_it() {
        use Pass::{Backward, Forward};
        let at = |text: &str, pass, place, name| parsed(text).is_at(pass, place, name);
        assert!(at("forward:layers.3", Forward, "layers.3", "input"));
        assert!(!at("forward:layers.3", Forward, "layers.3", "output"));
        assert!(!at("forward:layers.3", Backward, "layers.3", "input"));
        assert!(at("backward:layers.3", Backward, "layers.3", "output"));
        assert!(!at("backward:layers.3", Backward, "layers.3", "input"));
        assert!(at("backward:layers.3.input", Backward, "layers.3", "input"));
        assert!(at("forward:embed", Forward, "embed", "output"));
        assert!(!at("forward:layers.3", Forward, "layers.31", "input"));
        assert!(at("forward:layers.*.ffn", Forward, "layers.31.ffn", "input"));
        assert!(!at("forward:layers.*.ffn", Forward, "layers.31.attention", "input"));
        assert!(at("forward:*", Forward, "head", "output"));
    }
}
