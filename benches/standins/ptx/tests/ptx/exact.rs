//! Exact sums of products of f32, and the f32 values around them.

use std::cmp::Ordering;

const WORDS: usize = 12;
/// The exponent of the lowest bit, that of the smallest product of two f32.
const LOWEST: i32 = -298;

/// A number in two's complement, with the binary point `-LOWEST` bits from the right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exact([u64; WORDS]);

impl Exact {
    /// a · b, both finite.
    pub fn product(a: f32, b: f32) -> Exact {
        let parts = |value: f32| {
            let bits = value.to_bits();
            let (exponent, fraction) = ((bits >> 23 & 0xff) as i32, u64::from(bits & 0x7f_ffff));
            match exponent {
                0 => (fraction, -149),
                _ => (fraction | 0x80_0000, exponent - 150),
            }
        };
        let ((m, e), (n, f)) = (parts(a), parts(b));
        let (product, shift) = (m * n, (e + f - LOWEST) as usize);
        let mut words = [0; WORDS];
        let wide = u128::from(product) << (shift % 64);
        words[shift / 64] = wide as u64;
        words[shift / 64 + 1] = (wide >> 64) as u64;
        let positive = Exact(words);
        if a.is_sign_negative() == b.is_sign_negative() {
            positive
        } else {
            Exact([0; WORDS]).minus(positive)
        }
    }

    pub fn of(value: f32) -> Exact {
        Exact::product(value, 1.0)
    }

    pub fn plus(self, other: Exact) -> Exact {
        let mut carry = false;
        Exact(std::array::from_fn(|i| {
            let (sum, first) = self.0[i].overflowing_add(other.0[i]);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            carry = first || second;
            sum
        }))
    }

    pub fn minus(self, other: Exact) -> Exact {
        let one = Exact(std::array::from_fn(|i| u64::from(i == 0)));
        self.plus(Exact(other.0.map(|word| !word))).plus(one)
    }

    pub fn is_zero(self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    pub fn is_negative(self) -> bool {
        self.0[WORDS - 1] >> 63 == 1
    }

    pub fn magnitude(self) -> Exact {
        if self.is_negative() { Exact([0; WORDS]).minus(self) } else { self }
    }

    pub fn compare(self, other: Exact) -> Ordering {
        let difference = self.minus(other);
        match (difference.is_zero(), difference.is_negative()) {
            (true, _) => Ordering::Equal,
            (_, true) => Ordering::Less,
            _ => Ordering::Greater,
        }
    }

    /// The largest f32 that is not greater, which may be -∞.
    pub fn floor(self) -> f32 {
        // Numbers of floats in ascending order.
        let float =
            |key: i64| f32::from_bits(if key >= 0 { key as u32 } else { (-1 - key) as u32 | 1 << 31 });
        let (mut low, mut high) = (-1 - 0x7f80_0000i64, 0x7f80_0000i64);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if Exact::of(float(middle)).compare(self) == Ordering::Greater {
                high = middle
            } else {
                low = middle
            }
        }
        float(low)
    }

    /// The smallest f32 that is not less.
    pub fn ceiling(self) -> f32 {
        -Exact([0; WORDS]).minus(self).floor()
    }

    /// The nearest f32; ties to the one whose last bit is 0.
    pub fn nearest(self) -> f32 {
        let (low, high) = (self.floor(), self.ceiling());
        // Infinity is treated as the float after the largest.
        let place = |value: f32| match value.is_infinite() {
            true => Exact::product(2f32.powi(127).copysign(value), 2.0),
            false => Exact::of(value),
        };
        let (below, above) = (self.minus(place(low)), place(high).minus(self));
        match below.compare(above) {
            Ordering::Less => low,
            Ordering::Greater => high,
            Ordering::Equal if low.to_bits() & 1 == 0 => low,
            Ordering::Equal => high,
        }
    }
}
