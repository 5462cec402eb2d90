//! Finds NCCL's library and calls it, with types from cudarc. cudarc's loader accepts no path, and does not look for
//! `libnccl.so.2`, the only name in Python wheels.

#![allow(unsafe_code)]

use super::error::NcclError;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use kiln_nvidia::{Places, environment, reason};
use libloading::Library as Loaded;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, Ordering};

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An NCCL library found by [`installation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    /// The file, or its name if the system's loader knows its location.
    pub place: String,
    /// Version, such as `2.28.9`.
    pub version: String,
}

/// Finds NCCL as [`attach`](super::attach) does, and checks it by creating an id, which needs no GPU.
///
/// # Errors
///
/// [`NcclError`], with all places that were searched.
pub fn installation() -> Result<Installation, NcclError> {
    let library = Library::find()?;
    library.unique_id()?;
    let version = library.version();
    Ok(Installation { place: library.place, version })
}

/// Result of NCCL's functions. Not an enum, because an unknown code would be undefined behaviour.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;

pub(crate) const IN_PROGRESS: Code = 7;

type Reduce = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    CUstream,
) -> Code;

pub(crate) struct Library {
    pub(crate) place: String,
    version: c_int,
    get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> Code,
    init_rank_config:
        unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code,
    /// `None` before NCCL 2.18.
    split: Option<unsafe extern "C" fn(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t) -> Code>,
    get_async_error: unsafe extern "C" fn(ncclComm_t, *mut Code) -> Code,
    finalize: unsafe extern "C" fn(ncclComm_t) -> Code,
    destroy: unsafe extern "C" fn(ncclComm_t) -> Code,
    abort: unsafe extern "C" fn(ncclComm_t) -> Code,
    last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
    all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, CUstream) -> Code,
    reduce_scatter: Reduce,
    all_reduce: Reduce,
    broadcast: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        CUstream,
    ) -> Code,
    /// Never unloaded, because NCCL runs threads.
    _loaded: &'static Loaded,
}

pub(crate) struct Launch {
    pub(crate) kind: Kind,
    pub(crate) dtype: ncclDataType_t,
    pub(crate) count: usize,
}

pub(crate) enum Kind {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast { root: usize },
}

impl Library {
    pub(crate) fn find() -> Result<Library, NcclError> {
        let (mut tried, places) = (Vec::new(), Places::for_nccl(&environment));
        for path in NAMES.iter().map(PathBuf::from).chain(places.files(&NAMES)) {
            // SAFETY: loading NCCL's library runs no code of concern.
            match unsafe { Loaded::new(&path) } {
                Ok(loaded) => return Library::bind(Box::leak(Box::new(loaded)), &path),
                Err(error) => tried.push(reason(&error)),
            }
        }
        let (places, tried) = (places.names_with_loader(), tried.join("; "));
        Err(NcclError::NoLibrary { names: NAMES.join(" or "), places, tried })
    }

    fn bind(loaded: &'static Loaded, path: &Path) -> Result<Library, NcclError> {
        let place = path.display().to_string();
        fn symbol<F: Copy>(loaded: &'static Loaded, place: &str, name: &'static str) -> Result<F, NcclError> {
            // SAFETY: the types in `Library` match NCCL's header.
            match unsafe { loaded.get::<F>(name.as_bytes()) } {
                Ok(function) => Ok(*function),
                Err(_) => Err(NcclError::NoSymbol { place: place.to_owned(), name }),
            }
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> Code = symbol(loaded, &place, "ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: it writes one number.
        unsafe { get_version(&mut version) };
        Ok(Library {
            version,
            get_unique_id: symbol(loaded, &place, "ncclGetUniqueId")?,
            init_rank_config: symbol(loaded, &place, "ncclCommInitRankConfig")?,
            split: symbol(loaded, &place, "ncclCommSplit").ok(),
            get_async_error: symbol(loaded, &place, "ncclCommGetAsyncError")?,
            finalize: symbol(loaded, &place, "ncclCommFinalize")?,
            destroy: symbol(loaded, &place, "ncclCommDestroy")?,
            abort: symbol(loaded, &place, "ncclCommAbort")?,
            last_error: symbol(loaded, &place, "ncclGetLastError")?,
            all_gather: symbol(loaded, &place, "ncclAllGather")?,
            reduce_scatter: symbol(loaded, &place, "ncclReduceScatter")?,
            all_reduce: symbol(loaded, &place, "ncclAllReduce")?,
            broadcast: symbol(loaded, &place, "ncclBroadcast")?,
            place,
            _loaded: loaded,
        })
    }

    pub(crate) fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    pub(crate) fn unique_id(&self) -> Result<[u8; 128], NcclError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: it writes one id.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Returns whether communicators can be split. If not, the ranks of a new group must connect anew.
    pub(crate) fn can_split(&self) -> bool {
        self.split.is_some()
    }

    pub(crate) fn init(&self, size: usize, id: &[u8; 128], rank: usize) -> Result<Comm, NcclError> {
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let (promise, mut config) = (Promise::new(), config());
        let (size, rank, cell) = (int(size), int(rank), promise.0.as_ptr());
        // SAFETY: it writes one handle and reads one configuration.
        let code = unsafe { (self.init_rank_config)(cell, size, id, rank, &mut config) };
        self.check("ncclCommInitRankConfig", code)?;
        // NCCL writes this handle before it returns.
        promise.take().ok_or_else(|| self.no_handle("ncclCommInitRankConfig"))
    }

    fn no_handle(&self, call: &'static str) -> NcclError {
        let (version, text) = (self.version(), String::from("it returned no communicator"));
        NcclError::Call { call, code: SUCCESS, version, text }
    }

    /// Starts to split `comm`; `color` is `None` on ranks that join no group. Requires [`Library::can_split`]. The new
    /// communicator exists once [`Library::state`] of `comm` is [`SUCCESS`].
    pub(crate) fn split(&self, comm: &Comm, color: Option<usize>, key: usize) -> Result<Promise, NcclError> {
        let Some(split) = self.split else {
            let (place, name) = (self.place.clone(), "ncclCommSplit");
            return Err(NcclError::NoSymbol { place, name });
        };
        let (promise, mut config) = (Promise::new(), config());
        // NCCL_SPLIT_NOCOLOR
        let color = color.map_or(-1, int);
        // SAFETY: the communicator is alive; it writes one handle and reads one configuration.
        let code = unsafe { split(comm.0, color, int(key), promise.0.as_ptr(), &mut config) };
        self.check("ncclCommSplit", code)?;
        Ok(promise)
    }

    pub(crate) fn state(&self, comm: &Comm) -> Code {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive; it writes one number.
        let code = unsafe { (self.get_async_error)(comm.0, &mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// Starts to flush the communicator, which is finished once [`Library::state`] is [`SUCCESS`].
    pub(crate) fn finalize(&self, comm: &Comm) -> Result<(), NcclError> {
        // SAFETY: the communicator is alive.
        let code = unsafe { (self.finalize)(comm.0) };
        self.check("ncclCommFinalize", code)
    }

    pub(crate) fn destroy(&self, comm: Comm) {
        // SAFETY: the communicator is alive, and this is its last use. The result does not matter.
        unsafe { (self.destroy)(comm.0) };
    }

    pub(crate) fn abort(&self, comm: Comm) {
        // SAFETY: the communicator is alive, and this is its last use. The result does not matter.
        unsafe { (self.abort)(comm.0) };
    }

    /// Queues an operation that reads the memory at `from` and writes the memory at `to`.
    ///
    /// # Safety
    ///
    /// Both must be device memory of the size that `launch` implies, and stay allocated until the operation is done.
    pub(crate) unsafe fn launch(
        &self,
        comm: &Comm,
        launch: &Launch,
        from: u64,
        to: u64,
        stream: CUstream,
    ) -> Result<(), NcclError> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        let (count, dtype, sum) = (launch.count, launch.dtype, ncclRedOp_t::ncclSum);
        // SAFETY: the caller guarantees the memory; communicator and stream are alive.
        let (name, code) = unsafe {
            match launch.kind {
                Kind::AllGather => {
                    ("ncclAllGather", (self.all_gather)(from, to, count, dtype, comm.0, stream))
                }
                Kind::ReduceScatter => {
                    ("ncclReduceScatter", (self.reduce_scatter)(from, to, count, dtype, sum, comm.0, stream))
                }
                Kind::AllReduce => {
                    ("ncclAllReduce", (self.all_reduce)(from, to, count, dtype, sum, comm.0, stream))
                }
                Kind::Broadcast { root } => {
                    ("ncclBroadcast", (self.broadcast)(from, to, count, dtype, int(root), comm.0, stream))
                }
            }
        };
        self.check(name, code)
    }

    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: NCCL returns a static string or null. Without a communicator, it is the last error of any.
        let text = unsafe {
            let text = (self.last_error)(std::ptr::null_mut());
            if text.is_null() { "".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        let version = self.version();
        Err(NcclError::Call { call, code, version, text: text.into_owned() })
    }
}

pub(crate) struct Comm(ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for Comm {}

/// A cell for the handle of a communicator. Never freed, because NCCL may write at any time.
pub(crate) struct Promise(&'static AtomicPtr<ncclComm>);

impl Promise {
    fn new() -> Promise {
        Promise(Box::leak(Box::default()))
    }

    pub(crate) fn take(self) -> Option<Comm> {
        let comm = self.0.swap(std::ptr::null_mut(), Ordering::Acquire);
        (!comm.is_null()).then_some(Comm(comm))
    }
}

fn int(number: usize) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// NCCL version of the declared `ncclConfig_t`. NCCL 2.30.5 has a field in the place of earlier padding, and reads it
/// unless the caller declares an older version.
const CONFIG_VERSION: u32 = 23_000;

/// Returns a non-blocking configuration with defaults. Every field is named, so that a new field in cudarc's
/// declaration is a compile error: then update [`CONFIG_VERSION`] too.
fn config() -> ncclConfig_t {
    const UNSET: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        splitShare: UNSET,
        trafficClass: UNSET,
        commName: std::ptr::null(),
        collnetEnable: UNSET,
        CTAPolicy: UNSET,
        shrinkShare: UNSET,
        nvlsCTAs: UNSET,
        nChannelsPerNetPeer: UNSET,
        nvlinkCentricSched: UNSET,
        graphUsageMode: UNSET,
        numRmaCtx: UNSET,
        maxP2pPeers: UNSET,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps NCCL 2.30.5 and later from reading padding as a field; see [`CONFIG_VERSION`].
    #[test]
    fn padding_is_no_field() {
        let end = std::mem::offset_of!(ncclConfig_t, maxP2pPeers) + size_of::<c_int>();
        assert_eq!((end, size_of::<ncclConfig_t>()), (92, 96));
        assert!((23_000..23_005).contains(&config().version));
    }
}
