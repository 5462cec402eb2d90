//! Helpers for decoding an instruction: flags of its name, registers of its operands, and a place for the
//! result.

use std::collections::HashMap;

use crate::error::{ParseError, Space};
use crate::parse::{Instruction, Operand, Source, Variable, Width};
use crate::program::{Instr, Mode, Op, Round, Special, Type};

pub type Decoded<T> = Result<T, ParseError>;

/// The source of a virtual register's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    Instructions,
    Constant(u64),
    Special(Special),
}

/// A kernel with the registers of its text, before they are assigned to places.
pub struct Virtual {
    pub code: Vec<Instr>,
    pub operands: Vec<u32>,
    pub guards: Vec<Option<u32>>,
    pub registers: Vec<(Width, Origin)>,
}

pub struct Builder<'a> {
    source: &'a Source,
    registers: Vec<(Width, Origin)>,
    known: HashMap<(Width, Origin), u32>,
    /// Variables with their spaces and addresses.
    names: HashMap<String, (Space, u64)>,
    guards: Vec<Option<u32>>,
    operands: Vec<u32>,
    pub code: Vec<Instr>,
    /// Branches with unresolved targets: instruction, label, line.
    pub branches: Vec<(usize, String, u32)>,
    pub static_shared: u32,
    pub local_bytes: u32,
    line: u32,
    guard: Option<(u32, bool)>,
}

fn aligned(offset: u32, align: u32) -> u32 {
    offset.next_multiple_of(align.max(1))
}

impl<'a> Builder<'a> {
    pub fn new(source: &'a Source) -> Builder<'a> {
        let registers = source.registers.iter().map(|&width| (width, Origin::Instructions)).collect();
        let mut names = HashMap::new();
        let (mut static_shared, mut local_bytes) = (0, 0);
        for variable in source.variables.iter().filter(|variable| variable.bytes > 0) {
            let used = if variable.space == Space::Shared { &mut static_shared } else { &mut local_bytes };
            let at = aligned(*used, variable.align);
            *used = at + variable.bytes;
            names.insert(variable.name.clone(), (variable.space, u64::from(at)));
        }
        for variable in source.variables.iter().filter(|variable| variable.bytes == 0) {
            // All of these variables share the same memory, after the others.
            static_shared = aligned(static_shared, variable.align.max(16));
        }
        for variable in source.variables.iter().filter(|variable| variable.bytes == 0) {
            names.insert(variable.name.clone(), (Space::Shared, u64::from(static_shared)));
        }
        let mut builder = Builder {
            source,
            registers,
            known: HashMap::new(),
            names,
            guards: Vec::new(),
            operands: Vec::new(),
            code: Vec::new(),
            branches: Vec::new(),
            static_shared,
            local_bytes,
            line: source.line,
            guard: None,
        };
        for (variable, at) in builder.parameters().0 {
            builder.names.insert(variable.name, (Space::Param, u64::from(at)));
        }
        builder
    }

    /// Parameters with their positions, and the total number of bytes.
    pub fn parameters(&self) -> (Vec<(Variable, u32)>, u32) {
        let mut bytes = 0;
        let places = self.source.parameters.iter().map(|variable| {
            let at = aligned(bytes, variable.align);
            bytes = at + variable.bytes;
            (variable.clone(), at)
        });
        (places.collect(), bytes)
    }

    /// Sets the instruction to which errors and code from here on belong.
    pub fn begin(&mut self, instruction: &Instruction) {
        self.line = instruction.line;
        self.guard = instruction.guard;
    }

    pub fn fail<T>(&self, reason: impl Into<String>) -> Decoded<T> {
        Err(ParseError::new(self.line, reason))
    }

    /// Returns the target architecture of the module.
    pub fn target(&self) -> &'a str {
        &self.source.target
    }

    pub fn label(&mut self) {
        self.guard = None;
        self.plain(Op::Label);
    }

    /// Adds an instruction without registers.
    pub fn plain(&mut self, op: Op) {
        self.push(op, &[], &[]);
    }

    pub fn push(&mut self, op: Op, results: &[u32], sources: &[u32]) {
        self.code.push(Instr {
            op,
            guard: self.guard.map(|(_, inverted)| (0, inverted)),
            results: results.len() as u8,
            operands: (results.len() + sources.len()) as u8,
            first: self.operands.len() as u32,
            line: self.line,
            watched: false,
        });
        self.guards.push(self.guard.map(|(register, _)| register));
        self.operands.extend(results.iter().chain(sources));
    }

    pub fn branch(&mut self, label: &str) {
        self.branches.push((self.code.len(), label.to_owned(), self.line));
        self.plain(Op::Branch(0));
    }

    pub fn into_virtual(self) -> Virtual {
        let Builder { code, operands, guards, registers, .. } = self;
        Virtual { code, operands, guards, registers }
    }

    fn born(&mut self, width: Width, origin: Origin) -> u32 {
        let registers = &mut self.registers;
        *self.known.entry((width, origin)).or_insert_with(|| {
            registers.push((width, origin));
            registers.len() as u32 - 1
        })
    }

    pub fn constant(&mut self, width: Width, value: u64) -> u32 {
        let value = match width {
            Width::Predicate => value & 1,
            Width::Bits16 => value & 0xffff,
            Width::Bits32 => value & 0xffff_ffff,
            Width::Bits64 => value,
        };
        // Registers of 16 bits are the low halves of 32-bit registers.
        let width = if width == Width::Bits16 { Width::Bits32 } else { width };
        self.born(width, Origin::Constant(value))
    }

    /// Creates a register that does not occur in the text.
    pub fn scratch(&mut self, width: Width) -> u32 {
        self.registers.push((width, Origin::Instructions));
        self.registers.len() as u32 - 1
    }

    fn fits(&self, register: u32, width: Width) -> bool {
        let is = self.registers[register as usize].0;
        let small = |width| matches!(width, Width::Bits16 | Width::Bits32);
        is == width || (small(is) && small(width))
    }

    /// Returns the register of an operand that is read.
    pub fn source(&mut self, operand: &Operand, width: Width) -> Decoded<u32> {
        match operand {
            Operand::Register(register) if self.fits(*register, width) => Ok(*register),
            Operand::Register(_) => self.fail("the register has another width"),
            Operand::Immediate(value) => Ok(self.constant(width, *value)),
            Operand::Not(register) if width == Width::Predicate => {
                let opposite = self.scratch(width);
                let guard = self.guard.take();
                self.push(Op::NotPredicate, &[opposite], &[*register]);
                self.guard = guard;
                Ok(opposite)
            }
            Operand::Name(name) => {
                if let Some(&(_, address)) = self.names.get(name) {
                    return Ok(self.constant(width, address));
                }
                match special(name) {
                    Some(special) => Ok(self.born(Width::Bits32, Origin::Special(special))),
                    None if name == "WARP_SZ" => Ok(self.constant(width, 32)),
                    None => self.fail(format!("no variable or register `{name}`")),
                }
            }
            _ => self.fail("this operand cannot be read here"),
        }
    }

    /// Returns the register of an operand that is written.
    pub fn result(&mut self, operand: &Operand, width: Width) -> Decoded<u32> {
        match operand {
            Operand::Register(register) if self.fits(*register, width) => Ok(*register),
            Operand::Register(_) => self.fail("the register has another width"),
            Operand::Sink => Ok(self.scratch(width)),
            _ => self.fail("this operand cannot be written"),
        }
    }

    /// Returns the registers of `{…}`, or of a single operand.
    pub fn sources(&mut self, operand: &Operand, width: Width) -> Decoded<Vec<u32>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.source(one, width)).collect(),
            one => Ok(vec![self.source(one, width)?]),
        }
    }

    pub fn results(&mut self, operand: &Operand, width: Width) -> Decoded<Vec<u32>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|one| self.result(one, width)).collect(),
            one => Ok(vec![self.result(one, width)?]),
        }
    }

    /// Returns the register and the offset of an address in brackets, and whether the register has 64 bits.
    pub fn address(&mut self, operand: &Operand) -> Decoded<(u32, i32, bool)> {
        let Operand::Address(base, offset) = operand else { return self.fail("missing brackets") };
        let Ok(offset) = i32::try_from(*offset) else { return self.fail("an offset of more than 31 bits") };
        let narrow = matches!(**base, Operand::Register(register) if self.fits(register, Width::Bits32));
        let width = if narrow { Width::Bits32 } else { Width::Bits64 };
        Ok((self.source(base, width)?, offset, !narrow))
    }

    /// Returns the operands if there are `N` of them, otherwise an error.
    pub fn counted<'b, const N: usize>(&self, operands: &'b [Operand]) -> Decoded<&'b [Operand; N]> {
        match operands.try_into() {
            Ok(all) => Ok(all),
            Err(_) => self.fail(format!("{} operands instead of {N}", operands.len())),
        }
    }
}

fn special(name: &str) -> Option<Special> {
    let (name, axis) = match name.rsplit_once('.') {
        Some((name, axis)) => (name, ["x", "y", "z"].iter().position(|&known| known == axis)? as u8),
        None => (name, 0),
    };
    Some(match name {
        "%tid" => Special::Thread(axis),
        "%ctaid" => Special::Block(axis),
        "%ntid" => Special::BlockSize(axis),
        "%nctaid" => Special::GridSize(axis),
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%lanemask_lt" => Special::LanesBelow,
        "%lanemask_le" => Special::LanesUpTo,
        "%lanemask_eq" => Special::LaneMask,
        "%lanemask_ge" => Special::LanesFrom,
        "%lanemask_gt" => Special::LanesAbove,
        "%dynamic_smem_size" => Special::DynamicSharedSize,
        _ => return None,
    })
}

/// Returns the width of registers for values of a type.
pub fn width_of(ty: Type) -> Width {
    match ty.bits {
        64 => Width::Bits64,
        32 => Width::Bits32,
        _ => Width::Bits16,
    }
}

/// The parts of an instruction's name, which are taken one by one until none is left.
pub struct Flags<'a>(Vec<&'a str>);

impl<'a> Flags<'a> {
    pub fn of(name: &'a str) -> Flags<'a> {
        Flags(name.split('.').skip(1).collect())
    }

    pub fn take(&mut self, flag: &str) -> bool {
        let at = self.0.iter().position(|&known| known == flag);
        at.map(|at| self.0.remove(at)).is_some()
    }

    /// Takes the first flag for which `known` has a value.
    pub fn first<T>(&mut self, known: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (at, value) = self.0.iter().enumerate().find_map(|(at, flag)| Some((at, known(flag)?)))?;
        self.0.remove(at);
        Some(value)
    }

    pub fn ty(&mut self) -> Option<Type> {
        self.first(Type::named)
    }

    pub fn round(&mut self) -> Option<Round> {
        self.first(|flag| {
            Some(match flag {
                "rn" => Round::Nearest,
                "rna" => Round::NearestAway,
                "rz" => Round::Zero,
                "rm" => Round::Down,
                "rp" => Round::Up,
                _ => return None,
            })
        })
    }

    pub fn mode(&mut self) -> Mode {
        let round = self.round().unwrap_or(Round::Nearest);
        Mode { round, flush: self.take("ftz"), saturate: self.take("sat") }
    }

    /// Returns `true` if all flags have been taken.
    pub fn done(&self) -> bool {
        self.0.is_empty()
    }
}
