//! The positions of parameters in flat buffers. The layout is the only source of names, shapes and offsets for
//! sharding, optimizer, clipping, checkpoints and planning.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::mesh::Mesh;

/// Parameters and shards start at multiples of this many elements (512 bytes in f32).
pub const ALIGNMENT: usize = 128;

/// One parameter inside its group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterLayout {
    /// Full name, such as `layers.3.attention.q_proj.weight`.
    pub name: String,
    /// Logical shape.
    pub shape: Vec<usize>,
    /// Index of its first element in the group's flat buffer.
    pub offset: usize,
    /// State of the optimizer for the whole parameter, which the parameter's owner keeps.
    pub owned_slots: Vec<OwnedSlot>,
}

/// A slot of the optimizer's state for a whole parameter, such as a preconditioner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedSlot {
    /// Name of the slot, such as `preconditioner`.
    pub name: String,
    /// Shape of its f32 values; never empty of elements.
    pub shape: Vec<usize>,
}

impl OwnedSlot {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ParameterLayout {
    /// Returns the owned slot `name`, if the parameter has it.
    pub fn owned_slot(&self, name: &str) -> Option<&OwnedSlot> {
        self.owned_slots.iter().find(|slot| slot.name == name)
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the elements of the group's flat buffer that contain this parameter.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel()
    }

    /// Returns which elements of this parameter lie in `shard`, as a range within the shard and a range within the
    /// parameter; both are empty if there are none.
    pub fn held_by(&self, shard: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let range = self.range();
        let start = range.start.max(shard.start);
        let end = range.end.min(shard.end);
        if start >= end {
            return (0..0, 0..0);
        }
        (start - shard.start..end - shard.start, start - range.start..end - range.start)
    }
}

/// A parameter group: one flat buffer of parameters that are gathered and reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamGroupLayout {
    /// Name for logs and records, such as `layers.3`.
    pub name: String,
    /// True if its parameters are trained. A module with both trained and frozen parameters has separate groups.
    pub trainable: bool,
    /// The parameters, in the order of their offsets.
    pub parameters: Vec<ParameterLayout>,
    /// Number of elements per chunk. The flat buffer has one chunk per rank under every strategy, so that
    /// sums over chunks have the same bits under every strategy.
    pub chunk: usize,
    /// Number of chunks: the world size.
    pub chunks: usize,
}

impl ParamGroupLayout {
    /// Lays `parameters` (name, shape) out one after the other, for `world_size` ranks.
    pub fn new(
        name: String,
        trainable: bool,
        parameters: Vec<(String, Vec<usize>)>,
        world_size: usize,
    ) -> Self {
        let mut offset = 0;
        let parameters: Vec<_> = parameters
            .into_iter()
            .map(|(name, shape)| {
                let parameter = ParameterLayout { name, shape, offset, owned_slots: Vec::new() };
                offset += parameter.numel().next_multiple_of(ALIGNMENT);
                parameter
            })
            .collect();
        ParamGroupLayout {
            name,
            trainable,
            parameters,
            chunk: offset.div_ceil(world_size).next_multiple_of(ALIGNMENT),
            chunks: world_size,
        }
    }

    /// Returns the number of elements of the flat buffer, including padding.
    pub fn padded_numel(&self) -> usize {
        self.chunk * self.chunks
    }

    /// Returns the number of elements that belong to a parameter.
    pub fn numel(&self) -> usize {
        self.parameters.iter().map(ParameterLayout::numel).sum()
    }

    /// Returns whether `name` is an owned slot of a parameter in this group.
    pub fn owns(&self, name: &str) -> bool {
        self.parameters.iter().any(|parameter| parameter.owned_slot(name).is_some())
    }

    /// Returns the elements of the flat buffer that `rank` of `mesh` holds.
    pub fn shard_range(&self, mesh: &Mesh, rank: usize) -> Range<usize> {
        let shard_numel = self.padded_numel() / mesh.shard_size();
        let start = mesh.shard_index(rank) * shard_numel;
        start..start + shard_numel
    }

    /// Returns the chunk that `rank` of `mesh` writes, so that each chunk is written once: in a mesh without replicas
    /// the rank's only chunk, otherwise one of the chunks that it holds.
    pub fn own_chunk(mesh: &Mesh, rank: usize) -> usize {
        mesh.shard_index(rank) * mesh.replicate_size() + mesh.replicate_index(rank)
    }

    /// Returns the elements of the flat buffer in chunk `index`.
    pub fn chunk_range(&self, index: usize) -> Range<usize> {
        index * self.chunk..(index + 1) * self.chunk
    }

    /// Returns the ranges of the flat buffer that belong to no parameter: alignment and padding.
    pub fn gaps(&self) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut end = 0;
        for parameter in &self.parameters {
            gaps.push(end..parameter.offset);
            end = parameter.range().end;
        }
        gaps.push(end..self.padded_numel());
        gaps.retain(|gap| !gap.is_empty());
        gaps
    }
}

/// The layout of a whole model: its parameter groups in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// The arrangement of ranks that the groups were laid out for.
    pub mesh: Mesh,
    /// The groups.
    pub groups: Vec<ParamGroupLayout>,
}

impl Layout {
    /// Returns all parameters, in the order of the forward pass.
    pub fn parameters(&self) -> impl Iterator<Item = (&ParamGroupLayout, &ParameterLayout)> {
        self.groups.iter().flat_map(|group| group.parameters.iter().map(move |parameter| (group, parameter)))
    }

    /// Returns the number of elements of all parameters.
    pub fn num_parameters(&self) -> usize {
        self.groups.iter().map(ParamGroupLayout::numel).sum()
    }
}

/// Returns full names and shapes of the float parameters of `module`, in the order in which burn visits them. A name
/// is `prefix` plus the path of fields in the module, without the variants of enums. Initialises nothing.
pub fn parameters_of<M: Module>(module: &M, prefix: &str) -> Vec<(String, Vec<usize>)> {
    let mut found = Parameters { prefix, path: Vec::new(), parameters: Vec::new() };
    module.visit(&mut found);
    found.parameters
}

struct Parameters<'a> {
    prefix: &'a str,
    path: Vec<String>,
    parameters: Vec<(String, Vec<usize>)>,
}

/// Returns whether the children of a module have names: the fields of a struct do, the variants of an enum do not.
fn is_named(container_type: &str) -> bool {
    !container_type.starts_with("Enum:")
}

impl ModuleVisitor for Parameters<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if is_named(container_type) {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        if is_named(container_type) {
            self.path.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = format!("{}{}", self.prefix, self.path.join("."));
        self.parameters.push((name, param.lazy_shape().to_vec()));
    }
}
