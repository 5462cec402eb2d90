//! Rows grouped by expert.

use std::ops::Range;

use crate::ops::experts::ExpertsShape;

/// Maximum rows in a block, which stay in a core's L2 cache: an expert's weights are rarely read from memory.
const BLOCK_ROWS: usize = 192;

/// The choices of all tokens, sorted by expert and then by token: one row per choice.
#[derive(Debug)]
pub struct Groups {
    per_token: usize,
    /// First row of each expert, then the number of rows.
    starts: Vec<usize>,
    /// Choice of each row: `token * per_token + j`.
    choices: Vec<usize>,
    rows: Vec<usize>,
}

/// Rows of one expert that one thread computes.
#[derive(Clone, Debug)]
pub struct Block {
    pub expert: usize,
    pub rows: Range<usize>,
}

impl Groups {
    /// Groups `chosen`, `[tokens, per_token]`, by expert.
    pub fn new(chosen: &[i64], shape: ExpertsShape) -> Self {
        let expert = |index: i64| {
            let expert = usize::try_from(index).ok().filter(|&expert| expert < shape.experts);
            expert.unwrap_or_else(|| panic!("experts: there is no expert {index} of {}", shape.experts))
        };
        let mut starts = vec![0; shape.experts + 1];
        for &index in chosen {
            starts[expert(index) + 1] += 1;
        }
        for index in 0..shape.experts {
            starts[index + 1] += starts[index];
        }
        let mut next = starts.clone();
        let (mut choices, mut rows) = (vec![0; chosen.len()], vec![0; chosen.len()]);
        for (choice, &index) in chosen.iter().enumerate() {
            let row = &mut next[expert(index)];
            (choices[*row], rows[choice]) = (choice, *row);
            *row += 1;
        }
        Groups { per_token: shape.per_token, starts, choices, rows }
    }

    pub fn experts(&self) -> usize {
        self.starts.len() - 1
    }

    pub fn rows_of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    pub fn row(&self, choice: usize) -> usize {
        self.rows[choice]
    }

    pub fn choices(&self, rows: Range<usize>) -> &[usize] {
        &self.choices[rows]
    }

    pub fn tokens(&self, rows: Range<usize>) -> impl ExactSizeIterator<Item = usize> {
        self.choices(rows).iter().map(|choice| choice / self.per_token)
    }

    /// Returns all rows in blocks of similar size.
    pub fn blocks(&self) -> Vec<Block> {
        let blocks_of = |expert: usize| {
            let rows = self.rows_of(expert);
            let count = rows.len().div_ceil(BLOCK_ROWS);
            let at = move |index: usize| rows.start + rows.len() * index / count.max(1);
            (0..count).map(move |index| Block { expert, rows: at(index)..at(index + 1) })
        };
        (0..self.experts()).flat_map(blocks_of).collect()
    }
}

impl Block {
    /// Cuts `values`, `width` per row, into one slice per block. `blocks` must cover all rows in order.
    pub fn cut<'a, T>(blocks: &[Block], mut values: &'a mut [T], width: usize) -> Vec<&'a mut [T]> {
        let mut next = |block: &Block| {
            let (part, rest) = std::mem::take(&mut values).split_at_mut(block.rows.len() * width);
            values = rest;
            part
        };
        blocks.iter().map(&mut next).collect()
    }
}
