//! The registers of a warp: each register has the values of 32 lanes in a row.

/// Number of lanes of a warp, and the mask of all lanes.
pub const LANES: usize = 32;
pub const ALL: u32 = u32::MAX;

/// Values of one register in all lanes.
pub type Lanes<T> = [T; LANES];

/// Returns the values of `f` for all lanes. Unlike `std::array::from_fn`, it is inlined and vectorised.
#[inline(always)]
pub fn lanes<T: Copy + Default>(f: impl Fn(usize) -> T) -> Lanes<T> {
    let mut values = [T::default(); LANES];
    for (lane, value) in values.iter_mut().enumerate() {
        *value = f(lane);
    }
    values
}

/// Applies `f` to the values of all lanes.
#[inline(always)]
pub fn lanes_of<T: Copy, U: Copy + Default>(values: &Lanes<T>, f: impl Fn(T) -> U) -> Lanes<U> {
    lanes(|lane| f(values[lane]))
}

/// The registers of a warp. Registers of 16 bits are the low halves of 32-bit registers whose high halves are
/// zero.
pub struct Registers {
    pub narrow: Vec<Lanes<u32>>,
    pub wide: Vec<Lanes<u64>>,
    /// One bit per lane.
    pub predicates: Vec<u32>,
}

impl Registers {
    pub fn new([narrow, wide, predicates]: [usize; 3]) -> Registers {
        Registers {
            narrow: vec![[0; LANES]; narrow],
            wide: vec![[0; LANES]; wide],
            predicates: vec![0; predicates],
        }
    }

    #[inline(always)]
    pub fn narrow(&self, register: u16) -> &Lanes<u32> {
        &self.narrow[usize::from(register)]
    }

    #[inline(always)]
    pub fn wide(&self, register: u16) -> &Lanes<u64> {
        &self.wide[usize::from(register)]
    }

    #[inline(always)]
    pub fn predicate(&self, register: u16) -> u32 {
        self.predicates[usize::from(register)]
    }

    #[inline(always)]
    pub fn set_narrow(&mut self, register: u16, values: &Lanes<u32>, mask: u32) {
        blend(&mut self.narrow[usize::from(register)], values, mask);
    }

    #[inline(always)]
    pub fn set_wide(&mut self, register: u16, values: &Lanes<u64>, mask: u32) {
        blend(&mut self.wide[usize::from(register)], values, mask);
    }

    #[inline(always)]
    pub fn set_predicate(&mut self, register: u16, values: u32, mask: u32) {
        let there = &mut self.predicates[usize::from(register)];
        *there = (*there & !mask) | (values & mask);
    }
}

#[inline(always)]
fn blend<T: Copy>(to: &mut Lanes<T>, values: &Lanes<T>, mask: u32) {
    if mask == ALL {
        *to = *values;
    } else {
        for lane in 0..LANES {
            to[lane] = if mask >> lane & 1 == 1 { values[lane] } else { to[lane] };
        }
    }
}

/// Computes a register from one, two or three others in all lanes.
#[inline(always)]
pub fn map1(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32) -> u32) {
    let a = *r.narrow(o[1]);
    let mut values = [0; LANES];
    for lane in 0..LANES {
        values[lane] = f(a[lane]);
    }
    r.set_narrow(o[0], &values, mask);
}

#[inline(always)]
pub fn map2(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32, u32) -> u32) {
    let (a, b) = (*r.narrow(o[1]), *r.narrow(o[2]));
    let mut values = [0; LANES];
    for lane in 0..LANES {
        values[lane] = f(a[lane], b[lane]);
    }
    r.set_narrow(o[0], &values, mask);
}

#[inline(always)]
pub fn map3(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u32, u32, u32) -> u32) {
    let (a, b, c) = (*r.narrow(o[1]), *r.narrow(o[2]), *r.narrow(o[3]));
    let mut values = [0; LANES];
    for lane in 0..LANES {
        values[lane] = f(a[lane], b[lane], c[lane]);
    }
    r.set_narrow(o[0], &values, mask);
}

#[inline(always)]
pub fn map2_wide(r: &mut Registers, o: &[u16], mask: u32, f: impl Fn(u64, u64) -> u64) {
    let (a, b) = (*r.wide(o[1]), *r.wide(o[2]));
    r.set_wide(o[0], &lanes(|i| f(a[i], b[i])), mask);
}

/// Returns the lanes of a mask, lowest first.
pub fn each(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}
