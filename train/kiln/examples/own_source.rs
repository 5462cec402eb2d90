//! A custom data source: samples made on the fly, whose prompt is masked. The model learns to copy digits.
//!
//!     cargo run --release --example own_source -- train configs/debug.toml --set data.text=[] --set data.source=copy \
//!         --set data.path=runs/data/copy --set data.extra.digits=8 --set data.seq_len=17

use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

#[derive(Deserialize)]
#[serde(crate = "kiln::serde", deny_unknown_fields)]
struct Copying {
    digits: usize,
}

const EQUALS: u32 = 10;
const END: u32 = 11;
impl DataSource for Copying {
    fn vocab_size(&self) -> usize {
        12
    }

    fn end_of_text(&self) -> u32 {
        END
    }

    /// `d₁ … dₙ = d₁ … dₙ end`, in which only what follows the equals sign counts.
    fn sample(&self, split: Split, index: u64) -> Result<Sample, SourceError> {
        let key = Key::new(index).fork(split.name());
        let digits: Vec<u32> = key.ids(0, self.digits, 10).into_iter().map(i32::cast_unsigned).collect();
        let tokens = [digits.clone(), vec![EQUALS], digits, vec![END]].concat();
        let weights = [vec![0.0; self.digits], vec![1.0; self.digits + 1]].concat();
        Ok(Sample { tokens, weights })
    }
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(Registry::default().data("copy", |init| init.extra::<Copying>()))
}
