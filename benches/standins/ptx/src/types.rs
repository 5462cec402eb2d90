//! Types of values, and rounding of floats.

/// The interpretation of a value's bits.
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

    /// Returns the type with this name, without a dot.
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

/// The rounding of a result that a float cannot represent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Round {
    /// To the nearest; ties to even.
    Nearest,
    /// To the nearest; ties away from zero.
    NearestAway,
    Zero,
    Down,
    Up,
}

/// Options of a float operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    pub round: Round,
    /// Subnormal operands and results become zero.
    pub flush: bool,
    /// Results are clamped to the range from 0 to 1, and NaN becomes 0.
    pub saturate: bool,
}

impl Mode {
    pub const PLAIN: Mode = Mode { round: Round::Nearest, flush: false, saturate: false };
}
