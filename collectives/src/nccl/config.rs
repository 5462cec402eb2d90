//! The configuration of new communicators.

use cudarc::nccl::sys::ncclConfig_t;
use std::ffi::c_int;

/// The version of NCCL whose `ncclConfig_t` is declared here. NCCL 2.30.5 has one more field, where earlier
/// ones have padding: a library reads it unless the caller says that it is older.
const CONFIG_VERSION: u32 = 23_000;

/// A configuration in which nothing blocks and all else is up to NCCL. Older libraries read fewer of the
/// fields. Every field is named, so that this does not compile once cudarc declares another one: then
/// [`CONFIG_VERSION`] has to follow.
pub(super) fn config() -> ncclConfig_t {
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

    /// NCCL 2.30.5 and later have a field in the padding behind the last one here, and read it unless the
    /// version says that it is not there.
    #[test]
    fn padding_is_no_field() {
        let end = std::mem::offset_of!(ncclConfig_t, maxP2pPeers) + size_of::<c_int>();
        assert_eq!((end, size_of::<ncclConfig_t>()), (92, 96));
        assert!((23_000..23_005).contains(&config().version));
    }
}
