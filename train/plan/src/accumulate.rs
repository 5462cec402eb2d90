//! A recommendation of `shard.accumulate`. A plan never changes it, because its two values round differently.

use kiln_shard::Accumulate;

use super::report::{AS_FAST, Recommendation, cost, way};
use super::table::{PlanRow, Planned};
use kiln_config::{Choice, Config};
use kiln_sys::words::size;

/// Recommends the value of `shard.accumulate` that `rows` do not have, if a row with it fits and is faster than
/// the `recommended` row.
pub fn advise(
    planned: &Planned<'_>,
    rows: &[PlanRow],
    recommended: Option<&Recommendation>,
) -> Option<String> {
    let accumulates = |row: &&PlanRow| planned.target.ranks > 1 && row.micro_batches > 1;
    let others = rows.iter().filter(accumulates).filter_map(|row| planned.row(other(planned, row)));
    let fitting = others.filter(|row| row.fits != Some(false));
    let best = fitting.min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
    let own = recommended.map_or(f64::INFINITY, |found| cost(&rows[found.row]));
    (AS_FAST * cost(&best) < own).then(|| {
        format!(
            "With --set shard.accumulate={}, {} needs {} and sends {} per step; the last bits of gradients differ.",
            best.accumulate,
            way(&best),
            size(best.needed_bytes),
            size(best.sent_bytes)
        )
    })
}

/// Returns the configuration of a row with the other value.
fn other(planned: &Planned<'_>, row: &PlanRow) -> Config {
    let mut config = planned.config.clone();
    (config.shard.strategy, config.shard.recompute) = (row.strategy, row.recompute);
    config.shard.shard_size = planned.shard_size().filter(|_| row.strategy.is_hybrid());
    config.shard.offload = row.offload;
    config.shard.accumulate = Some(match row.accumulate {
        Accumulate::Sharded => Accumulate::Unsharded,
        Accumulate::Unsharded => Accumulate::Sharded,
    });
    config.train.micro_batch = Choice::Is(row.micro_batch);
    config
}
