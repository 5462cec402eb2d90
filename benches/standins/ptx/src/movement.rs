//! Decodes instructions that move values and control: memory, branches, barriers, warps, matrices.

use crate::builder::{Builder, Decoded, Flags, width_of};
use crate::error::Space;
use crate::parse::{Instruction, Operand, Width};
use crate::program::{Access, Atomic, Fragment, Kind, Matrix, Op, Shuffle, Type, Vote};

/// Decodes `instruction` if it is of this kind and all of its flags are known.
pub fn decode(builder: &mut Builder<'_>, instruction: &Instruction) -> Decoded<bool> {
    let mut flags = Flags::of(&instruction.name);
    let operands = &instruction.operands[..];
    let head = instruction.name.split('.').next().unwrap_or_default();
    match head {
        "mov" => moved(builder, &mut flags, operands),
        "ld" => load(builder, &mut flags, operands),
        "st" => store(builder, &mut flags, operands),
        "cvta" => converted_address(builder, &mut flags, operands),
        "bra" => {
            flags.take("uni");
            match operands {
                [Operand::Name(label)] if flags.done() => builder.branch(label),
                _ => return Ok(false),
            }
            Ok(true)
        }
        "ret" | "exit" | "trap" => {
            flags.take("uni");
            builder.plain(if head == "trap" { Op::Trap } else { Op::Return });
            Ok(flags.done() && operands.is_empty())
        }
        "bar" | "barrier" => barrier(builder, &mut flags, operands),
        "cp" => copy(builder, &mut flags, operands),
        "ldmatrix" => load_matrix(builder, &mut flags, operands),
        "mma" => multiply(builder, &mut flags, operands),
        "wmma" => wmma(builder, &mut flags, operands),
        "shfl" | "vote" | "activemask" => across_lanes(builder, head, &mut flags, operands),
        "atom" | "red" => atomic(builder, head == "atom", &mut flags, operands),
        _ => Ok(false),
    }
}

fn moved(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let [to, from] = builder.counted(operands)?;
    if flags.take("pred") {
        let from = builder.source(from, Width::Predicate)?;
        let to = builder.result(to, Width::Predicate)?;
        builder.push(Op::MovePredicate, &[to], &[from]);
        return Ok(flags.done());
    }
    let Some(ty) = flags.ty() else { return Ok(false) };
    let width = width_of(ty);
    let part = |parts: &Vec<Operand>| ty.bits / parts.len().max(1) as u32;
    let narrow = |bits| width_of(Type { kind: Kind::Bits, bits });
    match (to, from) {
        (Operand::Vector(parts), from) if part(parts) >= 16 => {
            let from = builder.source(from, width)?;
            let results = parts.iter().map(|one| builder.result(one, narrow(part(parts))));
            let results = results.collect::<Decoded<Vec<_>>>()?;
            builder.push(Op::Unpack { bits: part(parts) }, &results, &[from]);
        }
        (to, Operand::Vector(parts)) if part(parts) >= 16 => {
            let sources = parts.iter().map(|one| builder.source(one, narrow(part(parts))));
            let sources = sources.collect::<Decoded<Vec<_>>>()?;
            let to = builder.result(to, width)?;
            builder.push(Op::Pack { bits: part(parts) }, &[to], &sources);
        }
        _ => {
            let from = builder.source(from, width)?;
            let to = builder.result(to, width)?;
            builder.push(if width == Width::Bits64 { Op::Move64 } else { Op::Move32 }, &[to], &[from]);
        }
    }
    Ok(flags.done())
}

/// Returns the space in the name, or the generic space.
fn space(flags: &mut Flags<'_>) -> Space {
    let known = |flag: &str| {
        Some(match flag {
            "global" => Space::Global,
            "shared" | "shared::cta" => Space::Shared,
            "local" => Space::Local,
            "param" => Space::Param,
            _ => return None,
        })
    };
    flags.first(known).unwrap_or(Space::Generic)
}

/// Takes flags that do not affect results: caches, order, scope.
fn take_hints(flags: &mut Flags<'_>) {
    let known = [
        "nc",
        "volatile",
        "weak",
        "relaxed",
        "acquire",
        "release",
        "acq_rel",
        "cta",
        "gpu",
        "sys",
        "ca",
        "cg",
        "cs",
        "lu",
        "cv",
        "wb",
        "wt",
        "L1::no_allocate",
        "L1::evict_last",
        "L2::64B",
        "L2::128B",
        "L2::256B",
    ];
    for hint in known {
        flags.take(hint);
    }
}

fn count(flags: &mut Flags<'_>) -> u8 {
    flags
        .first(|flag| [("v2", 2), ("v4", 4)].into_iter().find(|(name, _)| *name == flag))
        .map_or(1, |(_, n)| n)
}

fn load(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let [to, from] = builder.counted(operands)?;
    let space = space(flags);
    take_hints(flags);
    let count = count(flags);
    let Some(ty) = flags.ty() else { return Ok(false) };
    let results = builder.results(to, width_of(ty))?;
    let (base, offset, wide) = builder.address(from)?;
    builder.push(Op::Load(Access { space, ty, count, offset, wide }), &results, &[base]);
    Ok(flags.done() && results.len() == usize::from(count))
}

fn store(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let [to, from] = builder.counted(operands)?;
    let space = space(flags);
    take_hints(flags);
    let count = count(flags);
    let Some(ty) = flags.ty() else { return Ok(false) };
    let values = builder.sources(from, width_of(ty))?;
    let (base, offset, wide) = builder.address(to)?;
    let known = flags.done() && values.len() == usize::from(count) && space != Space::Param;
    builder.push(Op::Store(Access { space, ty, count, offset, wide }), &[], &[&[base], &values[..]].concat());
    Ok(known)
}

fn converted_address(
    builder: &mut Builder<'_>,
    flags: &mut Flags<'_>,
    operands: &[Operand],
) -> Decoded<bool> {
    let [to, from] = builder.counted(operands)?;
    let back = flags.take("to");
    let space = space(flags);
    if !flags.take("u64") || space == Space::Generic {
        return Ok(false);
    }
    let from = builder.source(from, Width::Bits64)?;
    let to = builder.result(to, Width::Bits64)?;
    builder.push(if back { Op::FromGeneric(space) } else { Op::ToGeneric(space) }, &[to], &[from]);
    Ok(flags.done())
}

fn barrier(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let [one] = builder.counted(operands)?;
    let warp = flags.take("warp");
    flags.take("cta");
    flags.take("aligned");
    if !flags.take("sync") {
        return Ok(false);
    }
    let one = builder.source(one, Width::Bits32)?;
    builder.push(if warp { Op::WarpBarrier } else { Op::Barrier }, &[], &[one]);
    Ok(flags.done())
}

fn copy(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    if !flags.take("async") {
        return Ok(false);
    }
    if flags.take("commit_group") {
        builder.plain(Op::CopyCommit);
    } else if flags.take("wait_all") {
        builder.plain(Op::CopyWait { left: 0, uncommitted: true });
    } else if flags.take("wait_group") {
        let [Operand::Immediate(left)] = operands else { return Ok(false) };
        builder.plain(Op::CopyWait { left: *left as u32, uncommitted: false });
    } else {
        let [to, from, Operand::Immediate(bytes), size @ ..] = operands else { return Ok(false) };
        if !(flags.take("shared::cta") || flags.take("shared")) || !flags.take("global") || size.len() > 1 {
            return Ok(false);
        }
        // Only copies of 16 bytes may bypass the first cache.
        let known = matches!((flags.take("cg"), bytes), (true, 16) | (false, 4 | 8 | 16));
        take_hints(flags);
        let (base, target, wide_target) = builder.address(to)?;
        let (source_base, source, true) = builder.address(from)? else { return Ok(false) };
        let mut sources = vec![base, source_base];
        for size in size {
            sources.push(builder.source(size, Width::Bits32)?);
        }
        builder.push(Op::CopyAsync { bytes: *bytes as u8, target, source, wide_target }, &[], &sources);
        return Ok(known && flags.done());
    }
    Ok(flags.done())
}

fn load_matrix(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let [to, from] = builder.counted(operands)?;
    let shape = flags.take("sync") & flags.take("aligned") & flags.take("m8n8");
    let matrices = ["x1", "x2", "x4"].iter().position(|count| flags.take(count)).map(|power| 1 << power);
    let transposed = flags.take("trans");
    let space = space(flags);
    let ty = flags.ty();
    let results = builder.results(to, Width::Bits32)?;
    let (base, offset, wide) = builder.address(from)?;
    let (Some(count), Some(ty), true) = (matrices, ty, shape && flags.done()) else { return Ok(false) };
    let access = Access { space, ty, count, offset, wide };
    builder.push(Op::LoadMatrix { transposed, access }, &results, &[base]);
    Ok(results.len() == usize::from(count)
        && ty.bits == 16
        && matches!(space, Space::Shared | Space::Generic))
}

/// Returns the kind of products with f32 sums; `types` are those of D, A, B, C.
fn kind_of_product(types: &[Type]) -> Option<Kind> {
    match types {
        [Type::F32, a, b, Type::F32] if a == b && matches!(a.kind, Kind::F16 | Kind::BF16 | Kind::TF32) => {
            Some(a.kind)
        }
        _ => None,
    }
}

fn multiply(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let all = builder.counted::<4>(operands)?;
    let form = flags.take("sync") & flags.take("aligned") & flags.take("row") & flags.take("col");
    let k =
        ["m16n8k4", "m16n8k8", "m16n8k16"].iter().position(|shape| flags.take(shape)).map(|power| 4 << power);
    let types: Vec<Type> = std::iter::from_fn(|| flags.ty()).collect();
    let (Some(k), Some(kind), true) = (k, kind_of_product(&types), form && flags.done()) else {
        return Ok(false);
    };
    let (a, b) = match (kind, k) {
        (Kind::TF32, 4) | (Kind::F16 | Kind::BF16, 8) => (2, 1),
        (Kind::TF32, 8) | (Kind::F16 | Kind::BF16, 16) => (4, 2),
        _ => return Ok(false),
    };
    let results = builder.results(&all[0], Width::Bits32)?;
    let mut sources = Vec::new();
    for (operand, count) in all[1..].iter().zip([a, b, 4]) {
        let registers = builder.sources(operand, Width::Bits32)?;
        if registers.len() != count {
            return builder.fail(format!("{} registers instead of {count}", registers.len()));
        }
        sources.extend(registers);
    }
    builder.push(Op::Mma { k, kind }, &results, &sources);
    Ok(results.len() == 4)
}

fn wmma(builder: &mut Builder<'_>, flags: &mut Flags<'_>, operands: &[Operand]) -> Decoded<bool> {
    let act = flags.first(|flag| ["load", "store", "mma"].into_iter().find(|&known| known == flag));
    let matrix = flags.first(|flag| match flag {
        "a" => Some(Matrix::A),
        "b" => Some(Matrix::B),
        "c" | "d" => Some(Matrix::Accumulator),
        _ => None,
    });
    let form = flags.take("sync") & flags.take("aligned");
    let k = ["m16n16k8", "m16n16k16"].iter().position(|shape| flags.take(shape)).map(|power| 8 << power);
    let layout = |flags: &mut Flags<'_>| {
        flags.first(|flag| [("row", true), ("col", false)].into_iter().find(|l| l.0 == flag)).map(|l| l.1)
    };
    let (Some(k), true) = (k, form) else { return Ok(false) };
    let row_major = layout(flags);
    if act == Some("mma") {
        // Both layouts must match those of the loaded fragments, which do not depend on them.
        let all = builder.counted::<4>(operands)?;
        let types: Vec<Type> = std::iter::from_fn(|| flags.ty()).collect();
        let kind = if types == [Type::F32, Type::F32] { Some(Kind::F16) } else { kind_of_product(&types) };
        let (Some(kind), Some(_), true) = (kind, layout(flags), flags.done()) else { return Ok(false) };
        let count = if kind == Kind::F16 { 8 } else { 4 };
        let results = builder.results(&all[0], Width::Bits32)?;
        let mut sources = Vec::new();
        for (operand, count) in all[1..].iter().zip([count, count, 8]) {
            let registers = builder.sources(operand, Width::Bits32)?;
            if registers.len() != count {
                return builder.fail(format!("{} registers instead of {count}", registers.len()));
            }
            sources.extend(registers);
        }
        builder.push(Op::WmmaMma { k, kind }, &results, &sources);
        return Ok(results.len() == 8 && row_major.is_some() && (kind == Kind::TF32) == (k == 8));
    }
    let [one, two, stride] = builder.counted(operands)?;
    let space = space(flags);
    let (Some(matrix), Some(row_major), Some(ty)) = (matrix, row_major, flags.ty()) else { return Ok(false) };
    let is_load = act == Some("load");
    let (registers, address) = if is_load { (one, two) } else { (two, one) };
    let (base, offset, wide) = builder.address(address)?;
    let stride = builder.source(stride, Width::Bits32)?;
    let access = Access { space, ty, count: 1, offset, wide };
    let wanted = match (matrix, ty.kind) {
        (Matrix::Accumulator, Kind::F32) => 8,
        (Matrix::A | Matrix::B, Kind::F16) if k == 16 => 8,
        (Matrix::A | Matrix::B, Kind::BF16) if k == 16 => 4,
        (Matrix::A | Matrix::B, Kind::TF32) if k == 8 => 4,
        _ => return Ok(false),
    };
    if is_load {
        let results = builder.results(registers, Width::Bits32)?;
        builder.push(Op::WmmaLoad(Fragment { matrix, k, ty, row_major }, access), &results, &[base, stride]);
        Ok(flags.done() && results.len() == wanted)
    } else {
        let values = builder.sources(registers, Width::Bits32)?;
        builder.push(Op::WmmaStore(access, row_major), &[], &[&[base, stride], &values[..]].concat());
        Ok(flags.done() && values.len() == wanted && matrix == Matrix::Accumulator)
    }
}

fn across_lanes(
    builder: &mut Builder<'_>,
    head: &str,
    flags: &mut Flags<'_>,
    operands: &[Operand],
) -> Decoded<bool> {
    if head == "activemask" {
        let [to] = builder.counted(operands)?;
        let to = builder.result(to, Width::Bits32)?;
        builder.push(Op::ActiveMask, &[to], &[]);
        return Ok(flags.take("b32") && flags.done());
    }
    if !flags.take("sync") {
        return Ok(false);
    }
    if head == "vote" {
        let [to, from, mask] = builder.counted(operands)?;
        let vote = flags.first(|flag| {
            Some(match flag {
                "all" => Vote::All,
                "any" => Vote::Any,
                "uni" => Vote::Uniform,
                "ballot" => Vote::Ballot,
                _ => return None,
            })
        });
        let Some(vote) = vote else { return Ok(false) };
        let (ballot, width) =
            (vote == Vote::Ballot, if vote == Vote::Ballot { Width::Bits32 } else { Width::Predicate });
        let known = flags.take(if ballot { "b32" } else { "pred" }) && flags.done();
        let from = builder.source(from, Width::Predicate)?;
        let mask = builder.source(mask, Width::Bits32)?;
        let to = builder.result(to, width)?;
        builder.push(Op::Vote(vote), &[to], &[from, mask]);
        return Ok(known);
    }
    let [to, rest @ ..] = builder.counted::<5>(operands)?;
    let shuffle = flags.first(|flag| {
        Some(match flag {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            "idx" => Shuffle::Index,
            _ => return None,
        })
    });
    let (Some(shuffle), true) = (shuffle, flags.take("b32") && flags.done()) else { return Ok(false) };
    let results = match to {
        Operand::Pair(value, there) => {
            vec![builder.result(value, Width::Bits32)?, builder.result(there, Width::Predicate)?]
        }
        one => vec![builder.result(one, Width::Bits32)?, builder.scratch(Width::Predicate)],
    };
    let sources = rest.iter().map(|one| builder.source(one, Width::Bits32)).collect::<Decoded<Vec<_>>>()?;
    builder.push(Op::Shuffle(shuffle), &results, &sources);
    Ok(true)
}

fn atomic(
    builder: &mut Builder<'_>,
    returns: bool,
    flags: &mut Flags<'_>,
    operands: &[Operand],
) -> Decoded<bool> {
    let space = space(flags);
    take_hints(flags);
    let op = flags.first(|flag| {
        Some(match flag {
            "add" => Atomic::Add,
            "min" => Atomic::Min,
            "max" => Atomic::Max,
            "and" => Atomic::And,
            "or" => Atomic::Or,
            "xor" => Atomic::Xor,
            "exch" => Atomic::Exchange,
            "cas" => Atomic::CompareAndSwap,
            _ => return None,
        })
    });
    let (Some(op), Some(ty)) = (op, flags.ty()) else { return Ok(false) };
    let known = match ty.kind {
        Kind::F32 => matches!(op, Atomic::Add | Atomic::Exchange),
        Kind::F16 | Kind::BF16 => op == Atomic::Add && flags.take("noftz"),
        _ => ty.bits >= 32 && !ty.is_float(),
    };
    let (results, operands) = operands.split_at(usize::from(returns).min(operands.len()));
    let values = if op == Atomic::CompareAndSwap { 2 } else { 1 };
    let [address, given @ ..] = operands else { return Ok(false) };
    if given.len() != values || !known {
        return Ok(false);
    }
    let width = width_of(ty);
    let results = results.iter().map(|one| builder.result(one, width)).collect::<Decoded<Vec<_>>>()?;
    let (base, offset, wide) = builder.address(address)?;
    let mut sources = vec![base];
    for one in given {
        sources.push(builder.source(one, width)?);
    }
    let access = Access { space, ty, count: 1, offset, wide };
    builder.push(Op::Atomic { op, access }, &results, &sources);
    Ok(flags.done())
}
