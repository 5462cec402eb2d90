//! TensorBoard tags for the values of `metrics.jsonl`: the same as in torchtitan, so that runs of both can be
//! overlaid.

use std::borrow::Cow;

use crate::line::Line;

const GIB: f64 = (1u64 << 30) as f64;

/// Keys of `metrics.jsonl`, each with its tag and a factor for its value.
const TAGS: [(&str, &str, f64); 13] = [
    ("loss", "loss_metrics/global_avg_loss", 1.0),
    ("tokens_per_s", "throughput(tps)", 1.0),
    ("mfu", "mfu(%)", 100.0),
    ("step_s", "time_metrics/end_to_end(s)", 1.0),
    ("data_s", "time_metrics/data_loading(s)", 1.0),
    ("forward_s", "time_metrics/forward(s)", 1.0),
    ("backward_s", "time_metrics/backward(s)", 1.0),
    ("optimizer_s", "time_metrics/optimizer(s)", 1.0),
    ("other_s", "time_metrics/other(s)", 1.0),
    ("wait_s", "comm/exposed(s)", 1.0),
    ("peak_bytes", "memory/max_reserved(GiB)", 1.0 / GIB),
    ("val_loss", "validation_metrics/loss", 1.0),
    ("tokens", "n_tokens_seen", 1.0),
];

/// Keys in seconds that are also shown as a share of the step's time, each with the tag of the share.
const SHARES: [(&str, &str); 2] = [("data_s", "time_metrics/data_loading(%)"), ("wait_s", "comm/exposed(%)")];

/// Returns the scalars of a line: tags and values. Keys missing in the line are omitted.
pub(super) fn scalars(line: &Line) -> Vec<(Cow<'_, str>, f64)> {
    let mut scalars: Vec<(Cow<'_, str>, f64)> = Vec::with_capacity(line.values.len() + SHARES.len());
    for (key, value) in line.numbers() {
        let known = TAGS.iter().find(|(known, ..)| *known == key);
        scalars.push(known.map_or((key.into(), value), |(_, tag, factor)| ((*tag).into(), value * factor)));
    }
    let number = |wanted: &str| line.numbers().find(|(key, _)| *key == wanted).map(|(_, value)| value);
    for (key, tag) in SHARES {
        if let (Some(part), Some(whole)) = (number(key), number("step_s")) {
            scalars.push((tag.into(), 100.0 * part / whole));
        }
    }
    scalars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_names_and_units_of_torchtitan() {
        let line = r#"{"step":1,"loss":2.5,"grad_norm":1.0,"mfu":0.25,"peak_bytes":1610612736,"step_s":4.0,
            "wait_s":1.0,"layers.0.rms":0.5,"parameter":"lm_head"}"#;
        let line = Line::read(line.as_bytes()).unwrap();
        let expected = [
            ("loss_metrics/global_avg_loss", 2.5),
            ("grad_norm", 1.0),
            ("mfu(%)", 25.0),
            ("memory/max_reserved(GiB)", 1.5),
            ("time_metrics/end_to_end(s)", 4.0),
            ("comm/exposed(s)", 1.0),
            ("layers.0.rms", 0.5),
            ("comm/exposed(%)", 25.0),
        ];
        assert_eq!(scalars(&line), expected.map(|(tag, value)| (tag.into(), value)));
    }
}
