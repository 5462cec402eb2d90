//! What a program adds to Kiln: layers of its own, under names that a configuration uses.

use kiln_model::Layers;
use kiln_model::layers::{Layer, LayerError, LayerInit};

/// The parts that every command of a program knows: the built-in ones, and those that are added here. A program
/// with layers of its own has all commands of `kiln` in a `main` of a few lines:
///
/// ```no_run
/// # use kiln::registry::Registry;
/// # use kiln_model::layers::SwiGlu;
/// #[global_allocator]
/// static ALLOCATOR: kiln::process::CountingAllocator = kiln::process::CountingAllocator;
///
/// fn main() -> std::process::ExitCode {
///     kiln::cli::main(Registry::default().layer("my-ffn", |init| Ok(SwiGlu::new(init))))
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Registry {
    layers: Layers,
}

impl Registry {
    /// Adds a feed-forward layer, for `model.feed_forward = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn layer<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.feed_forward(name, make) }
    }

    /// Adds an attention layer, for `model.attention = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn attention<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.attention(name, make) }
    }

    /// Adds a whole block, for `model.block = name`.
    ///
    /// # Panics
    ///
    /// When the name is empty, or a layer of this kind has it already.
    pub fn block<L: Layer>(
        self,
        name: &str,
        make: impl Fn(LayerInit) -> Result<L, LayerError> + Send + Sync + 'static,
    ) -> Self {
        Registry { layers: self.layers.block(name, make) }
    }

    /// The layers that a decoder can be made of.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }
}
