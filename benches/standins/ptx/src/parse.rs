//! Parses text into statements: kernels with parameters, variables and instructions, with names of registers
//! resolved.

use std::collections::HashMap;

use crate::error::{ParseError, Space};
use crate::lexer::{Lexeme, tokens};

/// The number of bits of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    Predicate,
    Bits16,
    Bits32,
    Bits64,
}

/// An operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    Register(u32),
    /// A negated predicate.
    Not(u32),
    /// The value, or the bits of a float.
    Immediate(u64),
    /// A variable, a label or a special register such as `%tid.x`.
    Name(String),
    /// An address in brackets: a register, a name or a number, and an offset.
    Address(Box<Operand>, i64),
    Vector(Vec<Operand>),
    /// Two destinations, as in `%r1|%p1`.
    Pair(Box<Operand>, Box<Operand>),
    /// `_`, a destination that is discarded.
    Sink,
}

/// An instruction in one line of the text.
#[derive(Debug, Clone)]
pub struct Instruction {
    pub line: u32,
    /// The predicate under which it executes, and whether the predicate is negated.
    pub guard: Option<(u32, bool)>,
    pub name: String,
    pub operands: Vec<Operand>,
}

#[derive(Debug, Clone)]
pub enum Statement {
    Label(String),
    Instruction(Instruction),
}

/// A variable of the kernel in one of its spaces, or a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    pub space: Space,
    pub align: u32,
    /// 0 for shared memory whose size is set by the launch.
    pub bytes: u32,
}

/// A kernel as parsed.
#[derive(Debug, Clone)]
pub struct Source {
    pub name: String,
    pub line: u32,
    /// The architecture that the module targets, such as `sm_90a`.
    pub target: String,
    pub parameters: Vec<Variable>,
    pub variables: Vec<Variable>,
    /// `.maxntid`: the maximum number of threads of a block.
    pub most_threads: Option<u32>,
    pub registers: Vec<Width>,
    pub statements: Vec<Statement>,
}

/// Parses the kernels of `text`.
pub fn parse(text: &str) -> Result<Vec<Source>, ParseError> {
    let tokens = tokens(text)?;
    Parser { tokens: &tokens, at: 0, target: "", shared: Vec::new() }.module()
}

struct Parser<'a> {
    tokens: &'a [Lexeme<'a>],
    at: usize,
    target: &'a str,
    /// Shared variables of the module.
    shared: Vec<Variable>,
}

/// The body of a kernel during parsing.
struct Body {
    source: Source,
    /// Names of registers; the scope of the innermost braces is last.
    scopes: Vec<HashMap<String, u32>>,
}

impl Body {
    fn register(&self, name: &str) -> Option<u32> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name)).copied()
    }

    fn declare(&mut self, name: String, width: Width) {
        let id = self.source.registers.len() as u32;
        self.source.registers.push(width);
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name, id);
        }
    }
}

type Parsed<T> = Result<T, ParseError>;

impl<'a> Parser<'a> {
    fn peek(&self) -> &'a str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    fn line(&self) -> u32 {
        let last = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(last).map_or(0, |token| token.line)
    }

    fn next(&mut self) -> Parsed<&'a str> {
        let token = self.tokens.get(self.at).ok_or_else(|| ParseError::new(self.line(), "unexpected end"))?;
        self.at += 1;
        Ok(token.text)
    }

    fn accept(&mut self, text: &str) -> bool {
        let there = self.peek() == text;
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, text: &str) -> Parsed<()> {
        if self.accept(text) { Ok(()) } else { self.fail(format!("`{}` instead of `{text}`", self.peek())) }
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Parsed<T> {
        Err(ParseError::new(self.line(), reason))
    }

    /// Skips the rest of a line, such as that of `.loc`.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.at < self.tokens.len() && self.line() == line {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) -> Parsed<()> {
        let mut depth = 0;
        loop {
            match self.next()? {
                "{" => depth += 1,
                "}" if depth == 1 => return Ok(()),
                "}" => depth -= 1,
                _ => {}
            }
        }
    }

    fn number(&mut self) -> Parsed<u64> {
        let text = self.next()?;
        integer(text).map_or_else(|| self.fail(format!("bad number `{text}`")), Ok)
    }

    fn module(mut self) -> Parsed<Vec<Source>> {
        let mut kernels = Vec::new();
        while self.at < self.tokens.len() {
            match self.peek() {
                ".version" | ".address_size" | ".file" => self.skip_line(),
                ".target" => {
                    self.target = self.tokens.get(self.at + 1).map_or("", |token| token.text);
                    self.skip_line();
                }
                ".section" => self.skip_braces()?,
                ".visible" | ".extern" | ".weak" => self.at += 1,
                ".entry" => kernels.push(self.kernel()?),
                ".shared" => {
                    let variable = self.variable()?;
                    self.expect(";")?;
                    self.shared.push(variable);
                }
                other => return self.fail(format!("unknown `{other}`")),
            }
        }
        // Declarations may also follow a kernel.
        for kernel in &mut kernels {
            kernel.variables.extend(self.shared.iter().cloned());
        }
        Ok(kernels)
    }

    /// Parses `.shared .align 16 .b8 name[64]`, where most parts are optional.
    fn variable(&mut self) -> Parsed<Variable> {
        let space = match self.next()? {
            ".shared" => Space::Shared,
            ".local" => Space::Local,
            ".param" => Space::Param,
            other => return self.fail(format!("unknown space `{other}` of variables")),
        };
        let mut align = None;
        let mut size = None;
        while self.peek().starts_with('.') {
            match self.next()? {
                ".align" => align = Some(self.number()? as u32),
                ".ptr" | ".global" | ".shared" => {}
                kind => match bytes_of(kind.trim_start_matches('.')) {
                    Some(bytes) => size = Some(bytes),
                    None => return self.fail(format!("unknown `{kind}`")),
                },
            }
        }
        let Some(size) = size else { return self.fail("missing type of a variable") };
        let name = self.next()?.to_owned();
        let mut bytes = size;
        if self.accept("[") {
            bytes = if self.peek() == "]" { 0 } else { size * self.number()? as u32 };
            self.expect("]")?;
        }
        Ok(Variable { name, space, align: align.unwrap_or(size), bytes })
    }

    fn kernel(&mut self) -> Parsed<Source> {
        let line = self.line();
        self.expect(".entry")?;
        let name = self.next()?.to_owned();
        let mut parameters = Vec::new();
        if self.accept("(") {
            while !self.accept(")") {
                parameters.push(self.variable()?);
                self.accept(",");
            }
        }
        let mut most_threads = None;
        while self.peek() != "{" {
            match self.next()? {
                ".maxntid" => {
                    let mut product = self.number()? as u32;
                    while self.accept(",") {
                        product *= self.number()? as u32;
                    }
                    most_threads = Some(product);
                }
                ".minnctapersm" | ".maxnreg" => {
                    self.number()?;
                }
                other => return self.fail(format!("unknown `{other}`")),
            }
        }
        let source = Source {
            name,
            line,
            target: self.target.to_owned(),
            parameters,
            variables: Vec::new(),
            most_threads,
            registers: Vec::new(),
            statements: Vec::new(),
        };
        let mut body = Body { source, scopes: Vec::new() };
        self.braces(&mut body)?;
        Ok(body.source)
    }

    /// Parses a block in braces, in which registers may have local names.
    fn braces(&mut self, body: &mut Body) -> Parsed<()> {
        self.expect("{")?;
        body.scopes.push(HashMap::new());
        loop {
            match self.peek() {
                "}" => break,
                "{" => self.braces(body)?,
                ".loc" | ".file" => self.skip_line(),
                ".pragma" => {
                    self.at += 2;
                    self.expect(";")?;
                }
                ".reg" => self.registers(body)?,
                ".shared" | ".local" => {
                    let variable = self.variable()?;
                    self.expect(";")?;
                    body.source.variables.push(variable);
                }
                text if text.starts_with('.') => return self.fail(format!("unknown `{text}`")),
                _ if self.tokens.get(self.at + 1).is_some_and(|token| token.text == ":") => {
                    let label = self.next()?.to_owned();
                    self.at += 1;
                    body.source.statements.push(Statement::Label(label));
                }
                _ => {
                    let instruction = self.instruction(body)?;
                    body.source.statements.push(Statement::Instruction(instruction));
                }
            }
        }
        self.at += 1;
        body.scopes.pop();
        Ok(())
    }

    /// Parses `.reg .b32 %r<5>, %x;`.
    fn registers(&mut self, body: &mut Body) -> Parsed<()> {
        self.at += 1;
        let kind = self.next()?;
        let width = match (kind, bytes_of(kind.trim_start_matches('.'))) {
            (".pred", _) => Width::Predicate,
            (_, Some(1 | 2)) => Width::Bits16,
            (_, Some(4)) => Width::Bits32,
            (_, Some(8)) => Width::Bits64,
            _ => return self.fail(format!("unknown type `{kind}` of registers")),
        };
        loop {
            let name = self.next()?;
            if self.accept("<") {
                let count = self.number()?;
                self.expect(">")?;
                (0..count).for_each(|i| body.declare(format!("{name}{i}"), width));
            } else {
                body.declare(name.to_owned(), width);
            }
            if !self.accept(",") {
                return self.expect(";");
            }
        }
    }

    fn instruction(&mut self, body: &Body) -> Parsed<Instruction> {
        let mut guard = None;
        if self.accept("@") {
            let inverted = self.accept("!");
            let name = self.next()?;
            match body.register(name) {
                Some(register) => guard = Some((register, inverted)),
                None => return self.fail(format!("no register `{name}`")),
            }
        }
        let line = self.line();
        let name = self.next()?.to_owned();
        let mut operands = Vec::new();
        while !self.accept(";") {
            operands.push(self.operand(body)?);
            if !self.accept(",") {
                self.expect(";")?;
                break;
            }
        }
        Ok(Instruction { line, guard, name, operands })
    }

    fn operand(&mut self, body: &Body) -> Parsed<Operand> {
        if self.accept("{") {
            let mut elements = Vec::new();
            while !self.accept("}") {
                elements.push(self.operand(body)?);
                self.accept(",");
            }
            return Ok(Operand::Vector(elements));
        }
        if self.accept("[") {
            let base = self.simple(body)?;
            let mut offset = 0;
            if self.accept("+") {
                let sign = if self.accept("-") { -1 } else { 1 };
                offset = sign * self.number()? as i64;
            } else if self.accept("-") {
                offset = -(self.number()? as i64);
            }
            self.expect("]")?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        let first = self.simple(body)?;
        if self.accept("|") {
            return Ok(Operand::Pair(Box::new(first), Box::new(self.simple(body)?)));
        }
        Ok(first)
    }

    fn simple(&mut self, body: &Body) -> Parsed<Operand> {
        if self.accept("-") {
            return Ok(Operand::Immediate((self.number()? as i64).wrapping_neg() as u64));
        }
        if self.accept("!") {
            let name = self.next()?;
            return match body.register(name) {
                Some(register) => Ok(Operand::Not(register)),
                None => self.fail(format!("no register `{name}`")),
            };
        }
        let text = self.next()?;
        if text == "_" {
            return Ok(Operand::Sink);
        }
        if let Some(register) = body.register(text) {
            return Ok(Operand::Register(register));
        }
        if text.starts_with(|c: char| c.is_ascii_digit()) {
            return integer(text)
                .map_or_else(|| self.fail(format!("bad number `{text}`")), |v| Ok(Operand::Immediate(v)));
        }
        Ok(Operand::Name(text.to_owned()))
    }
}

/// Returns the value of a number, or the bits of a float (`0f…`, `0d…`).
fn integer(text: &str) -> Option<u64> {
    let radix = |digits: &str, radix| u64::from_str_radix(digits, radix).ok();
    match text.as_bytes() {
        [b'0', b'f' | b'F' | b'd' | b'D', ..] => radix(&text[2..], 16),
        [b'0', b'x' | b'X', ..] => radix(text[2..].trim_end_matches('U'), 16),
        [b'0', b'b' | b'B', ..] => radix(text[2..].trim_end_matches('U'), 2),
        _ => text.trim_end_matches('U').parse().ok(),
    }
}

/// Returns the number of bytes of a type such as `f32`.
pub fn bytes_of(kind: &str) -> Option<u32> {
    Some(match kind {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}
