//! Decodes statements into instructions with registers: resolves names, and assigns registers to constants.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::arithmetic;
use crate::builder::{Builder, Decoded};
use crate::error::{ParseError, Space};
use crate::layout::allocate;
use crate::moved;
use crate::movement;
use crate::parse::{Instruction, Source, Statement, parse};
use crate::program::{Kernel, Module, Op};
use crate::warpgroup;
use crate::watch;

/// Decodes the kernels of `text` for execution.
pub fn module(text: &str) -> Result<Module, ParseError> {
    let shared: Arc<str> = Arc::from(text);
    let sources = parse(text)?;
    let kernels = sources.iter().map(|source| kernel(source, &shared).map(Arc::new));
    Ok(Module { kernels: kernels.collect::<Result<_, _>>()? })
}

/// Returns the unknown kinds of instructions in `text`, each with its first line.
pub fn unknown(text: &str) -> Result<Vec<ParseError>, ParseError> {
    let (mut found, mut names) = (Vec::new(), HashSet::new());
    for source in parse(text)? {
        let mut builder = Builder::new(&source);
        for statement in &source.statements {
            let Statement::Instruction(instruction) = statement else { continue };
            if let Err(error) = decode(&mut builder, instruction)
                && names.insert(instruction.name.clone())
            {
                found.push(error);
            }
        }
    }
    Ok(found)
}

fn decode(builder: &mut Builder<'_>, instruction: &Instruction) -> Decoded<()> {
    builder.begin(instruction);
    if !arithmetic::decode(builder, instruction)?
        && !movement::decode(builder, instruction)?
        && !warpgroup::decode::decode(builder, instruction)?
    {
        return builder.fail(format!("unknown instruction `{}`", instruction.name));
    }
    Ok(())
}

fn kernel(source: &Source, text: &Arc<str>) -> Result<Kernel, ParseError> {
    let mut builder = Builder::new(source);
    let mut labels = HashMap::new();
    for statement in &source.statements {
        match statement {
            Statement::Label(name) => {
                labels.insert(name.clone(), builder.code.len() as u32);
                builder.label();
            }
            Statement::Instruction(instruction) => {
                decode(&mut builder, instruction)?;
                // Lanes that did not branch may join others after the branch.
                if instruction.name.starts_with("bra") && instruction.guard.is_some() {
                    builder.label();
                }
            }
        }
    }
    // The end of the text ends the kernel.
    builder.plain(Op::Return);
    for (at, label, line) in std::mem::take(&mut builder.branches) {
        let Some(&target) = labels.get(&label) else {
            return Err(ParseError::new(line, format!("no label `{label}`")));
        };
        builder.code[at].op = Op::Branch(target);
    }
    let granule = builder.code.iter().filter_map(|instr| shared_bytes(&instr.op)).min().unwrap_or(4).min(16);
    let (static_shared, local_bytes) = (builder.static_shared, builder.local_bytes);
    let (parameters, parameter_bytes) = builder.parameters();
    let mut instructions = builder.into_virtual();
    moved::mark(&mut instructions);
    let watches = watch::find(&mut instructions);
    let product_uses = warpgroup::pipeline::find(&mut instructions);
    let placed = allocate(instructions);
    Ok(Kernel {
        name: source.name.clone(),
        code: placed.code,
        operands: placed.operands,
        parameters,
        parameter_bytes,
        most_threads: source.most_threads,
        static_shared,
        local_bytes,
        registers: placed.registers,
        constants32: placed.constants32,
        constants64: placed.constants64,
        true_predicates: placed.true_predicates,
        specials: placed.specials,
        granule,
        watches,
        product_uses,
        text: text.clone(),
    })
}

/// Bytes of the smallest part of shared memory that an instruction accesses separately.
fn shared_bytes(op: &Op) -> Option<u32> {
    let (access, elements) = match op {
        Op::Load(access) | Op::Store(access) => (access, u32::from(access.count)),
        Op::Atomic { access, .. } => (access, 1),
        Op::WmmaLoad(_, access) | Op::WmmaStore(access, _) => (access, 1),
        Op::CopyAsync { bytes, .. } => return Some(u32::from(*bytes)),
        _ => return None,
    };
    matches!(access.space, Space::Shared | Space::Generic).then_some(access.ty.bits / 8 * elements)
}
