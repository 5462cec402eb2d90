use std::ops::RangeInclusive;

/// Parses a range of steps such as `steps=1-20` or `steps=5`; the error describes the problem.
pub(super) fn parse(part: &str) -> Result<RangeInclusive<u64>, String> {
    let steps = part.trim().strip_prefix("steps=").ok_or("expected steps=FIRST-LAST")?;
    let (first, last) = steps.split_once('-').unwrap_or((steps, steps));
    let number = |text: &str| {
        let number = text.trim().parse().ok().filter(|number| *number > 0);
        number.ok_or_else(|| format!("\"{text}\" is not a step: steps are numbered from 1"))
    };
    let steps = number(first)?..=number(last)?;
    match steps.is_empty() {
        true => Err(format!("step {last} is before step {first}")),
        false => Ok(steps),
    }
}

pub(super) fn name(steps: &RangeInclusive<u64>) -> String {
    match steps.start() == steps.end() {
        true => steps.start().to_string(),
        false => format!("{}-{}", steps.start(), steps.end()),
    }
}
