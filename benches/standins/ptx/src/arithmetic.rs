//! Decodes arithmetic instructions: integers, floats, comparisons, conversions.

use crate::builder::{Builder, Decoded, Flags, width_of};
use crate::float;
use crate::parse::{Instruction, Operand, Width};
use crate::program::{Compare, Float1, Float2, Int1, Int2, Kind, Logic, Mode, Op, Round, Type};

/// Decodes `instruction` if it is of this kind and all of its flags are known.
pub fn decode(builder: &mut Builder<'_>, instruction: &Instruction) -> Decoded<bool> {
    let mut flags = Flags::of(&instruction.name);
    let operands = &instruction.operands;
    let head = instruction.name.split('.').next().unwrap_or_default();
    let Some((op, types)) = operation(head, &mut flags) else { return Ok(false) };
    if !flags.done() {
        return Ok(false);
    }
    match op {
        Op::Compare { .. } => compare(builder, op, types[0], operands)?,
        _ => {
            if operands.len() != types.len() {
                return builder.fail(format!("{} operands instead of {}", operands.len(), types.len()));
            }
            let result = builder.result(&operands[0], types[0])?;
            let sources =
                operands[1..].iter().zip(&types[1..]).map(|(one, &width)| builder.source(one, width));
            let sources = sources.collect::<Decoded<Vec<_>>>()?;
            builder.push(op, &[result], &sources);
        }
    }
    Ok(true)
}

fn compare(builder: &mut Builder<'_>, op: Op, width: Width, operands: &[Operand]) -> Decoded<()> {
    let Op::Compare { compare, ty, flush, with, .. } = op else { return Ok(()) };
    let (results, opposite) = match &operands[0] {
        Operand::Pair(yes, no) => {
            let pair = [builder.result(yes, Width::Predicate)?, builder.result(no, Width::Predicate)?];
            (pair.to_vec(), true)
        }
        one => (vec![builder.result(one, Width::Predicate)?], false),
    };
    let wanted = if with.is_some() { 4 } else { 3 };
    if operands.len() != wanted {
        return builder.fail(format!("{} operands instead of {wanted}", operands.len()));
    }
    let mut sources = vec![builder.source(&operands[1], width)?, builder.source(&operands[2], width)?];
    if with.is_some() {
        sources.push(builder.source(&operands[3], Width::Predicate)?);
    }
    builder.push(Op::Compare { compare, ty, flush, with, opposite }, &results, &sources);
    Ok(())
}

/// Returns the operation with this name, and the registers of its result and operands.
fn operation(head: &str, flags: &mut Flags<'_>) -> Option<(Op, Vec<Width>)> {
    let predicate = Width::Predicate;
    if matches!(head, "and" | "or" | "xor" | "not") && flags.take("pred") {
        return Some(match head {
            "and" => (Op::Logic(Logic::And), vec![predicate; 3]),
            "or" => (Op::Logic(Logic::Or), vec![predicate; 3]),
            "xor" => (Op::Logic(Logic::Xor), vec![predicate; 3]),
            _ => (Op::NotPredicate, vec![predicate; 2]),
        });
    }
    match head {
        "cvt" => return conversion(flags),
        "mul" | "mad" => {
            if let Some(found) = product(head, flags) {
                return Some(found);
            }
        }
        "setp" => {
            let compare = flags.first(comparison)?;
            let with = flags.first(|flag| match flag {
                "and" => Some(Logic::And),
                "or" => Some(Logic::Or),
                "xor" => Some(Logic::Xor),
                _ => None,
            });
            let (flush, ty) = (flags.take("ftz"), flags.ty()?);
            let compare = for_type(compare, ty)?;
            return Some((Op::Compare { compare, ty, flush, with, opposite: false }, vec![width_of(ty)]));
        }
        "set" => {
            let compare = flags.first(comparison)?;
            let (flush, to, ty) = (flags.take("ftz"), flags.ty()?, flags.ty()?);
            let yes = match to.kind {
                Kind::F16 | Kind::BF16 => float::one(to.kind),
                Kind::F32 => 1f32.to_bits(),
                _ if to.bits == 32 && !to.is_float() => u32::MAX,
                _ => return None,
            };
            let compare = for_type(compare, ty)?;
            return Some((
                Op::Set { compare, ty, flush, yes },
                vec![width_of(to), width_of(ty), width_of(ty)],
            ));
        }
        "selp" => {
            let width = width_of(flags.ty()?);
            let op = if width == Width::Bits64 { Op::Select64 } else { Op::Select32 };
            return Some((op, vec![width, width, width, predicate]));
        }
        "bfi" => {
            let width = width_of(flags.ty()?);
            let bits = Width::Bits32;
            return (width == bits).then_some((Op::Insert32, vec![bits; 5]));
        }
        _ => {}
    }
    let mode = flags.mode();
    let nan = flags.take("NaN");
    let approximate = flags.take("approx") || flags.take("full");
    let ty = flags.ty()?;
    let width = width_of(ty);
    let op = if ty.is_float() { float(head, ty, mode, nan, approximate)? } else { int(head, ty)? };
    if !ty.is_float() && (mode != Mode::PLAIN || nan || approximate) {
        return None;
    }
    let mut widths = match op {
        Op::Int1(..) | Op::Float1(..) => vec![width; 2],
        Op::MulAddFloat(_) | Op::HalfMulAdd(_) => vec![width; 4],
        _ => vec![width; 3],
    };
    match op {
        Op::Int2(Int2::ShiftLeft | Int2::ShiftRight, _) => widths[2] = Width::Bits32,
        Op::Int1(Int1::CountOnes | Int1::LeadingZeros, _) => widths[0] = Width::Bits32,
        _ => {}
    }
    Some((op, widths))
}

fn product(head: &str, flags: &mut Flags<'_>) -> Option<(Op, Vec<Width>)> {
    let part = flags.first(|flag| ["lo", "hi", "wide"].into_iter().find(|&known| known == flag))?;
    let ty = flags.ty()?;
    let width = width_of(ty);
    let twice = width_of(Type { kind: ty.kind, bits: ty.bits * 2 });
    let signed = ty.kind == Kind::Signed;
    Some(match (head, part) {
        ("mul", "lo") => (Op::Int2(Int2::Mul, ty), vec![width; 3]),
        ("mul", "hi") => (Op::Int2(Int2::MulHigh, ty), vec![width; 3]),
        ("mad", "lo") => (Op::MulAdd(ty), vec![width; 4]),
        ("mul", "wide") if ty.bits < 64 => {
            (Op::MulWide { signed, bits: ty.bits, add: false }, vec![twice, width, width])
        }
        ("mad", "wide") if ty.bits < 64 => {
            (Op::MulWide { signed, bits: ty.bits, add: true }, vec![twice, width, width, twice])
        }
        _ => return None,
    })
}

fn int(head: &str, ty: Type) -> Option<Op> {
    let two = match head {
        "add" => Int2::Add,
        "sub" => Int2::Sub,
        "div" => Int2::Div,
        "rem" => Int2::Rem,
        "min" => Int2::Min,
        "max" => Int2::Max,
        "and" => Int2::And,
        "or" => Int2::Or,
        "xor" => Int2::Xor,
        "shl" => Int2::ShiftLeft,
        "shr" => Int2::ShiftRight,
        _ => {
            return Some(Op::Int1(
                match head {
                    "not" => Int1::Not,
                    "neg" => Int1::Neg,
                    "abs" => Int1::Abs,
                    "popc" => Int1::CountOnes,
                    "clz" => Int1::LeadingZeros,
                    "brev" => Int1::Reverse,
                    _ => return None,
                },
                ty,
            ));
        }
    };
    Some(Op::Int2(two, ty))
}

fn float(head: &str, ty: Type, mode: Mode, nan: bool, approximate: bool) -> Option<Op> {
    let two = match head {
        "add" => Some(Float2::Add),
        "sub" => Some(Float2::Sub),
        "mul" => Some(Float2::Mul),
        "div" => Some(Float2::Div),
        "min" if nan => Some(Float2::MinNan),
        "max" if nan => Some(Float2::MaxNan),
        "min" => Some(Float2::Min),
        "max" => Some(Float2::Max),
        "copysign" => Some(Float2::CopySign),
        _ => None,
    };
    let nearest = mode.round == Round::Nearest;
    if ty.bits == 16 {
        let known = nearest && !mode.flush && !mode.saturate && !approximate;
        return match (head, two) {
            ("fma", _) if known => Some(Op::HalfMulAdd(ty.kind)),
            (_, Some(Float2::Div | Float2::CopySign)) => None,
            (_, Some(two)) if known => Some(Op::Half2(two, ty.kind)),
            _ => None,
        };
    }
    if ty != Type::F32 {
        return None;
    }
    let exact = matches!(two, Some(Float2::Add | Float2::Sub | Float2::Mul));
    if head == "fma" && !approximate {
        return Some(Op::MulAddFloat(mode));
    }
    if !nearest && !exact {
        return None;
    }
    if let Some(two) = two {
        return Some(Op::Float2(two, mode));
    }
    // Approximate instructions may be computed exactly; the others must be exact.
    let one = match (head, approximate) {
        ("neg", false) => Float1::Neg,
        ("abs", false) => Float1::Abs,
        ("rcp", _) => Float1::Reciprocal,
        ("sqrt", _) => Float1::Sqrt,
        ("rsqrt", true) => Float1::ReciprocalSqrt,
        ("ex2", true) => Float1::Exp2,
        ("lg2", true) => Float1::Log2,
        ("sin", true) => Float1::Sin,
        ("cos", true) => Float1::Cos,
        ("tanh", true) => Float1::Tanh,
        _ => return None,
    };
    Some(Op::Float1(one, mode))
}

fn conversion(flags: &mut Flags<'_>) -> Option<(Op, Vec<Width>)> {
    let integral = flags.first(|flag| {
        Some(match flag {
            "rni" => Round::Nearest,
            "rzi" => Round::Zero,
            "rmi" => Round::Down,
            "rpi" => Round::Up,
            _ => return None,
        })
    });
    let mut mode = flags.mode();
    if let Some(round) = integral {
        mode.round = round;
    }
    let pair = flags.first(|flag| match flag {
        "f16x2" => Some(Kind::F16),
        "bf16x2" => Some(Kind::BF16),
        _ => None,
    });
    if let Some(kind) = pair {
        let known = flags.ty() == Some(Type::F32) && mode.round == Round::Nearest && integral.is_none();
        return known.then_some((Op::ConvertPair { kind, mode }, vec![Width::Bits32; 3]));
    }
    let (to, from) = (flags.ty()?, flags.ty()?);
    if from.kind == Kind::TF32 || (from.kind == Kind::F64 && mode.round != Round::Nearest && to.is_float()) {
        return None;
    }
    let integral = integral.is_some();
    Some((Op::Convert { to, from, mode, integral }, vec![width_of(to), width_of(from)]))
}

fn comparison(flag: &str) -> Option<Compare> {
    Some(match flag {
        "eq" => Compare::Equal,
        "ne" => Compare::NotEqual,
        "lt" | "lo" => Compare::Less,
        "le" | "ls" => Compare::LessEqual,
        "gt" | "hi" => Compare::Greater,
        "ge" | "hs" => Compare::GreaterEqual,
        "equ" => Compare::EqualOrNan,
        "neu" => Compare::NotEqualOrNan,
        "ltu" => Compare::LessOrNan,
        "leu" => Compare::LessEqualOrNan,
        "gtu" => Compare::GreaterOrNan,
        "geu" => Compare::GreaterEqualOrNan,
        "num" => Compare::Numbers,
        "nan" => Compare::Nan,
        _ => return None,
    })
}

/// Returns `compare` if values of this type support it.
fn for_type(compare: Compare, ty: Type) -> Option<Compare> {
    let ordered = matches!(
        compare,
        Compare::Equal
            | Compare::NotEqual
            | Compare::Less
            | Compare::LessEqual
            | Compare::Greater
            | Compare::GreaterEqual
    );
    let known = matches!(ty.kind, Kind::F32 | Kind::F16 | Kind::BF16) || !ty.is_float();
    (known && (ordered || ty.is_float())).then_some(compare)
}
