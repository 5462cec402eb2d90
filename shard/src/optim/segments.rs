//! A shard on a GPU, cut into segments for kernels.

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::rule::{DeviceShard, Settings};
use crate::layout::ParamGroupLayout;
use crate::mesh::Mesh;

/// Maximum number of elements per segment; one cube processes one segment.
const SEGMENT: usize = 1 << 14;

const VECTOR: usize = DeviceShard::VECTOR;

/// Part of a shard that belongs to one parameter and one chunk.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Segment {
    /// Range of elements in the shard.
    pub(super) range: Range<usize>,
    pub(super) decays: bool,
    pub(super) chunk: usize,
    /// Index of the parameter in its group.
    pub(super) parameter: usize,
}

/// The segments of one group's shard, in order.
pub(super) struct Segments {
    pub(super) segments: Vec<Segment>,
    /// Table of all segments, as in [`DeviceShard::table`].
    pub(super) table: Handle,
    /// Index of the first segment of each chunk, counted from the start of `chunks`, followed by the end of the last.
    pub(super) bounds: Handle,
    pub(super) chunks: Range<usize>,
    pub(super) classes: Vec<Class>,
}

/// The segments of parameters with the same settings, apart from whether they decay.
pub(super) struct Class {
    /// Settings of the parameters that decay.
    pub(super) settings: Settings,
    /// Table of its segments, as in [`DeviceShard::table`].
    pub(super) table: Handle,
    pub(super) segments: usize,
}

impl Segments {
    /// Cuts the shard of `group` that `rank` of `mesh` holds into segments; `None` if the group is frozen. `settings`
    /// are those of the group's parameters.
    pub(super) fn new(
        client: &Client,
        group: &ParamGroupLayout,
        settings: &[Settings],
        mesh: &Mesh,
        rank: usize,
    ) -> Option<Self> {
        if !group.trainable {
            return None;
        }
        let shard = group.shard_range(mesh, rank);
        let segments = cut(group, settings, &shard);
        let chunks = shard.start / group.chunk..shard.end / group.chunk;
        let bounds = (chunks.start..=chunks.end)
            .map(|chunk| segments.partition_point(|segment| segment.chunk < chunk));
        let bounds = upload(client, bounds.collect());
        let table = upload_table(client, segments.iter());
        let classes = classify(settings).into_iter().filter_map(|(settings, parameters)| {
            let is_of = |segment: &&Segment| parameters.contains(&segment.parameter);
            let count = segments.iter().filter(is_of).count();
            let table = match count {
                0 => return None,
                // A class contains all segments, unless parameters have separate settings.
                count if count == segments.len() => table.clone(),
                _ => upload_table(client, segments.iter().filter(is_of)),
            };
            Some(Class { settings, table, segments: count })
        });
        let classes = classes.collect();
        Some(Segments { segments, table, bounds, chunks, classes })
    }
}

/// Groups parameters whose settings are equal apart from whether they decay.
fn classify(settings: &[Settings]) -> Vec<(Settings, Vec<usize>)> {
    let mut classes: Vec<(Settings, Vec<usize>)> = Vec::new();
    for (index, mine) in settings.iter().enumerate() {
        let decay = mine.weight_decay;
        let fits = |of: &Settings| {
            (of.learning_rate, of.scale, of.schedule) == (mine.learning_rate, mine.scale, mine.schedule)
                && (decay == 0.0 || of.weight_decay == 0.0 || of.weight_decay == decay)
        };
        match classes.iter_mut().find(|(of, _)| fits(of)) {
            Some((of, parameters)) => {
                if of.weight_decay == 0.0 {
                    of.weight_decay = decay;
                }
                parameters.push(index);
            }
            None => classes.push((*mine, vec![index])),
        }
    }
    classes
}

fn upload_table<'a>(client: &Client, segments: impl Iterator<Item = &'a Segment>) -> Handle {
    let table = segments.flat_map(|segment| {
        let Range { start, end } = segment.range;
        [start / VECTOR, end.div_ceil(VECTOR), usize::from(segment.decays)]
    });
    // Never empty: kernels do not accept empty buffers.
    upload(client, table.chain([0; 3]).collect())
}

fn upload(client: &Client, values: Vec<usize>) -> Handle {
    let values: Vec<_> = values.into_iter().map(|value| value as u32).collect();
    client.create_from_slice(bytemuck::cast_slice(&values))
}

/// Returns the segments of `shard` that belong to parameters, in order.
fn cut(group: &ParamGroupLayout, settings: &[Settings], shard: &Range<usize>) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (index, (parameter, settings)) in group.parameters.iter().zip(settings).enumerate() {
        let (held, _) = parameter.held_by(shard);
        let mut start = held.start;
        while start < held.end {
            let chunk = (shard.start + start) / group.chunk;
            let end_of_chunk = (chunk + 1) * group.chunk - shard.start;
            let end = held.end.min(end_of_chunk).min(start + SEGMENT);
            let decays = settings.weight_decay != 0.0;
            segments.push(Segment { range: start..end, decays, chunk, parameter: index });
            start = end;
        }
    }
    segments
}
