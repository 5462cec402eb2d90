//! Attention where its kernels for warpgroups are found to be wrong. The set of such operations belongs to the process,
//! so this test has one of its own.
#![cfg(feature = "cuda")]

use burn::tensor::{Device, FloatDType};
use kiln_model::ops::FusedOp;
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
    let (warpgroups, attention) = errors(None);
    assert!(warpgroups.is_right(), "{warpgroups:?}");
    assert_eq!(attention.error, warpgroups.error);

    let (warpgroups, substitute) = errors(Some(FusedOp::WarpgroupAttention));
    assert!(!warpgroups.is_right(), "{warpgroups:?}");
    assert!(substitute.is_right(), "{substitute:?}");
    assert_ne!(substitute.error, attention.error, "other instructions round at other places");
}
