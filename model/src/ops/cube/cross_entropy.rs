//! Output projection and cross-entropy loss, block by block of rows: one cube per row of logits.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::matmul::{Output, matmul, transposed};
use super::sums::{Reduction, cube_reduce, zeros};
use super::{UNITS, WIDEST, contiguous, cubes, cubes_for, elem, empty, len_of, rows_at, vector_size};
use crate::ops::cross_entropy::{CrossEntropyKernels, HeadLayout, LogitOptions, Targets, logit_rows};

impl CrossEntropyKernels for CubeBackend {
    fn cross_entropy_forward(
        hidden: &CubeTensor,
        weight: &CubeTensor,
        layout: HeadLayout,
        targets: Targets<'_, Self>,
        scale: f64,
        options: LogitOptions,
        wanted: [bool; 2],
    ) -> (CubeTensor, [Option<CubeTensor>; 2]) {
        let Targets { ids: targets, weights: row_weights } = targets;
        let [rows, d_model, vocab] = layout.sizes(hidden, weight, targets);
        let (hidden, targets) = (contiguous(hidden), into_contiguous(targets.clone()));
        let LogitOptions { softcap, z_loss } = options;
        let per_row = if z_loss.is_some() { 2 } else { 1 };
        let losses = empty(&hidden, [rows, per_row], DType::F32);
        let dhidden = wanted[0].then(|| empty(&hidden, [rows, d_model], DType::F32));
        let mut dweight = None;
        // The weight as `[d_model, vocab]` in either layout.
        let columns = match layout {
            HeadLayout::VocabRows => transposed(weight),
            HeadLayout::VocabColumns => weight.clone(),
        };
        let row_weights = row_weights.map(contiguous);
        let block_rows = logit_rows(vocab, false);
        let derive = wanted.contains(&true);
        for start in (0..rows).step_by(block_rows) {
            let count = block_rows.min(rows - start);
            let block = rows_at(&hidden, start, count);
            let logits = matmul(block.clone(), columns.clone(), 1.0, Output::New(DType::F32));
            // Not multiplied by `scale`, which may be too small for `f16`: the products below multiply by it.
            let dlogits = match derive {
                true => empty(&hidden, [count, vocab], hidden.dtype),
                false => empty(&hidden, [1, WIDEST], hidden.dtype),
            };
            let block_losses = rows_at(&losses, start, count);
            let block_targets = rows_at(&targets, start, count);
            let vector = vector_size(&[&logits, &dlogits], vocab);
            // SAFETY: cubes beyond the last row do nothing, units stay within a row of logits, and targets
            // outside the vocabulary are not used as an index.
            unsafe {
                launch! {
                    row_losses_kernel, cubes(&logits.client, count, UNITS), [logits], vector;
                    logits / vector, block_targets / 1, block_losses / 1, dlogits / vector;
                    vocab / vector, f32::NAN, f32::MIN, softcap.unwrap_or(1.0) as f32,
                    z_loss.unwrap_or(0.0) as f32, derive, softcap.is_some(), z_loss.is_some(),
                    [elem(&targets), elem(&dlogits)]
                }
            }
            drop(logits);
            if let Some(weights) = &row_weights {
                let weights = rows_at(weights, start, count);
                let width = if derive { vocab / vector } else { 0 };
                // SAFETY: cubes beyond the last row do nothing, and units stay within a row of each tensor.
                unsafe {
                    launch! {
                        weigh_rows_kernel, cubes(&weights.client, count, UNITS), [weights], vector;
                        weights / 1, block_losses / 1, dlogits / vector;
                        width, z_loss.is_some(), elem(&dlogits)
                    }
                }
            }
            let scale = scale as f32;
            if let Some(dhidden) = &dhidden {
                let output = Output::Overwrite(rows_at(dhidden, start, count));
                matmul(dlogits.clone(), transposed(&columns), scale, output);
            }
            if wanted[1] {
                let (lhs, rhs) = match layout {
                    HeadLayout::VocabRows => (transposed(&dlogits), block),
                    HeadLayout::VocabColumns => (transposed(&block), dlogits),
                };
                let output = dweight.map_or(Output::New(DType::F32), Output::Add);
                dweight = Some(matmul(lhs, rhs, scale, output));
            }
        }
        if wanted[1] && dweight.is_none() {
            dweight = Some(zeros(&hidden, weight.meta.shape().clone(), DType::F32));
        }
        let loss = empty(&losses, [per_row], DType::F32);
        // SAFETY: units stay within `losses`, and `loss` has an element for each of a row.
        unsafe {
            launch! {
                sum_kernel, cubes(&losses.client, 1, UNITS), [losses]; losses / 1, loss / 1;
                scale as f32, z_loss.is_some()
            }
        }
        (loss, [dhidden, dweight])
    }

    fn cross_entropy_backward(gradient: CubeTensor, dy: &CubeTensor, dtype: DType) -> CubeTensor {
        let dy = contiguous(dy);
        let scaled = empty(&gradient, gradient.meta.shape().clone(), dtype);
        let len = len_of(&gradient);
        let vector = vector_size(&[&gradient, &scaled], len);
        // SAFETY: both have the same length, and no unit goes beyond it; `dy` has an element.
        unsafe {
            launch! {
                scaled_kernel, cubes_for(&dy.client, len / vector), [gradient], vector;
                gradient / vector, dy / 1, scaled / vector; [elem(&gradient), elem(&dy), elem(&scaled)]
            }
        }
        scaled
    }
}

#[cube]
fn capped(value: f32, cap: f32, #[comptime] is_capped: bool) -> f32 {
    if comptime!(is_capped) { cap * (value / cap).tanh() } else { value }
}

/// Losses of each row (cross-entropy, then z-loss if any) and, if requested, the gradients of the row's logits.
#[cube(launch_unchecked, address_type = "dynamic")]
fn row_losses_kernel<I: Int, D: Float, N: Size>(
    logits: &[Vector<f32, N>],
    targets: &[I],
    losses: &mut [f32],
    dlogits: &mut [Vector<D, N>],
    width: usize,
    outside: f32,
    smallest: f32,
    cap: f32,
    z: f32,
    #[comptime] derive: bool,
    #[comptime] is_capped: bool,
    #[comptime] has_z: bool,
    #[define(I, D)] _dtypes: [ElemType; 2],
) {
    let row = CUBE_POS;
    let per_row = comptime!(if has_z { 2usize } else { 1usize });
    if row * per_row >= losses.len() {
        terminate!();
    }
    let start = row * width;
    let target = i32::cast_from(targets[row]);
    let vocab = i32::cast_from(width * N::value());

    let mut largest = smallest;
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < width {
        let values = logits[start + i];
        #[unroll]
        for k in 0..N::value() {
            let value = capped(values.extract(k), cap, is_capped);
            if value > largest {
                sum = sum * (largest - value).exp() + 1.0f32;
                largest = value;
            } else {
                sum += (value - largest).exp();
            }
        }
        i += UNITS;
    }
    let shift = cube_reduce(largest, Reduction::Max, UNITS);
    let sum = cube_reduce(sum * (largest - shift).exp(), Reduction::Sum, UNITS);

    if UNIT_POS == 0 {
        let mut loss = 0.0f32;
        if target >= vocab {
            loss = outside;
        } else if target >= 0 {
            let place = usize::cast_from(target);
            let values = logits[start + place / N::value()];
            let mut picked = 0.0f32;
            #[unroll]
            for k in 0..N::value() {
                if place % N::value() == k {
                    picked = capped(values.extract(k), cap, is_capped);
                }
            }
            loss = sum.ln() + (shift - picked);
        }
        losses[row * per_row] = loss;
        if comptime!(has_z) {
            let mut z_loss = 0.0f32;
            if target >= 0 {
                let log_sum = shift + sum.ln();
                z_loss = z * log_sum * log_sum;
            }
            losses[row * per_row + 1] = z_loss;
        }
    }

    if comptime!(derive) {
        let mut raise = 1.0f32;
        if comptime!(has_z) {
            raise += 2.0f32 * z * (shift + sum.ln());
        }
        let factor = Vector::<f32, N>::new(raise / sum);
        let shift = Vector::<f32, N>::new(shift);
        let mut i = UNIT_POS as usize;
        while i < width {
            let mut gradient = Vector::<f32, N>::new(0.0f32);
            if target >= 0 {
                let mut values = logits[start + i];
                let mut slopes = Vector::<f32, N>::new(1.0f32);
                if comptime!(is_capped) {
                    #[unroll]
                    for k in 0..N::value() {
                        let tanh = (values.extract(k) / cap).tanh();
                        values.insert(k, cap * tanh);
                        slopes.insert(k, 1.0f32 - tanh * tanh);
                    }
                }
                gradient = (values - shift).exp() * factor;
                #[unroll]
                for k in 0..N::value() {
                    if target == i32::cast_from(i * N::value() + k) {
                        let value = gradient.extract(k);
                        gradient.insert(k, value - 1.0f32);
                    }
                }
                if comptime!(is_capped) {
                    gradient *= slopes;
                }
            }
            dlogits[start + i] = Vector::cast_from(gradient);
            i += UNITS;
        }
    }
}

/// Multiplies the losses and the gradients of each row by the row's weight.
#[cube(launch_unchecked, address_type = "dynamic")]
fn weigh_rows_kernel<D: Float, N: Size>(
    weights: &[f32],
    losses: &mut [f32],
    dlogits: &mut [Vector<D, N>],
    width: usize,
    #[comptime] has_z: bool,
    #[define(D)] _dtype: ElemType,
) {
    let row = CUBE_POS;
    if row >= weights.len() {
        terminate!();
    }
    let weight = weights[row];
    if UNIT_POS == 0 {
        let per_row = comptime!(if has_z { 2usize } else { 1usize });
        losses[row * per_row] *= weight;
        if comptime!(has_z) {
            losses[row * per_row + 1] *= weight;
        }
    }
    let factor = Vector::<f32, N>::new(weight);
    let mut i = UNIT_POS as usize;
    while i < width {
        let place = row * width + i;
        dlogits[place] = Vector::cast_from(Vector::<f32, N>::cast_from(dlogits[place]) * factor);
        i += UNITS;
    }
}

/// Sums the losses of all rows, times `factor`; with a z-loss, also every second value separately.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_kernel(values: &[f32], result: &mut [f32], factor: f32, #[comptime] has_z: bool) {
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < values.len() {
        sum += values[i];
        i += UNITS;
    }
    let sum = cube_reduce(sum, Reduction::Sum, UNITS);
    if UNIT_POS == 0 {
        result[0] = sum * factor;
    }
    if comptime!(has_z) {
        let mut z_sum = 0.0f32;
        let mut i = 2 * UNIT_POS as usize + 1;
        while i < values.len() {
            z_sum += values[i];
            i += 2 * UNITS;
        }
        let z_sum = cube_reduce(z_sum, Reduction::Sum, UNITS);
        if UNIT_POS == 0 {
            result[1] = z_sum * factor;
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scaled_kernel<G: Float, D: Float, F: Float, N: Size>(
    gradient: &[Vector<G, N>],
    dy: &[D],
    scaled: &mut [Vector<F, N>],
    #[define(G, D, F)] _dtypes: [ElemType; 3],
) {
    if ABSOLUTE_POS < scaled.len() {
        let factor = Vector::<f32, N>::new(f32::cast_from(dy[0]));
        let value = Vector::<f32, N>::cast_from(gradient[ABSOLUTE_POS]);
        scaled[ABSOLUTE_POS] = Vector::cast_from(value * factor);
    }
}
