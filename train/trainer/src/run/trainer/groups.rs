//! The table of parameter groups that a run prints at its start. Identical groups share one row.

use kiln_shard::Engine;

use kiln_sys::words::{in_ranges, size};

const F32: u64 = 4;

const ROWS: usize = 12;

const LISTED: usize = 20;

const LONGEST: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbers {
    parameters: u64,
    /// Bytes while gathered, in the compute dtype.
    whole: u64,
    weights: u64,
    gradients: u64,
    optimizer: u64,
}

#[derive(Clone, Debug)]
struct Row {
    /// The name before and after the layer number, as in `layers.` and `.muon`.
    name: (String, String),
    layers: Vec<usize>,
    each: Numbers,
}

pub(super) struct GroupTable {
    rows: Vec<Row>,
    dtype: String,
}

impl GroupTable {
    /// Builds the table. With `copies`, a rank also holds its share of the weights in the compute dtype.
    pub(super) fn from_engine(engine: &Engine, copies: bool) -> Self {
        let (layout, mesh, dtype) = (engine.layout(), engine.mesh(), engine.policy().compute_dtype);
        let width = dtype.size() as u64;
        let groups = layout.groups.iter().enumerate().map(|(position, group)| {
            let padded = group.padded_numel() as u64;
            let share = padded / mesh.shard_size() as u64;
            let slots = engine.slots_of_group(position).len() as u64;
            let owned = group.parameters.iter().flat_map(|parameter| {
                let is_mine = matches!(engine.is_owner(&parameter.name), Ok(true));
                parameter.owned_slots.iter().filter(move |_| is_mine)
            });
            let owned: u64 = owned.map(|slot| slot.numel() as u64).sum();
            let each = Numbers {
                parameters: group.numel() as u64,
                whole: padded * width,
                weights: share * (F32 + if copies { width } else { 0 }),
                gradients: if group.trainable { share * F32 } else { 0 },
                optimizer: (share * slots + owned) * F32,
            };
            (group.name.as_str(), each)
        });
        GroupTable { rows: alike(groups), dtype: dtype.to_string() }
    }

    fn sum(&self) -> Numbers {
        let sum = |of: fn(&Numbers) -> u64| self.rows.iter().map(|row| row.count() * of(&row.each)).sum();
        Numbers {
            parameters: sum(|each| each.parameters),
            whole: sum(|each| each.whole),
            weights: sum(|each| each.weights),
            gradients: sum(|each| each.gradients),
            optimizer: sum(|each| each.optimizer),
        }
    }

    pub(super) fn summary(&self) -> String {
        let Numbers { weights, gradients, optimizer, .. } = self.sum();
        format!(
            "a rank holds: weights {}, gradients {}, optimizer {}",
            size(weights),
            size(gradients),
            size(optimizer)
        )
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let (shown, more) = self.rows.split_at(self.rows.len().min(ROWS));
        let names: Vec<_> = shown.iter().map(Row::name).collect();
        let width =
            names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("parameter group".len());
        let row = |name: &str, count: &str, [parameters, whole, weights, gradients, optimizer]: [&str; 5]| {
            format!(
                "{name:<width$} {count:>6} {parameters:>10} {whole:>11} {weights:>10} {gradients:>10} \
                 {optimizer:>10}"
            )
        };
        let line = |name: &str, count: u64, numbers: &Numbers| {
            let Numbers { parameters, whole, weights, gradients, optimizer } = *numbers;
            let [whole, weights, gradients, optimizer] = [whole, weights, gradients, optimizer].map(size);
            let parameters = millions(parameters);
            row(name, &count.to_string(), [&parameters, &whole, &weights, &gradients, &optimizer])
        };
        let whole = format!("whole, {}", self.dtype);
        let mut lines = vec![
            format!("{:<width$} {:>6} {:>10} {:>11} {:->32}", "", "", "", "", " a rank's share of each"),
            row("parameter group", "groups", ["parameters", &whole, "weights", "gradients", "optimizer"]),
        ];
        lines.extend(shown.iter().zip(&names).map(|(row, name)| line(name, row.count(), &row.each)));
        if !more.is_empty() {
            lines.push(format!("and {} more kinds of groups", more.len()));
        }
        let groups = self.rows.iter().map(Row::count).sum();
        lines.push(line("all", groups, &self.sum()));
        lines
    }
}

impl Row {
    fn count(&self) -> u64 {
        self.layers.len().max(1) as u64
    }

    fn name(&self) -> String {
        let (before, behind) = &self.name;
        let listed = in_ranges(&self.layers).replace(", ", ",");
        let listed = match self.layers[..] {
            [first, .., last] if listed.len() > LISTED => format!("{first}..{last}"),
            _ => listed,
        };
        let name = format!("{before}{listed}{behind}");
        match name.char_indices().nth(LONGEST) {
            None => name,
            Some((end, _)) => format!("{}\u{2026}", &name[..end]),
        }
    }
}

fn alike<'a>(groups: impl Iterator<Item = (&'a str, Numbers)>) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (name, each) in groups {
        let (name, layer) = split(name);
        let same = rows.iter_mut().find(|row| row.name == name && row.each == each);
        match same {
            Some(row) => row.layers.extend(layer),
            None => rows.push(Row { name, layers: layer.into_iter().collect(), each }),
        }
    }
    rows
}

/// Splits the name of a group around its layer number, as in `layers.3.muon`.
fn split(name: &str) -> ((String, String), Option<usize>) {
    let layer = || {
        let (before, rest) = name.split_once('.')?;
        let end = rest.find('.').unwrap_or(rest.len());
        let layer = rest[..end].parse().ok()?;
        Some(((format!("{before}."), rest[end..].to_owned()), layer))
    };
    match layer() {
        Some((name, layer)) => (name, Some(layer)),
        None => ((name.to_owned(), String::new()), None),
    }
}

fn millions(count: u64) -> String {
    match count {
        0..100_000 => count.to_string(),
        100_000..1_000_000_000 => format!("{:.2}M", count as f64 / 1e6),
        _ => format!("{:.2}B", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use kiln_model::{Decoder, Key, Layers, ModelConfig};
    use kiln_shard::ranks::run_ranks;
    use kiln_shard::{EngineBuilder, Policy, ShardError, Strategy};

    use super::*;
    use kiln_checkpoint::sharded::ShardedDecoder;
    use kiln_config::device;

    fn numbers(parameters: u64, ranks: u64) -> Numbers {
        let padded = parameters.next_multiple_of(128 * ranks);
        let share = padded / ranks * 4;
        Numbers { parameters, whole: padded * 2, weights: share, gradients: share, optimizer: 2 * share }
    }

    fn table(groups: &[(String, Numbers)]) -> String {
        let rows = alike(groups.iter().map(|(name, each)| (name.as_str(), *each)));
        GroupTable { rows, dtype: "bf16".to_owned() }.lines().join("\n")
    }

    #[test]
    fn groups_that_are_alike_have_one_row() {
        let model = |ranks| {
            let mut groups = vec![("embed".to_owned(), numbers(131_072_000, ranks))];
            groups.extend((0..32).map(|i| (format!("layers.{i}"), numbers(218_112_000, ranks))));
            groups.push(("head".to_owned(), numbers(131_076_096, ranks)));
            table(&groups)
        };
        let mut mixed = vec![("embed".to_owned(), numbers(1000, 2))];
        for layer in 0..24 {
            let parameters = if layer % 2 == 0 { 70_000_000 } else { 1_400_000_000 };
            mixed.push((format!("layers.{layer}"), numbers(512, 2)));
            mixed.push((format!("layers.{layer}.muon"), numbers(parameters, 2)));
        }
        mixed.push(("an_unusually_long_name_of_a_module_of_ones_own".to_owned(), numbers(3, 2)));
        let all_different: Vec<_> = (0..40).map(|i| (format!("layers.{i}"), numbers(1 << i, 1))).collect();
        let tables = [model(1), model(64), table(&mixed), table(&all_different[..14])];
        assert!(tables.iter().all(|table| table.lines().count() <= ROWS + 4));
        insta::assert_snapshot!(tables.join("\n\n"));
    }

    /// Returns the weight bytes in the table, the bytes that the engine holds, and the optimizer bytes in the table.
    fn from_engine(ranks: usize, strategy: Strategy, shard_size: Option<usize>) -> (u64, u64, u64) {
        let told = run_ranks(ranks, 1, |world| {
            let small = ModelConfig {
                d_model: 32,
                heads: 2,
                kv_heads: 1,
                layers: 3,
                vocab_size: 96,
                ..ModelConfig::preset("10m").unwrap()
            };
            let decoder = Decoder::new(&Layers::default(), &small, Key::new(0), &device::plain()).unwrap();
            let builder = EngineBuilder::new(world, Policy { strategy, ..Policy::default() }, shard_size)?;
            let decoder = ShardedDecoder::new(decoder, builder.freeze(|name| name.starts_with("layers.0.")))?;
            let engine = decoder.engine();
            let table = GroupTable::from_engine(engine, false);
            let mut held = 0;
            for (_, parameter) in engine.layout().parameters() {
                held += engine.held(&parameter.name)?.len() as u64 * F32;
            }
            assert_eq!(table.sum().parameters, engine.layout().num_parameters() as u64);
            assert_eq!(table.rows.iter().map(Row::count).sum::<u64>(), engine.layout().groups.len() as u64);
            let sum = table.sum();
            Ok::<_, ShardError>((sum.weights, held, sum.optimizer))
        });
        told.unwrap().swap_remove(0)
    }

    #[test]
    fn a_rank_has_as_much_as_its_engine_says() {
        let (whole, held, _) = from_engine(1, Strategy::FullShard, None);
        assert!((held..held + held / 10).contains(&whole), "{whole} for {held}");
        let (alone, _, optimizer) = from_engine(4, Strategy::NoShard, None);
        assert!(optimizer < 2 * alone, "the first layer is frozen: {optimizer} of {alone}");
        let (quarter, held, quarter_optimizer) = from_engine(4, Strategy::FullShard, None);
        assert_eq!((quarter * 4, quarter_optimizer * 4), (alone, optimizer));
        assert!(quarter >= held, "{quarter} for {held}");
        assert_eq!(from_engine(4, Strategy::HybridShard, Some(2)).0, 2 * quarter);
    }
}
