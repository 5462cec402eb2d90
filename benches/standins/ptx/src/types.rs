//! Types of values, and how floats are rounded.

/// What the bits of a value mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Signed,
    Unsigned,
    Bits,
    F16,
    BF16,
    F32,
    TF32,
    F64,
}

/// A type of a value, such as `u16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Type {
    pub kind: Kind,
    pub bits: u32,
}

impl Type {
    pub const F32: Type = Type { kind: Kind::F32, bits: 32 };

    /// The type of this name, without a dot.
    pub fn named(name: &str) -> Option<Type> {
        let (kind, bits) = match name {
            "f16" => (Kind::F16, 16),
            "bf16" => (Kind::BF16, 16),
            "f32" => (Kind::F32, 32),
            "tf32" => (Kind::TF32, 32),
            "f64" => (Kind::F64, 64),
            _ => {
                let kind = match name.as_bytes().first()? {
                    b'u' => Kind::Unsigned,
                    b's' => Kind::Signed,
                    b'b' => Kind::Bits,
                    _ => return None,
                };
                match &name[1..] {
                    "8" => (kind, 8),
                    "16" => (kind, 16),
                    "32" => (kind, 32),
                    "64" => (kind, 64),
                    _ => return None,
                }
            }
        };
        Some(Type { kind, bits })
    }

    pub fn is_float(self) -> bool {
        !matches!(self.kind, Kind::Signed | Kind::Unsigned | Kind::Bits)
    }
}

/// Where a result goes that a float cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Round {
    /// To the nearest, of two to the even one.
    Nearest,
    /// To the nearest, of two to the one that is further from zero.
    NearestAway,
    Zero,
    Down,
    Up,
}

/// How a float operation treats its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    pub round: Round,
    /// Subnormal operands and results are zero.
    pub flush: bool,
    /// Results are between 0 and 1, and what is no number is 0.
    pub saturate: bool,
}

impl Mode {
    pub const PLAIN: Mode = Mode { round: Round::Nearest, flush: false, saturate: false };
}
