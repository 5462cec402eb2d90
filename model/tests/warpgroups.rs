//! Attention after its warpgroup kernels have been found to be wrong. The set of such operations is global to the
//! process, so this test has its own process.
#![cfg(feature = "cuda")]

use burn::tensor::{Device, FloatDType};
use cubecl::cuda::CudaDevice;
use cubecl::ir::FloatKind;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use kiln_model::ops::FusedOp;
use kiln_model::ops::cube::attention::{Instructions, Pass, Tile};
use kiln_model::verify::{Shapes, verify};

#[test]
fn attention_without_warpgroups_is_right() {
    if std::env::var("KILN_TEST_DEVICE").as_deref() != Ok("cuda") {
        eprintln!("SKIPPED: KILN_TEST_DEVICE is not cuda");
        return;
    }
    let device = Device::cuda(0);
    if device.identity().is_none_or(|identity| identity.fingerprint != "ptx_sm90") {
        eprintln!("SKIPPED: the GPU has no instructions for warpgroups");
        return;
    }
    let shapes = Shapes { attention: vec![(64, None), (128, Some(9))], experts: false };
    let errors = |fault| {
        let findings = verify(&device, &[FloatDType::BF16], &shapes, fault);
        let of = |op| findings.iter().find(|finding| finding.op == op).cloned().expect("checked");
        (of(FusedOp::WarpgroupAttention), of(FusedOp::Attention))
    };
    let instructions = || {
        let client = CudaRuntime::client(&CudaDevice::new(0));
        let tile = Tile::select(Pass::Keys, client.properties(), FloatKind::BF16, 64);
        tile.expect("a tile that fits").instructions
    };
    let (warpgroups, attention) = errors(None);
    assert!(warpgroups.is_right(), "{warpgroups:?}");
    assert!(attention.is_right(), "{attention:?}");
    assert_eq!(instructions(), Instructions::Wgmma);

    let (warpgroups, substitute) = errors(Some(FusedOp::WarpgroupAttention));
    assert!(!warpgroups.is_right(), "{warpgroups:?}");
    assert!(substitute.is_right(), "{substitute:?}");
    assert_eq!(instructions(), Instructions::Mma);
}
