//! The values that layers record during a step: read, summed over the ranks, and named for the log.

use std::collections::HashMap;

use burn::tensor::Tensor;
use kiln_collectives::Phase;
use kiln_model::layers::{Record, RecordKind, Records};
use kiln_shard::{Engine, PendingValues};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::values::Values;

/// The values that this rank's layers recorded in one step, possibly still being copied to the host.
pub struct RecordedStep {
    keys: Vec<(Key, f64)>,
    values: Option<PendingValues>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    place: String,
    name: String,
    kind: RecordKind,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    /// Sum of the passes' shares of the step's tokens.
    share: f64,
    /// Sum of the values, each weighted by its pass's share.
    value: f64,
}

#[derive(Default)]
struct Sums {
    order: Vec<(Key, Sum)>,
    index: HashMap<Key, usize>,
}

impl Sums {
    fn add(&mut self, key: Key, Sum { share, value }: Sum) {
        let index = *self.index.entry(key).or_insert_with_key(|key| {
            self.order.push((key.clone(), Sum::default()));
            self.order.len() - 1
        });
        self.order[index].1.share += share;
        self.order[index].1.value += value;
    }
}

impl RecordedStep {
    /// Starts to read the values that a step left in `records`, without waiting for a GPU. Not collective.
    ///
    /// # Errors
    ///
    /// If a value cannot be read.
    pub fn start(engine: &Engine, records: &Records) -> Result<Self> {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for Record { place, name, kind, value, share } in records.take() {
            keys.push((Key { place, name, kind }, share));
            values.push(value);
        }
        let values = match values.is_empty() {
            true => None,
            false => Some(engine.read_later(Tensor::cat(values, 0))?),
        };
        Ok(RecordedStep { keys, values })
    }

    /// Returns whether the layers of this rank have recorded nothing.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Waits for the values of the step, and returns them under their names in `metrics.jsonl`.
    /// Each is a mean over the tokens of the passes that recorded it. `loss_name` names the rest of the step's `loss`.
    /// Collective: all ranks must call it if any rank has recorded anything.
    ///
    /// # Errors
    ///
    /// If a GPU fails, or the ranks lose contact.
    pub fn finish(self, engine: &Engine, loss: f64, loss_name: &str) -> Result<Values> {
        let read = self.values.map_or(Ok(Vec::new()), PendingValues::wait);
        let read = read.map_err(kiln_shard::ShardError::from)?;
        let mut mine = Sums::default();
        for ((key, share), value) in self.keys.into_iter().zip(read) {
            mine.add(key, Sum { share, value: share * f64::from(value) });
        }
        // As bits, because JSON has no NaN.
        let message: Vec<_> =
            mine.order.into_iter().map(|(key, sum)| (key, sum.share, sum.value.to_bits())).collect();
        let message = serde_json::to_vec(&message).map_err(unreadable)?;
        let mut all = Sums::default();
        for message in engine.all_gather_bytes(Phase::Other, "records", &message)? {
            let sums: Vec<(Key, f64, u64)> = serde_json::from_slice(&message).map_err(unreadable)?;
            for (key, share, value) in sums {
                all.add(key, Sum { share, value: f64::from_bits(value) });
            }
        }
        Ok(named(&all.order, loss, loss_name))
    }
}

fn unreadable(error: serde_json::Error) -> TrainError {
    TrainError::Records { reason: error.to_string() }
}

/// Names the values as in `docs/configuration.md`.
fn named(sums: &[(Key, Sum)], loss: f64, loss_name: &str) -> Values {
    let mut values = Values::default();
    let (mut losses, mut means) = (Values::default(), Vec::<(String, f64, f64)>::new());
    for (Key { place, name, kind }, Sum { share, value }) in sums {
        match kind {
            RecordKind::Loss => {
                let total = format!("losses.{name}");
                losses.set(&total, losses.get(&total).unwrap_or(0.0) + value);
                values.set(format!("losses.{place}.{name}"), *value);
            }
            RecordKind::Activation => values.set(format!("activation_rms.{place}"), value / share),
            RecordKind::Value => {
                values.set(format!("{place}.{name}"), value / share);
                let Some(inner) = inside_of_layer(place) else { continue };
                let mean = format!("layers.mean{inner}.{name}");
                match means.iter_mut().find(|(of, ..)| *of == mean) {
                    Some((_, sum, count)) => (*sum, *count) = (*sum + value / share, *count + 1.0),
                    None => means.push((mean, value / share, 1.0)),
                }
            }
        }
    }
    for (mean, sum, count) in means {
        values.set(mean, sum / count);
    }
    if !losses.is_empty() {
        let added: f64 = losses.iter().map(|(_, value)| value).sum();
        values.set(loss_name, loss - added);
    }
    losses.iter().for_each(|(name, value)| values.set(name, value));
    values
}

/// Returns the part of a place after the layer number: `.ffn` for `layers.3.ffn`.
fn inside_of_layer(place: &str) -> Option<&str> {
    let numbered = place.strip_prefix("layers.")?;
    Some(numbered.trim_start_matches(|digit: char| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_config::CROSS_ENTROPY;

    #[test]
    fn losses_are_summed_and_values_averaged_over_the_layers() {
        let key = |place: &str, name: &str, kind: RecordKind| Key {
            place: place.to_owned(),
            name: name.to_owned(),
            kind,
        };
        let mut sums = Sums::default();
        for layer in [0, 10] {
            let (place, layer) = (format!("layers.{layer}.ffn"), f64::from(layer));
            for (share, value) in [(0.25, 2.0), (0.75, 4.0)] {
                let sum = Sum { share, value: share * (value + layer) };
                sums.add(key(&place, "rms", RecordKind::Value), sum);
                sums.add(key(&place, "balance", RecordKind::Loss), sum);
            }
            sums.add(
                key(&place[..place.len() - 4], "", RecordKind::Activation),
                Sum { share: 1.0, value: 2.0 },
            );
        }
        sums.add(key("embed", "rms", RecordKind::Value), Sum { share: 0.25, value: 0.5 });
        let values = named(&sums.order, 20.0, CROSS_ENTROPY);
        let expected = [
            ("layers.0.ffn.rms", 3.5),
            ("losses.layers.0.ffn.balance", 3.5),
            ("activation_rms.layers.0", 2.0),
            ("layers.10.ffn.rms", 13.5),
            ("losses.layers.10.ffn.balance", 13.5),
            ("activation_rms.layers.10", 2.0),
            ("embed.rms", 2.0),
            ("layers.mean.ffn.rms", 8.5),
            ("cross_entropy", 3.0),
            ("losses.balance", 17.0),
        ];
        assert_eq!(values.iter().collect::<Vec<_>>(), expected);
    }
}
