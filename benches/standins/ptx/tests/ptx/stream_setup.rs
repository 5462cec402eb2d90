//! The setup of stream tests: a device with two streams, memory, a kernel, and a way to plant a bug.

use std::sync::{Arc, Mutex};

use kiln_ptx::streams::{Access, Device, Settings, Submitted, Use};
use kiln_ptx::{DeviceMemory, Footprint, Kernel, Launch, Options};

use crate::support::{kernel, text};

/// Seeds that cover delays of all kinds.
pub const SEEDS: [u64; 5] = [1, 2, 3, 4, 5];

pub const WORDS: usize = 64;
pub const BYTES: u64 = 4 * WORDS as u64;

/// Adds 1 to 64 words of `p0`, and writes them to `p1`.
const BODY: &str = ".reg .b32 %t, %v;\n.reg .b64 %a, %b, %y;
    mov.u32 %t, %tid.x;\nmul.wide.u32 %y, %t, 4;
    ld.param.u64 %a, [p0];\nadd.s64 %a, %a, %y;
    ld.param.u64 %b, [p1];\nadd.s64 %b, %b, %y;
    ld.global.u32 %v, [%a];\nadd.u32 %v, %v, 1;\nst.global.u32 [%b], %v;";

/// A device, and its reports.
pub struct Setup {
    pub device: Device,
    pub memory: DeviceMemory,
    pub kernel: Arc<Kernel>,
    pub told: Arc<Mutex<Vec<String>>>,
}

/// Memory for 64 words, which exists as long as the process: streams may access it at any time.
pub fn words() -> u64 {
    // Aligned for every access.
    Box::leak(Box::new([0_u64; WORDS / 2])).as_mut_ptr() as u64
}

pub fn read(at: u64) -> Vec<u32> {
    // SAFETY: `at` comes from `words`, and no stream uses it any more. Volatile, because other threads have
    // written it.
    (0..WORDS).map(|i| unsafe { (at as *const u32).add(i).read_volatile() }).collect()
}

impl Setup {
    pub fn new(seed: u64) -> Setup {
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = told.clone();
        let device = Device::new(Settings { seed, queue: 4, goes_on: false }, move |problem| {
            telling.lock().unwrap().push(problem.to_owned());
        });
        device.create(1, false);
        device.create(2, false);
        Setup { device, memory: DeviceMemory::default(), kernel: kernel(&text(2, "", BODY)), told }
    }

    /// Device memory of 64 words.
    pub fn allocate(&self, stream: Option<usize>) -> u64 {
        let start = words();
        // SAFETY: the memory is never freed.
        unsafe { self.memory.add(start, BYTES, true) };
        let _ = self.device.allocated(start, BYTES, stream);
        start
    }

    /// Device memory filled with 7, which the host has waited for.
    pub fn filled(&self) -> u64 {
        let start = self.allocate(None);
        self.fill(1, start, 7);
        let _ = self.device.wait_on_host(&self.device.record(1));
        start
    }

    pub fn pinned(&self) -> u64 {
        let start = words();
        self.device.pinned(start, BYTES);
        start
    }

    pub fn fill(&self, stream: usize, at: u64, value: u32) {
        let memory = self.memory.clone();
        let call = move || {
            // SAFETY: the memory is never freed, and this operation is ordered.
            (0..WORDS).for_each(|i| unsafe { (at as *mut u32).add(i).write_volatile(value) });
            memory.wrote(at, BYTES);
            Ok(())
        };
        let used = vec![Access::new(at, BYTES, Use::Write)];
        let _ = self.device.submit(stream, Submitted::call("memset", used, call));
    }

    pub fn copy(&self, stream: usize, to: u64, from: u64) {
        let memory = self.memory.clone();
        let call = move || {
            // SAFETY: both are never freed, and this operation is ordered.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, BYTES as usize) };
            memory.wrote(to, BYTES);
            Ok(())
        };
        let used = vec![Access::new(from, BYTES, Use::Read), Access::new(to, BYTES, Use::Write)];
        let _ = self.device.submit(stream, Submitted::call("copy", used, call));
    }

    pub fn launch(&self, stream: usize, from: u64, to: u64) {
        let arguments = [from.to_le_bytes(), to.to_le_bytes()];
        let arguments: Vec<&[u8]> = arguments.iter().map(|argument| &argument[..]).collect();
        let launch = Launch::new(&self.kernel, [1, 1, 1], [WORDS as u32, 1, 1], &arguments).unwrap();
        let memory = self.memory.clone();
        let kernel = move || {
            let footprint = Mutex::new(Footprint::default());
            let result = launch.run_noting(&memory, Options::default(), Some(&footprint));
            let accesses = footprint.into_inner().unwrap().accesses();
            (accesses, result.map(drop).map_err(|error| error.to_string()))
        };
        let _ = self.device.submit(stream, Submitted::kernel("launch of test", kernel));
    }

    pub fn free(&self, stream: Option<usize>, at: u64) {
        let _ = self.device.free(at, stream, Box::new(|| ()));
    }

    /// Makes `later` wait for the operations of `earlier`.
    pub fn order(&self, earlier: usize, later: usize) {
        let _ = self.device.wait(later, &self.device.record(earlier));
    }
}

/// Runs `program` with and without the bug, with all delays. Returns the report, which is the same with
/// all delays; without the bug, there must be no report.
#[track_caller]
pub fn planted(program: impl Fn(&Setup, bool)) -> String {
    let mut messages = Vec::new();
    for seed in SEEDS {
        let setup = Setup::new(seed);
        program(&setup, true);
        let _ = setup.device.synchronize();
        assert!(setup.device.has_failed(), "seed {seed}: nothing is found");
        messages.extend(setup.told.lock().unwrap().drain(..));

        let setup = Setup::new(seed);
        program(&setup, false);
        let result = setup.device.synchronize();
        let told = setup.told.lock().unwrap().join("\n");
        assert!(result.is_ok() && told.is_empty(), "seed {seed}, fixed: {told}");
    }
    assert_eq!(messages.len(), SEEDS.len(), "{messages:#?}");
    messages.dedup();
    assert_eq!(messages.len(), 1, "{messages:#?}");
    messages.remove(0)
}
