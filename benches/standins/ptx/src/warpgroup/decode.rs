//! Decodes `wgmma`, and the fence between its reads of shared memory and other writes.

use crate::builder::{Builder, Decoded, Flags};
use crate::parse::{Instruction, Operand, Width};
use crate::program::{Kind, Op, Type};
use crate::wgmma::form::{WarpgroupOp, WarpgroupProduct};

/// Decodes `instruction` if it is of this kind and all of its flags are known.
pub fn decode(builder: &mut Builder<'_>, instruction: &Instruction) -> Decoded<bool> {
    let mut flags = Flags::of(&instruction.name);
    let operands = &instruction.operands[..];
    match instruction.name.split('.').next().unwrap_or_default() {
        "fence" => {
            let known = flags.take("proxy") & flags.take("async");
            flags.take("shared::cta");
            builder.plain(Op::ProxyFence);
            Ok(known && flags.done() && operands.is_empty())
        }
        "wgmma" => {
            // The assembler would refuse it.
            if builder.target() != "sm_90a" {
                return builder
                    .fail(format!("`wgmma` needs sm_90a, but the module is for {}", builder.target()));
            }
            if !(flags.take("sync") & flags.take("aligned")) {
                return Ok(false);
            }
            if flags.take("mma_async") {
                return product(builder, &mut flags, operands);
            }
            let op = match operands {
                [] if flags.take("fence") => WarpgroupOp::Fence,
                [] if flags.take("commit_group") => WarpgroupOp::Commit,
                [Operand::Immediate(left)] if flags.take("wait_group") => WarpgroupOp::Wait(*left as u32),
                _ => return Ok(false),
            };
            builder.plain(Op::Warpgroup(op));
            Ok(flags.done())
        }
        _ => Ok(false),
    }
}

/// Returns the number of columns of a shape such as `m64n128k16`.
fn columns(shape: &str) -> Option<u16> {
    let columns = shape.strip_prefix("m64n")?.strip_suffix("k16")?.parse().ok()?;
    (columns % 8 == 0 && (8..=256).contains(&columns)).then_some(columns)
}

/// `mma_async` of halves with f32 sums: registers of D; A in registers, or its descriptor; the descriptor of
/// B; whether D is added; two signs, which must be 1; and whether matrices in shared memory are transposed.
fn product(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let columns = flags.first(columns);
    let types: Vec<Type> = std::iter::from_fn(|| flags.ty()).collect();
    let (Some(columns), [Type::F32, a, b], true) = (columns, &types[..], flags.done()) else {
        return Ok(false);
    };
    let [d, left, right, adds, Operand::Immediate(1), Operand::Immediate(1), transposed @ ..] = operands
    else {
        return Ok(false);
    };
    if a != b || !matches!(a.kind, Kind::F16 | Kind::BF16) {
        return Ok(false);
    }
    let (a_in_registers, transposed_a, transposed_b) = match (left, transposed) {
        (Operand::Vector(_), [Operand::Immediate(b @ (0 | 1))]) => (true, false, *b == 1),
        (Operand::Register(_), [Operand::Immediate(a @ (0 | 1)), Operand::Immediate(b @ (0 | 1))]) => {
            (false, *a == 1, *b == 1)
        }
        _ => return Ok(false),
    };
    let results = builder.results(d, Width::Bits32)?;
    if results.len() != usize::from(columns / 2) {
        return builder.fail(format!("{} registers of D instead of {}", results.len(), columns / 2));
    }
    let mut sources = builder.sources(left, if a_in_registers { Width::Bits32 } else { Width::Bits64 })?;
    let wanted = if a_in_registers { 4 } else { 1 };
    if sources.len() != wanted {
        return builder.fail(format!("{} registers of A instead of {wanted}", sources.len()));
    }
    sources.push(builder.source(right, Width::Bits64)?);
    sources.push(builder.source(adds, Width::Predicate)?);
    let product = WarpgroupProduct { columns, kind: a.kind, a_in_registers, transposed_a, transposed_b };
    builder.push(Op::Warpgroup(WarpgroupOp::Product(product)), &results, &sources);
    Ok(true)
}
